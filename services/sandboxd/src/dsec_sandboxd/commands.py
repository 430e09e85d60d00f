"""Commands in sandboxes: checked here, run by the sandbox's own first process."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from dsec_common.bus_types import Request
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode
from dsec_common.wire.sandbox import MAX_OUTPUT_BYTES, EndCause, ExecCommand, ExecResult
from dsec_sandboxd import metrics
from dsec_sandboxd.admission import check_env
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.exec_table import ExecTable
from dsec_sandboxd.execs import (
    PROCESSES_GONE,
    Exec,
    command_cancelled,
    command_rolled_back,
    went_with_its_processes,
)
from dsec_sandboxd.kernel.init import is_sandbox_over
from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec, Kernel
from dsec_sandboxd.lifecycle import local_of
from dsec_sandboxd.one_shots import Keeper, OneShots
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog, shortened

#: The kernel takes a quarter of the stack's limit of 8 MiB, environment and pointers included.
ARGUMENT_BYTES_MAX: Final = 1536 * 1024
#: What the kernel takes for a single one.
_ONE_ARGUMENT_BYTES_MAX: Final = 128 * 1024
ARGUMENTS_MAX: Final = 4096
PATH_BYTES_MAX: Final = 4095
TIMEOUT_MIN_S: Final = 0.001
STDIN_UNDER_WAY_BYTES_MAX: Final = 64 << 20
"""Input that the commands of one sandbox may be given at once; it is in the daemon's memory."""

_USER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(?::[0-9]{1,10})?")


@dataclass(frozen=True, slots=True)
class _Running:
    """A one-shot command between its start and its end."""

    command: ExecCommand
    record: SandboxRecord
    keeper: Keeper
    over: asyncio.Future[ExecResult]
    started_at: float

    @property
    def key(self) -> tuple[str, str]:
        return self.record.local, self.command.message_id


