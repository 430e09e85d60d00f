"""What the scheduler is told."""

from __future__ import annotations

import math

from dsec_common.config import ServiceConfig


class SchedulerConfig(ServiceConfig, frozen=True, kw_only=True):
    """The scheduler: where a sandbox goes.

    Attributes:
        node_timeout_s: a node is placed on while its last heartbeat is younger than this.
        node_forget_s: a silent node is no longer named in listings after this long.
        choices: so many nodes are drawn at random, and the least loaded of them is taken.
        attempts_max: nodes that are asked for one request at most.
        attempt_timeout_s: how long one node has to make the sandbox.
        reply_grace_s: how much longer its answer may take; more than clocks differ.
        list_timeout_s: how long a node may take to list its sandboxes.
        warm_up_s: a start listens this long before it opens its doors: one heartbeat of each node.
        retry_after_s: what a caller is told when all nodes are full.
        request_timeout_max_s: the longest wait that a request may ask for.
        lease_claim_s: a lease lives this much longer than the attempt it was taken for, until the
            node's heartbeats keep it alive.
        idempotency_ttl_s: how long an idempotency key is known.
        idempotency_grace_s: how long after its attempt's end a dead scheduler's claim stands.
        queue_patience_s: how long a queued request waits at least.
        queue_in_flight: queued requests worked on at once by this process.
        concurrency: requests worked on at once by this process.
        replicas: how many NATS servers keep keys, queue and events.
    """

    node_timeout_s: float = 3.0
    node_forget_s: float = 600.0
    choices: int = 2
    attempts_max: int = 4
    attempt_timeout_s: float = 10.0
    reply_grace_s: float = 0.5
    list_timeout_s: float = 2.0
    warm_up_s: float = 1.1
    retry_after_s: float = 1.0
    request_timeout_max_s: float = 3600.0
    lease_claim_s: float = 30.0
    idempotency_ttl_s: float = 86_400.0
    idempotency_grace_s: float = 1.0
    queue_patience_s: float = 3600.0
    queue_in_flight: int = 64
    concurrency: int = 1024
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse values that no scheduler could work with."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.endswith("_s") and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of seconds, 0 or more")
        for name in ("node_timeout_s", "attempt_timeout_s", "list_timeout_s", "idempotency_ttl_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 s")
        for name in ("choices", "attempts_max", "queue_in_flight", "concurrency", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
