"""``dsec-sandboxd``: the daemon of one node."""

from __future__ import annotations

import os
import sys

from dsec_common import service
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.service import SandboxdService


def main() -> None:
    """Run the daemon until it is told to stop, and exit with its code."""
    asks_help = bool({"-h", "--help"} & set(sys.argv[1:]))
    if os.geteuid() != 0 and not asks_help:
        sys.stderr.write(
            "dsec-sandboxd: it makes namespaces, mounts and cgroups, which needs root; start it as "
            "root (sudo dsec-sandboxd …)\n"
        )
        sys.exit(service.EXIT_CONFIGURATION)
    sys.exit(service.main(SandboxdService, SandboxdConfig, SandboxdService.name, None))


if __name__ == "__main__":
    main()