class Commands:
    """Runs commands; counts those in flight so that a stop can wait for them.

    The same message is the same command: while it runs it is joined, and its result is kept.
    """

    def __init__(
        self,
        state: NodeState,
        kernel: Kernel,
        steps: StepLog,
        table: ExecTable,
        one_shots: OneShots,
        *,
        end_known: Callable[[SandboxRecord], Awaitable[None]],
        timeout_max_s: float,
    ) -> None:
        self._state = state
        self._end_known = end_known
        self._kernel = kernel
        self._steps = steps
        self._table = table
        self._one_shots = one_shots
        self._timeout_max_s = timeout_max_s
        self._leaving = False
        self._stdin_bytes: Counter[str] = Counter()
        self._untold: list[Callable[[], None]] = []
        self._ends: dict[tuple[str, str], asyncio.Future[CommandResult]] = {}
        self._cancelled: set[tuple[str, str]] = set()
        self._waiting_for_ends: set[asyncio.Task[None]] = set()

    async def exec(self, request: Request[ExecCommand]) -> ExecResult:
        """Run one command and return how it ended.

        A command that fails, times out or is killed is a result, not an error.

        Raises:
            DsecError: ``invalid`` for a malformed command; ``not_found`` for the sandbox, the
                program, the user or the directory (``details["what"]``); ``expired`` or ``oom``
                when the sandbox is over or ends meanwhile; ``unavailable`` before it is ready, or
                when the result of this message was lost.
        """
        record = self._state.running(request.project, local_of(request))
        return await self.run(request.message, record)

    def check(self, command: ExecCommand, record: SandboxRecord) -> None:
        """Return if the command can be run in the sandbox at all.

        Raises:
            DsecError: ``invalid``, naming the field and what is allowed.
        """
        command_spec(command, record, timeout_max_s=self._timeout_max_s)

    async def run(self, command: ExecCommand, record: SandboxRecord) -> ExecResult:
        """Run a command in a sandbox that runs; see :meth:`exec`."""
        spec = command_spec(command, record, timeout_max_s=self._timeout_max_s)
        await self._table.adopted(record.local)
        key = (record.local, command.message_id)
        kept = self._one_shots.result(key)
        if kept is not None:
            return kept
        over = self._one_shots.running(key)
        if over is None:
            if key in self._table.starting:
                raise _has_started_an_exec()
            earlier = self._table.find_message(*key)
            if earlier is not None:
                return await self._joined(earlier, record)
            self._check_stdin(command, record.local)
            over = self._begin(command, record, spec)
        await self._one_shots.wait(key, over)
        return over.result()

    def _check_stdin(self, command: ExecCommand, local: str) -> None:
        under_way = self._stdin_bytes[local] if command.stdin else 0
        if under_way and under_way + len(command.stdin) > STDIN_UNDER_WAY_BYTES_MAX:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"commands that run in this sandbox were given {under_way} bytes of input; wait "
                "for one to end, or start this one and write its input piece by piece",
                details={"what": "stdin"},
            )

    def _count_stdin(
        self, command: ExecCommand, local: str, ended: asyncio.Future[CommandResult]
    ) -> None:
        size = len(command.stdin)
        if not size:
            return
        self._stdin_bytes[local] += size

        def over(_: object) -> None:
            self._stdin_bytes[local] -= size
            if self._stdin_bytes[local] <= 0:
                del self._stdin_bytes[local]

        ended.add_done_callback(over)

    def has_taken(self, local: str, message_id: str) -> bool:
        """Return whether a message runs, or has run, a command here."""
        key = (local, message_id)
        return self._one_shots.running(key) is not None or self._one_shots.result(key) is not None

    def knows(self, local: str, message_id: str) -> bool:
        """Return whether the result of a message's command is here, or will be once it ends."""
        if self.has_taken(local, message_id):
            return True
        earlier = self._table.find_message(local, message_id)
        return earlier is not None and earlier.meta.one_shot

    def cancel(self, local: str, message_id: str) -> bool:
        """Kill the whole tree of a message's command; return false when none runs here.

        Whoever still waits for it is told, and the message runs nothing again.
        """
        ended = self._ends.get((local, message_id))
        if ended is None or not ended.cancel():
            return False
        self._cancelled.add((local, message_id))
        self._table.lose(local, message_id, time.time())
        return True

    async def _joined(self, earlier: Exec, record: SandboxRecord) -> ExecResult:
        if not earlier.meta.one_shot:
            raise _has_started_an_exec()
        await self._one_shots.wait((record.local, earlier.meta.message_id), earlier.ended)
        try:
            return earlier.result()
        except DsecError as error:
            raise self.why(record, error) from error

    def _begin(
        self, command: ExecCommand, record: SandboxRecord, spec: CommandSpec
    ) -> asyncio.Future[ExecResult]:
        """Start a command, whoever waits for it or goes away; return what tells its result."""
        one = _Running(
            command,
            record,
            Keeper(self._table, record.local, command.message_id, spec),
            self._one_shots.begin((record.local, command.message_id)),
            time.perf_counter(),
        )
        try:
            ended = self._kernel.begin(record.local, spec, one.keeper)
        except Exception as error:  # noqa: BLE001  whoever waits is told
            self._failed(one, error)
        else:
            self._count_stdin(command, record.local, ended)
            self._ends[one.key] = ended
            ended.add_done_callback(lambda ended: self._ended(one, ended))
        return one.over

    def _ended(self, one: _Running, ended: asyncio.Future[CommandResult]) -> None:
        self._ends.pop(one.key, None)
        try:
            if one.key in self._cancelled and ended.cancelled():
                self._failed(one, command_cancelled())
            elif ended.cancelled():
                self._failed(one, asyncio.CancelledError())
            elif (error := ended.exception()) is not None:
                self._lost(one, error)
            else:
                self._succeeded(one, ended.result())
        except Exception as error:
            if not one.over.done():
                self._one_shots.fail(one.key, error)
            raise

    def _succeeded(self, one: _Running, result: CommandResult) -> None:
        one.keeper.settle(result, keep=self._leaving)
        self._one_shots.end(one.key, _told(one.command, result))
        self._tell(one, _status(result))

    def _lost(self, one: _Running, error: BaseException) -> None:
        """Have a command fail; one that went with its sandbox, when it is known why that ended."""
        if self._leaving or not (isinstance(error, DsecError) and is_sandbox_over(error)):
            self._failed(one, error)
            return
        task = asyncio.create_task(self._went(one, error), name=f"end of {one.record.local}")
        self._waiting_for_ends.add(task)
        task.add_done_callback(self._waiting_for_ends.discard)

    async def _went(self, one: _Running, error: DsecError) -> None:
        try:
            await self._end_known(one.record)
        finally:
            self._failed(one, error)

    def _failed(self, one: _Running, error: BaseException) -> None:
        one.keeper.settle(None, keep=self._leaving)
        if isinstance(error, DsecError):
            if is_sandbox_over(error):
                # It may have run: the same message must not run it again on other files.
                self._table.lose(one.record.local, one.command.message_id, time.time())
            put_back = is_sandbox_over(error) and self._one_shots.is_put_back(one.key)
            told = command_rolled_back() if put_back else self.why(one.record, error)
            told.__cause__ = error if told is not error else None
            if one.key in self._cancelled:
                self._tell(one, "cancelled")
            else:
                self._tell(one, told.code.value, error_code=told.code.value)
            error = told
        self._cancelled.discard(one.key)
        self._one_shots.fail(one.key, error)

    def _tell(self, one: _Running, status: str, *, error_code: str = "") -> None:
        """Have a command written into the behaviour log, but its answer sent before."""
        if not self._untold:
            loop = asyncio.get_running_loop()
            # One turn for whoever waits for the answer, and its end for sending that.
            loop.call_soon(loop.call_soon, self._tell_all)
        lasted_s = time.perf_counter() - one.started_at
        if not error_code:
            metrics.EXEC_SECONDS.observe(lasted_s)
        told = functools.partial(self._log, one, lasted_s, status, error_code)
        self._untold.append(functools.partial(contextvars.copy_context().run, told))

    def _tell_all(self) -> None:
        untold, self._untold = self._untold, []
        for tell in untold:
            tell()

    async def finished(self, timeout_s: float) -> bool:
        """Return true when no command runs, false when ``timeout_s`` is over first.

        All that have ended are then in the behaviour log.
        """
        running = self._one_shots.all_running()
        if running:
            await asyncio.wait(running, timeout=timeout_s)
        self._tell_all()
        return all(over.done() for over in running)

    def leave(self) -> None:
        """Keep what is written down of commands that run: a later daemon takes them over."""
        self._leaving = True

    async def aclose(self) -> None:
        """Wait for the commands that the kernel's end has ended."""
        running = self._one_shots.all_running()
        if running:
            await asyncio.wait(running)
        self._tell_all()

    async def why_in_the_end(self, record: SandboxRecord, error: DsecError) -> DsecError:
        """Return the error for the caller, as :meth:`why`; the end of a sandbox is waited for."""
        if is_sandbox_over(error) or error.details.get("reason") == PROCESSES_GONE:
            await self._end_known(record)
        return self.why(record, error)

    def why(self, record: SandboxRecord, error: DsecError) -> DsecError:
        """Return the error for the caller: if the sandbox has ended, with the cause of that."""
        if error.code is not ErrorCode.UNAVAILABLE and error.details.get("what") != "sandbox":
            return error
        try:
            self._state.running(record.project, record.local)
        except DsecError as ended:
            known = is_sandbox_over(error) or error.details.get("reason") == PROCESSES_GONE
            return _overtaken(ended) if known else ended
        return went_with_its_processes() if is_sandbox_over(error) else error

    def _log(self, one: _Running, lasted_s: float, status: str, error_code: str) -> None:
        command = one.command
        self._steps.step(
            one.record,
            "exec",
            status=status,
            latency_ms=lasted_s * 1000,
            attributes={
                "command": joined(command.argv),
                "cwd": command.cwd if command.cwd != "/" else "",
                "user": command.user if command.user != "root" else "",
            },
            cause_id=command.message_id,
            error_code=error_code,
        )


