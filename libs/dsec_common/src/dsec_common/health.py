"""``python -m dsec_common.health URL``: exit 0 when a service's readiness endpoint says so.

For container health checks: the image needs no curl. Exit 1 when it is not ready or does not
answer, with the reason on standard error; 2 when the command line cannot be meant.
"""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Final

_TIMEOUT_S: Final = 2.0
_USAGE: Final = "usage: python -m dsec_common.health http://HOST:PORT/readyz\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask once and return the exit code; prints the service's reason when it is not ready."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1 or not words[0].startswith("http://"):
        sys.stderr.write(_USAGE)
        return 2
    url = words[0]
    # A proxy from the environment does not lead to a service of this container.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S):
            return 0
    except urllib.error.HTTPError as error:
        sys.stderr.write(error.read().decode(errors="replace") + "\n")
        error.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        sys.stderr.write(f"{url}: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
