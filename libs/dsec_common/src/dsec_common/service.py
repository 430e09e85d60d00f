"""The one life cycle of every service.

``starting → running → draining → stopped | failed``. The order is fixed here, so that reading one
service teaches all:

1. signal handlers, before anything slow;
2. configuration printed, health endpoints up (``/readyz`` says 503);
3. :meth:`Service.open`: connections, waiting for NATS as long as the configuration allows;
4. :meth:`Service.recover`: leftovers of an earlier life;
5. :meth:`Service.subscribe`, then a flush to the server: from here on requests arrive; ready;
6. on SIGTERM or SIGINT: ready is false, :meth:`Service.quiesce`, ``bus.drain()`` (in-flight work is
   answered within ``drain_timeout_s``), :meth:`Service.close`; exit code 0.

Exit codes: 0 stopped as asked, 1 fatal, 2 configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

import structlog
import uvloop
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from dsec_common.bus import Bus, BusConfig
from dsec_common.clock import Clock, SystemClock
from dsec_common.config import ServiceConfig, describe, load_config
from dsec_common.errors import DsecError
from dsec_common.logging import configure_logging

log = structlog.get_logger()

C = TypeVar("C", bound=ServiceConfig)

EXIT_STOPPED = 0
EXIT_FATAL = 1
EXIT_CONFIGURATION = 2
#: Objects made and not freed before the youngest are looked at; the older ones, more seldom still.
_COLLECT_AT: Final = (20_000, 20, 100)


class ServiceState(StrEnum):
    """Where a service is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Service(Generic[C]):
    """Base of every service: owns the bus, the health endpoints and the order of start and stop.

    Subclasses fill in :meth:`open`, :meth:`recover`, :meth:`subscribe`, :meth:`quiesce`,
    :meth:`close` and :meth:`readiness`; each may be empty. Long-lived work is started with
    :meth:`spawn`: a task that raises ends the service as failed, since a service that has lost a
    part of itself must not look healthy.
    """

    name: ClassVar[str]

    def __init__(self, config: C, clock: Clock | None = None) -> None:
        self.config = config
        self.clock: Clock = clock or SystemClock()
        self.state = ServiceState.STARTING
        self.bus: Bus
        self._stop = asyncio.Event()
        self._fatal: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: web.AppRunner | None = None
        self.http_port = 0

    # --- What a service fills in --------------------------------------------------------------

    def bus_name(self) -> str:
        """Return the name under which this process connects to NATS."""
        return self.name

    async def open(self) -> None:
        """Connect what the service needs besides the bus, which is already connected."""

    async def recover(self) -> None:
        """Bring leftovers of an earlier life into order, before any request is taken."""

    async def subscribe(self) -> None:
        """Start taking requests and events."""

    async def quiesce(self) -> None:
        """Stop making new work; called before the bus drains."""

    async def close(self) -> None:
        """Persist and let go of everything; called after the bus has drained."""

    def readiness(self) -> str:
        """Return why the service is not ready though it runs, or the empty string."""
        return ""

    # --- The life cycle -----------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run ``work`` until the service stops; if it raises, the service fails."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the service as failed because of ``error``."""
        if self._fatal is None:
            self._fatal = error
        self._stop.set()

    @property
    def failed(self) -> bool:
        """Whether it has failed, or a step of its stop has."""
        return self._fatal is not None

    def request_stop(self) -> None:
        """Begin to stop, as SIGTERM does."""
        self._stop.set()

    async def run(self) -> int:
        """Live from start to stop and return the exit code; returns only when all is let go of."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        try:
            try:
                await self.start()
                await self._stop.wait()
            except BaseException as error:  # noqa: BLE001  told below, after everything is let go of
                self.fail(error)
            # A second signal must not cut the stop short: a parent that dies sends several.
            return await self.stop()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def start(self) -> None:
        """Go from ``starting`` to ``running``."""
        log.info("starting", **describe(self.config))
        await self._serve_http()
        self._write_runtime_file()
        # Any step may wait for a part that never comes; SIGTERM and a failed task end the wait.
        preparing = asyncio.create_task(self._prepare(), name="prepare")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        await asyncio.wait({preparing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not preparing.done():
            preparing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await preparing
            return
        await preparing
        self._become(ServiceState.RUNNING)

    async def _prepare(self) -> None:
        await self._connect_bus()
        await self.open()
        await self.recover()
        await self.subscribe()
        await self.bus.flush()

    async def _connect_bus(self) -> None:
        self.bus = await Bus.connect(
            BusConfig(
                servers=self.config.nats_servers,
                credentials_path=self.config.nats_credentials,
                name=self.bus_name(),
                connect_timeout_s=self.config.connect_timeout_s,
            )
        )

    async def stop(self) -> int:
        """Go from any state to ``stopped`` or ``failed`` and return the exit code."""
        if self._fatal is not None:
            error = self._fatal
            shown = str(error) if isinstance(error, DsecError) else repr(error)
            log.error(
                "failed", error=shown, exc_info=None if isinstance(error, DsecError) else error
            )
        self._become(ServiceState.DRAINING)
        await self._guard(self.quiesce(), "quiesce")
        if hasattr(self, "bus"):
            await self._guard(self.bus.drain(self.config.drain_timeout_s), "drain")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._guard(self.close(), "close")
        self._become(ServiceState.STOPPED if self._fatal is None else ServiceState.FAILED)
        if self._http is not None:
            await self._http.cleanup()
        return EXIT_STOPPED if self._fatal is None else EXIT_FATAL

    async def _guard(self, step: Coroutine[Any, Any, None], name: str) -> None:
        # One failing step of the stop must not keep the others from letting go.
        try:
            await step
        except Exception as error:
            log.exception("stop_step_failed", step=name)
            self.fail(error)

    def _become(self, state: ServiceState) -> None:
        self.state = state
        log.info(str(state))
        self._write_runtime_file()

    # --- Health -------------------------------------------------------------------------------

    async def _serve_http(self) -> None:
        application = web.Application()
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics)
        self._http = web.AppRunner(application, access_log=None)
        await self._http.setup()
        site = web.TCPSite(self._http, self.config.http_host, self.config.http_port)
        await site.start()
        self.http_port = self._http.addresses[0][1]

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"state": self.state})

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self.not_ready_reason()
        return web.json_response(
            {"ready": not reason, "state": self.state, "reason": reason},
            status=503 if reason else 200,
        )

    def not_ready_reason(self) -> str:
        """Return why requests should not be sent here now, or the empty string."""
        if self.state is not ServiceState.RUNNING:
            return f"the service is {self.state}"
        if not self.bus.connected:
            return "NATS is not connected; reconnecting"
        return self.readiness()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _write_runtime_file(self) -> None:
        if not self.config.runtime_file:
            return
        path = Path(self.config.runtime_file)
        temporary = path.with_suffix(".new")
        temporary.write_text(
            json.dumps({"pid": os.getpid(), "http_port": self.http_port, "state": self.state})
        )
        temporary.replace(path)


def main(
    service: Callable[[C], Service[C]], config_type: type[C], name: str, argv: Sequence[str] | None
) -> int:
    """Run one service as a process (configuration, logs, uvloop) and return its exit code."""
    try:
        config = load_config(config_type, name, argv)
    except DsecError as error:
        sys.stderr.write(f"dsec-{name}: {error.message}\n")
        return EXIT_CONFIGURATION
    configure_logging(name, level=config.log_level)

    _collect_seldom()

    async def live() -> int:
        return await service(config).run()

    return uvloop.run(live())


def _collect_seldom() -> None:
    """Have the garbage collector pass over what stays, and look at the rest less often.

    Requests are freed by counting; only cycles wait for it. With Python's own threshold, 700, it
    ran some hundred times a second under load, each time in the middle of somebody's request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)
