"""What agents depend on: versions that only grow, and which instances are behind them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_common.asdl.reading import checked, read_value
from dsec_common.compute.consistency import judge
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.consistency import AHEAD_MAX_MS, DEPENDENCIES_MAX, ReportDependencies
from dsec_scheduler.agents.records import InstanceRecord
from dsec_scheduler.dependencies import (
    Declared,
    DependencyRecord,
    behind,
    check_report,
    declared_in,
    reported,
)

NOW_MS = 1_700_000_000_000
NAMES = st.sampled_from(["orders", "prices", "weather-api"])
VERSIONS = st.dictionaries(NAMES, st.integers(1, 9))


def report(**versions: int) -> ReportDependencies:
    return ReportDependencies(versions=versions)


@given(st.lists(VERSIONS, min_size=1), st.randoms())
def test_whatever_order_reports_come_in_and_how_often_the_newest_is_known(
    reports: list[dict[str, int]], randomness: Any
) -> None:
    again = [*reports, *reports]
    randomness.shuffle(again)
    record: DependencyRecord | None = None
    for versions in again:
        record = reported(record, ReportDependencies(versions=versions))
    assert record is not None
    names = {name for versions in reports for name in versions}
    newest = {name: max(versions.get(name, 0) for versions in reports) for name in names}
    assert record.versions == newest


def test_what_changes_nothing_is_not_written() -> None:
    record = reported(None, report(prices=7))
    assert reported(record, report(prices=6)) is record
    assert reported(record, ReportDependencies(forget=("orders",))) is record


def test_what_is_forgotten_is_known_no_more_and_may_begin_anew() -> None:
    record = reported(None, report(prices=7, orders=5))
    record = reported(record, ReportDependencies(versions={"prices": 3}, forget=("prices",)))
    assert record.versions == {"orders": 5, "prices": 3}


def test_a_project_has_so_many_dependencies_and_no_more() -> None:
    full = reported(None, report(**{f"d{n}": 1 for n in range(DEPENDENCIES_MAX)}))
    with pytest.raises(DsecError) as caught:
        reported(full, report(another=1))
    assert caught.value.code is ErrorCode.EXHAUSTED
    assert len(reported(full, report(d0=2)).versions) == DEPENDENCIES_MAX


@pytest.mark.parametrize(
    "request_",
    [
        report(),
        report(prices=0),
        report(prices=-1),
        report(prices=NOW_MS + AHEAD_MAX_MS + 1),
        ReportDependencies(versions={"": 1}),
        ReportDependencies(versions={"a b": 1}),
        ReportDependencies(versions={"prices.*": 1}),
        ReportDependencies(versions={"x" * 64: 1}),
        ReportDependencies(forget=("UPPER",)),
        report(**{f"d{n}": 1 for n in range(DEPENDENCIES_MAX + 1)}),
    ],
)
def test_a_report_that_makes_no_sense_is_refused(request_: ReportDependencies) -> None:
    with pytest.raises(DsecError) as caught:
        check_report(request_, NOW_MS)
    assert caught.value.code is ErrorCode.INVALID


def test_a_clock_may_be_a_little_ahead() -> None:
    check_report(report(prices=NOW_MS + AHEAD_MAX_MS), NOW_MS)


def test_a_contract_declares_what_its_agent_depends_on() -> None:
    contract = {"name": "trader", "depends_on": ["prices"], "synchronise": ["/bin/fetch", "-q"]}
    assert declared_in(contract) == Declared(("prices",), ("/bin/fetch", "-q"))
    assert declared_in({"name": "trader"}) == Declared()


@pytest.mark.parametrize(
    ("contract", "field"),
    [
        ({"depends_on": ["prices"]}, "synchronise"),
        ({"synchronise": ["/bin/fetch"]}, "synchronise"),
        ({"depends_on": "prices", "synchronise": ["/bin/fetch"]}, "contract"),
        ({"depends_on": ["no name"], "synchronise": ["/bin/fetch"]}, "name"),
        (
            {
                "depends_on": [f"d{n}" for n in range(DEPENDENCIES_MAX + 1)],
                "synchronise": ["/bin/fetch"],
            },
            "depends_on",
        ),
    ],
)
def test_half_a_declaration_is_none(contract: dict[str, Any], field: str) -> None:
    with pytest.raises(DsecError) as caught:
        declared_in(contract)
    assert (caught.value.code, caught.value.details["field"]) == (ErrorCode.INVALID, field)
    with pytest.raises(DsecError) as caught:
        checked(read_value(contract, whole=False), "the contract")
    assert caught.value.code is ErrorCode.INVALID


@given(
    started_ms=st.integers(0, 400),
    settled_ms=st.none() | st.integers(0, 400),
    known=st.dictionaries(NAMES, st.integers(1, 300)),
    depends_on=st.sets(NAMES),
)
def test_an_instance_is_behind_when_the_equation_says_so(
    started_ms: int, settled_ms: int | None, known: dict[str, int], depends_on: set[str]
) -> None:
    instances = {
        "n.1": InstanceRecord("trader", "1", started_ms / 1000),
        "n.2": InstanceRecord("trader", "2", started_ms / 1000),
        "n.3": InstanceRecord("other", "1", started_ms / 1000),
    }
    declared = {("trader", "1"): Declared(tuple(sorted(depends_on)), ("/bin/fetch",))}
    settled = {} if settled_ms is None else {"n.1": settled_ms}
    needed = {name: version for name, version in known.items() if name in depends_on}
    version_ms = max(int(started_ms / 1000 * 1000), settled_ms or 0)
    verdict = judge(version_ms, needed)
    found = behind(instances, declared, known, settled, 50)
    assert [one.sandbox_id for one in found] == ([] if verdict is None else ["n.1"])
    for one in found:
        assert verdict is not None
        assert (one.required_ms, one.versions) == (verdict.required_ms, needed)
        assert one.command == ("/bin/fetch",)
