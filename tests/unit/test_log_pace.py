"""A reader of a quiet log asks seldom, and soon again when something comes."""

from __future__ import annotations

import pytest

from dsec_common.log_pace import LONGEST_S, SHORTEST_S, Pace


def test_the_pause_grows_with_the_quiet_up_to_the_longest() -> None:
    pace = Pace(100.0)
    assert pace.pause_s(100.0) == SHORTEST_S
    assert pace.pause_s(104.0) == pytest.approx(0.5)
    assert pace.pause_s(108.0) == pytest.approx(LONGEST_S)
    assert pace.pause_s(100_000.0) == LONGEST_S


def test_what_comes_makes_the_pause_short_again() -> None:
    pace = Pace(0.0)
    pace.hurry(1_000.0)
    assert pace.pause_s(1_000.0) == SHORTEST_S


def test_a_quiet_reader_asks_few_times_before_it_asks_once_in_the_longest_pause() -> None:
    pace, now_s, asked = Pace(0.0), 0.0, 0
    while pace.pause_s(now_s) < LONGEST_S:
        now_s += pace.pause_s(now_s)
        asked += 1
    assert asked < 60
