"""The client: one connection, one project."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, Unpack

import msgspec

from dsec.agents import Agents
from dsec.channel import ANSWER_PATIENCE_S, AWAY_S, Channel
from dsec.connection import Context, resolve_connection
from dsec.contracts import Given
from dsec.creating import (
    CreateOptions,
    command_of,
    create_request,
    idle_action_of,
    limits_of,
)
from dsec.dags import Dags
from dsec.events import EventHub, EventStream
from dsec.inventory import Readings
from dsec.layers import Layers
from dsec.listing import Listings
from dsec.network import Policy
from dsec.pools import Functions
from dsec.queueing import queued
from dsec.results import ExecResult
from dsec.rollouts import Rollouts
from dsec.sandbox import Sandbox
from dsec.snapshots import Snapshot, Snapshots
from dsec.waiting import Waits
from dsec_common import subjects
from dsec_common.bus import Bus, BusConfig
from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.sandbox import (
    CreateSandbox,
    ExecCommand,
    IdleAction,
    Limits,
    SandboxCreated,
)
from dsec_common.wire.task import WarmUse

_TIMEOUT_S: Final = 10.0
#: The platform answers within the caller's time; its answer says more than our giving up.
_ANSWER_MARGIN_S: Final = 2.0
#: A time that makes sense for a request at all.
_WORTH_ASKING_S: Final = 0.1  # with less left, no node makes a sandbox any more
_LEAST_S: Final = 0.01
#: A node ends a command at its time (TERM, then KILL), and then answers.
_COMMAND_MARGIN_S: Final = 15.0


class DSecClient(Functions, Listings, Readings, Waits):
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
        channel, self._channel = self._channel, None
        events, self._events = self._events, None
        if events is not None:
            await events.aclose()
        if channel is not None:
            await channel.bus.drain()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
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
        base: str = "",
        *,
        workspace: str = "",
        toolkits: Iterable[str] = (),
        limits: Limits | None = None,
        cpus: float | None = None,
        memory_bytes: int | None = None,
        disk_bytes: int | None = None,
        pids: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        labels: Mapping[str, str] | None = None,
        agent: str = "",
        agent_version: str = "",
        rollout_id: str = "",
        model_rollout_id: str = "",
        ttl_s: float = 0.0,
        idle_ttl_s: float = 0.0,
        idle_action: IdleAction | str = IdleAction.END,
        command: str | Sequence[str] | ExecCommand | None = None,
        command_timeout_s: float = 60.0,
        network: Policy | None = None,
        setup_network: Policy | None = None,
        snapshot: Snapshot | str = "",
        warm: WarmUse | str = WarmUse.PREFER,
        idempotency_key: str = "",
        gpu: GpuDemand | None = None,
        service_class: ServiceClass | str = ServiceClass.STANDARD,
        priority: int = 0,
        contract: Given | None = None,
        request_id: str = "",
        timeout_s: float = 30.0,
    ) -> Sandbox:
        """Return a running sandbox; use it as an async context manager to have it deleted.

        While the platform is full it goes on asking for ``timeout_s``; it never asks
        again when that could make two sandboxes. With an ``idempotency_key`` it always may.

        Args:
            base: the base layer, ``name@version`` or ``sha256:…``; none with a ``snapshot``.
            workspace: the layer over it.
            toolkits: the layers on top, toolkits and data, lowest first.
            snapshot: a snapshot, or its id, with whose files and layers it begins.
            limits: what it may use; ``cpus``, ``memory_bytes``, ``disk_bytes`` and ``pids`` change
                single limits.
            cpus: processors' worth of CPU time.
            memory_bytes: memory, the writable layer included.
            disk_bytes: size of the writable layer.
            pids: processes and threads.
            env: variables of every command, on top of those that the base's image says.
            cwd: working directory of commands that name none; by default the base's image's, or /.
            user: of commands that name none; by default the base's image's, or root.
            labels: the caller's own, for listings.
            agent: the agent type written into behaviour logs. If the project has registered such
                an agent, the sandbox is an instance of its active version.
            agent_version: of this version instead; ``active`` if it has to be registered.
            rollout_id: the rollout that its agent socket belongs to.
            model_rollout_id: gives it a model endpoint, whose calls go to this rollout; see
                :class:`dsec.model_relay.relay.ModelRelay`.
            ttl_s: its node ends it after so many seconds; 0: never. See :meth:`Sandbox.touch`.
            idle_ttl_s: after so many seconds without use its node ends or pauses it; 0 means never.
            idle_action: ``end`` or ``pause``.
            command: run at once, in the same round trip; see :attr:`Sandbox.first_result`. A
                command that fails leaves the sandbox as it is.
            command_timeout_s: its time limit, unless it is an ``ExecCommand`` of its own.
            network: what it may reach, as :func:`dsec.network.network_policy` takes it; None is
                nothing.
            setup_network: what it may reach until ``sandbox.network.enter_agent_phase()``.
            warm: ``prefer`` one that waits in a pool, ``require`` it, or ``bypass`` pools.
            idempotency_key: the same key with the same arguments is the same sandbox, and the
                command is not run again.
            gpu: what it needs of a node's GPUs; it waits for them for ``timeout_s``.
            service_class: ``realtime``, ``standard`` or ``batch``: in which queue it waits.
            priority: among the project's own that wait; the higher goes first.
            contract: an agent's, by its path or as a mapping: what the request leaves open is as it
                says, and more than it allows is ``denied``.
            request_id: by which :meth:`explain_waiting` and :meth:`cancel_waiting` know it while it
                waits; by default one of its own.
            timeout_s: how long to wait for the sandbox.

        Raises:
            DsecError: ``not_found`` for an unknown layer, ``invalid``, ``exhausted`` when there is
                no room, ``unavailable`` without nodes, ``conflict`` for a key used otherwise.
        """
        request = create_request(
            base,
            workspace=workspace,
            toolkits=toolkits,
            limits=limits_of(
                limits, cpus=cpus, memory_bytes=memory_bytes, disk_bytes=disk_bytes, pids=pids
            ),
            env=env,
            cwd=cwd,
            user=user,
            labels=labels,
            agent=agent,
            agent_version=agent_version,
            rollout_id=rollout_id,
            model_rollout_id=model_rollout_id,
            ttl_s=ttl_s,
            idle_ttl_s=idle_ttl_s,
            idle_action=idle_action_of(idle_action),
            command=None if command is None else command_of(command, timeout_s=command_timeout_s),
            network=network,
            setup_network=setup_network,
            snapshot=snapshot,
            warm=warm,
            idempotency_key=idempotency_key,
            gpu=gpu,
            service_class=service_class,
            priority=priority,
            contract=contract,
            request_id=request_id,
            timeout_s=timeout_s,
        )
        return await self._create(request)

    async def _create(self, request: CreateSandbox) -> Sandbox:
        channel, command = self._connected(), request.command
        # The node refuses a time that makes no sense; its answer is waited for.
        command_s = max(command.timeout_s, 0.0) + _COMMAND_MARGIN_S if command else 0.0

        def with_less_time(left_s: float) -> CreateSandbox:
            for_sandbox_s = max(left_s - command_s - _ANSWER_MARGIN_S, _LEAST_S)
            return msgspec.structs.replace(request, timeout_s=min(request.timeout_s, for_sandbox_s))

        created = await channel.ask(
            subjects.sandbox_create(self.project),
            request,
            SandboxCreated,
            shortened=with_less_time,
            timeout_s=request.timeout_s + command_s + _ANSWER_MARGIN_S,
            repeatable=bool(request.idempotency_key),
            room_within_s=request.timeout_s - _WORTH_ASKING_S,
            away_s=min(AWAY_S, request.timeout_s - _WORTH_ASKING_S),
            patience_s=ANSWER_PATIENCE_S + command_s,
        )
        return Sandbox(channel, created.sandbox_id, created, command.argv if command else ())

    async def run(
        self,
        base: str,
        command: str | Sequence[str],
        *,
        cwd: str = "",
        user: str = "",
        stdin: str | bytes = b"",
        timeout_s: float = 60.0,
        check: bool = False,
        create_timeout_s: float = 30.0,
        **options: Unpack[CreateOptions],
    ) -> ExecResult:
        """Run one command in a sandbox of its own, in one round trip; its node then deletes that.

        The sandbox goes even if this process dies. When the result is here, its removal has begun.

        Args:
            base: the base layer; empty with a ``snapshot``.
            command: as for :meth:`Sandbox.exec`.
            cwd: working directory; empty for the sandbox's own.
            user: name or ``uid[:gid]`` in the sandbox; empty for the sandbox's own.
            stdin: given to the command, then end of file.
            timeout_s: after it the command is ended; the output so far is kept.
            check: raise when the command does not succeed.
            create_timeout_s: how long to wait for the sandbox.
            options: what the sandbox is given; see :meth:`create_sandbox`.

        Raises:
            CommandFailed: with ``check``, unless it ended by itself with code 0.
            DsecError: as :meth:`create_sandbox` and :meth:`Sandbox.exec`.
        """
        given: dict[str, Any] = dict(options)
        narrow = {"limits", "cpus", "memory_bytes", "disk_bytes", "pids"} & given.keys()
        request = create_request(
            base,
            limits=limits_of(**{name: given.pop(name) for name in narrow}),
            command=command_of(command, cwd=cwd, user=user, stdin=stdin, timeout_s=timeout_s),
            delete_after=True,
            timeout_s=create_timeout_s,
            **given,
        )
        result = (await self._create(request)).first_result
        if result is None:
            raise DsecError(ErrorCode.INTERNAL, "the node told of no command")
        return result.check() if check else result

    async def queue_sandbox(
        self,
        base: str = "",
        *,
        workspace: str = "",
        toolkits: Iterable[str] = (),
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        labels: Mapping[str, str] | None = None,
        agent: str = "",
        agent_version: str = "",
        rollout_id: str = "",
        model_rollout_id: str = "",
        ttl_s: float = 0.0,
        idle_ttl_s: float = 0.0,
        idle_action: IdleAction | str = IdleAction.END,
        network: Policy | None = None,
        setup_network: Policy | None = None,
        snapshot: Snapshot | str = "",
        idempotency_key: str = "",
        gpu: GpuDemand | None = None,
        service_class: ServiceClass | str = ServiceClass.STANDARD,
        priority: int = 0,
        contract: Given | None = None,
        request_id: str = "",
        timeout_s: float = 300.0,
    ) -> Sandbox:
        """Ask through the durable door and wait for the sandbox; see `create_sandbox`.

        The request is kept until there is room, over restarts of every service, for ``timeout_s``.

        Raises:
            DsecError: as the scheduler refused it; ``invalid``; ``timeout`` when no outcome came in
                time (the sandbox may still come: find it by its labels).
        """
        request = create_request(
            base,
            workspace=workspace,
            toolkits=toolkits,
            limits=limits or Limits(),
            env=env,
            cwd=cwd,
            user=user,
            labels=labels,
            agent=agent,
            agent_version=agent_version,
            rollout_id=rollout_id,
            model_rollout_id=model_rollout_id,
            ttl_s=ttl_s,
            idle_ttl_s=idle_ttl_s,
            idle_action=idle_action_of(idle_action),
            network=network,
            setup_network=setup_network,
            snapshot=snapshot,
            idempotency_key=idempotency_key,
            gpu=gpu,
            service_class=service_class,
            priority=priority,
            contract=contract,
            request_id=request_id,
            timeout_s=timeout_s,
        )
        if not 0 < timeout_s < math.inf:
            raise invalid(f"timeout_s is {timeout_s}: use more than 0 seconds")
        channel, events = self._connected(), self._event_hub()
        running = await queued(channel, events, request)
        return Sandbox(channel, running.sandbox_id, running.created)

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """Return the handle of a sandbox by its id; nothing is asked.

        Raises:
            DsecError: ``invalid`` when it is no sandbox id.
        """
        return Sandbox(self._connected(), sandbox_id, None)

    # --- The rest -----------------------------------------------------------------------------

    @property
    def layers(self) -> Layers:
        """The project's layers."""
        return Layers(self._connected(), self._event_hub())

    @property
    def agents(self) -> Agents:
        """The project's agents: versions, instances, and what those may do."""
        return Agents(self._connected())

    @property
    def dags(self) -> Dags:
        """The project's DAGs of agents."""
        return Dags(self._connected())

    @property
    def snapshots(self) -> Snapshots:
        """The project's snapshots."""
        return Snapshots(self._connected())

    @property
    def rollouts(self) -> Rollouts:
        """The project's rollouts."""
        return Rollouts(self._connected())

    def events(self) -> EventStream:
        """Return the project's events, to be read within its context: sandboxes, imports."""
        return EventStream(self._event_hub())
