"""What the scheduler counts."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

_BUCKETS: Final = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

CREATES: Final = Counter(
    "dsec_scheduler_creates_total", "Create requests by door and outcome", ["door", "outcome"]
)
CREATE_SECONDS: Final = Histogram(
    "dsec_scheduler_create_seconds",
    "From a request's arrival to its end",
    ["door"],
    buckets=_BUCKETS,
)
ATTEMPTS: Final = Counter("dsec_scheduler_attempts_total", "Nodes asked for a sandbox")
REFUSALS: Final = Counter(
    "dsec_scheduler_refusals_total", "Nodes that made no sandbox, by code", ["code"]
)
NODES: Final = Gauge("dsec_scheduler_nodes", "Nodes that take new sandboxes")
WAITING: Final = Gauge(
    "dsec_scheduler_waiting", "Requests that wait for Compute Units, by class", ["service_class"]
)
WAIT_SECONDS: Final = Histogram(
    "dsec_scheduler_units_seconds",
    "From a request for Compute Units to their grant, by class",
    ["service_class"],
    buckets=(*_BUCKETS, 60.0, 600.0, 3600.0),
)
ROUNDS: Final = Counter("dsec_scheduler_rounds_total", "Rounds in which units were given out")
SOLVE_SECONDS: Final = Histogram(
    "dsec_scheduler_solve_seconds", "What the solver took for one question", buckets=_BUCKETS
)
