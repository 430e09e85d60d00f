"""``dsec-chronus``: one Chronus process."""

from __future__ import annotations

import sys

from dsec_chronus.config import ChronusConfig
from dsec_chronus.service import ChronusService
from dsec_common import service


def main() -> None:
    """Run Chronus until it is told to stop, and exit with its code."""
    sys.exit(service.main(ChronusService, ChronusConfig, ChronusService.name, None))


if __name__ == "__main__":
    main()
