"""The elastic engine in the simulator: shares that move, nodes that come and go, and the files."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from dsec.simulation.cluster import NodeSource, SimulatedNode
from dsec.simulation.elasticity import Elasticity, SimulatedProvider
from dsec.simulation.engine import Grant, Simulation
from dsec.simulation.outcome import Moves, Outcome
from dsec.simulation.policies import FirstFit, Scheduler
from dsec.simulation.report import SPANS, report
from dsec.simulation.scenario import ScenarioError, read_scenario, simulate, work_of
from dsec.simulation.work import Kind, Mix, Surge, Work, draw
from dsec_broker.books import Books
from dsec_broker.elastic_config import ElasticConfig
from dsec_common.compute.model import Card, GpuDemand, ServiceClass
from dsec_common.compute.units import DEFAULT_PRICES, UnitTable
from dsec_scheduler.queues import QueueRules
from dsec_scheduler.solving.objective import SLA_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
RULES = QueueRules(realtime_share=0)
SOURCE = NodeSource(name="more", model="A100", gpus=1, start_s=120, idle_s=300, max_nodes=2)
BATCH, REALTIME = ServiceClass.BATCH, ServiceClass.REALTIME


def node(name: str, **labels: str) -> SimulatedNode:
    return SimulatedNode(name, (Card(uuid=f"{name}.0", model="A100", cu=100.0),), labels=labels)


def work(name: str, cu: float, at_s: float = 0.0, duration_s: float = 60.0, **more: object) -> Work:
    demand = GpuDemand(min_cu=cu, max_cu=float(more.pop("max_cu", cu)))  # type: ignore[arg-type]
    return Work(name=name, at_s=at_s, duration_s=duration_s, demand=demand, **more)  # type: ignore[arg-type]


def engine(source: NodeSource | None = None) -> Elasticity:
    if source is None:
        return Elasticity(ElasticConfig())
    config = ElasticConfig(
        node_provider=source.name,
        node_provider_cu=100,
        node_provider_min=source.min_nodes,
        node_provider_max=source.max_nodes,
        node_idle_s=source.idle_s,
    )
    return Elasticity(config, SimulatedProvider(source, UnitTable()))


def simulated(
    *works: Work,
    nodes: tuple[SimulatedNode, ...] = (node("a"),),
    elasticity: Elasticity | None = None,
) -> Outcome:
    policy = Scheduler(RULES, DEFAULT_PRICES, leases_yield=elasticity is not None)
    return Simulation(nodes, works, policy, DEFAULT_PRICES, elasticity).run()


def moves_of(outcome: Outcome) -> Moves:
    assert outcome.moves is not None
    return outcome.moves


def shares_of(outcome: Outcome, name: str) -> list[tuple[float, float]]:
    (served,) = (it for it in outcome.served if it.work.name == name)
    return [(round(share.since_s, 6), share.cu) for share in served.shares]


def nodes_over_time(outcome: Outcome) -> list[tuple[float, int]]:
    """Return when the number of the provider's nodes changed, and to what."""
    found = [(0.0, 0)]
    for time, count in zip(outcome.times_s, moves_of(outcome).nodes, strict=True):
        if count != found[-1][1]:
            found.append((round(time, 6), count))
    return found


# --- Shares -----------------------------------------------------------------------------------

SURGE = (
    work("low", 20, duration_s=200, max_cu=90, service_class=BATCH),
    work("surge", 60, at_s=100, service_class=REALTIME),
)


