"""Deadlines come when they are due, whatever is set, moved and dropped in between."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_sandboxd.deadlines import Deadlines
from dsec_sandboxd.ended import EndedRecords
from sandbox_records import record

NAMES = st.sampled_from("abcdef")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), NAMES, st.integers(0, 50)),
        st.tuples(st.just("discard"), NAMES, st.just(0)),
        st.tuples(st.just("take"), st.just(""), st.integers(0, 50)),
    ),
    max_size=300,
)


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_what_is_due_is_what_a_plain_table_says(steps: list[tuple[str, str, int]]) -> None:
    deadlines, table = Deadlines(), dict[str, float]()
    for what, name, number in steps:
        assert deadlines.earliest() == min(table.values(), default=None)
        match what:
            case "set":
                deadlines.set(name, float(number))
                table[name] = float(number)
            case "discard":
                deadlines.discard(name)
                table.pop(name, None)
            case _:
                due = deadlines.take_due(float(number))
                expected = sorted((at, each) for each, at in table.items() if at <= number)
                assert sorted(due) == sorted(each for _, each in expected)
                assert [table[each] for each in due] == [at for at, _ in expected]
                for each in due:
                    del table[each]
        assert dict.fromkeys(deadlines) == dict.fromkeys(table)
        assert {name: deadlines.at(name) for name in deadlines} == table


def test_a_deadline_that_moves_for_ever_takes_no_room() -> None:
    deadlines = Deadlines()
    for moment in range(100_000):
        deadlines.set("a", float(moment))
    assert len(deadlines._heap) < 200
    assert deadlines.take_due(1e9) == ["a"]


def test_ended_records_go_by_age_and_by_number() -> None:
    ended = EndedRecords(kept_s=10.0, kept_max=3)
    assert [ended.add(record(f"s{number}"), float(number)) for number in range(5)] == [
        [],
        [],
        [],
        ["s0"],
        ["s1"],
    ]
    assert ended.drop_old(12.0) == ["s2"]
    assert ended.drop_old(12.0) == []
    assert list(ended) == ["s3", "s4"]
    assert ended.drop_old(100.0) == ["s3", "s4"]


def test_no_record_is_kept_where_none_may_be() -> None:
    assert EndedRecords(kept_s=10.0, kept_max=0).add(record("a"), 0.0) == ["a"]
