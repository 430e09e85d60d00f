"""One service as a child process: started, awaited, restarted when it crashes, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.processes import ProcessIdentity, wait_exit

_POLL_S: Final = 0.02
_EXIT_CONFIGURATION: Final = 2
_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 30.0
#: A service that lived this long before it crashed starts again with the first pause.
_HEALTHY_S: Final = 30.0

Report = Callable[[str, Mapping[str, Any]], Awaitable[None]]
"""Told ``(what, facts)`` of everything worth saying."""


class RuntimeState(msgspec.Struct, frozen=True):
    """What a service keeps in its runtime file."""

    pid: int
    http_port: int
    state: str


class ServiceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to run one service.

    Attributes:
        name: unique in the stack: ``broker``, ``sandboxd-node-1``.
        module: run as ``python -m``.
        arguments: its configuration.
        runtime_file: where it tells its state.
        log: where its output goes, appended.
        niceness: how far it stands back when processors are short, as nice(2) counts.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    runtime_file: Path
    log: Path
    niceness: int = 0


class Child:
    """A service's process. Started by :meth:`start`, kept alive by :meth:`watch`."""

    def __init__(self, spec: ServiceSpec, report: Report) -> None:
        self.spec = spec
        self.restarts = 0
        self.was_running = False
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False

    @property
    def identity(self) -> ProcessIdentity | None:
        """The process now running, or None."""
        return ProcessIdentity.of(self._process.pid) if self._process else None

    @property
    def http_port(self) -> int:
        """The port of ``/readyz`` and ``/metrics``; 0 before the service has one."""
        state = self._runtime()
        return state.http_port if state else 0

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", self.spec.module, *self.spec.arguments]
        # A killed supervisor must not leave services behind.
        if setpriv := shutil.which("setpriv"):
            command = [setpriv, "--pdeathsig", "TERM", "--", *command]
        self.spec.runtime_file.unlink(missing_ok=True)
        with self.spec.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for the supervisor, which stops its children in order.
                process_group=0,
            )
        if self.spec.niceness:
            with contextlib.suppress(OSError):  # it has ended, which is found out soon
                niceness = os.getpriority(os.PRIO_PROCESS, 0) + self.spec.niceness
                os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        return process

    def _runtime(self) -> RuntimeState | None:
        try:
            state = msgspec.json.decode(self.spec.runtime_file.read_bytes(), type=RuntimeState)
        except (OSError, msgspec.DecodeError):
            return None
        return state if self._process and state.pid == self._process.pid else None

    async def start(self, timeout_s: float) -> None:
        """Start the service and return when it says that it is running.

        Raises:
            DsecError: ``unavailable`` with the end of its log when it ends or takes too long;
                ``invalid`` when it refuses its configuration.
        """
        if not self._process:
            self._process = self._spawn()
        process = self._process
        try:
            async with asyncio.timeout(timeout_s):
                while process.poll() is None:
                    state = self._runtime()
                    if state and state.state == "running":
                        self.was_running = True
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise self._start_error(f"is not running after {timeout_s:g} s") from None
        code, self._process = process.returncode, None
        if code == _EXIT_CONFIGURATION:
            raise invalid(f"{self.spec.name} refused its configuration: {self._log_end(3)}")
        raise self._start_error(f"ended with {_exit_text(code)} while starting")

    def _start_error(self, what: str) -> DsecError:
        return DsecError(
            ErrorCode.UNAVAILABLE,
            f"{self.spec.name} {what}; its log {self.spec.log} ends with:\n{self._log_end(15)}",
        )

    def _log_end(self, lines: int) -> str:
        try:
            with self.spec.log.open("rb") as file:
                file.seek(max(self.spec.log.stat().st_size - 8192, 0))
                text = file.read().decode(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(map(_readable, text.rstrip().splitlines()[-lines:]))

    async def watch(self, start_timeout_s: float) -> None:
        """Start the service again whenever it ends by itself, after a growing pause, and say so."""
        pause_s = _FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            process = self._process
            if process is not None:
                await wait_exit(process.pid)
                code = process.wait()
                if self._stopping:
                    return
                self._process = None
                if loop.time() - since > _HEALTHY_S:
                    pause_s = _FIRST_PAUSE_S
                await self._report(
                    "service_ended",
                    {
                        "name": self.spec.name,
                        "how": _exit_text(code),
                        "restart_in_s": pause_s,
                        "log": str(self.spec.log),
                    },
                )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LAST_PAUSE_S)
            since = loop.time()
            self.restarts += 1
            try:
                await self.start(start_timeout_s)
            except DsecError as error:
                await self._report(
                    "service_start_failed", {"name": self.spec.name, "error": error.message}
                )
            else:
                await self._report(
                    "service_restarted", {"name": self.spec.name, "restarts": self.restarts}
                )

    async def stop(self, timeout_s: float) -> bool:
        """Stop the service (TERM, after ``timeout_s`` KILL); return whether it went in order."""
        self._stopping = True
        process, self._process = self._process, None
        if process is None:
            return True
        in_order = True
        if process.poll() is None:
            process.terminate()
            try:
                async with asyncio.timeout(timeout_s):
                    await wait_exit(process.pid)
            except TimeoutError:
                in_order = False
                process.kill()
                with contextlib.suppress(ProcessLookupError):
                    await wait_exit(process.pid)
        return process.wait() == 0 and in_order


def _readable(line: str) -> str:
    """Return a structured log line as people read it; any other line as it is."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return line
    event, level = fields.get("event", ""), fields.get("level", "")
    error = fields.get("error") or fields.get("reason") or ""
    return f"{level}: {event}" + (f": {error}" if error else "")


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"
