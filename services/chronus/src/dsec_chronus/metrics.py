"""What Chronus counts."""

from __future__ import annotations

from functools import cache
from typing import Final

from prometheus_client import Counter, Gauge

SHARDS: Final = Gauge("dsec_chronus_shards", "Shards that this process owns")
ROLLOUTS: Final = Gauge("dsec_chronus_rollouts", "Rollouts in the shards of this process")
POLLS: Final = Gauge("dsec_chronus_polls", "Requests that wait for a stage or for feedback")
REQUESTS: Final = Counter(
    "dsec_chronus_requests_total", "Requests that were answered", ["verb", "outcome"]
)
FRAMES: Final = Counter("dsec_chronus_frames_total", "Frames by what became of them", ["outcome"])
RECORDS: Final = Counter("dsec_chronus_records_total", "Records in durable frames")
TAKEOVERS: Final = Counter("dsec_chronus_takeovers_total", "Shards taken, by success", ["outcome"])


@cache
def answered(verb: str, outcome: str) -> Counter:
    """Return the counter of a kind of request: looking it up costs more than counting."""
    return REQUESTS.labels(verb, outcome)


@cache
def frames(outcome: str) -> Counter:
    """Return the counter of frames that came to this, as :func:`answered`."""
    return FRAMES.labels(outcome)
