"""What came of a simulation, in figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dsec.simulation.outcome import Moves, Outcome
from dsec_common.compute.model import ServiceClass

SPANS: Final = 48
"""Of equal length, in which what changes over time is told."""


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """How long one class waited, in seconds.

    Attributes:
        count: how many were asked for.
        never: how many of them had no units by the end.
        in_sla: the part that began within the class's SLA.
    """

    count: int
    never: int
    p50_s: float
    p99_s: float
    max_s: float
    in_sla: float


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """What the elastic engine did.

    Attributes:
        shrinks, recoveries: how often a lease got fewer units, or more.
        share: units that leases held beyond what was promised to them, as a part of all that there
            are, over the window.
        share_over_time: the same in each of :data:`SPANS` spans from the start to the last arrival.
        nodes_ordered, nodes_given_up: nodes of the provider.
        nodes_most: so many of them at once.
        node_hours: how long they were there in all, with or without work.
    """

    shrinks: int
    recoveries: int
    share: float
    share_over_time: tuple[float, ...]
    nodes_ordered: int
    nodes_given_up: int
    nodes_most: int
    node_hours: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one policy.

    Attributes:
        utilisation: units in useful work as a part of all that there are, over the window.
        held: units under lease as a part of all.
        cost_per_cu_hour: price of all that was held for each CU-hour of useful work.
        fairness: Jain's index of what projects got of what they asked for: 1 when each got the same
            part of its own, 1/n when one of n got all.
        elastic: None where leases keep what they were granted.
    """

    policy: str
    utilisation: float
    held: float
    waits: dict[str, Waits]
    cost: float
    useful_cu_hours: float
    cost_per_cu_hour: float
    fairness: float
    served_by_project: dict[str, float]
    elastic: Elastic | None = None


def report(
    policy: str,
    outcome: Outcome,
    sla_s: Mapping[ServiceClass, float],
    from_s: float,
    until_s: float,
) -> Report:
    """Return the figures; utilisation and fairness for the window, the rest for the whole run."""
    total = _integral(outcome.times_s, outcome.total_cu, from_s, until_s)
    useful = _integral(outcome.times_s, outcome.useful_cu, from_s, until_s)
    held = _integral(outcome.times_s, outcome.held_cu, from_s, until_s)
    served = _served_by_project(outcome, until_s)
    hours = sum(it.useful_cu_s(outcome.times_s[-1]) / 3600 for it in outcome.served)
    return Report(
        policy=policy,
        utilisation=useful / total if total else 0.0,
        held=held / total if total else 0.0,
        waits=_waits(outcome, sla_s),
        cost=outcome.cost,
        useful_cu_hours=hours,
        cost_per_cu_hour=outcome.cost / hours if hours else 0.0,
        fairness=_jain(list(served.values())),
        served_by_project=served,
        elastic=_elastic(outcome, outcome.moves, from_s, until_s) if outcome.moves else None,
    )


def _elastic(outcome: Outcome, moves: Moves, from_s: float, until_s: float) -> Elastic:
    def share(start_s: float, end_s: float) -> float:
        total = _integral(outcome.times_s, outcome.total_cu, start_s, end_s)
        elastic = _integral(outcome.times_s, moves.elastic_cu, start_s, end_s)
        # A sum of what came and went is not exactly nothing in the end.
        return max(0.0, elastic) / total if total else 0.0

    span_s = until_s / SPANS
    node_s = _integral(outcome.times_s, moves.nodes, 0.0, outcome.times_s[-1])
    return Elastic(
        shrinks=moves.shrinks,
        recoveries=moves.recoveries,
        share=share(from_s, until_s),
        share_over_time=tuple(share(at * span_s, (at + 1) * span_s) for at in range(SPANS)),
        nodes_ordered=moves.ordered,
        nodes_given_up=moves.given_up,
        nodes_most=max(moves.nodes, default=0),
        node_hours=node_s / 3600,
    )


def _integral(
    times_s: Sequence[float], values: Sequence[float], from_s: float, until_s: float
) -> float:
    """Return the integral of a staircase over a window."""
    ends = [*times_s[1:], math.inf]
    return math.fsum(
        value * max(0.0, min(end, until_s) - max(start, from_s))
        for start, end, value in zip(times_s, ends, values, strict=True)
    )


def _waits(outcome: Outcome, sla_s: Mapping[ServiceClass, float]) -> dict[str, Waits]:
    found: dict[ServiceClass, list[float]] = {}
    first: set[str] = set()
    for served in outcome.served:
        if served.work.name not in first:
            first.add(served.work.name)
            found.setdefault(served.work.service_class, []).append(served.wait_s)
    never: dict[ServiceClass, int] = {}
    for work in outcome.left:
        never[work.service_class] = never.get(work.service_class, 0) + 1
    waits = {}
    for service_class in ServiceClass:
        if service_class not in found and service_class not in never:
            continue
        times = sorted(found.get(service_class, []))
        count = len(times) + never.get(service_class, 0)
        in_time = sum(wait <= sla_s[service_class] for wait in times)
        waits[service_class.value] = Waits(
            count=count,
            never=never.get(service_class, 0),
            p50_s=_percentile(times, 0.5),
            p99_s=_percentile(times, 0.99),
            max_s=times[-1] if times else 0.0,
            in_sla=in_time / count,
        )
    return waits


def _percentile(ordered: Sequence[float], part: float) -> float:
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


def _served_by_project(outcome: Outcome, until_s: float) -> dict[str, float]:
    asked: dict[str, float] = {}
    got: dict[str, float] = {}
    for served in outcome.served:
        work = served.work
        asked[work.project] = asked.get(work.project, 0.0) + work.cu_seconds
        got[work.project] = got.get(work.project, 0.0) + served.useful_cu_s(until_s)
    for work in outcome.left:
        asked[work.project] = asked.get(work.project, 0.0) + work.cu_seconds
    return {project: got.get(project, 0.0) / asked[project] for project in sorted(asked)}


def _jain(parts: Sequence[float]) -> float:
    squares = math.fsum(part * part for part in parts)
    return math.fsum(parts) ** 2 / (len(parts) * squares) if squares else 1.0
