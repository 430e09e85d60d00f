"""What Chronus is told."""

from __future__ import annotations

import math
from typing import Final

from dsec_common.config import ServiceConfig

_HEARTBEATS_S: Final = 3.0
"""Nodes tell of themselves once a second."""


class ChronusConfig(ServiceConfig, frozen=True, kw_only=True):
    """Chronus: the durable mailbox between sandboxes and trainers.

    Attributes:
        shards: how many shards all rollouts are spread over, the same for every process. When it
            changes, idempotency keys used before it are not known again.
        lease_ttl_s: the shards of a process that is silent for this long go to others.
        poll_max_s: the longest that one request may wait for a stage or for feedback.
        polls_max: requests that may wait on one shard at once.
        waiting_max: changes that may wait for the journal on one shard.
        shard_bytes_max: what one shard's rollouts may hold in memory.
        closed_keep_s: a closed rollout can be read for this long.
        idle_keep_s: an open rollout that nobody changes is forgotten after this long.
        sweep_interval_s: how often such rollouts are looked for.
        snapshot_after_frames: a snapshot shortens a journal that grew by more frames than this.
        snapshot_after_bytes: the same in bytes, beyond what the shard holds.
        node_lost_s: a node that is silent for this long is gone: rollouts with a durable checkpoint
            go on elsewhere.
        replicas: how many NATS servers keep the journal and the leases.
    """

    shards: int = 8
    lease_ttl_s: float = 2.0
    poll_max_s: float = 60.0
    polls_max: int = 20_000
    waiting_max: int = 10_000
    shard_bytes_max: int = 256 * 1024 * 1024
    closed_keep_s: float = 3600.0
    idle_keep_s: float = 7 * 86_400.0
    sweep_interval_s: float = 5.0
    snapshot_after_frames: int = 1000
    snapshot_after_bytes: int = 4 * 1024 * 1024
    node_lost_s: float = 30.0
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse values that Chronus could not work with."""
        for name in ("poll_max_s", "closed_keep_s", "idle_keep_s", "sweep_interval_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds")
        if not _HEARTBEATS_S <= self.node_lost_s < math.inf:
            raise ValueError(f"node_lost_s must be at least {_HEARTBEATS_S:g} seconds")
        # NATS counts an entry's life in whole seconds, and a lease is renewed four times in its.
        if not 1 <= self.lease_ttl_s < math.inf:
            raise ValueError("lease_ttl_s must be at least 1 second")
        for name in (
            "shards",
            "polls_max",
            "waiting_max",
            "shard_bytes_max",
            "snapshot_after_frames",
            "snapshot_after_bytes",
            "replicas",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names of all shards: the first token of every rollout id."""
        return tuple(f"s{number}" for number in range(self.shards))
