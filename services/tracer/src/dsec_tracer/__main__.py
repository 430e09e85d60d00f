"""``dsec-tracer``: one tracer process."""

from __future__ import annotations

import sys

from dsec_common import service
from dsec_tracer.config import TracerConfig
from dsec_tracer.service import TracerService


def main() -> None:
    """Run the tracer until it is told to stop, and exit with its code."""
    sys.exit(service.main(TracerService, TracerConfig, TracerService.name, None))


if __name__ == "__main__":
    main()