def _overtaken(ended: DsecError) -> DsecError:
    """Return the error about a command that ran when its sandbox ended."""
    if ended.code is not ErrorCode.EXPIRED:
        return ended
    is_oom = ended.details.get("end_cause") == EndCause.OOM
    return DsecError(
        ErrorCode.OOM if is_oom else ErrorCode.EXPIRED,
        f"the command went with its sandbox: {ended.message}"
        + (" with more memory" if is_oom else ""),
        retryable=False,
        details={**ended.details, MAY_HAVE_HAPPENED: True},
    )


def _has_started_an_exec() -> DsecError:
    return invalid_field("message_id", "it has started an exec; use a fresh one")


def command_spec(
    command: ExecCommand, record: SandboxRecord, *, timeout_max_s: float
) -> CommandSpec:
    """Return what the kernel is to run.

    Raises:
        DsecError: ``invalid``, naming the field and what is allowed.
    """
    check_argv(command.argv)
    env = record.env_for(command.env)
    if command.env:
        check_env(env, "env")
    cwd = record.cwd_for(command.cwd)
    check_path(cwd, "cwd")
    if not math.isfinite(command.timeout_s) or not (
        TIMEOUT_MIN_S <= command.timeout_s <= timeout_max_s
    ):
        raise invalid_field(
            "timeout_s",
            f"{command.timeout_s} is not between {TIMEOUT_MIN_S} and {timeout_max_s:g} seconds",
        )
    if not 0 <= command.output_limit_bytes <= MAX_OUTPUT_BYTES:
        raise invalid_field(
            "output_limit_bytes",
            f"{command.output_limit_bytes} is not between 0 and {MAX_OUTPUT_BYTES}; let the "
            "command write into a file and read that",
        )
    return CommandSpec(
        argv=command.argv,
        env=env,
        cwd=cwd,
        user=kernel_user(record.user_for(command.user)),
        stdin=command.stdin,
        timeout_s=command.timeout_s,
        output_limit_bytes=command.output_limit_bytes,
        merge_stderr=command.merge_stderr,
    )


