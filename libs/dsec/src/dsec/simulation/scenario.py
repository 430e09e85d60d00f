"""A file that says what to simulate: nodes, prices, queues, and what arrives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec

from dsec.simulation.engine import Outcome, Policy, SimulatedNode, Simulation
from dsec.simulation.policies import FirstFit, Scheduler, WholeCards
from dsec.simulation.report import Report, report
from dsec.simulation.traces import TraceError, TraceFile, read_trace
from dsec.simulation.work import Amount, Mix, Positive, Work, draw
from dsec_common.compute.model import COUNT_MAX, Card, CardMode, ServiceClass
from dsec_common.compute.units import DEFAULT_PRICES, UNITS_MAX, UnitTable
from dsec_common.errors import DsecError
from dsec_common.yaml_text import read_yaml
from dsec_scheduler.queues import QueueRules
from dsec_scheduler.solving.objective import SLA_S

_GIB = 1 << 30
_HOUR_S = 3600.0
_CARDS_MAX: Final = 100_000


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
    nodes: Annotated[int, msgspec.Meta(ge=1, le=_CARDS_MAX)] = 1
    gpus: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)] = 8
    memory_gib: Annotated[float, msgspec.Meta(ge=0, le=1 << 14)] = 0
    islands: Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)] = 1
    mode: CardMode = CardMode.MPS
    from_hour: Amount = 0.0
    until_hour: Annotated[float, msgspec.Meta(gt=0)] = math.inf


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

    cluster: Annotated[tuple[NodeGroup, ...], msgspec.Meta(min_length=1)]
    mix: Mix | None = None
    trace: TraceFile | None = None
    prices: dict[str, Amount] = {}
    units: dict[str, Annotated[float, msgspec.Meta(ge=0, le=UNITS_MAX)]] = {}
    queues: QueueRules = QueueRules()
    compare: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("scheduler",)
    warm_up_hours: Amount = 0.0
    sla_s: dict[ServiceClass, Positive] = {}


class ScenarioError(ValueError):
    """A scenario that cannot be meant."""


def read_scenario(path: Path) -> Scenario:
    """Return the scenario of a YAML file.

    Raises:
        ScenarioError: what is wrong with it, and where.
    """
    try:
        scenario = read_yaml(path.read_text(encoding="utf-8"), Scenario, str(path))
    except OSError as error:
        raise ScenarioError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path} is no text: {error}") from None
    except DsecError as error:
        raise ScenarioError(error.message) from None
    for flaw in (*_flaws(scenario), *_flaws_of_rules(scenario.queues)):
        raise ScenarioError(f"{path}: {flaw}")
    return scenario


def _flaws(scenario: Scenario) -> Iterator[str]:
    """Yield what does not go together."""
    if (scenario.mix is None) == (scenario.trace is None):
        yield "give either mix or trace"
    for policy in scenario.compare:
        if policy not in POLICIES:
            yield f"no policy {policy!r}: use {', '.join(POLICIES)}"
    names = [group.name for group in scenario.cluster]
    if len(set(names)) < len(names):
        yield "two groups of nodes have the same name"
    if sum(group.nodes * group.gpus for group in scenario.cluster) > _CARDS_MAX:
        yield f"the cluster has more than {_CARDS_MAX} cards"
    for kind in scenario.mix.kinds if scenario.mix else ():
        if kind.cu[0] > kind.cu[1]:
            yield f"the kind {kind.name} has cu from {kind.cu[0]:g} down to {kind.cu[1]:g}"


def _flaws_of_rules(rules: QueueRules) -> Iterator[str]:
    if not 0 <= rules.realtime_share <= 1:
        yield f"realtime_share {rules.realtime_share:g} is no part of all cards: use 0 to 1"
    for name in ("ageing_s", "starving_s", "batch_patience_s"):
        if not 0 < getattr(rules, name) < math.inf:
            yield f"{name} must be a positive number of seconds"


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
