"""The benchmark harness: what it prints, and what it answers."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from benchmarks import __main__ as harness
from benchmarks import _specification as specification
from benchmarks.report import Options, Reach, Report, median, percentile, to_json
from dsec_common.errors import unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.__main__ import Run

FAST = Report("fast", {"create_p50_ms": 1.5}, {"to_bare": 3.0}, (Reach.at_most("p50", 1.5, 2.0),))
SLOW = Report("slow", {"rate_per_s": 9.0}, {}, (Reach.at_least("rate_per_s", 9.0, 10.0),))


def measuring(report: Report) -> Run:
    async def run(options: Options) -> Report:
        assert options.rounds == 2
        return report

    return run


async def refuse(options: Options) -> Report:
    raise unavailable("no compiler is installed")


@pytest.mark.parametrize(
    ("entry", "met"),
    [
        (Reach.at_most("ms", 2.0, 2.0), True),
        (Reach.at_most("ms", 2.01, 2.0), False),
        (Reach.at_least("per_s", 2.0, 2.0), True),
        (Reach.at_least("per_s", 1.99, 2.0), False),
        (Reach.at_most("ms", math.nan, 2.0), False),
        (Reach.at_least("per_s", math.nan, 2.0), False),
    ],
)
def test_a_target_is_met_at_its_bound_and_never_by_nothing(entry: Reach, *, met: bool) -> None:
    assert entry.met is met


def test_a_report_is_one_line_of_json_with_every_part() -> None:
    line = to_json(FAST)
    assert "\n" not in line
    document = json.loads(line)
    assert set(document) == {"name", "machine", "figures", "ratios", "reach"}
    assert document["name"] == "fast"
    assert document["figures"] == {"create_p50_ms": 1.5}
    assert document["ratios"] == {"to_bare": 3.0}
    assert document["reach"] == [
        {"name": "p50", "value": 1.5, "target": 2.0, "direction": "at most", "met": True}
    ]
    assert document["machine"]["cpus"] >= 1
    assert document["machine"]["memory_bytes"] > 1 << 20


def test_what_cannot_be_measured_here_says_why_and_misses_nothing() -> None:
    report = Report("docker", {}, skipped="no dockerd: apt-get install docker.io")
    assert report.met
    assert json.loads(to_json(report))["skipped"] == "no dockerd: apt-get install docker.io"


def test_json_prints_one_object_per_name_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = {"fast": measuring(FAST), "slow": measuring(SLOW)}
    assert harness.measure(chosen, Options(rounds=2), as_json=True) == harness.NOT_MET
    output = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["name"] for line in output] == ["fast", "slow"]


def test_the_answer_is_0_only_when_every_target_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = {"fast": measuring(FAST)}, {"slow": measuring(SLOW)}
    assert harness.measure(fast, Options(rounds=2), as_json=False) == 0
    assert harness.measure(slow, Options(rounds=2), as_json=False) == 1
    shown = capsys.readouterr().out
    assert "at most 2" in shown
    assert "at least 10" in shown


def test_a_benchmark_that_cannot_run_says_why_and_is_not_taken_for_a_miss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = harness.measure({"bare": refuse}, Options(), as_json=True)
    assert answer == harness.NOT_MEASURED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "bare was not measured: unavailable: no compiler is installed" in captured.err


def test_one_that_fails_keeps_no_other_from_being_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def fail(options: Options) -> Report:
        raise AssertionError(f"wrong in {options.rounds} rounds")

    fast = measuring(FAST)
    chosen = {"bare": refuse, "broken": fail, "fast": fast}
    assert harness.measure(chosen, Options(rounds=2), as_json=True) == harness.NOT_MEASURED
    captured = capsys.readouterr()
    assert [json.loads(line)["name"] for line in captured.out.splitlines()] == ["fast"]
    assert "AssertionError: wrong in 2 rounds" in captured.err
    chosen |= {"slow": measuring(SLOW)}
    assert harness.measure(chosen, Options(rounds=2), as_json=True) == harness.NOT_MET


@pytest.mark.parametrize("arguments", [["no-such"], [], ["cgroup", "--rounds", "0"]])
def test_a_wrong_call_is_told_apart_from_a_missed_target(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        harness.main(arguments)
    assert caught.value.code == 2
    assert "python -m benchmarks" in capsys.readouterr().err


def test_every_listed_benchmark_can_be_loaded_and_tools_are_not_listed() -> None:
    names = harness.names()
    assert "cgroup" in names
    assert not {"report", "peers", "__main__"} & set(names)
    for name in names:
        assert callable(harness.load(name))


def test_percentiles_are_values_that_were_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert (percentile(values, 0), percentile(values, 0.5), percentile(values, 1)) == (1, 3, 5)
    assert percentile(values, 0.99) == 5
    assert median([4.0, 1.0, 3.0, 2.0]) == 2
    for part in (-0.1, 1.1):
        with pytest.raises(ValueError, match="no percentile"):
            percentile(values, part)
    with pytest.raises(ValueError, match="no percentile"):
        median([])


def test_the_table_of_the_specification_tells_every_target_and_the_machine(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "measured.jsonl"
    page.write_text(f"before\n{specification.BEGIN}\nold\n{specification.END}\nafter\n")
    skipped = Report("docker", {}, skipped="no dockerd")
    old = Report("fast", {"create_p50_ms": 9.0})
    results.write_text("\n".join(map(to_json, (old, FAST, SLOW, skipped))) + "\n")
    assert specification.main([str(results), "--page", str(page), "--note", "idle"]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{specification.BEGIN}\nMeasured on: ")
    assert text.endswith(f"{specification.END}\nafter\n")
    assert "old" not in text
    assert ", idle." in text
    assert "| `fast` | `p50` | 1.5 | at most 2 |" in text
    assert "| `fast` | beside it | `create_p50_ms` 1.5, `to_bare` 3 | |" in text
    assert "| `slow` | `rate_per_s` | 9, **missed** | at least 10 |" in text
    assert "| `docker` | not measured | no dockerd | |" in text


def test_a_page_without_marks_is_not_written(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "measured.jsonl"
    page.write_text("nothing")
    results.write_text(to_json(FAST))
    with pytest.raises(ValueError, match="measured:begin"):
        specification.main([str(results), "--page", str(page)])
    assert page.read_text() == "nothing"
