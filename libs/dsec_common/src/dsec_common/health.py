"""``python -m dsec_common.health URL``: exit 0 when a service's readiness endpoint says so.

For container health checks: the image needs no curl.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request


def main() -> int:
    """Ask once and return the exit code; prints the service's reason when it is not ready."""
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=2) as response:  # noqa: S310  a given URL
            return 0 if response.status == 200 else 1  # noqa: PLR2004  HTTP's OK
    except urllib.error.HTTPError as error:
        sys.stderr.write(error.read().decode(errors="replace") + "\n")
    except OSError as error:
        sys.stderr.write(f"{sys.argv[1]}: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
