"""A file that says what to simulate: nodes, prices, queues, and what arrives."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from dsec.simulation.engine import Outcome, Policy, SimulatedNode, Simulation
from dsec.simulation.policies import FirstFit, Scheduler, WholeCards
from dsec.simulation.report import Report, report
from dsec.simulation.traces import TraceError, TraceFile, read_trace
from dsec.simulation.work import Mix, Work, draw
from dsec_common.compute.model import Card, CardMode, ServiceClass
from dsec_common.compute.units import DEFAULT_PRICES, UnitTable
from dsec_scheduler.queues import QueueRules
from dsec_scheduler.solving.objective import SLA_S

_GIB = 1 << 30
_HOUR_S = 3600.0


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes that are alike.

    Attributes:
        name: with a number behind it when there are several.
        gpus: cards of each.
        model: as in the table of units.
        islands: into how many NVLink islands the cards of one are joined; 0 for none.
        from_hour, until_hour: when they are there.
    """

    name: str
    model: str
    nodes: int = 1
    gpus: int = 8
    memory_gib: float = 0
    islands: int = 1
    mode: CardMode = CardMode.MPS
    from_hour: float = 0.0
    until_hour: float = math.inf


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to simulate.

    Attributes:
        cluster: its nodes.
        mix, trace: what arrives; one of them.
        prices: of one unit for an hour, beside the defaults.
        units: of models, beside the table.
        queues: the scheduler's rules.
        compare: what is run: ``scheduler``, ``first-fit``, ``whole-cards``.
        warm_up_hours: left out of utilisation and fairness: an empty cluster fills first.
        sla_s: seconds that each class may wait, beside the defaults.
    """

    cluster: tuple[NodeGroup, ...]
    mix: Mix | None = None
    trace: TraceFile | None = None
    prices: dict[str, float] = {}
    units: dict[str, float] = {}
    queues: QueueRules = QueueRules()
    compare: tuple[str, ...] = ("scheduler",)
    warm_up_hours: float = 0.0
    sla_s: dict[ServiceClass, float] = {}


class ScenarioError(ValueError):
    """A scenario that cannot be meant."""


def read_scenario(path: Path) -> Scenario:
    """Return the scenario of a YAML file.

    Raises:
        ScenarioError: what is wrong with it, and where.
    """
    import yaml  # noqa: PLC0415  an extra

    try:
        scenario = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Scenario)
    except OSError as error:
        raise ScenarioError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ScenarioError(f"{path}: {error}") from None
    if (scenario.mix is None) == (scenario.trace is None):
        raise ScenarioError(f"{path}: give either mix or trace")
    for policy in scenario.compare:
        if policy not in POLICIES:
            raise ScenarioError(f"{path}: no policy {policy!r}: use {', '.join(POLICIES)}")
    return scenario


def nodes_of(scenario: Scenario) -> list[SimulatedNode]:
    """Return the scenario's nodes.

    Raises:
        ScenarioError: a model is not in the table of units.
    """
    table = UnitTable(scenario.units)
    found = []
    for group in scenario.cluster:
        known = table.find(group.model)
        if known is None:
            raise ScenarioError(f"{group.name}: no model {group.model!r}; say its CU under units")
        model, cu = known
        for number in range(group.nodes):
            name = f"{group.name}-{number}" if group.nodes > 1 else group.name
            cards = tuple(
                Card(
                    uuid=f"{name}.{index}",
                    model=model,
                    cu=cu,
                    memory_bytes=int(group.memory_gib * _GIB),
                    island=f"{index * group.islands // group.gpus}" if group.islands else "",
                    mode=group.mode,
                )
                for index in range(group.gpus)
            )
            since_s, until_s = group.from_hour * _HOUR_S, group.until_hour * _HOUR_S
            found.append(SimulatedNode(name, cards, since_s, until_s))
    return found


def work_of(scenario: Scenario, directory: Path) -> list[Work]:
    """Return what arrives.

    Raises:
        TraceError: the trace cannot be read.
    """
    if scenario.trace is not None:
        works = read_trace(scenario.trace, directory)
        if not works:
            raise TraceError(f"{scenario.trace.file} asks for no GPU")
        return works
    assert scenario.mix is not None  # noqa: S101  checked when it was read
    total_cu = math.fsum(card.cu for node in nodes_of(scenario) for card in node.cards)
    return draw(scenario.mix, total_cu)


def policy_of(name: str, scenario: Scenario) -> Policy:
    """Return a policy in its first state."""
    if name == "scheduler":
        return Scheduler(scenario.queues, {**DEFAULT_PRICES, **scenario.prices})
    return FirstFit() if name == "first-fit" else WholeCards()


def simulate(scenario: Scenario, works: list[Work]) -> list[tuple[Report, Outcome]]:
    """Return what comes of each policy; the window ends with the last arrival."""
    nodes = nodes_of(scenario)
    prices = {**DEFAULT_PRICES, **scenario.prices}
    until_s = max(work.at_s for work in works)
    from_s = min(scenario.warm_up_hours * _HOUR_S, until_s)
    found = []
    for name in scenario.compare:
        outcome = Simulation(nodes, works, policy_of(name, scenario), prices).run()
        sla_s = {**SLA_S, **scenario.sla_s}
        found.append((report(name, outcome, sla_s, from_s, until_s), outcome))
    return found


POLICIES = ("scheduler", "first-fit", "whole-cards")
"""What can be compared."""
