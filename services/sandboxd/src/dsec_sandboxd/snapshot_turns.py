"""Whose snapshot is packed next: nobody's large ones hold up everybody else's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Final

_AT_ONCE: Final = 4
_PER_PROJECT: Final = 2


class PackingTurns:
    """Turns at a work that takes a processor and the disk for a while.

    Projects take turns, and within each its sandboxes do. One sandbox has one at a time and one
    project a part of them, so however long somebody's work takes there is a place for others.

    Args:
        at_once: so many work at the same time.
        per_project: so many of them for one project.
    """

    def __init__(self, *, at_once: int = _AT_ONCE, per_project: int = _PER_PROJECT) -> None:
        self._at_once = at_once
        self._per_project = per_project
        self._waiting: dict[str, dict[str, deque[asyncio.Future[None]]]] = {}
        """By project and sandbox; who has had a turn is last."""
        self._working: Counter[str] = Counter()
        self._busy: set[tuple[str, str]] = set()

    @contextlib.asynccontextmanager
    async def turn(self, project: str, sandbox: str) -> AsyncIterator[None]:
        """Wait for a turn and have it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(project, {}).setdefault(sandbox, deque()).append(turn)
        self._give()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._working[project] -= 1
                self._working += Counter()  # without those at zero
                self._busy.discard((project, sandbox))
            self._give()

    def _give(self) -> None:
        while self._working.total() < self._at_once:
            turn = self._next()
            if turn is None:
                return
            turn.set_result(None)

    def _next(self) -> asyncio.Future[None] | None:
        for project, sandboxes in list(self._waiting.items()):
            if self._working[project] >= self._per_project:
                continue
            for sandbox, turns in list(sandboxes.items()):
                if (project, sandbox) in self._busy:
                    continue
                turn = _first(turns)
                del sandboxes[sandbox]
                if turns:
                    sandboxes[sandbox] = turns
                if turn is None:
                    continue
                del self._waiting[project]
                if sandboxes:
                    self._waiting[project] = sandboxes
                self._working[project] += 1
                self._busy.add((project, sandbox))
                return turn
            if not sandboxes:
                del self._waiting[project]
        return None


def _first(turns: deque[asyncio.Future[None]]) -> asyncio.Future[None] | None:
    """Return the first that is still waited for."""
    while turns:
        turn = turns.popleft()
        if not turn.done():
            return turn
    return None
