"""What the scheduler is told."""

from __future__ import annotations

import math
from typing import Self

import msgspec

from dsec_common.compute.conservation import BURST_FACTOR
from dsec_common.compute.consistency import CLOCK_TOLERANCE_MS
from dsec_common.config import ServiceConfig
from dsec_common.nodes_file import NODES_FILE, read_nodes_file
from dsec_scheduler.fair_share import Quota, check_quotas
from dsec_scheduler.queues import QueueRules


class SchedulerConfig(ServiceConfig, frozen=True, kw_only=True):
    """The scheduler: where a sandbox goes.

    Attributes:
        node_timeout_s: a node is placed on while its last heartbeat is younger than this.
        node_forget_s: a silent node is no longer named in listings after this long.
        choices: so many nodes are drawn at random, and the least loaded of them is taken.
        burst_factor: the use of the cluster's own nodes above which other capacity goes first.
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
        node_in_flight: sandboxes being made at once for each node that takes some; others wait.
        rollout_window_s: so long after an update an agent's new version is watched.
        rollout_threshold: it is taken back when more than this share of its ended instances failed.
        rollout_minimum: it is judged only once so many have ended.
        dag_runs_kept_s: how long a run of a DAG is known after its last change.
        dag_runs_max_bytes: what all runs with their values may take of JetStream's storage, which
            sets it aside for them.
        clock_tolerance_s: how far the clocks of an agent and of what it depends on may be apart.
        agent_packages_max_bytes: what packages of agents may take of it.
        agent_packages_project_max_bytes: what those of one project may.
        agents_project_max: agents that one project may have.
        dags_project_max: DAGs that one project may have.
        replicas: how many NATS servers keep keys, queue and events.
        quotas: how projects share Compute Units; see
            :class:`~dsec_scheduler.fair_share.Quota`.
        realtime_share: of all cards, whole ones, those that only realtime requests get.
        ageing_s: waiting for units that is worth one step of priority.
        starving_s: what has waited for units this long and longest of all has nodes kept for it.
        batch_patience_s: batch that has waited this long is looked at with standard.
        round_interval_s: units are given out so often while something waits.
        realtime_interval_s: and so often while something of the realtime class does.
        solve_deadline_s: how long the solver may look for the best places.
        waiting_max: requests that may wait for units at this process, of which one project never
            has all.
        queue_waiting_max: of the durable queue's, so many at most; others stay in the stream.
        prices: what a Compute Unit costs for an hour, by model, before ``nodes_file`` and the
            built-in table.
        nodes_file: ``nodes.yaml``, of which schedulers read the prices.
    """

    node_timeout_s: float = 3.0
    node_forget_s: float = 600.0
    choices: int = 2
    burst_factor: float = BURST_FACTOR
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
    node_in_flight: int = 128
    rollout_window_s: float = 300.0
    rollout_threshold: float = 0.2
    rollout_minimum: int = 10
    dag_runs_kept_s: float = 604_800.0
    dag_runs_max_bytes: int = 1 << 30
    clock_tolerance_s: float = CLOCK_TOLERANCE_MS / 1000
    agent_packages_max_bytes: int = 2 << 30
    agent_packages_project_max_bytes: int = 512 << 20
    agents_project_max: int = 1000
    dags_project_max: int = 1000
    replicas: int = 1
    quotas: tuple[Quota, ...] = ()
    realtime_share: float = 0.1
    ageing_s: float = 60.0
    starving_s: float = 60.0
    batch_patience_s: float = 600.0
    round_interval_s: float = 0.2
    realtime_interval_s: float = 0.05
    solve_deadline_s: float = 0.15
    waiting_max: int = 16_384
    queue_waiting_max: int = 1024
    prices: dict[str, float] = msgspec.field(default_factory=dict)
    nodes_file: str = NODES_FILE

    def completed(self) -> Self:
        """Return the settings with the prices of ``nodes_file`` behind their own."""
        prices = read_nodes_file(self.nodes_file).prices
        return msgspec.structs.replace(self, prices={**prices, **self.prices})

    def queue_rules(self) -> QueueRules:
        """Return what the queues for Compute Units go by."""
        return QueueRules(
            quotas=self.quotas,
            realtime_share=self.realtime_share,
            ageing_s=self.ageing_s,
            starving_s=self.starving_s,
            batch_patience_s=self.batch_patience_s,
            burst_factor=self.burst_factor,
        )

    def __post_init__(self) -> None:
        """Refuse values that no scheduler could work with."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.endswith("_s") and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of seconds, 0 or more")
        for name in ("node_timeout_s", "attempt_timeout_s", "list_timeout_s", "idempotency_ttl_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 s")
        for name in (
            *("choices", "attempts_max", "queue_in_flight", "concurrency", "replicas"),
            "rollout_minimum",
            "node_in_flight",
            "dag_runs_max_bytes",
            "agent_packages_max_bytes",
            "agent_packages_project_max_bytes",
            "agents_project_max",
            "dags_project_max",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        self._check_queues()

    def _check_queues(self) -> None:
        check_quotas(self.quotas)
        for name in ("ageing_s", "round_interval_s", "realtime_interval_s", "solve_deadline_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 s")
        if not 0 <= self.burst_factor <= 1:
            raise ValueError("burst_factor is a part of the cluster's own nodes: use 0 to 1")
        if not 0 <= self.realtime_share <= 1:
            raise ValueError("realtime_share is a part of all cards: use 0 to 1")
        if self.waiting_max < 1 or self.queue_waiting_max < 1:
            raise ValueError("waiting_max and queue_waiting_max must be at least 1")
        for model, price in self.prices.items():
            if not 0 <= price < math.inf:
                raise ValueError(f"prices[{model!r}] must be a number, 0 or more")