def test_a_surge_shrinks_batch_to_its_promise_and_it_grows_back_and_takes_longer() -> None:
    outcome = simulated(*SURGE, elasticity=engine())
    low = [(0, 90), (0.2, 85), (100, 20), (160.2, 80)]
    assert shares_of(outcome, "low") == low
    assert shares_of(outcome, "surge") == [(100, 60)]
    moves = moves_of(outcome)
    assert (moves.shrinks, moves.recoveries) == (2, 1)
    # 200 s of 90 units are the work; what it has done by 160.2 s is what it has held.
    done = 0.2 * 90 + 99.8 * 85 + 60.2 * 20
    ended_s = max(served.ended_s for served in outcome.served)
    assert ended_s == pytest.approx(160.2 + (200 * 90 - done) / 80)
    assert outcome.cost == pytest.approx(1.8 * (200 * 90 + 60 * 60) / 3600)
    assert outcome.useful_cu[-1] == pytest.approx(0, abs=1e-6)
    assert moves.elastic_cu[-1] == pytest.approx(0, abs=1e-6)


def test_without_the_engine_the_surge_waits_until_batch_has_ended() -> None:
    outcome = simulated(*SURGE)
    assert shares_of(outcome, "low") == [(0, 90)]
    ((started_s, _),) = shares_of(outcome, "surge")
    assert 200 < started_s <= 200.2 + 1e-6
    assert outcome.moves is None


def test_the_least_important_shrinks_first_and_grows_back_last() -> None:
    works = (
        work("batch", 10, duration_s=1000, max_cu=40, service_class=BATCH),
        work("standard", 10, duration_s=1000, max_cu=40),
        work("later", 15, at_s=50),
    )
    outcome = simulated(*works, elasticity=engine())
    # 95 of 100 are handed out: batch gives the ten that are above 85 %.
    assert shares_of(outcome, "batch")[1] == (50.2, 30)
    assert shares_of(outcome, "standard") == [(0, 40)]
    assert shares_of(outcome, "batch")[2] == (110.2, 40)


def test_what_cannot_shrink_and_is_below_the_line_is_as_without_the_engine() -> None:
    works = [work(f"w{i}", 20, at_s=10 * i, duration_s=25) for i in range(20)]
    assert simulated(*works, elasticity=engine()).served == simulated(*works).served


def test_the_report_says_how_much_was_elastic_and_when() -> None:
    late = work("late", 1, at_s=480, duration_s=1)
    outcome = simulated(*SURGE, late, elasticity=engine())
    told = report("scheduler", outcome, SLA_S, 0.0, 480.0).elastic
    assert told is not None
    assert (told.shrinks, told.recoveries) == (2, 1)
    assert len(told.share_over_time) == SPANS
    # Spans of ten seconds: 65 of 100 units beyond the promise, then none, then 60.
    assert told.share_over_time[5] == pytest.approx(0.65)
    assert told.share_over_time[12] == pytest.approx(0)
    assert told.share_over_time[20] == pytest.approx(0.6)
    assert told.share == pytest.approx(sum(told.share_over_time) / SPANS)


# --- Nodes ------------------------------------------------------------------------------------


def test_nodes_are_there_after_their_start_and_go_when_the_rest_suffices() -> None:
    works = (
        work("x", 50, duration_s=500),
        work("y", 50, duration_s=1000),
        work("z", 50, at_s=10),
    )
    outcome = simulated(*works, elasticity=engine(SOURCE))
    (z,) = (served for served in outcome.served if served.work.name == "z")
    assert z.node == "more-1"
    assert z.started_s == pytest.approx(120.4)
    # It has idled for long enough at 480 s, when all of the others' units are in use still.
    assert nodes_over_time(outcome) == [(0, 0), (120.2, 1), (500.2, 0)]
    moves = moves_of(outcome)
    assert (moves.ordered, moves.given_up) == (1, 1)
    assert max(outcome.total_cu) == 200
    told = report("scheduler", outcome, SLA_S, 0.0, 1000.0).elastic
    assert told is not None
    assert told.nodes_most == 1
    assert told.node_hours == pytest.approx(380 / 3600)


def test_a_node_that_idles_leaves_after_its_time() -> None:
    works = (work("x", 90, duration_s=100), work("y", 10, at_s=50, duration_s=1000))
    outcome = simulated(*works, elasticity=engine(SOURCE))
    # Ordered a moment after 0 s, and there when nobody needs it any more.
    assert nodes_over_time(outcome) == [(0, 0), (120.2, 1), (420.6, 0)]


