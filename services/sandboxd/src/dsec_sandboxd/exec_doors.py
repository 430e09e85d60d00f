"""The verbs of started execs: checked here, done by :mod:`dsec_sandboxd.exec_table`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from dsec_common.errors import DsecError, ErrorCode, from_os_error
from dsec_common.wire.base import Message
from dsec_common.wire.exec import (
    READ_BYTES_MAX,
    STDIN_CHUNK_BYTES,
    WAIT_MAX_S,
    CancelExec,
    ExecChanged,
    ExecEvents,
    ExecInfo,
    ExecList,
    ExecState,
    InspectExec,
    ListExecs,
    ReadExec,
    ResizeExec,
    SignalExec,
    StartExec,
    StdinWritten,
    TerminalSize,
    WriteStdin,
)
from dsec_common.wire.sandbox import LISTING_PAGE_BYTES
from dsec_sandboxd.admission import check_env, check_labels
from dsec_sandboxd.commands import (
    TIMEOUT_MIN_S,
    check_argv,
    check_path,
    joined,
    kernel_user,
)
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.kernel.init import is_sandbox_over
from dsec_sandboxd.kernel.interface import CommandSpec
from dsec_sandboxd.kernel.process import TERMINAL_SIDE_MAX, SignalScope
from dsec_sandboxd.lifecycle import local_of

if TYPE_CHECKING:
    from dsec_common.bus_types import Request
    from dsec_common.clock import Clock
    from dsec_sandboxd.commands import Commands
    from dsec_sandboxd.exec_arguments import ArgumentLists
    from dsec_sandboxd.exec_table import ExecTable
    from dsec_sandboxd.execs import Exec
    from dsec_sandboxd.records import SandboxRecord
    from dsec_sandboxd.state import NodeState
    from dsec_sandboxd.step_log import StepLog

GRACE_MAX_S: Final = 60.0
_SIGNAL_MAX: Final = 64
_OFFSET_MAX: Final = 2**62
_M = TypeVar("_M", bound=Message)

Admit = Callable[["SandboxRecord", str, str], "SandboxRecord"]
"""Notes that a message's command is about to run in an action.

