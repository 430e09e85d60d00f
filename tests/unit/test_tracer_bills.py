"""Sums of what was held and used: exact, whatever comes twice, late, or in another order."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from dsec_common.behavior import BehaviorLog
from dsec_common.metering import MICRO, LeaseSegment, MeterRecord, SandboxSegment
from dsec_common.wire.cost import Amounts
from dsec_tracer.bills import ENDED_KEPT, HOUR_MS, Bills

T0 = 1_000 * HOUR_MS
ALL = (0, 10**9)


def sandbox(
    number: int = 1, *, name: str = "n1.a", last: bool = True, **changes: object
) -> SandboxSegment:
    values: dict[str, object] = {
        "project": "team",
        "agent": "coder",
        "node": "n1",
        "number": number,
        "from_ms": T0 + 1000 * (number - 1),
        "to_ms": T0 + 1000 * number,
        "last": last,
        "sandbox_id": name,
        "cpu_us": 7,
        "memory_byte_ms": 11,
    }
    return SandboxSegment(**(values | changes))  # type: ignore[arg-type]  # a test's shorthand


def lease(number: int, cu: float, lasted_ms: int, *, last: bool = False) -> LeaseSegment:
    return LeaseSegment(
        project="team",
        agent="coder",
        node="n1",
        number=number,
        from_ms=T0,
        to_ms=T0 + lasted_ms,
        last=last,
        lease_id="n1.lease",
        cu_micro=round(cu * MICRO),
        cost_micro_per_hour=round(2 * cu * MICRO),
    )


def total(bills: Bills, project: str = "team") -> Amounts:
    rows = bills.rows(project, *ALL, by_agent=False)
    return rows[0].amounts if rows else Amounts()


def counted(*records: MeterRecord) -> Bills:
    bills = Bills()
    for record in records:
        bills.segment(record)
    return bills


def test_segments_add_up_to_the_millisecond() -> None:
    bills = counted(sandbox(1, last=False), sandbox(2, last=False), sandbox(3))
    assert total(bills) == Amounts(sandboxes=1, sandbox_ms=3000, cpu_us=21, memory_byte_ms=33)
    assert bills.missing == 0


def test_units_held_cost_what_the_table_says() -> None:
    bills = counted(lease(1, 10.0, HOUR_MS), lease(2, 7.0, HOUR_MS // 2, last=True))
    amounts = total(bills)
    assert amounts.cu_micro_ms == (10 * HOUR_MS + 7 * HOUR_MS // 2) * MICRO
    assert amounts.cost_nano == (10 * 2 + 7) * 1_000_000_000
    assert amounts.lease_ms == HOUR_MS + HOUR_MS // 2


@pytest.mark.parametrize("seed", range(20))
def test_no_order_and_no_repetition_changes_a_sum(seed: int) -> None:
    things: list[list[MeterRecord]] = [
        [
            sandbox(
                number,
                name=f"n1.{name}",
                last=number == 4,
                gpu_memory_byte_ms=number if number % 2 else None,
                gpu_memory_unknown_ms=number,
            )
            for number in range(1, 5)
        ]
        for name in "abc"
    ]
    records: list[MeterRecord] = [
        *itertools.chain(*things),
        lease(1, 3.0, 5),
        lease(2, 2.0, 6, last=True),
    ]
    expected = total(counted(*records))
    shuffled = records * 2
    random.Random(seed).shuffle(shuffled)  # noqa: S311  the same each time
    bills = counted(*shuffled)
    assert total(bills) == expected
    assert bills.missing == 0


def test_what_is_missing_is_told_until_it_comes() -> None:
    bills = counted(sandbox(1, last=False), sandbox(4))
    assert bills.missing == 2
    bills.segment(sandbox(3, last=False))
    assert bills.missing == 1
    bills.segment(sandbox(2, last=False))
    assert bills.missing == 0
    assert total(bills).sandbox_ms == 4000


def test_a_measured_segment_takes_the_place_of_one_whose_time_alone_was_known() -> None:
    bills = counted(sandbox(cpu_us=0, memory_byte_ms=0, measured=False))
    assert total(bills) == Amounts(sandboxes=1, sandbox_ms=1000, unmeasured=1)
    assert bills.segment(sandbox())
    assert not bills.segment(sandbox())
    assert not bills.segment(sandbox(cpu_us=0, memory_byte_ms=0, measured=False))
    assert total(bills) == Amounts(sandboxes=1, sandbox_ms=1000, cpu_us=7, memory_byte_ms=11)


def test_gpu_use_is_the_sum_of_what_is_known_beside_how_long_it_is_not() -> None:
    bills = counted(
        sandbox(1, last=False, gpu_memory_byte_ms=40, cu_used_micro_ms=7),
        sandbox(2, gpu_memory_byte_ms=2, gpu_memory_unknown_ms=300, cu_used_unknown_ms=1000),
        sandbox(name="n1.without_units"),
    )
    amounts = total(bills)
    assert (amounts.gpu_memory_byte_ms, amounts.gpu_memory_unknown_ms) == (42, 300)
    assert (amounts.cu_used_micro_ms, amounts.cu_used_unknown_ms) == (7, 1000)


def test_gpu_use_of_which_nothing_is_known_is_not_nothing() -> None:
    amounts = total(counted(sandbox(gpu_memory_unknown_ms=1000, cu_used_unknown_ms=1000)))
    assert (amounts.gpu_memory_byte_ms, amounts.cu_used_micro_ms) == (None, None)
    idle = total(counted(sandbox(gpu_memory_byte_ms=0, cu_used_micro_ms=0)))
    assert (idle.gpu_memory_byte_ms, idle.cu_used_micro_ms) == (0, 0)


def test_projects_agents_and_hours_are_kept_apart() -> None:
    bills = counted(
        sandbox(name="n1.a"),
        sandbox(name="n1.b", agent="writer"),
        sandbox(name="n1.c", project="other"),
        sandbox(name="n1.d", from_ms=T0, to_ms=T0 + HOUR_MS),
    )
    rows = bills.rows("team", *ALL, by_agent=True)
    assert [(row.agent, row.amounts.sandboxes) for row in rows] == [("coder", 2), ("writer", 1)]
    assert [row.amounts.sandboxes for row in bills.rows("other", *ALL, by_agent=False)] == [1]
    (first,) = bills.rows("team", 1000, 1000, by_agent=False)
    assert first.amounts.sandboxes == 2
    assert bills.rows("team", 1002, 2000, by_agent=False) == ()
    assert bills.rows("nobody", *ALL, by_agent=True) == ()


def test_steps_count_commands_tokens_and_bytes() -> None:
    bills = Bills()
    for action, size in [("exec", ""), ("read_file", "5"), ("write_file", "9"), ("exec", "")]:
        step = BehaviorLog(
            sandbox_id="n1.a",
            project="team",
            seq=1,
            source="s",
            time_us=T0 * 1000,
            agent="coder",
            action=action,
            status="ok",
            tokens_in=2,
            tokens_out=3,
            attributes={"size_bytes": size},
        )
        bills.step(step)
    bills.step(msgspec.structs.replace(step, action="create", tokens_in=0, tokens_out=0))
    bills.step(msgspec.structs.replace(step, action="read_file", attributes={"size_bytes": "9e9"}))
    amounts = total(bills)
    assert (amounts.execs, amounts.bytes_read, amounts.bytes_written) == (2, 5, 9)
    assert (amounts.tokens_in, amounts.tokens_out) == (10, 15)


def test_what_is_kept_is_what_is_known() -> None:
    bills = counted(sandbox(1, last=False), sandbox(3, name="n1.b"), lease(1, 1.0, 7))
    sums, things, dropped = bills.take_changes()
    assert not dropped
    again = Bills()
    again.load(sums.items(), things)
    for record in (sandbox(1, last=False), sandbox(3, name="n1.b"), lease(1, 1.0, 7)):
        assert not again.segment(record)
    assert total(again) == total(bills)
    assert again.missing == bills.missing == 2
    assert bills.take_changes() == ({}, {}, set())


def test_what_ended_is_remembered_in_bounds() -> None:
    bills = Bills()
    for number in range(ENDED_KEPT + 10):
        bills.segment(sandbox(name=f"n1.s{number}"))
    _, things, dropped = bills.take_changes()
    assert len(dropped) == 10
    assert len(things) == ENDED_KEPT
    assert total(bills).sandboxes == ENDED_KEPT + 10


def test_old_hours_are_dropped() -> None:
    bills = counted(sandbox(name="n1.a"), sandbox(name="n1.b", to_ms=T0 + 5 * HOUR_MS))
    (old,) = bills.forget_before(1001)
    assert old.hour == 1000
    assert total(bills).sandboxes == 1
