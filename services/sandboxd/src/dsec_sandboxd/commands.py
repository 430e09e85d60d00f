"""Commands in sandboxes: checked here, run by the sandbox's own first process."""

from __future__ import annotations

import asyncio
import math
import re
import shlex
import time
from typing import Final

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.sandbox import MAX_OUTPUT_BYTES, ExecCommand, ExecResult
from dsec_sandboxd import metrics
from dsec_sandboxd.admission import check_env
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec, Kernel
from dsec_sandboxd.lifecycle import local_of
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog, shortened

#: The kernel takes no single argument over 128 KiB; all of them together are held to the same.
ARGUMENT_BYTES_MAX: Final = 128 * 1024
ARGUMENTS_MAX: Final = 4096
PATH_BYTES_MAX: Final = 4095
TIMEOUT_MIN_S: Final = 0.001

_USER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(?::[0-9]{1,10})?")


class Commands:
    """Runs commands; counts those in flight so that a stop can wait for them."""

    def __init__(
        self, state: NodeState, kernel: Kernel, steps: StepLog, *, timeout_max_s: float
    ) -> None:
        self._state = state
        self._kernel = kernel
        self._steps = steps
        self._timeout_max_s = timeout_max_s
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def exec(self, request: Request[ExecCommand]) -> ExecResult:
        """Run one command and return how it ended.

        A command that fails, times out or is killed is a result, not an error.

        Raises:
            DsecError: ``invalid`` for a malformed command; ``not_found`` for the sandbox, the
                program, the user or the directory (``details["what"]``); ``expired`` or ``oom``
                when the sandbox is over or ends meanwhile; ``unavailable`` before it is ready.
        """
        command = request.message
        record = self._state.running(request.project, local_of(request))
        spec = command_spec(command, record, timeout_max_s=self._timeout_max_s)
        started_at = time.perf_counter()
        self._in_flight += 1
        self._idle.clear()
        try:
            result = await self._kernel.exec(record.local, spec)
        except DsecError as error:
            told = self._why(record, error)
            self._log(record, command, started_at, told.code.value, error_code=told.code.value)
            raise told from error
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
        metrics.EXEC_SECONDS.observe(time.perf_counter() - started_at)
        self._log(record, command, started_at, _status(result))
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
        )

    async def finished(self, timeout_s: float) -> bool:
        """Return true when no command runs, false when ``timeout_s`` is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _why(self, record: SandboxRecord, error: DsecError) -> DsecError:
        """Return the error for the caller: if the sandbox has ended, with the cause of that."""
        if error.code is not ErrorCode.UNAVAILABLE and error.details.get("what") != "sandbox":
            return error
        try:
            self._state.running(record.project, record.local)
        except DsecError as ended:
            return ended
        return error

    def _log(
        self,
        record: SandboxRecord,
        command: ExecCommand,
        started_at: float,
        status: str,
        *,
        error_code: str = "",
    ) -> None:
        self._steps.step(
            record,
            "exec",
            status=status,
            latency_ms=(time.perf_counter() - started_at) * 1000,
            attributes={
                "command": joined(command.argv),
                "cwd": command.cwd if command.cwd != "/" else "",
                "user": command.user if command.user != "root" else "",
            },
            cause_id=command.message_id,
            error_code=error_code,
        )


def command_spec(
    command: ExecCommand, record: SandboxRecord, *, timeout_max_s: float
) -> CommandSpec:
    """Return what the kernel is to run.

    Raises:
        DsecError: ``invalid``, naming the field and what is allowed.
    """
    _check_argv(command.argv)
    env = {**record.env, **command.env} if command.env else record.env
    if command.env:
        check_env(env, "env")
    check_path(command.cwd, "cwd")
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
        cwd=command.cwd,
        user=kernel_user(command.user),
        stdin=command.stdin,
        timeout_s=command.timeout_s,
        output_limit_bytes=command.output_limit_bytes,
    )


def _check_argv(argv: tuple[str, ...]) -> None:
    if not argv or not argv[0]:
        raise invalid_field("argv", "name a program, and its arguments after it")
    if len(argv) > ARGUMENTS_MAX:
        raise invalid_field("argv", f"{len(argv)} arguments; {ARGUMENTS_MAX} are the most")
    if any("\0" in argument for argument in argv):
        raise invalid_field("argv", "an argument holds a NUL byte, which no program can be given")
    size = sum(len(argument.encode("utf-8", "surrogateescape")) + 1 for argument in argv)
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


def _status(result: CommandResult) -> str:
    if result.timed_out:
        return "timeout"
    if result.oom:
        return "oom"
    return f"signal:{result.signal}" if result.signal is not None else str(result.exit_code)