def test_the_fewest_nodes_stay_when_all_is_done() -> None:
    source = msgspec.structs.replace(SOURCE, min_nodes=2, max_nodes=3)
    outcome = simulated(work("x", 10), elasticity=engine(source))
    assert nodes_over_time(outcome) == [(0, 0), (120.2, 2)]
    assert moves_of(outcome).given_up == 0


def test_no_more_nodes_are_ordered_than_there_may_be() -> None:
    works = [work(f"w{i}", 100, at_s=i, duration_s=2000) for i in range(8)]
    outcome = simulated(*works, elasticity=engine(SOURCE))
    assert max(moves_of(outcome).nodes) == 2
    assert moves_of(outcome).ordered == 2
    assert not outcome.left


def test_nodes_for_bursts_take_work_above_four_fifths_and_realtime_stays_at_home() -> None:
    works = (
        work("own", 81, duration_s=500),
        work("burst", 5, at_s=1),
        work("urgent", 5, at_s=2, service_class=REALTIME),
    )

    def where(*nodes: SimulatedNode) -> dict[str, str]:
        return {it.work.name: it.node for it in simulated(*works, nodes=nodes).served}

    other = node("b", capacity="burst")
    assert where(node("a"), other) == {"own": "a", "burst": "b", "urgent": "a"}
    assert where(node("a"), node("b")) == {"own": "a", "burst": "a", "urgent": "a"}


# --- A policy that is wrong -------------------------------------------------------------------


class Greedy(FirstFit):
    """Grants whoever waits, whether or not there is room."""

    def look(self, now_s: float, books: Mapping[str, Books]) -> Sequence[Grant]:
        """Return a place for everybody."""
        del now_s
        return [Grant(waiting, "a", ()) for waiting in self._line.values() if books]


def test_who_is_granted_what_is_not_there_waits_on() -> None:
    works = [work("x", 60, duration_s=30), work("y", 60, duration_s=30)]
    outcome = Simulation([node("a")], works, Greedy(), DEFAULT_PRICES, engine()).run()
    assert [served.work.name for served in outcome.served] == ["x", "y"]
    assert outcome.served[1].started_s >= 30
    assert not outcome.left


# --- Files ------------------------------------------------------------------------------------


def test_a_surge_asks_for_so_many_times_as_much_of_its_kinds() -> None:
    kinds = (Kind(name="a", share=1, projects=("a",)), Kind(name="b", share=1, projects=("b",)))
    mix = Mix(kinds=kinds, hours=30, load=0.5)
    surge = Surge(from_hour=10, until_hour=20, times=4, kinds=("a",))
    works = draw(msgspec.structs.replace(mix, surge=surge), 1000)

    def rate(project: str, from_hour: int) -> int:
        span = range(from_hour * 3600, (from_hour + 10) * 3600)
        return sum(it.project == project and int(it.at_s) in span for it in works)

    assert rate("a", 10) == pytest.approx(4 * rate("a", 0), rel=0.15)
    assert rate("b", 10) == pytest.approx(rate("b", 0), rel=0.15)
    assert rate("a", 20) == pytest.approx(rate("a", 0), rel=0.15)
    with pytest.raises(ValueError, match="at most 2000000 are simulated"):
        draw(msgspec.structs.replace(mix, surge=msgspec.structs.replace(surge, times=1e6)), 1e4)


def test_without_elastic_parts_an_example_has_the_figures_that_it_always_had() -> None:
    scenario = read_scenario(EXAMPLES / "a100-l40.yaml")
    assert scenario.mix is not None
    mix = msgspec.structs.replace(scenario.mix, hours=1.0)
    scenario = msgspec.structs.replace(scenario, mix=mix, warm_up_hours=0.5)
    figures = {
        "scheduler": (0.915755025906131, 5088.500442715491, 359),
        "first-fit": (0.9039040525359552, 5426.0184514338, 409),
        "whole-cards": (0.6868265233150481, 8096.557489030916, 535),
    }
    for told, outcome in simulate(scenario, work_of(scenario, EXAMPLES)):
        utilisation, cost, changes = figures.pop(told.policy)
        assert told.utilisation == pytest.approx(utilisation, rel=1e-12)
        assert told.cost == pytest.approx(cost, rel=1e-12)
        assert len(outcome.times_s) == changes
        assert told.elastic is None
    assert not figures


