"""Starts a stack in order, watches it, and stops it in order; leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from dsec.channel import Channel
from dsec.connection import Context, write_context
from dsec.inventory import list_nodes
from dsec.stack.child import Child, Report
from dsec.stack.layout import NODE_PART_PREFIX, Layout, PartRecord, StackLock, StackRecord
from dsec.stack.options import NATS_PORT, StackOptions, service_specs
from dsec.stack.sweep import hold_node_name, sweep_node
from dsec_common.accounts import AuthDirectory
from dsec_common.bus import Bus, BusConfig
from dsec_common.embedded.kafka import KafkaProvider, open_kafka
from dsec_common.embedded.nats import NatsServer
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.processes import ProcessIdentity
from dsec_common.subjects import DEFAULT_PROJECT

#: Above what a service takes at most to drain and close.
_STOP_TIMEOUT_S: Final = 45.0
_WATCH_S: Final = 0.5
_NODES_POLL_S: Final = 0.05


class Supervisor:
    """One stack, from :meth:`start` to :meth:`stop`; the latter is due whatever the former did.

    Start: lock → leftovers of a killed predecessor → NATS → Kafka → services, together → nodes seen
    by the broker. Stop: nodes → Chronus → tracer → scheduler → broker → Kafka → NATS → traces. A
    part that ends by itself is started again after a growing pause, and ``report`` is told.
    """

    def __init__(self, options: StackOptions, report: Report) -> None:
        self.options = options
        self.layout = Layout(options.directory)
        self.context: Context | None = None
        self._report = report
        self._lock: StackLock | None = None
        self._names: list[socket.socket] = []
        self._nats: NatsServer | None = None
        self._kafka: KafkaProvider | None = None
        self._children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._state = "starting"

    # --- Start --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return when every part runs and every node is ready.

        Raises:
            DsecError: what failed, where its log is, what to do. Call :meth:`stop` then, too.
        """
        self.options.check()
        self._lock = StackLock.take(self.layout)
        for name in await asyncio.to_thread(self.layout.clean_after_crash):
            await self._report("leftover_ended", {"name": name})
        self.layout.prepare()
        self._hold_node_names()
        auth = AuthDirectory.create_or_open(self.layout.auth)
        self._write_record()
        nats = await self._start_nats(auth)
        kafka = await self._start_kafka()
        await self._start_services(auth, nats.url, kafka)
        self.context = Context(
            nats_servers=(nats.url,),
            credentials=str(auth.project(DEFAULT_PROJECT)),
            project=DEFAULT_PROJECT,
            kafka_bootstrap=kafka,
        )
        await self._wait_for_nodes()
        write_context(self.layout.directory, self.context)
        self._state = "running"
        self._write_record()

    def _hold_node_names(self) -> None:
        """Make sure that no other stack of this machine runs a node of the same name."""
        for node in self.options.node_names():
            holder = hold_node_name(node)
            if holder is None:
                raise DsecError(
                    ErrorCode.CONFLICT,
                    f"another platform on this machine runs a node called {node}; choose other "
                    "names with --node-prefix",
                )
            self._names.append(holder)

    async def _start_nats(self, auth: AuthDirectory) -> NatsServer:
        port = self.options.nats_port
        if port is None:
            port = NATS_PORT if _is_free(NATS_PORT) else 0
        elif port and not _is_free(port):
            raise DsecError(
                ErrorCode.CONFLICT,
                f"another program listens on 127.0.0.1:{port}; give NATS another port with "
                "--nats-port, 0 for any that is free",
            )
        nats = NatsServer(self.layout.nats, auth, port=port)
        await nats.start(self.options.start_timeout_s)
        self._nats = nats
        self._watchers.append(asyncio.create_task(self._watch_nats(nats), name="watch nats"))
        self._write_record()
        return nats

    async def _start_kafka(self) -> str:
        kafka = open_kafka(
            self.options.kafka,
            self.layout.kafka,
            bootstrap_servers=self.options.kafka_bootstrap,
        )
        await kafka.start()
        self._kafka = kafka
        self._watchers.append(asyncio.create_task(self._watch_kafka(kafka), name="watch kafka"))
        self._write_record()
        return kafka.bootstrap_servers

    async def _start_services(self, auth: AuthDirectory, nats_url: str, kafka: str) -> None:
        specs = service_specs(self.options, self.layout, auth, nats_url, kafka)
        self._children = [Child(spec, self._report) for spec in specs]
        timeout_s = self.options.start_timeout_s
        starting = [asyncio.create_task(child.start(timeout_s)) for child in self._children]
        try:
            # The first failure is told at once; the others are stopped with the rest.
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            self._write_record()
        for child in self._children:
            self._watchers.append(
                asyncio.create_task(child.watch(timeout_s), name=f"watch {child.spec.name}")
            )

    async def _wait_for_nodes(self) -> None:
        """Return when the broker has seen every node: from then on a request finds room."""
        context, wanted = self.context, set(self.options.node_names())
        assert context is not None  # noqa: S101  set just before
        bus = await Bus.connect(
            BusConfig(
                servers=context.nats_servers,
                credentials_path=context.credentials,
                name="dsec-up",
                connect_timeout_s=self.options.start_timeout_s,
            )
        )
        reasons: dict[str, str] = {}
        try:
            async with asyncio.timeout(self.options.start_timeout_s):
                while wanted:
                    with contextlib.suppress(DsecError):
                        reply = await list_nodes(Channel(bus, context.project))
                        reasons = {node.node: node.reason for node in reply.nodes}
                        wanted -= {node.node for node in reply.nodes if node.ready}
                    await asyncio.sleep(_NODES_POLL_S)
        except TimeoutError:
            told = ", ".join(f"{node} ({reasons.get(node) or 'not seen'})" for node in wanted)
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                f"not ready after {self.options.start_timeout_s:g} s: {told}; see the logs in "
                f"{self.layout.logs}",
            ) from None
        finally:
            await bus.drain()

    # --- While it runs ------------------------------------------------------------------------

    async def _watch_nats(self, nats: NatsServer) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            if not nats.running:
                await self._report("service_ended", {"name": "nats", "log": str(nats.log_path)})
                await self._restart("nats", nats.start)

    async def _watch_kafka(self, kafka: KafkaProvider) -> None:
        pid = getattr(kafka, "pid", 0)
        while pid:
            await asyncio.sleep(_WATCH_S)
            if ProcessIdentity.of(pid) is None:
                await self._report("service_ended", {"name": "kafka"})
                await kafka.stop()
                await self._restart("kafka", kafka.start)
                pid = getattr(kafka, "pid", 0)

    async def _restart(self, name: str, start: Callable[[], Awaitable[None]]) -> None:
        pause_s = _WATCH_S
        while True:
            try:
                await start()
            except DsecError as error:
                await self._report("service_start_failed", {"name": name, "error": error.message})
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, 30.0)
            else:
                self._write_record()
                await self._report("service_restarted", {"name": name})
                return

    def parts(self) -> tuple[PartRecord, ...]:
        """Return the running parts in the order of their start."""
        parts: list[PartRecord] = []
        if self._nats and self._nats.running:
            parts.append(
                PartRecord(
                    name="nats",
                    process=ProcessIdentity.of(self._nats.pid),
                    address=self._nats.url,
                    log=str(self._nats.log_path),
                )
            )
        if self._kafka:
            pid = getattr(self._kafka, "pid", 0)
            parts.append(
                PartRecord(
                    name="kafka",
                    process=ProcessIdentity.of(pid) if pid else None,
                    address=self._kafka.bootstrap_servers,
                    log=str(getattr(self._kafka, "log_file", "")),
                )
            )
        parts += [
            PartRecord(
                name=child.spec.name,
                process=child.identity,
                address=f"http://127.0.0.1:{child.http_port}" if child.http_port else "",
                log=str(child.spec.log),
            )
            for child in reversed(self._children)
        ]
        return tuple(parts)

    def _write_record(self) -> None:
        me = ProcessIdentity.of(os.getpid())
        assert me is not None  # noqa: S101  we live
        self.layout.write_record(StackRecord(supervisor=me, state=self._state, parts=self.parts()))

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until ``stop`` is set, keeping the record up to date."""
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _WATCH_S * 2)
            self._write_record_if_changed()

    def _write_record_if_changed(self) -> None:
        record = self.layout.read_record()
        if record is None or record.parts != self.parts():
            self._write_record()

    # --- Stop ---------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop all that runs, in order, and remove all traces; from any state."""
        if self._lock is None:
            return
        self._state = "stopping"
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        nodes = [child for child in self._children if child.spec.name.startswith(NODE_PART_PREFIX)]
        await asyncio.gather(*(self._stop_child(child) for child in nodes))
        for child in self._children:
            if child not in nodes:
                await self._stop_child(child)
        if self._kafka is not None:
            await self._kafka.stop()
        if self._nats is not None:
            await self._nats.stop()
        self.layout.remove_traces()
        for holder in self._names:
            holder.close()
        self._lock.release()
        self._lock = None

    async def _stop_child(self, child: Child) -> None:
        in_order = await child.stop(_STOP_TIMEOUT_S)
        _, is_node, node = child.spec.name.partition(NODE_PART_PREFIX)
        if is_node and not in_order:
            await asyncio.to_thread(sweep_node, node)
        # One that was still starting has not learnt yet how to go in order.
        if child.was_running:
            await self._report(
                "service_stopped",
                {"name": child.spec.name, "in_order": in_order, "log": str(child.spec.log)},
            )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
