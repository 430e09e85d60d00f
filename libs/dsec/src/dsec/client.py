"""The client: one connection, one project."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from dsec.channel import ANSWER_PATIENCE_S, ATTEMPTS_MAX, Channel
from dsec.connection import Context, resolve_connection
from dsec.events import EventHub, EventStream
from dsec.layers import Layers
from dsec.rollouts import Rollouts
from dsec.sandbox import Sandbox
from dsec_common import subjects
from dsec_common.bus import Bus, BusConfig
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import Message
from dsec_common.wire.node import InspectNode, ListNodes, NodeInfo, NodeList
from dsec_common.wire.sandbox import (
    CreateSandbox,
    Limits,
    ListSandboxes,
    SandboxCreated,
    SandboxInfo,
    SandboxList,
    SandboxRefused,
    SandboxRunning,
)
from dsec_common.wire.trace import GetTrace, Trace

_TIMEOUT_S: Final = 10.0
#: The platform answers within the caller's time; its answer says more than our giving up.
_ANSWER_MARGIN_S: Final = 2.0


class DSecClient:
    """A project's way to the platform: ``async with DSecClient() as client: …``.

    Without arguments it finds the platform by the environment (``DSEC_NATS_SERVERS``,
    ``DSEC_NATS_CREDENTIALS``) or a running ``dsec up``. The project is the credentials' own.
    One client serves any number of tasks; it reconnects by itself.

    Args:
        servers: NATS URLs, as a list or joined by commas.
        credentials: path of the project's credentials file.
        project: only for a NATS server without accounts.
        kafka_bootstrap: ``host:port`` of Kafka, for reading logs.
        state_directory: where to look for a running ``dsec up``.
        connect_timeout_s: how long the first connection may take.

    Raises:
        DsecError: ``unavailable`` when nothing says where the platform is; ``invalid``.
    """

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        credentials: str | os.PathLike[str] | None = None,
        *,
        project: str | None = None,
        kafka_bootstrap: str | None = None,
        state_directory: str | os.PathLike[str] | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self.context: Context = resolve_connection(
            servers,
            credentials,
            project=project,
            kafka_bootstrap=kafka_bootstrap,
            directory=Path(state_directory) if state_directory else None,
        )
        self._connect_timeout_s = connect_timeout_s
        self._channel: Channel | None = None
        self._events: EventHub | None = None

    @property
    def project(self) -> str:
        """The project that the credentials belong to."""
        return self.context.project

    # --- The connection -----------------------------------------------------------------------

    async def connect(self) -> Self:
        """Connect; called by ``async with``.

        Raises:
            DsecError: ``unavailable`` when no server answers in time, ``denied`` when it refuses
                the credentials.
        """
        bus = await Bus.connect(
            BusConfig(
                servers=self.context.nats_servers,
                credentials_path=self.context.credentials,
                name="dsec-sdk",
                connect_timeout_s=self._connect_timeout_s,
            )
        )
        self._channel = Channel(bus, self.project, self.context.kafka_bootstrap)
        self._events = EventHub(self._channel)
        return self

    async def close(self) -> None:
        """Let go of the connection. Sandboxes live on unless their own context ended."""
        channel, self._channel, self._events = self._channel, None, None
        if channel is not None:
            await channel.bus.drain()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, error, traceback
        await self.close()

    def _connected(self) -> Channel:
        if self._channel is None:
            raise invalid("the client is not connected: use `async with DSecClient() as client`")
        return self._channel

    def _event_hub(self) -> EventHub:
        self._connected()
        assert self._events is not None  # noqa: S101  set together with the channel
        return self._events

    # --- Sandboxes ----------------------------------------------------------------------------

    async def create_sandbox(
        self,
        base: str,
        *,
        workspace: str = "",
        toolkits: Iterable[str] = (),
        limits: Limits | None = None,
        cpus: float | None = None,
        memory_bytes: int | None = None,
        disk_bytes: int | None = None,
        pids: int | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        agent: str = "",
        rollout_id: str = "",
        ttl_s: float = 0.0,
        idempotency_key: str = "",
        timeout_s: float = 30.0,
    ) -> Sandbox:
        """Return a running sandbox; use it as an async context manager to have it deleted.

        While the platform is full it asks again a few times within ``timeout_s``; it never asks
        again when that could make two sandboxes. With an ``idempotency_key`` it always may.

        Args:
            base: the base layer, ``name@version`` or ``sha256:…``.
            workspace: the layer over it.
            toolkits: the layers on top, lowest first.
            limits: what it may use; ``cpus``, ``memory_bytes``, ``disk_bytes`` and ``pids`` change
                single limits.
            cpus: processors' worth of CPU time.
            memory_bytes: memory, the writable layer included.
            disk_bytes: size of the writable layer.
            pids: processes and threads.
            env: variables of every command.
            labels: the caller's own, for listings.
            agent: the agent type written into behaviour logs.
            rollout_id: the rollout that its agent socket belongs to.
            ttl_s: its node ends it after this many seconds; 0 means never.
            idempotency_key: the same key with the same arguments is the same sandbox.
            timeout_s: how long to wait.

        Raises:
            DsecError: ``not_found`` for an unknown layer, ``invalid``, ``exhausted`` when there is
                no room, ``unavailable`` without nodes, ``conflict`` for a key used otherwise.
        """
        channel = self._connected()
        request = _create_request(
            base,
            workspace=workspace,
            toolkits=toolkits,
            limits=limits_of(
                limits, cpus=cpus, memory_bytes=memory_bytes, disk_bytes=disk_bytes, pids=pids
            ),
            env=env,
            labels=labels,
            agent=agent,
            rollout_id=rollout_id,
            ttl_s=ttl_s,
            idempotency_key=idempotency_key,
            timeout_s=timeout_s,
        )
        created = await channel.ask(
            subjects.sandbox_create(self.project),
            request,
            SandboxCreated,
            timeout_s=timeout_s + _ANSWER_MARGIN_S,
            repeatable=bool(idempotency_key),
            attempts_max=ATTEMPTS_MAX,
            patience_s=ANSWER_PATIENCE_S,
        )
        return Sandbox(channel, created.sandbox_id, created)

    async def queue_sandbox(
        self,
        base: str,
        *,
        workspace: str = "",
        toolkits: Iterable[str] = (),
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        agent: str = "",
        rollout_id: str = "",
        ttl_s: float = 0.0,
        idempotency_key: str = "",
        timeout_s: float = 300.0,
    ) -> Sandbox:
        """Ask through the durable door and wait for the sandbox; see `create_sandbox`.

        The request is kept until there is room, over restarts of every service, for ``timeout_s``.

        Raises:
            DsecError: as the scheduler refused it; ``invalid``; ``timeout`` when no outcome came in
                time (the sandbox may still come: find it by its labels).
        """
        request = _create_request(
            base,
            workspace=workspace,
            toolkits=toolkits,
            limits=limits or Limits(),
            env=env,
            labels=labels,
            agent=agent,
            rollout_id=rollout_id,
            ttl_s=ttl_s,
            idempotency_key=idempotency_key,
            timeout_s=timeout_s,
        )
        if not 0 < timeout_s < math.inf:
            raise invalid(f"timeout_s is {timeout_s}: use more than 0 seconds")
        channel, events = self._connected(), self._event_hub()
        outcome: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def settle(message: Message) -> None:
            if not outcome.done():
                outcome.set_result(message)

        created, refused = (
            subjects.request_event(self.project, request.message_id, what)
            for what in ("created", "refused")
        )
        async with events.listening(created, settle), events.listening(refused, settle):
            await channel.bus.js_publish(subjects.queue_sandbox_create(self.project), request)
            try:
                async with asyncio.timeout(timeout_s):
                    message = await outcome
            except TimeoutError:
                raise DsecError(
                    ErrorCode.TIMEOUT,
                    f"no outcome of queued request {request.message_id} within {timeout_s:g} s; "
                    "it stays queued, and the sandbox may still come",
                    details={"request_id": request.message_id},
                ) from None
        if isinstance(message, SandboxRunning):
            return Sandbox(channel, message.sandbox_id, message.created)
        if isinstance(message, SandboxRefused):
            raise _refusal(message)
        raise DsecError(ErrorCode.INTERNAL, f"an unexpected event: {type(message).__name__}")

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """Return the handle of a sandbox by its id; nothing is asked.

        Raises:
            DsecError: ``invalid`` when it is no sandbox id.
        """
        return Sandbox(self._connected(), sandbox_id, None)

    async def list_sandboxes(
        self, *, labels: Mapping[str, str] | None = None, include_ended: bool = False
    ) -> list[SandboxInfo]:
        """Return the project's sandboxes on all nodes, oldest first.

        Args:
            labels: only those that carry all of these.
            include_ended: also those whose record is kept after their end.

        Raises:
            DsecError: ``unavailable`` when a node did not answer, naming it: a listing that leaves
                sandboxes out must not look whole.
        """
        found: list[SandboxInfo] = []
        after = ""
        while True:
            page = await self._connected().ask(
                subjects.sandbox_list(self.project),
                ListSandboxes(labels=dict(labels or {}), include_ended=include_ended, after=after),
                SandboxList,
                timeout_s=_TIMEOUT_S,
                repeatable=True,
                patience_s=ANSWER_PATIENCE_S,
            )
            if page.silent_nodes:
                raise DsecError(
                    ErrorCode.UNAVAILABLE,
                    f"these nodes did not answer: {', '.join(page.silent_nodes)}; "
                    "list again, or see `dsec node list`",
                )
            found += page.sandboxes
            if not page.more or not page.sandboxes:
                return sorted(found, key=lambda sandbox: sandbox.created_at)
            after = page.sandboxes[-1].sandbox_id

    async def sandboxes(self, *, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        """Return handles of the project's living sandboxes; see :meth:`list_sandboxes`."""
        found = await self.list_sandboxes(labels=labels)
        return [Sandbox(self._connected(), info.sandbox_id, None) for info in found]

    # --- The rest -----------------------------------------------------------------------------

    @property
    def layers(self) -> Layers:
        """The project's layers."""
        return Layers(self._connected(), self._event_hub())

    @property
    def rollouts(self) -> Rollouts:
        """The project's rollouts."""
        return Rollouts(self._connected())

    async def nodes(self) -> NodeList:
        """Return all nodes, ready or not, and the cluster's Compute Units."""
        return await self._connected().ask(
            subjects.node(self.project, "list"),
            ListNodes(),
            NodeList,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def node(self, name: str) -> NodeInfo:
        """Return one node.

        Raises:
            DsecError: ``not_found`` when the broker does not know it.
        """
        return await self._connected().ask(
            subjects.node(self.project, "inspect"),
            InspectNode(node=subjects.validate_node(name)),
            NodeInfo,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def trace(self, sandbox_id: str) -> Trace:
        """Return all steps of a sandbox in order, from its behaviour log; it may have ended.

        Raises:
            DsecError: ``not_found`` when the tracer has read nothing of it (yet).
        """
        ScopedId.parse(sandbox_id)
        after_seq = 0
        whole: Trace | None = None
        while True:
            page = await self._connected().ask(
                subjects.trace(self.project, "get"),
                GetTrace(sandbox_id=sandbox_id, after_seq=after_seq),
                Trace,
                timeout_s=_TIMEOUT_S,
                repeatable=True,
                patience_s=ANSWER_PATIENCE_S,
            )
            steps = (whole.steps if whole else ()) + page.steps
            whole = msgspec.structs.replace(page, steps=steps, more=False)
            if not page.more or not page.steps:
                return whole
            after_seq = page.steps[-1].seq

    def events(self) -> EventStream:
        """Return the project's events, to be read within its context: sandboxes, imports."""
        return EventStream(self._event_hub())


def limits_of(
    limits: Limits | None = None,
    *,
    cpus: float | None = None,
    memory_bytes: int | None = None,
    disk_bytes: int | None = None,
    pids: int | None = None,
    cu: float | None = None,
) -> Limits:
    """Return ``limits`` (by default the platform's) with what is given changed."""
    asked: dict[str, Any] = {
        "cpus": cpus,
        "memory_bytes": memory_bytes,
        "disk_bytes": disk_bytes,
        "pids": pids,
        "cu": cu,
    }
    changes = {name: value for name, value in asked.items() if value is not None}
    return msgspec.structs.replace(limits or Limits(), **changes)


def _create_request(
    base: str,
    *,
    toolkits: Iterable[str],
    limits: Limits,
    env: Mapping[str, str] | None,
    labels: Mapping[str, str] | None,
    **rest: Any,
) -> CreateSandbox:
    if isinstance(toolkits, str):
        raise invalid(f"toolkits is a list of layers, not the text {toolkits!r}")
    return CreateSandbox(
        base=base,
        toolkits=tuple(toolkits),
        limits=limits,
        env=dict(env or {}),
        labels=dict(labels or {}),
        **rest,
    )


def _refusal(event: SandboxRefused) -> DsecError:
    try:
        code = ErrorCode(event.code)
    except ValueError:
        code = ErrorCode.INTERNAL
    return DsecError(code, event.reason, details={"request_id": event.request_id})
