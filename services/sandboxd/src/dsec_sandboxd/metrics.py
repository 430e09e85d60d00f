"""What Prometheus reads of a node."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

_SECONDS: Final = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 60.0)

SANDBOXES_ALIVE: Final = Gauge("dsec_sandboxd_sandboxes_alive", "Sandboxes that are not over")
CREATES: Final = Counter(
    "dsec_sandboxd_creates_total", "Placements by outcome: created or an error's code", ["outcome"]
)
CREATE_SECONDS: Final = Histogram(
    "dsec_sandboxd_create_seconds", "From the placement to a running sandbox", buckets=_SECONDS
)
EXEC_SECONDS: Final = Histogram(
    "dsec_sandboxd_exec_seconds", "From the request to a command's end", buckets=_SECONDS
)
ENDS: Final = Counter("dsec_sandboxd_ends_total", "Sandboxes that ended, by cause", ["cause"])
