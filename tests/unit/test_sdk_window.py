from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from dsec.window import drained, in_window


async def test_at_most_a_window_of_jobs_runs_and_results_keep_their_order() -> None:
    running = most = 0

    async def job(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        # Later jobs end earlier within their window.
        for _ in range(20 - number % 4):
            await asyncio.sleep(0)
        running -= 1
        return number

    async def jobs() -> AsyncIterator[Coroutine[Any, Any, int]]:
        for number in range(50):
            yield job(number)

    assert [result async for result in in_window(jobs(), window=4)] == list(range(50))
    assert most == 4


async def test_the_first_failure_ends_it_and_cancels_the_others() -> None:
    cancelled: list[int] = []

    async def job(number: int) -> None:
        if number == 1:
            message = "broken"
            raise ValueError(message)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    async def jobs() -> AsyncIterator[Coroutine[Any, Any, None]]:
        yield job(1)
        for number in range(2, 5):
            yield job(number)

    with pytest.raises(ValueError, match="broken"):
        await drained(in_window(jobs(), window=4))
    assert cancelled == [2, 3, 4]


async def test_leaving_early_leaves_no_task_behind() -> None:
    async def job() -> int:
        await asyncio.sleep(0)
        return 1

    async def jobs() -> AsyncIterator[Coroutine[Any, Any, int]]:
        while True:
            yield job()

    async with aclosing(in_window(jobs())) as results:
        async for _ in results:
            break
    assert asyncio.all_tasks() == {asyncio.current_task()}
