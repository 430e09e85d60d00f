"""The simulator: real cores, a virtual clock, traces of real clusters."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dsec.simulation.cluster import SimulatedNode
from dsec.simulation.engine import Simulation
from dsec.simulation.outcome import Outcome
from dsec.simulation.policies import FirstFit, Scheduler, WholeCards
from dsec.simulation.scenario import (
    Scenario,
    ScenarioError,
    read_scenario,
    simulate,
    work_of,
)
from dsec.simulation.traces import TraceError, TraceFile, read_trace
from dsec.simulation.work import Kind, Mix, Work, draw
from dsec_common.compute.model import Card, GpuDemand, ServiceClass
from dsec_common.compute.units import DEFAULT_PRICES
from dsec_scheduler.queues import QueueRules

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
_CU = {"A100": 100.0, "L40": 65.0}
RULES = QueueRules(realtime_share=0)


def node(name: str, *models: str, until_s: float = math.inf) -> SimulatedNode:
    cards = tuple(
        Card(uuid=f"{name}.{index}", model=model, cu=_CU[model])
        for index, model in enumerate(models)
    )
    return SimulatedNode(name, cards, until_s=until_s)


def work(name: str, cu: float, at_s: float = 0.0, duration_s: float = 60.0, **more: object) -> Work:
    demand = GpuDemand(min_cu=cu, max_cu=float(more.pop("max_cu", cu)))  # type: ignore[arg-type]
    return Work(name=name, at_s=at_s, duration_s=duration_s, demand=demand, **more)  # type: ignore[arg-type]


def simulated(*works: Work, nodes: tuple[SimulatedNode, ...]) -> Outcome:
    return Simulation(nodes, works, Scheduler(RULES, DEFAULT_PRICES), DEFAULT_PRICES).run()


def test_two_share_a_card_and_the_third_waits_for_the_first_end() -> None:
    works = (work("x", 50, duration_s=30), work("y", 50), work("z", 50))
    outcome = simulated(*works, nodes=(node("a", "A100"),))
    starts = {served.work.name: served.started_s for served in outcome.served}
    assert (starts["x"], starts["y"]) == (0, 0)
    assert 30 < starts["z"] <= 30.2 + 1e-6
    assert outcome.cost == pytest.approx(1.8 * 50 * (30 + 60 + 60) / 3600)


def test_with_less_than_it_could_use_the_same_work_takes_longer() -> None:
    outcome = simulated(work("x", 50, max_cu=200), nodes=(node("a", "A100"),))
    (served,) = outcome.served
    assert served.ended_s == pytest.approx(120)


def test_work_on_a_node_that_goes_begins_again_elsewhere() -> None:
    nodes = (node("a", "L40", until_s=30), node("b", "A100"))
    outcome = simulated(work("x", 50), nodes=nodes)
    assert [served.node for served in outcome.served] == ["a", "b"]
    assert outcome.served[1].ended_s == pytest.approx(90)
    assert not outcome.left


def test_what_never_fits_is_told_as_left() -> None:
    outcome = simulated(work("x", 500), work("y", 5), nodes=(node("a", "A100"),))
    assert [left.name for left in outcome.left] == ["x"]


def test_whole_cards_hold_units_that_nobody_uses() -> None:
    works = [work(f"w{i}", 25) for i in range(4)]
    nodes = (node("a", "A100"),)
    shared = Simulation(nodes, works, FirstFit(), DEFAULT_PRICES).run()
    whole = Simulation(nodes, works, WholeCards(), DEFAULT_PRICES).run()
    assert max(served.ended_s for served in shared.served) < 61
    assert max(served.ended_s for served in whole.served) > 240
    assert max(whole.useful_cu) == 25
    assert max(whole.held_cu) == 100


def test_batch_waits_for_cheap_units_and_what_is_urgent_does_not() -> None:
    nodes = (node("a", "A100"), node("l", "L40"))
    works = (
        work("first", 65, duration_s=600),
        work("urgent", 60, at_s=1),
        work("batch", 60, at_s=2, service_class=ServiceClass.BATCH),
    )
    outcome = simulated(*works, nodes=nodes)
    where = {served.work.name: (served.node, served.started_s) for served in outcome.served}
    assert where["urgent"] == ("a", 1)
    assert where["batch"][0] == "l"
    assert where["batch"][1] >= 600


def test_no_more_is_ever_held_than_there_is() -> None:
    scenario = read_scenario(EXAMPLES / "a100-l40.yaml")
    assert scenario.mix is not None
    mix = msgspec.structs.replace(scenario.mix, hours=1.0)
    scenario = msgspec.structs.replace(scenario, mix=mix, warm_up_hours=0.0)
    for told, outcome in simulate(scenario, work_of(scenario, EXAMPLES)):
        pairs = zip(outcome.held_cu, outcome.total_cu, strict=True)
        assert all(held <= total + 1e-6 for held, total in pairs)
        assert 0 < told.utilisation <= told.held <= 1
        assert not outcome.left
        assert outcome.held_cu[-1] == pytest.approx(0, abs=1e-6)


def test_the_same_file_has_the_same_answer() -> None:
    mix = Mix(kinds=(Kind(name="k", share=1, cu=(5, 60)),), hours=1, load=1.2)
    works = draw(mix, 330)
    assert works == draw(mix, 330)
    nodes = (node("a", "A100", "A100"), node("l", "L40", "L40"))
    first, second = (simulated(*works, nodes=nodes) for _ in range(2))
    assert first.served == second.served


def test_a_mix_asks_for_its_load() -> None:
    mix = Mix(kinds=(Kind(name="k", share=1, cu=(5, 60)),), hours=200, load=0.5, swing=0.5)
    works = draw(mix, 1000)
    asked = sum(one.cu_seconds for one in works) / (200 * 3600)
    assert asked == pytest.approx(500, rel=0.1)


# --- Traces ---------------------------------------------------------------------------------------

OPENB = """name,num_gpu,gpu_milli,qos,creation_time,deletion_time,scheduled_time
p0,1,460,LS,1000,1600,1010
p1,0,0,BE,1000,1600,1010
p2,4,1000,BE,1060,,1070
p3,8,1000,BE,1060,5000,1070
"""
PHILLY = """job_id,vc,submit_time,duration,gpu_num,state
j0,vc1,2020-04-01 00:00:00,300,1,COMPLETED
j1,vc2,2020-04-01 00:01:00,600,4,FAILED
"""
AZURE = """vmidvmidvmidvmid,subscription0000,dep,0,600,91,0.7,20,Interactive,4,32
other,subscription1111,dep,300,900,91,0.7,20,Delay-insensitive,>24,>64
"""
POD = {
    "metadata": {
        "name": "p",
        "namespace": "team",
        "creationTimestamp": "2024-01-01T00:00:00Z",
    },
    "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
    "status": {
        "containerStatuses": [
            {
                "state": {
                    "terminated": {
                        "startedAt": "2024-01-01T00:00:10Z",
                        "finishedAt": "2024-01-01T00:05:10Z",
                    }
                }
            }
        ]
    },
}


def read(tmp_path: Path, kind: str, text: str, **more: object) -> list[Work]:
    (tmp_path / "trace").write_text(text)
    return read_trace(TraceFile(file="trace", format=kind, **more), tmp_path)  # type: ignore[arg-type]


def test_alibabas_pods_keep_their_fractions_of_cards(tmp_path: Path) -> None:
    part, whole = read(tmp_path, "openb", OPENB, cu_per_gpu=100)
    assert (part.demand.min_cu, part.duration_s, part.at_s) == (46, 590, 0)
    assert part.service_class is ServiceClass.STANDARD
    assert (whole.demand.min_cu, whole.demand.count, whole.at_s) == (800, 8, 60)
    assert whole.service_class is ServiceClass.BATCH


def test_philly_jobs_keep_their_virtual_clusters(tmp_path: Path) -> None:
    first, second = read(tmp_path, "philly", PHILLY, speed=2)
    assert (first.project, first.demand.min_cu) == ("vc1", 65)
    assert (second.at_s, second.demand.count, second.duration_s) == (30, 4, 600)


def test_azures_machines_are_cores(tmp_path: Path) -> None:
    first, second = read(tmp_path, "azure", AZURE, cu_per_core=2)
    assert (first.demand.min_cu, first.duration_s) == (8, 600)
    assert (second.demand.min_cu, second.service_class) == (48, ServiceClass.BATCH)


def test_kubernetes_pods_that_have_ended_are_work(tmp_path: Path) -> None:
    running = POD | {"status": {"containerStatuses": [{"state": {"running": {}}}]}}
    (pod,) = read(tmp_path, "kubernetes", json.dumps({"items": [POD, running]}))
    assert (pod.project, pod.demand.count, pod.duration_s) == ("team", 2, 300)


def test_our_own_events_are_read_as_they_are(tmp_path: Path) -> None:
    one = work("x", 10, at_s=5, project="p")
    (found,) = read(tmp_path, "events", msgspec.json.encode(one).decode() + "\n\n")
    assert found == msgspec.structs.replace(one, name="0-x", at_s=0.0)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("openb", "a,b\n1,2\n", "no column 'num_gpu'"),
        ("philly", "job_id,submit_time,duration,gpu_num\nj,then,5,1\n", "then"),
        ("events", '{"name": "x"}\n', "line 1"),
        ("kubernetes", "{}", "no column 'items'"),
        ("kubernetes", '{"items": [{"spec": {"containers": ["x"]}}]}', "no kubernetes trace"),
        ("kubernetes", "[" * 100_000, "no kubernetes trace"),
        ("philly", "job_id,submit_time,duration,gpu_num\nj,1,5,inf\n", "no philly trace"),
        ("philly", "job_id,submit_time,duration,gpu_num\n" + "x" * 200_000, "no philly trace"),
        ("azure", "1,2,3\n", "no azure trace"),
        ("other", "", "no format 'other'"),
    ],
)
def test_a_trace_that_cannot_be_read_says_why(
    tmp_path: Path, kind: str, text: str, said: str
) -> None:
    with pytest.raises(TraceError, match=said):
        read(tmp_path, kind, text)


def test_what_makes_no_sense_in_a_trace_is_left_out(tmp_path: Path) -> None:
    lines = [work("nan", math.nan), work("back", 5, duration_s=-1), work("fine", 5)]
    text = "\n".join(msgspec.json.encode(one).decode() for one in lines[1:])
    broken = text + '\n{"name":"n","at_s":0,"duration_s":1,"demand":{"min_cu":-1,"max_cu":5}}'
    philly = "job_id,submit_time,duration,gpu_num\nj,nan,5,1\ni,-inf,5,1\nfine,0,5,1\n"
    assert [one.name for one in read(tmp_path, "philly", philly)] == ["0-fine"]
    assert [one.name for one in read(tmp_path, "events", broken)] == ["0-fine"]


# --- From the command line ------------------------------------------------------------------------

SMALL = """
cluster: [{name: a, model: A100, gpus: 2}]
compare: [scheduler, whole-cards]
queues: {realtime_share: 0}
mix: {hours: 1, load: 0.9, kinds: [{name: k, share: 1, cu: [10, 60]}]}
"""


def dsec(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsec.cli.main", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_command_prints_figures_and_writes_a_picture(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    done = dsec("simulate", str(tmp_path / "small.yaml"), "--plot", "--json")
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)["reports"]
    assert [told["policy"] for told in reports] == ["scheduler", "whole-cards"]
    assert reports[0]["utilisation"] > reports[1]["utilisation"]
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("model: A100", "model: Z9"), "no model 'Z9'"),
        (("compare:", "comparre:"), "comparre"),
        (("whole-cards", "magic"), "no policy 'magic'"),
        (("mix:", "trace: {file: t, format: openb}\nmix:"), "either mix or trace"),
    ],
)
def test_a_file_that_cannot_be_meant_says_what_is_wrong(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    (tmp_path / "small.yaml").write_text(SMALL.replace(*change))
    done = dsec("simulate", str(tmp_path / "small.yaml"))
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((SMALL, ""), "missing required field `cluster`"),
        (("gpus: 2", "gpus: 0"), "2:34: Expected `int` >= 1"),
        (("gpus: 2", "gpus: 2, nodes: 100000000"), "2:43: Expected `int` <= "),
        (("gpus: 2", "gpus: 1000, nodes: 1000"), "more than 100000 cards"),
        (("gpus: 2}", "gpus: 2}, {name: a, model: L40}"), "same name"),
        (("[scheduler, whole-cards]", "[]"), "length >= 1"),
        (("realtime_share: 0", "realtime_share: 7"), "realtime_share 7"),
        (("realtime_share: 0", "starving_s: 0"), "starving_s"),
        (("hours: 1", "hours: .nan"), "nan is no amount"),
        (("hours: 1", "hours: -1"), "> 0"),
        (("load: 0.9", "load: 0"), "> 0"),
        (("share: 1", "share: 0"), "> 0"),
        (("[10, 60]", "[60, 10]"), "from 60 down to 10"),
        (("[10, 60]", "[10, 60], minutes: 0"), "> 0"),
        (("[10, 60]", "[10, 60], projects: []"), "length >= 1"),
        (("kinds: [{name: k, share: 1, cu: [10, 60]}]", "kinds: []"), "length >= 1"),
        (("mix: ", "prices: {A100: .inf}\nmix: "), "inf is no amount"),
        (("mix: ", "trace: {file: t, format: openb, speed: 0}\nmix: "), "> 0"),
    ],
)
def test_figures_that_cannot_be_meant_are_told_with_their_place(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.replace(*change))
    with pytest.raises(ScenarioError) as caught:
        read_scenario(path)
    assert said in str(caught.value)


def test_a_mix_that_would_take_for_ever_is_refused() -> None:
    mix = Mix(kinds=(Kind(name="k", share=1.0),), hours=1e6, load=1000.0)
    with pytest.raises(ValueError, match="at most 2000000 are simulated"):
        draw(mix, 100.0)


def test_where_no_picture_can_be_written_nothing_is_simulated(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    nowhere = str(tmp_path / "nowhere" / "it.png")
    done = dsec("simulate", str(tmp_path / "small.yaml"), "--picture", nowhere)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no directory" in done.stderr


def test_the_examples_are_scenarios() -> None:
    for path in EXAMPLES.glob("*.yaml"):
        assert isinstance(read_scenario(path), Scenario)
    with pytest.raises(ScenarioError, match="cannot be read"):
        read_scenario(EXAMPLES / "none.yaml")