def test_in_the_example_the_surge_is_met_with_the_elastic_engine_and_not_without() -> None:
    scenario = read_scenario(EXAMPLES / "surge.yaml")
    works = work_of(scenario, EXAMPLES)
    (elastic, outcome), (inelastic, _) = simulate(scenario, works)
    assert elastic.waits["realtime"].in_sla == 1
    assert inelastic.waits["realtime"].in_sla < 0.8
    assert elastic.elastic is not None
    assert inelastic.elastic is None
    assert elastic.elastic.nodes_ordered == elastic.elastic.nodes_given_up == 2
    assert elastic.elastic.shrinks > 100 < elastic.elastic.recoveries
    pairs = zip(outcome.held_cu, outcome.total_cu, strict=True)
    assert all(held <= total + 1e-6 for held, total in pairs)
    for served in outcome.served:
        demand = served.work.demand
        assert all(share.cu >= demand.min_cu - 1e-9 for share in served.shares)
        assert served.useful_cu_s(math.inf) == pytest.approx(served.work.cu_seconds)
    only = msgspec.structs.replace(scenario, compare=("scheduler",))
    ((again, _),) = simulate(only, works)
    assert again == elastic


SMALL = """
cluster: [{name: a, model: A100, gpus: 1}]
queues: {realtime_share: 0}
elastic:
  provider: {name: more, model: A100, gpus: 1, start_s: 60}
compare: [scheduler, inelastic]
mix: {hours: 1, load: 0.9, kinds: [{name: k, share: 1, cu: [10, 20], stretch: 3}]}
"""


def dsec(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsec.cli.main", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_command_tells_what_the_engine_did(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    done = dsec("simulate", str(path), "--plot")
    assert done.returncode == 0, done.stderr
    assert "SHRINKS   RECOVERIES" in done.stdout
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("start_s: 60", "start_s: 0"), "> 0"),
        (("start_s: 60", "max_nodes: 0"), ">= 1"),
        (("start_s: 60", "min_nodes: 9"), "min_nodes 9 is more than max_nodes 8"),
        (("gpus: 1, start_s: 60", "gpus: 2, max_nodes: 100000"), "more than 100000 cards"),
        (("{name: a,", "{name: more-1,"), "rename either"),
        (("elastic:\n", "elastic:\n  recovery_factor: 0.9\n"), "recovery_factor"),
        (("elastic:\n", "elastic:\n  interval_s: 0\n"), "> 0"),
        (("realtime_share: 0", "burst_factor: 7"), "burst_factor 7"),
        (("load: 0.9", "surge: {from_hour: 0, until_hour: 1, times: 0.5}"), ">= 1"),
        (("load: 0.9", "surge: {from_hour: 1, until_hour: 1, times: 2}"), "ends at hour 1"),
        (
            ("load: 0.9", "surge: {from_hour: 0, until_hour: 1, times: 2, kinds: [x]}"),
            "a kind 'x' that is not there: use k",
        ),
    ],
)
def test_figures_that_cannot_be_meant_are_told(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.replace(*change))
    with pytest.raises(ScenarioError) as caught:
        read_scenario(path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("name: more, model: A100", "name: more, model: Z9"), "more: no model 'Z9'"),
        (("name: more, model: A100", "name: more, model: K1"), "bring no Compute Units"),
    ],
)
def test_nodes_that_bring_nothing_are_refused(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("units: {K1: 0}\n" + SMALL.replace(*change))
    scenario = read_scenario(path)
    with pytest.raises(ScenarioError, match=said):
        simulate(scenario, work_of(scenario, tmp_path))
