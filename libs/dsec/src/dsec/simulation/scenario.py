"""A file that says what to simulate: nodes, prices, queues, and what arrives."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from dsec.simulation.cluster import CARDS_MAX, NodeGroup, NodeSource, SimulatedNode
from dsec.simulation.elasticity import Elasticity, SimulatedProvider
from dsec.simulation.engine import Policy, Simulation
from dsec.simulation.outcome import Outcome
from dsec.simulation.policies import FirstFit, Scheduler, WholeCards
from dsec.simulation.report import Report, report
from dsec.simulation.traces import TraceError, TraceFile, read_trace
from dsec.simulation.work import Amount, Mix, Positive, Surge, Work, draw
from dsec_broker.elastic_config import ElasticConfig
from dsec_common.compute.conservation import RECOVERY_FACTOR, UTILISATION_FACTOR
from dsec_common.compute.model import ServiceClass
from dsec_common.compute.units import DEFAULT_PRICES, UNITS_MAX, UnitTable
from dsec_common.errors import DsecError
from dsec_common.yaml_text import read_yaml
from dsec_scheduler.queues import QueueRules
from dsec_scheduler.solving.objective import SLA_S

_HOUR_S = 3600.0


class ElasticRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the elastic engine goes by; as in the broker's configuration.

    Attributes:
        utilisation_factor: the part of all units above which leases shrink and nodes are ordered.
        recovery_factor: the part up to which they grow back, and below which the cluster must be
            without a node that is given up.
        interval_s: how long after a change the cluster is looked at.
        provider: where further nodes come from, if from anywhere.
    """

    utilisation_factor: float = UTILISATION_FACTOR
    recovery_factor: float = RECOVERY_FACTOR
    interval_s: Positive = 0.2
    provider: NodeSource | None = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to simulate.

    Attributes:
        cluster: its nodes.
        mix, trace: what arrives; one of them.
        prices: of one unit for an hour, beside the defaults.
        units: of models, beside the table.
        queues: the scheduler's rules.
        elastic: the elastic engine's rules; without them leases keep what they were granted.
        compare: what is run: ``scheduler``, ``inelastic`` (the same without the elastic engine),
            ``first-fit``, ``whole-cards``.
        warm_up_hours: left out of utilisation and fairness: an empty cluster fills first.
        sla_s: seconds that each class may wait, beside the defaults.
    """

    cluster: Annotated[tuple[NodeGroup, ...], msgspec.Meta(min_length=1)]
    mix: Mix | None = None
    trace: TraceFile | None = None
    prices: dict[str, Amount] = {}
    units: dict[str, Annotated[float, msgspec.Meta(ge=0, le=UNITS_MAX)]] = {}
    queues: QueueRules = QueueRules()
    elastic: ElasticRules | None = None
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
    if sum(group.nodes * group.gpus for group in scenario.cluster) > CARDS_MAX:
        yield f"the cluster has more than {CARDS_MAX} cards"
    if scenario.elastic is not None:
        yield from _flaws_of_elastic(scenario.elastic, scenario.cluster)
    for kind in scenario.mix.kinds if scenario.mix else ():
        if kind.cu[0] > kind.cu[1]:
            yield f"the kind {kind.name} has cu from {kind.cu[0]:g} down to {kind.cu[1]:g}"
    if scenario.mix is not None and scenario.mix.surge is not None:
        yield from _flaws_of_surge(scenario.mix.surge, scenario.mix)


def _flaws_of_surge(surge: Surge, mix: Mix) -> Iterator[str]:
    known = [kind.name for kind in mix.kinds]
    for name in surge.kinds:
        if name not in known:
            yield f"the surge is of a kind {name!r} that is not there: use {', '.join(known)}"
    if surge.from_hour >= surge.until_hour:
        yield f"the surge ends at hour {surge.until_hour:g}, not after it begins"


def _flaws_of_elastic(rules: ElasticRules, cluster: Sequence[NodeGroup]) -> Iterator[str]:
    try:
        _config_of(msgspec.structs.replace(rules, provider=None), 1.0)
    except ValueError as error:
        yield f"elastic: {error}"
    source = rules.provider
    if source is None:
        return
    for group in cluster:
        name = f"{group.name}-0" if group.nodes > 1 else group.name
        if re.fullmatch(re.escape(source.name) + r"-\d+", name):
            yield f"nodes of {group.name} may have the names of the provider's: rename either"
    if source.min_nodes > source.max_nodes:
        yield f"elastic: min_nodes {source.min_nodes} is more than max_nodes {source.max_nodes}"
    if source.max_nodes * source.gpus > CARDS_MAX:
        yield f"the provider's nodes have more than {CARDS_MAX} cards"


def _flaws_of_rules(rules: QueueRules) -> Iterator[str]:
    if not 0 <= rules.realtime_share <= 1:
        yield f"realtime_share {rules.realtime_share:g} is no part of all cards: use 0 to 1"
    if not 0 <= rules.burst_factor <= 1:
        yield f"burst_factor {rules.burst_factor:g} is no part of the own cards: use 0 to 1"
    for name in ("ageing_s", "starving_s", "batch_patience_s"):
        if not 0 < getattr(rules, name) < math.inf:
            yield f"{name} must be a positive number of seconds"


def nodes_of(scenario: Scenario) -> list[SimulatedNode]:
    """Return the scenario's nodes.

    Raises:
        ScenarioError: a model is not in the table of units.
    """
    table = UnitTable(scenario.units)
    try:
        return [node for group in scenario.cluster for node in group.simulated(table)]
    except ValueError as error:
        raise ScenarioError(str(error)) from None


def elasticity_of(scenario: Scenario) -> Elasticity | None:
    """Return the elastic engine in its first state, if there is one.

    Raises:
        ScenarioError: the model of the provider's nodes is worth nothing, or not in the table.
    """
    rules = scenario.elastic
    if rules is None:
        return None
    source, node_cu, provider = rules.provider, 1.0, None
    if source is not None:
        table = UnitTable(scenario.units)
        try:
            node_cu = math.fsum(card.cu_total for card in source.cards(source.name, table))
        except ValueError as error:
            raise ScenarioError(str(error)) from None
        if node_cu <= 0:
            raise ScenarioError(f"{source.name}: nodes that bring no Compute Units are no help")
        provider = SimulatedProvider(source, table)
    return Elasticity(_config_of(rules, node_cu), provider)


def _config_of(rules: ElasticRules, node_cu: float) -> ElasticConfig:
    config = ElasticConfig(
        utilisation_factor=rules.utilisation_factor,
        recovery_factor=rules.recovery_factor,
        elastic_interval_s=rules.interval_s,
    )
    source = rules.provider
    if source is None:
        return config
    return msgspec.structs.replace(
        config,
        node_provider=source.name,
        node_provider_cu=node_cu,
        node_provider_min=source.min_nodes,
        node_provider_max=source.max_nodes,
        node_idle_s=source.idle_s,
    )


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
    if name in {"scheduler", "inelastic"}:
        leases_yield = name == "scheduler" and scenario.elastic is not None
        prices = {**DEFAULT_PRICES, **scenario.prices}
        return Scheduler(scenario.queues, prices, leases_yield=leases_yield)
    return FirstFit() if name == "first-fit" else WholeCards()


def simulate(scenario: Scenario, works: list[Work]) -> list[tuple[Report, Outcome]]:
    """Return what comes of each policy; the window ends with the last arrival.

    Raises:
        ScenarioError: as :func:`nodes_of` and :func:`elasticity_of`.
    """
    nodes = nodes_of(scenario)
    prices = {**DEFAULT_PRICES, **scenario.prices}
    until_s = max(work.at_s for work in works)
    from_s = min(scenario.warm_up_hours * _HOUR_S, until_s)
    found = []
    for name in scenario.compare:
        elasticity = elasticity_of(scenario) if name == "scheduler" else None
        policy = policy_of(name, scenario)
        outcome = Simulation(nodes, works, policy, prices, elasticity).run()
        sla_s = {**SLA_S, **scenario.sla_s}
        found.append((report(name, outcome, sla_s, from_s, until_s), outcome))
    return found


POLICIES = ("scheduler", "inelastic", "first-fit", "whole-cards")
"""What can be compared."""
