"""A number of places that projects take turns at, so that none waits for all of another's work."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class FairPlaces:
    """At most so many are inside at once; a place that becomes free goes to the next project.

    Within a project who came first is first. A project that nobody of waits costs the others
    nothing.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def place(self, project: str) -> AsyncIterator[None]:
        """Hold a place while the context lasts."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(project)
        try:
            yield
        finally:
            self._give_back()

    async def _turn(self, project: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(project, deque()).append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._give_back()  # it was given a place in the moment in which it gave up
            raise

    def _give_back(self) -> None:
        """Give a place to the project whose turn it is, or have it free."""
        while self._waiting:
            project, turns = next(iter(self._waiting.items()))
            del self._waiting[project]
            turn = turns.popleft()
            if turns:
                self._waiting[project] = turns  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
