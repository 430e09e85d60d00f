"""Brokers that write the same record leave each other turns."""

from __future__ import annotations

from dsec_broker.turns import Turns


def test_a_broker_alone_never_waits() -> None:
    turns = Turns()
    for number in range(1, 4):
        assert turns.begin("n", 1.0) == 0.0
        turns.saw("n", number, 1.0)  # its own write, told before the acknowledgement
        turns.won("n", number, 1.0)
        turns.saw("n", number, 1.0)


def test_where_others_write_it_leaves_a_gap_after_its_own_write_to_the_same_record() -> None:
    turns = Turns()
    turns.won("n", 1, 1.0)
    turns.saw("n", 2, 1.0)
    assert 0.0 < turns.begin("n", 1.001) < 0.008
    assert turns.begin("other", 1.001) == 0.0
    turns.won("n", 3, 1.002)
    assert turns.begin("n", 1.1) == 0.0


def test_a_lost_race_tells_of_others_and_is_forgotten_after_a_while() -> None:
    turns = Turns()
    turns.lost("n", 1.0, conflict=False)
    turns.won("n", 1, 1.0)
    assert turns.begin("n", 1.0) == 0.0
    turns.lost("n", 1.0, conflict=True)
    assert turns.begin("n", 1.0) > 0.0
    turns.won("n", 2, 20.0)
    assert turns.begin("n", 20.0) == 0.0