def check_argv(argv: tuple[str, ...]) -> None:
    """Return if ``argv`` can be run.

    Raises:
        DsecError: ``invalid``, naming what is allowed.
    """
    if not argv or not argv[0]:
        raise invalid_field("argv", "name a program, and its arguments after it")
    if len(argv) > ARGUMENTS_MAX:
        raise invalid_field("argv", f"{len(argv)} arguments; {ARGUMENTS_MAX} are the most")
    joined_argv = "\0".join(argv)
    if joined_argv.count("\0") != len(argv) - 1:
        raise invalid_field("argv", "an argument holds a NUL byte, which no program can be given")
    if 4 * len(joined_argv) < _ONE_ARGUMENT_BYTES_MAX:  # whatever its characters take
        return
    sizes = [len(argument.encode("utf-8", "surrogateescape")) + 1 for argument in argv]
    size = sum(sizes)
    if max(sizes) > _ONE_ARGUMENT_BYTES_MAX:
        raise invalid_field(
            "argv",
            f"an argument of {max(sizes)} bytes; {_ONE_ARGUMENT_BYTES_MAX} are the most for one. "
            "Write it to a file, or give it as stdin",
        )
    if size > ARGUMENT_BYTES_MAX:
        raise invalid_field(
            "argv",
            f"{size} bytes in all; {ARGUMENT_BYTES_MAX} are the most. Write long input to a file, "
            "or give it as stdin",
        )


def check_path(path: str, field: str) -> None:
    """Return if ``path`` can name something inside a sandbox.

    Raises:
        DsecError: ``invalid`` with ``details["reason"]`` ``invalid_path``.
    """
    size = len(path.encode("utf-8", "surrogateescape"))
    if path.startswith("/") and "\0" not in path and size <= PATH_BYTES_MAX:
        return
    error = invalid_field(
        field,
        f"{path[:80]!r} is not an absolute path of at most {PATH_BYTES_MAX} bytes without NUL",
    )
    error.details["reason"] = "invalid_path"
    raise error


def kernel_user(user: str) -> str:
    """Return a user as the kernel seam wants it; root needs no ``/etc/passwd``.

    Raises:
        DsecError: ``invalid`` for what can be no user.
    """
    if user == "root":
        return "0"
    if not _USER.fullmatch(user):
        raise invalid_field("user", f"{user[:40]!r} is no name, number or number:number")
    return user


def joined(argv: tuple[str, ...]) -> str:
    """Return a command as one would type it, bounded."""
    shown: list[str] = []
    length = 0
    for argument in argv:
        quoted = shlex.quote(shortened(argument))
        shown.append(quoted)
        length += len(quoted) + 1
        if length > PATH_BYTES_MAX:
            break
    return " ".join(shown)


def _told(command: ExecCommand, result: CommandResult) -> ExecResult:
    return ExecResult(
        cause_id=command.message_id,
        exit_code=result.exit_code,
        signal=result.signal,
        stdout=result.stdout,
        stderr=result.stderr,
        stdout_truncated=result.stdout_truncated,
        stderr_truncated=result.stderr_truncated,
        timed_out=result.timed_out,
        oom=result.oom,
        duration_s=result.duration_s,
        oom_process=result.oom_victim.name if result.oom_victim else "",
        oom_pid=result.oom_victim.pid if result.oom_victim else 0,
    )


def _status(result: CommandResult) -> str:
    if result.timed_out:
        return "timeout"
    if result.oom:
        return "oom"
    return f"signal:{result.signal}" if result.signal is not None else str(result.exit_code)
