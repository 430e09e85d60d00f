"""Turns: no more at once than the limit, in order, and none lost whatever happens to who waits."""

from __future__ import annotations

import asyncio

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_scheduler.turns import Turns


class Work:
    """Takes a turn, notes that it has it, and gives it back when told to."""

    def __init__(self, turns: Turns, order: list[int], number: int) -> None:
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._do(turns, order, number))

    async def _do(self, turns: Turns, order: list[int], number: int) -> None:
        async with turns.turn(60.0, 1.0):
            order.append(number)
            await self.end.wait()


async def turn_over() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_no_more_have_a_turn_than_the_limit_and_the_first_to_come_is_next() -> None:
    order: list[int] = []
    turns = Turns(lambda: 2)
    works = [Work(turns, order, number) for number in range(5)]
    await turn_over()
    assert order == [0, 1]
    assert turns.waiting == 3
    works[1].end.set()
    await turn_over()
    assert order == [0, 1, 2]
    for work in works:
        work.end.set()
    await asyncio.gather(*(work.task for work in works))
    assert order == [0, 1, 2, 3, 4]
    assert turns.waiting == 0


async def test_one_has_its_turn_though_no_node_is_known() -> None:
    turns = Turns(lambda: 0)
    async with turns.turn(1.0, 1.0):
        pass


async def test_who_waits_too_long_is_told_to_come_back_and_costs_no_turn() -> None:
    turns = Turns(lambda: 1)
    async with turns.turn(1.0, 1.0):
        with pytest.raises(DsecError) as caught:
            async with turns.turn(0.01, 2.5):
                pytest.fail("there was no turn to have")
    assert caught.value.code is ErrorCode.EXHAUSTED
    assert caught.value.retryable
    assert caught.value.retry_after_s == 2.5
    async with turns.turn(1.0, 1.0):
        assert turns.waiting == 0


async def test_who_goes_away_in_the_moment_of_its_turn_passes_it_on() -> None:
    order: list[int] = []
    turns = Turns(lambda: 1)
    first, second, third = (Work(turns, order, number) for number in range(3))
    await turn_over()
    first.end.set()
    await asyncio.sleep(0)  # the first gives back, and the second's turn is set
    second.task.cancel()
    await turn_over()
    assert 2 in order
    third.end.set()
    await asyncio.gather(first.task, second.task, third.task, return_exceptions=True)
    assert turns.waiting == 0
    async with turns.turn(1.0, 1.0):
        pass


async def test_a_limit_that_grows_lets_more_in_with_the_next_that_comes() -> None:
    order: list[int] = []
    limit = 1
    turns = Turns(lambda: limit)
    works = [Work(turns, order, number) for number in range(3)]
    await turn_over()
    assert order == [0]
    limit = 4
    works.append(Work(turns, order, 3))
    await turn_over()
    assert sorted(order) == [0, 1, 2, 3]
    for work in works:
        work.end.set()
    await asyncio.gather(*(work.task for work in works))