It returns the sandbox as the command is to see it, or raises when the action does not go on.
"""


class ExecDoors:
    """Answers requests about started execs. Each is seen by its own sandbox's project only."""

    def __init__(
        self,
        state: NodeState,
        table: ExecTable,
        commands: Commands,
        steps: StepLog,
        arguments: ArgumentLists,
        *,
        clock: Clock,
        timeout_max_s: float,
    ) -> None:
        self._state = state
        self._clock = clock
        self._table = table
        self._arguments = arguments
        self._commands = commands
        self._steps = steps
        self._timeout_max_s = timeout_max_s
        self._starting: dict[tuple[str, str], asyncio.Task[Exec]] = {}
        self.admit: Admit

    def _record(self, request: Request[_M]) -> SandboxRecord:
        return self._state.running(request.project, local_of(request))

    def _paused_s(self, request: Request[_M]) -> float:
        record = self._state.find(request.project, local_of(request))
        return record.stood_still_s(self._clock.now())

    def _find(self, request: Request[_M], exec_id: str) -> Exec:
        return self._table.get(self._record(request).local, exec_id)

    async def start(self, request: Request[StartExec]) -> ExecInfo:
        """Start a command; the same message again is the same exec.

        Raises:
            DsecError: ``invalid``; ``exhausted`` when the sandbox has no further command, terminal
                or process to give, or output takes all the memory it may.
        """
        message, record = request.message, self._record(request)
        key = (record.local, message.message_id)
        one = self._table.find_message(*key)
        if one is None:
            starting = self._starting.get(key)
            if starting is None:
                if self._commands.has_taken(*key):
                    raise _has_run_a_command()
                if message.arguments_from:
                    more = self._arguments.get(record.local, message.arguments_from)
                    message = msgspec.structs.replace(message, argv=message.argv + more)
                if message.action:
                    record = self.admit(record, message.action, message.message_id)
                spec = _spec(message, record, self._timeout_max_s)
                starting = asyncio.create_task(
                    self._start(message, record, spec), name=f"start exec {record.local}"
                )
                self._starting[key] = starting
                self._table.starting.add(key)
                starting.add_done_callback(lambda _: self._has_started(key))
            try:
                one = await asyncio.shield(starting)
            except DsecError as error:
                raise await self._commands.why_in_the_end(record, error) from error
        elif (starting := self._starting.get(key)) is not None:
            one = await asyncio.shield(starting)
        if one.meta.one_shot:
            raise _has_run_a_command()
        return one.info(message.message_id)

    async def started(self, local: str, message_id: str) -> None:
        """Return when no exec of this message is about to be known."""
        starting = self._starting.get((local, message_id))
        if starting is not None:
            await asyncio.wait({starting})

    def _has_started(self, key: tuple[str, str]) -> None:
        self._starting.pop(key, None)
        self._table.starting.discard(key)

    async def _start(self, message: StartExec, record: SandboxRecord, spec: CommandSpec) -> Exec:
        meta = self._table.new_meta(message.message_id, spec, one_shot=False)
        meta.user, meta.labels = record.user_for(message.user), message.labels
        one = await self._table.start(record.local, meta, spec)
        if message.arguments_from:
            self._arguments.forget(record.local, message.arguments_from)
        one.ended.add_done_callback(lambda _: self._log(record, one))
        return one

    async def read(self, request: Request[ReadExec]) -> ExecEvents:
        """Return events after a number; wait for one when there is none.

        Raises:
            DsecError: ``not_found``; ``invalid``.
        """
        message, record = request.message, self._record(request)
        one = self._table.get(record.local, message.exec_id)
        if not 0 <= message.after <= _OFFSET_MAX:
            raise invalid_field("after", f"{message.after} is no event's number")
        if not 0 < message.max_bytes <= READ_BYTES_MAX:
            raise invalid_field(
                "max_bytes", f"{message.max_bytes} is not between 1 and {READ_BYTES_MAX}"
            )
        await one.news(message.after, _wait(message.wait_s))
        try:
            events = one.read(message.after, message.max_bytes, message.message_id)
        except DsecError as error:
            raise await self._commands.why_in_the_end(record, error) from error
        events = msgspec.structs.replace(events, paused_s=self._paused_s(request))
        if events.ended is None or one.error is None or not is_sandbox_over(one.error):
            return events
        why = await self._commands.why_in_the_end(record, one.error)
        ended = msgspec.structs.replace(
            events.ended, error_code=why.code.value, error_message=why.message
        )
        return msgspec.structs.replace(events, ended=ended)

    async def write_stdin(self, request: Request[WriteStdin]) -> StdinWritten:
        """Give an exec input.

        Raises:
            DsecError: ``not_found``; ``invalid``; ``conflict`` when bytes before it are missing.
        """
        message = request.message
        one = self._find(request, message.exec_id)
        if len(message.data) > STDIN_CHUNK_BYTES:
            raise invalid_field(
                "data", f"{len(message.data)} bytes; {STDIN_CHUNK_BYTES} are the most in one piece"
            )
        if not 0 <= message.offset <= _OFFSET_MAX:
            raise invalid_field("offset", f"{message.offset} is no place in an input")
        given = one.input
        if given is None:
            raise invalid_field("exec_id", "this exec takes no input: start it with stdin")
        await given.write(
            message.offset, message.data, end=message.end, wait_s=_wait(message.wait_s)
        )
        return StdinWritten(
            cause_id=message.message_id,
            accepted=given.accepted,
            closed=given.closed,
            paused_s=self._paused_s(request),
        )

    async def resize(self, request: Request[ResizeExec]) -> ExecChanged:
        """Give an exec's terminal another size.

        Raises:
            DsecError: ``not_found``; ``invalid`` without a terminal; ``conflict`` after the end.
        """
        message = request.message
        one = self._find(request, message.exec_id)
        rows, columns = _size(message.size)
        if one.meta.terminal is None:
            raise invalid_field("exec_id", "this exec has no terminal")
        try:
            one.process().resize(rows, columns)
        except OSError as error:
            raise from_os_error("resizing a terminal", error) from error
        return ExecChanged(cause_id=message.message_id, exec_id=message.exec_id)

    async def signal(self, request: Request[SignalExec]) -> ExecChanged:
        """Send a signal to processes of an exec.

        Raises:
            DsecError: ``not_found``; ``invalid``; ``conflict`` after the end.
        """
        message = request.message
        one = self._find(request, message.exec_id)
        if not 1 <= message.signal <= _SIGNAL_MAX:
            raise invalid_field("signal", f"{message.signal} is not between 1 and {_SIGNAL_MAX}")
        one.process().signal(message.signal, SignalScope(message.target.value))
        return ExecChanged(cause_id=message.message_id, exec_id=message.exec_id)

    async def cancel(self, request: Request[CancelExec]) -> ExecInfo:
        """End an exec and return when it is over; fine for one that is.

        A one-shot command, by its message's id, is killed at once.

        Raises:
            DsecError: ``not_found``; ``invalid``.
        """
        message = request.message
        record = self._record(request)
        if self._commands.cancel(record.local, message.exec_id):
            return ExecInfo(
                cause_id=message.message_id,
                exec_id=message.exec_id,
                state=ExecState.EXITED,
                argv=(),
                started_at=0.0,
                cancelled=True,
            )
        # One that an earlier daemon ran is among the execs, by its message.
        one = self._table.find_message(record.local, message.exec_id)
        one = one or self._table.get(record.local, message.exec_id)
        if not 0 <= message.grace_s <= GRACE_MAX_S:
            raise invalid_field(
                "grace_s", f"{message.grace_s} is not between 0 and {GRACE_MAX_S:g} seconds"
            )
        await one.cancel(message.grace_s)
        return one.info(message.message_id)

    async def inspect(self, request: Request[InspectExec]) -> ExecInfo:
        """Return what is known of an exec.

        Raises:
            DsecError: ``not_found``.
        """
        return self._find(request, request.message.exec_id).info(request.message.message_id)

    async def list(self, request: Request[ListExecs]) -> ExecList:
        """Return a page of a sandbox's execs."""
        message = request.message
        found: list[ExecInfo] = []
        size = 0
        for one in self._table.all(self._record(request).local):
            if one.meta.exec_id <= message.after or not (one.running or message.include_ended):
                continue
            if not message.labels.items() <= one.meta.labels.items():
                continue
            info = one.info()
            size += len(msgspec.json.encode(info))
            if found and size > LISTING_PAGE_BYTES:
                return ExecList(cause_id=message.message_id, execs=tuple(found), more=True)
            found.append(info)
        return ExecList(cause_id=message.message_id, execs=tuple(found))

    def _log(self, record: SandboxRecord, one: Exec) -> None:
        meta = one.meta
        status = (
            "timeout"
            if meta.timed_out
            else "cancelled"
            if meta.cancelled
            else str(meta.exit_code if meta.signal is None else f"signal:{meta.signal}")
        )
        self._steps.step(
            record,
            "exec",
            status=meta.error_code or status,
            latency_ms=(time.time() - meta.started_at) * 1000,
            attributes={
                "command": joined(meta.argv),
                "cwd": meta.cwd if meta.cwd != "/" else "",
                "user": meta.user if meta.user != "root" else "",
                "exec": meta.exec_id,
            },
            cause_id=meta.message_id,
            error_code=meta.error_code,
        )


