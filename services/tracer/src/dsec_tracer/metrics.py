"""What the tracer counts."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

SANDBOXES: Final = Gauge("dsec_tracer_sandboxes", "Sandboxes remembered")
STEPS: Final = Counter("dsec_tracer_steps_total", "Steps kept")
PASSED_OVER: Final = Gauge(
    "dsec_tracer_records_passed_over", "Records that are no new step of a trace"
)
SHED: Final = Gauge("dsec_tracer_steps_shed", "Steps beyond the limit of one sandbox")
REQUESTS: Final = Counter("dsec_tracer_requests_total", "Requests for traces", ["outcome"])
