"""``dsec-broker``: one broker process."""

from __future__ import annotations

import sys

from dsec_broker.config import BrokerConfig
from dsec_broker.service import BrokerService
from dsec_common import service


def main() -> None:
    """Run the broker until it is told to stop, and exit with its code."""
    sys.exit(service.main(BrokerService, BrokerConfig, BrokerService.name, None))


if __name__ == "__main__":
    main()
