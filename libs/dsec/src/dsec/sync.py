"""The SDK without ``await``: ``from dsec.sync import DSecClient``.

Every class here is made from its asynchronous twin: the same names, arguments, results and errors.
A client runs the asynchronous one on an event loop in a thread of its own; it may be used from any
thread. Asynchronous iterators become plain ones, ``async with`` becomes ``with``::

    with DSecClient() as client, client.create_sandbox("python@1") as sandbox:
        print(sandbox.exec("echo hello", check=True).stdout_text)
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final

from dsec import client as asynchronous
from dsec import recipes
from dsec.actions import Action as AsyncAction
from dsec.agents import Agents as AsyncAgents
from dsec.checkpoints import RolloutBranch as AsyncRolloutBranch
from dsec.dags import Dags as AsyncDags
from dsec.events import EventStream as AsyncEventStream
from dsec.file_watch import FileWatch as AsyncFileWatch
from dsec.layers import Layers as AsyncLayers
from dsec.network import Network as AsyncNetwork
from dsec.network import PortStream as AsyncPortStream
from dsec.network import Tunnel as AsyncTunnel
from dsec.pack import registering
from dsec.pools import Pools as AsyncPools
from dsec.process import Process as AsyncProcess
from dsec.rollouts import Rollout as AsyncRollout
from dsec.rollouts import Rollouts as AsyncRollouts
from dsec.rollouts import Stage as AsyncStage
from dsec.sandbox import Sandbox as AsyncSandbox
from dsec.session import Session as AsyncSession
from dsec.snapshots import Snapshot as AsyncSnapshot
from dsec.snapshots import Snapshots as AsyncSnapshots
from dsec_common.errors import invalid

__all__ = [
    "Action",
    "Agents",
    "DSecClient",
    "Dags",
    "EventStream",
    "FileWatch",
    "Layers",
    "Pools",
    "Process",
    "Rollout",
    "RolloutBranch",
    "Rollouts",
    "Sandbox",
    "Session",
    "Snapshot",
    "Snapshots",
    "Stage",
    "build_layer",
    "register_package",
    "run_with",
    "update_model",
]

_END: Final = object()


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dsec", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return what ``work`` returns; if this thread is interrupted, ``work`` is cancelled."""
        if self._loop.is_closed():
            work.close()
            raise invalid("the client is closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class _Twin:
    """Base of all twins: the asynchronous object, and the loop it lives on."""

    def __init__(self, loop: _LoopThread, inner: Any) -> None:
        self._loop = loop
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    def __getattr__(self, name: str) -> Any:
        # Attributes and properties; methods are made by _twin_of.
        return _wrapped(self._loop, getattr(self._inner, name))


def _wrapped(loop: _LoopThread, value: Any) -> Any:
    """Return the twin of a handle, a plain iterator for an asynchronous one, else the value."""
    if twin := _TWIN_OF.get(type(value)):
        return twin(loop, value)
    if isinstance(value, list):
        return [_wrapped(loop, item) for item in value]
    if isinstance(value, AsyncIterator):
        return _iterate(loop, value)
    return value


def _iterate(loop: _LoopThread, items: AsyncIterator[Any]) -> Iterator[Any]:
    async def step() -> Any:
        return await anext(items, _END)

    async def close() -> None:
        if inspect.isasyncgen(items):
            await items.aclose()

    try:
        while (item := loop.run(step())) is not _END:
            yield _wrapped(loop, item)
    finally:
        loop.run(close())


def _delegate(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: _Twin, *arguments: Any, **named: Any) -> Any:
        async def call() -> Any:
            result = getattr(self._inner, name)(*arguments, **named)
            return await result if inspect.iscoroutine(result) else result

        return _wrapped(self._loop, self._loop.run(call()))

    return method


def _twin_of(kind: type, base: type[_Twin] = _Twin) -> Any:
    """Return the class whose methods call those of ``kind`` on its loop and wait for the result."""
    members: dict[str, Any] = {"__doc__": kind.__doc__, "__module__": __name__}
    inherited = {
        name: member for one in reversed(kind.__mro__[:-1]) for name, member in vars(one).items()
    }
    for name, member in inherited.items():
        if not name.startswith("_") and inspect.isfunction(member) and name not in vars(base):
            members[name] = _delegate(name, member)
    if hasattr(kind, "__aenter__") and not hasattr(base, "__enter__"):
        members |= {"__enter__": _enter, "__exit__": _exit}
    if hasattr(kind, "__aiter__"):
        members["__iter__"] = lambda self: _iterate(self._loop, self._inner)
    return type(kind.__name__, (base,), members)


def _enter(self: _Twin) -> _Twin:
    self._loop.run(self._inner.__aenter__())
    return self


def _exit(self: _Twin, *error: object) -> None:
    self._loop.run(self._inner.__aexit__(*error))


class _ClientTwin(_Twin):
    """What is the client's own: it makes the loop and ends it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        # Not connected yet, so there is no loop; a wrong argument is told here and now.
        self._inner = asynchronous.DSecClient(*arguments, **named)
        self._loop: Any = None

    def connect(self) -> Any:
        """Connect; called by ``with``."""
        self._loop = _LoopThread()
        try:
            self._loop.run(self._inner.connect())
        except BaseException:
            self._loop.close()
            raise
        return self

    def close(self) -> None:
        """Let go of the connection and end the thread."""
        try:
            self._loop.run(self._inner.close())
        finally:
            self._loop.close()

    def __enter__(self) -> Any:
        return self.connect()

    def __exit__(self, *error: object) -> None:
        self.close()


Action: Any = _twin_of(AsyncAction)
Agents: Any = _twin_of(AsyncAgents)
Dags: Any = _twin_of(AsyncDags)
Sandbox: Any = _twin_of(AsyncSandbox)
EventStream: Any = _twin_of(AsyncEventStream)
FileWatch: Any = _twin_of(AsyncFileWatch)
Layers: Any = _twin_of(AsyncLayers)
Pools: Any = _twin_of(AsyncPools)
Process: Any = _twin_of(AsyncProcess)
Rollouts: Any = _twin_of(AsyncRollouts)
Rollout: Any = _twin_of(AsyncRollout)
RolloutBranch: Any = _twin_of(AsyncRolloutBranch)
Session: Any = _twin_of(AsyncSession)
Snapshot: Any = _twin_of(AsyncSnapshot)
Snapshots: Any = _twin_of(AsyncSnapshots)
Stage: Any = _twin_of(AsyncStage)
Network: Any = _twin_of(AsyncNetwork)
PortStream: Any = _twin_of(AsyncPortStream)
Tunnel: Any = _twin_of(AsyncTunnel)
DSecClient: Any = _twin_of(asynchronous.DSecClient, _ClientTwin)


def run_with(
    client: Any, work: Callable[[asynchronous.DSecClient], Coroutine[Any, Any, Any]]
) -> Any:
    """Return what ``work(asynchronous client)`` returns: what is done at once costs one wait.

    It runs on the loop of ``client``, and is cancelled if this thread is interrupted.
    """

    async def worked() -> Any:
        return await work(client._inner)  # noqa: SLF001  its twin

    return client._loop.run(worked())  # noqa: SLF001  its twin


def _with_twin(work: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Return a function for clients of this module; the original has the same documentation."""

    @functools.wraps(work)
    def worked(client: Any, *given: Any, **named: Any) -> Any:
        return client._loop.run(work(client._inner, *given, **named))  # noqa: SLF001  its twin

    return worked


build_layer: Any = _with_twin(recipes.build_layer)
register_package: Any = _with_twin(registering.register_package)
update_model: Any = _with_twin(registering.update_model)


_TWIN_OF: Final[dict[type, Any]] = {
    AsyncAction: Action,
    AsyncAgents: Agents,
    AsyncDags: Dags,
    AsyncSandbox: Sandbox,
    AsyncEventStream: EventStream,
    AsyncFileWatch: FileWatch,
    AsyncLayers: Layers,
    AsyncPools: Pools,
    AsyncProcess: Process,
    AsyncRollouts: Rollouts,
    AsyncRollout: Rollout,
    AsyncRolloutBranch: RolloutBranch,
    AsyncSession: Session,
    AsyncSnapshot: Snapshot,
    AsyncSnapshots: Snapshots,
    AsyncStage: Stage,
    AsyncNetwork: Network,
    AsyncPortStream: PortStream,
    AsyncTunnel: Tunnel,
}
