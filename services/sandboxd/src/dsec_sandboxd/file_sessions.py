"""What goes on over several requests (uploads, downloads, trees, watches), bounded in all ways."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Generic, Protocol, TypeVar

from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.errors import rolled_back

#: Failed sessions that are remembered until their last pieces are here.
_FAILED_MAX: Final = 1024

#: Project, sandbox, the client's name for it.
Key = tuple[str, str, str]


class Session(Protocol):
    """Something with descriptors."""

    async def end(self) -> None:
        """Let go of all it holds; who waits for it is told. Idempotent."""
        ...


SessionT = TypeVar("SessionT", bound=Session)


class Sessions(Generic[SessionT]):
    """The sessions of one kind on this node, by project, sandbox and the client's name.

    Opening is shared by all requests that come meanwhile. A session that failed is remembered: its
    late pieces are refused with the same error, and none begins it anew.
    """

    def __init__(
        self, what: str, clock: Clock, *, per_sandbox: int, per_node: int, idle_s: float
    ) -> None:
        self._what = what
        self._clock = clock
        self._per_sandbox = per_sandbox
        self._per_node = per_node
        self._idle_s = idle_s
        self._open: dict[Key, asyncio.Task[SessionT]] = {}
        self._used_at: dict[Key, float] = {}
        self._busy: dict[Key, int] = {}
        self._failed: dict[Key, DsecError] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def use(self, key: Key, opening: Callable[[], Awaitable[SessionT]]) -> SessionT:
        """Return the session, opened if it is new. Call ``rest`` when the request is answered.

        Raises:
            DsecError: what made it fail before; ``exhausted`` when there are too many.
        """
        task = self._open.get(key)
        if task is None:
            if failure := self._failed.get(key):
                raise DsecError(
                    failure.code, failure.message, retryable=False, details={**failure.details}
                )
            self._check_room(key)

            async def run() -> SessionT:
                return await opening()

            task = self._open[key] = asyncio.create_task(run(), name=f"open {self._what} {key}")
        self._busy[key] = self._busy.get(key, 0) + 1
        try:
            return await asyncio.shield(task)
        except BaseException:
            failed = task.done() and (task.cancelled() or task.exception() is not None)
            if failed and self._open.get(key) is task:
                del self._open[key]  # it never was one
            self.rest(key)
            raise

    def has(self, key: Key) -> bool:
        """Return whether a session is open, or opening."""
        return key in self._open

    def rest(self, key: Key) -> None:
        """Count the end of a request that used a session: from now on it may be idle."""
        self._used_at[key] = self._clock.monotonic()
        left = self._busy.get(key, 0) - 1
        if left > 0:
            self._busy[key] = left
        else:
            self._busy.pop(key, None)
        if key not in self._open:
            self._used_at.pop(key, None)

    def _check_room(self, key: Key) -> None:
        here = sum(1 for other in self._open if other[:2] == key[:2])
        ours = sum(1 for other in self._open if other[0] == key[0])
        # No project may keep all others out.
        if (
            here >= self._per_sandbox
            or ours >= self._per_node // 2
            or len(self._open) >= self._per_node
        ):
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"{here} {self._what} of this sandbox are under way, {ours} of this project's on "
                "this node; finish one first",
                retry_after_s=0.5,
            )

    async def fail(self, key: Key, error: DsecError) -> DsecError:
        """End a session and have what is still on its way refused, too.

        Returns:
            The error for the caller: of an open session it is final, since the same piece again
            would only begin another one.
        """
        if key in self._open:
            error = DsecError(error.code, error.message, retryable=False, details={**error.details})
            self._failed[key] = error
            if len(self._failed) > _FAILED_MAX:
                del self._failed[next(iter(self._failed))]
            await self.end(key)
        return self.why(key, error)

    def why(self, key: Key, error: DsecError) -> DsecError:
        """Return what a session failed of, where ``error`` is what became of it then."""
        known = self._failed.get(key)
        if known is None or known is error:
            return error
        return DsecError(known.code, known.message, retryable=False, details={**known.details})

    async def end(self, key: Key) -> None:
        """End a session; none is fine."""
        task = self._open.pop(key, None)
        if key not in self._busy:
            self._used_at.pop(key, None)
        if task is None:
            return
        try:
            session = await task
        except DsecError:
            return
        await session.end()

    async def remove_idle(self) -> None:
        """End sessions that nobody goes on with."""
        oldest = self._clock.monotonic() - self._idle_s
        for key, task in list(self._open.items()):
            if task.done() and key not in self._busy and self._used_at.get(key, oldest) <= oldest:
                await self.end(key)

    async def sandbox_put_back(self, local: str) -> None:
        """Fail every session of a sandbox whose processes are about to end."""
        for key in [key for key in self._open if key[1] == local]:
            await self.fail(key, rolled_back(f"one of the {self._what}"))

    async def sandbox_ending(self, local: str) -> None:
        """End every session of a sandbox."""
        for key in [key for key in self._open if key[1] == local]:
            await self.end(key)
