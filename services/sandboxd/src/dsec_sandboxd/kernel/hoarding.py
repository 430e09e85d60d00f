"""Ending a sandbox that takes what the kernel cannot limit; see ``file_locks``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from dsec_sandboxd.kernel.file_locks import (
    NODE_LOCKS_MAX,
    SANDBOX_LOCKS_MAX,
    LockWatch,
    count_locks,
)
from dsec_sandboxd.kernel.interface import IDS_PER_SANDBOX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dsec_sandboxd.kernel.sandbox import Sandbox

_log = structlog.get_logger(__name__)


class Hoarders:
    """Finds and ends the sandboxes with too many locks, from its creation to ``close``.

    Args:
        sandboxes: returns all that live now.
        base_id: returns the first id of a slot.

    Raises:
        OSError: this kernel does not tell of locks.
    """

    def __init__(
        self, sandboxes: Callable[[], Iterable[Sandbox]], base_id: Callable[[int], int]
    ) -> None:
        self._sandboxes = sandboxes
        self._base_id = base_id
        self._watch = LockWatch()
        self._looking: asyncio.Task[None] | None = None
        asyncio.get_running_loop().add_reader(self._watch.fileno(), self._heard)

    async def close(self) -> None:
        """Stop, in the middle of a look too. Once."""
        asyncio.get_running_loop().remove_reader(self._watch.fileno())
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        self._watch.close()

    def _heard(self) -> None:
        users = self._watch.read()
        if self._looking is None and self._watch.too_many():
            self._looking = asyncio.ensure_future(self._look(users))
            self._looking.add_done_callback(self._looked)

    def _looked(self, _task: asyncio.Task[None]) -> None:
        self._looking = None

    async def _look(self, users: set[int]) -> None:
        """Look at all sandboxes, those first of whom the kernel told, while there are too many."""

        def is_told_of(sandbox: Sandbox) -> bool:
            first = self._base_id(sandbox.slot)
            return any(first <= user < first + IDS_PER_SANDBOX for user in users)

        found = False
        for sandbox in sorted(self._sandboxes(), key=is_told_of, reverse=True):
            if not self._watch.too_many():
                return
            if sandbox.ending is None and await _has_too_many(sandbox):
                found = True
                sandbox.hoarded = (
                    f"it held more than {SANDBOX_LOCKS_MAX} locks on ranges of files, which the "
                    f"kernel cannot limit, while the node had more than {NODE_LOCKS_MAX}"
                )
                _log.warning("sandbox_hoards", sandbox=sandbox.local, what="locks")
                sandbox.cgroup.kill()
        if not found:
            self._watch.nobody_found()


async def _has_too_many(sandbox: Sandbox) -> bool:
    count = await asyncio.to_thread(
        lambda: count_locks(sandbox.cgroup.processes(), SANDBOX_LOCKS_MAX)
    )
    return count > SANDBOX_LOCKS_MAX
