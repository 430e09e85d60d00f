"""``dsec-scheduler``: one scheduler process."""

from __future__ import annotations

import sys

from dsec_common import service
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.service import SchedulerService


def main() -> None:
    """Run the scheduler until it is told to stop, and exit with its code."""
    sys.exit(service.main(SchedulerService, SchedulerConfig, SchedulerService.name, None))


if __name__ == "__main__":
    main()
