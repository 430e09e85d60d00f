"""Time passes for a node: deadlines when they are due, chores each round, nothing in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from dsec_common.testing.clock import FakeClock
from dsec_sandboxd.housekeeping import ROUND_S, Housekeeping
from dsec_sandboxd.times import Times


class House:
    """Counts what is done in it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.times = Times()
        self.busy = False
        self.looks: list[float] = []
        self.ended: list[tuple[str, float]] = []
        self.rounds: list[float] = []

    def end_due(self) -> None:
        """Note each time that is over."""
        now_s = self.clock.monotonic()
        self.looks.append(now_s)
        self.ended += [(local, now_s) for local in self.times.take_due(now_s)]

    async def chore(self) -> None:
        """Note a round."""
        self.rounds.append(self.clock.monotonic())

    async def pass_s(self, seconds: float) -> None:
        """Let time pass, a little at a time."""
        for _ in range(round(seconds * 100)):
            await self.clock.advance(0.01)


@contextlib.asynccontextmanager
async def kept(house: House) -> AsyncIterator[House]:
    keeping = Housekeeping(
        house.clock, house.times, house.end_due, (house.chore,), lambda: house.busy
    )
    task = asyncio.create_task(keeping.run())
    await asyncio.sleep(0)
    try:
        yield house
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_node_whose_sandboxes_sleep_looks_once_a_round() -> None:
    house = House()
    for number in range(3200):
        house.times.due.set(f"s{number}", 3600.0 + number)
    async with kept(house):
        await house.pass_s(20.0)
    assert 19 <= len(house.looks) <= 20
    assert house.rounds == house.looks


async def test_a_deadline_is_met_when_it_is_due_and_not_at_the_next_round() -> None:
    house = House()
    house.times.due.set("a", 2.34)
    async with kept(house):
        await house.pass_s(3.0)
    ((local, at_s),) = house.ended
    assert local == "a"
    assert 2.34 <= at_s < 2.40


async def test_a_deadline_that_is_set_meanwhile_is_met_too() -> None:
    house = House()
    async with kept(house):
        await house.pass_s(1.5)
        house.times.due.set("soon", 1.6)
        house.times.due.set("later", 4.21)
        await house.pass_s(3.0)
    assert [local for local, _ in house.ended] == ["soon", "later"]
    assert house.ended[0][1] <= 1.6 + ROUND_S
    assert house.ended[1][1] < 4.27


async def test_many_deadlines_close_together_are_met_with_few_looks() -> None:
    house = House()
    for number in range(1000):
        house.times.due.set(f"s{number}", 0.5 + number / 1000)
    async with kept(house):
        await house.pass_s(2.0)
    assert len(house.ended) == 1000
    assert len(house.looks) <= 25
    assert len(house.rounds) <= 2


async def test_rounds_come_more_often_while_there_is_something_to_keep() -> None:
    house = House()
    house.busy = True
    async with kept(house):
        await house.pass_s(2.0)
    assert len(house.rounds) >= 7
