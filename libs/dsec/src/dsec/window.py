"""Moving data in pieces, a bounded number of them under way at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

T = TypeVar("T")

WINDOW: Final = 8
"""Pieces under way at once: enough to fill the wire, too few to overrun a receiver."""


async def in_window(
    jobs: AsyncIterable[Coroutine[Any, Any, T]], window: int = WINDOW
) -> AsyncGenerator[T, None]:
    """Run ``jobs``, at most ``window`` at once, and yield their results in the jobs' order.

    The first job that fails ends it: the others are cancelled and awaited. Leaving the loop early
    does the same, when the iterator is closed. A generator of jobs is closed, too.
    """
    running: deque[asyncio.Task[T]] = deque()
    try:
        async for job in jobs:
            running.append(asyncio.ensure_future(job))
            if len(running) >= window:
                yield await running.popleft()
        while running:
            yield await running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if isinstance(jobs, AsyncGenerator):
            await jobs.aclose()


async def drained(results: AsyncGenerator[Any, None]) -> None:
    """Run ``results`` to its end for its effects; close it whatever happens."""
    async with aclosing(results):
        async for _ in results:
            pass
