"""The relay without ``await``: ``from dsec.model_relay.sync import ModelRelay``.

It goes with the client of :mod:`dsec.sync` and works in that client's thread, beside what the
caller does::

    with DSecClient() as client:
        rollout = client.rollouts.open()
        with ModelRelay(rollout, sample, journal=Path("calls.jsonl")) as relay:
            with client.create_sandbox("host@1", model_rollout_id=rollout.id) as sandbox:
                sandbox.exec(["my-agent"], check=True)
            print(relay.trace().main().token_ids)
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dsec.model_relay.calls import ModelRequest
from dsec.model_relay.engine import Sampled
from dsec.model_relay.http_engine import HttpEngine
from dsec.model_relay.relay import Budget
from dsec.model_relay.relay import ModelRelay as AsyncModelRelay
from dsec.model_trace import Trace

Engine = HttpEngine | Callable[[ModelRequest], Sampled | Awaitable[Sampled]]
"""An inference server, which is opened and closed with the relay; or a function. One that is no
coroutine function is called in a thread of its own for each call, and several at once."""


class ModelRelay:
    """Answers the calls of one rollout, from the beginning of its ``with`` to the end.

    Args:
        rollout: of :mod:`dsec.sync`; that sandboxes name as their ``model_rollout_id``.
        engine: samples.
        journal: the file of this rollout's calls.
        budget: what they may use.
    """

    def __init__(
        self, rollout: Any, engine: Engine, *, journal: Path, budget: Budget | None = None
    ) -> None:
        self._loop = rollout._loop  # noqa: SLF001  its twin
        self._engine = engine
        self._inner = AsyncModelRelay(
            rollout._inner,  # noqa: SLF001  its twin
            engine if isinstance(engine, HttpEngine) else _awaited(engine),
            journal=journal,
            budget=budget,
        )
        self._opened = AsyncExitStack()
        self._running: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            DsecError: ``conflict`` while another relay has the journal.
        """
        self._loop.run(self._begin())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End. What was not answered is, by the next relay.

        Raises:
            DsecError: why calls were not answered any more, if they were not; see
                :meth:`dsec.model_relay.ModelRelay.run`.
        """
        failed = self._loop.run(self._end())
        if failed is not None and error is None:
            raise failed

    def pause(self) -> None:
        """Hold calls back that have not begun, as while weights are updated."""
        self._call(self._inner.pause)

    def resume(self) -> None:
        """Let calls begin again."""
        self._call(self._inner.resume)

    def trace(self) -> Trace:
        """Return what was sampled so far, stitched."""
        found: Trace = self._call(self._inner.trace)
        return found

    def join(self) -> None:
        """Return when the rollout is closed.

        Raises:
            DsecError: as the end of the ``with`` does.
        """
        self._loop.run(self._joined())

    # --- In the client's thread ---------------------------------------------------------------

    def _call(self, function: Callable[[], Any]) -> Any:
        async def called() -> Any:
            return function()

        return self._loop.run(called())

    async def _begin(self) -> None:
        async with AsyncExitStack() as opened:
            if isinstance(self._engine, HttpEngine):
                await opened.enter_async_context(self._engine)
            await opened.enter_async_context(self._inner)
            self._opened = opened.pop_all()
        self._running = asyncio.create_task(self._inner.run(), name="model relay")

    async def _joined(self) -> None:
        if self._running is not None:
            await asyncio.shield(self._running)

    async def _end(self) -> BaseException | None:
        assert self._running is not None  # noqa: S101  begun
        self._running.cancel()
        (failed,) = await asyncio.gather(self._running, return_exceptions=True)
        await self._opened.aclose()
        return None if isinstance(failed, asyncio.CancelledError) else failed


def _awaited(
    function: Callable[[ModelRequest], Any],
) -> Callable[[ModelRequest], Awaitable[Sampled]]:
    async def sampled(request: ModelRequest) -> Sampled:
        is_awaited = inspect.iscoroutinefunction(function)
        made: Any = function(request) if is_awaited else await asyncio.to_thread(function, request)
        # The call of an object may be a coroutine function without looking like one.
        answer: Sampled = await made if inspect.isawaitable(made) else made
        return answer

    return sampled