def _has_run_a_command() -> DsecError:
    return invalid_field("message_id", "it has run a command; use a fresh one")


def _spec(message: StartExec, record: SandboxRecord, timeout_max_s: float) -> CommandSpec:
    check_argv(message.argv)
    env = dict(record.env_for(message.env))
    if message.terminal is not None:
        env.setdefault("TERM", "xterm-256color")
    check_env(env, "env")
    cwd = record.cwd_for(message.cwd)
    check_path(cwd, "cwd")
    check_labels(message.labels)
    if message.timeout_s and (
        not math.isfinite(message.timeout_s)
        or not TIMEOUT_MIN_S <= message.timeout_s <= timeout_max_s
    ):
        raise invalid_field(
            "timeout_s",
            f"{message.timeout_s} is neither 0 nor between {TIMEOUT_MIN_S} and "
            f"{timeout_max_s:g} seconds",
        )
    return CommandSpec(
        argv=message.argv,
        env=env,
        cwd=cwd,
        user=kernel_user(record.user_for(message.user)),
        timeout_s=message.timeout_s,
        merge_stderr=message.merge_stderr or message.terminal is not None,
        terminal=_size(message.terminal) if message.terminal is not None else None,
        with_input=message.stdin,
    )


def _size(size: TerminalSize) -> tuple[int, int]:
    for name, value in (("rows", size.rows), ("columns", size.columns)):
        if not 1 <= value <= TERMINAL_SIDE_MAX:
            raise invalid_field(name, f"{value} is not between 1 and {TERMINAL_SIDE_MAX}")
    return size.rows, size.columns


def _wait(wait_s: float) -> float:
    if not 0 <= wait_s <= WAIT_MAX_S:
        raise DsecError(
            ErrorCode.INVALID,
            f"wait_s: {wait_s} is not between 0 and {WAIT_MAX_S:g} seconds",
            details={"field": "wait_s"},
        )
    return wait_s
