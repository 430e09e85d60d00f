"""A shell that lives on between commands: working directory, variables, functions stay.

The shell runs in the sandbox like any exec. Each command is handed to it as one word for ``eval``,
followed by a line that prints a random word to both outputs; what lies before that word is the
command's. Whoever runs in the same sandbox as the same user can read that word and print it too:
what a session says is the sandbox's own word. Verdicts on what an agent has done belong to
one-shot commands, whose exit code the node's daemon takes from the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shlex
import signal
import time
from typing import Final, Self

from dsec.handle import Closing
from dsec.process import Process, failure_of
from dsec.results import ExecResult
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.exec import ExecEvent, ExecStream, SignalTarget
from dsec_common.wire.sandbox import MAX_OUTPUT_BYTES

#: How long one request for output waits, and at least where the sandbox stands still.
_READ_S: Final = 20.0
_STANDING_READ_S: Final = 1.0
#: How long an interrupted command, and then a killed one, may take to let the shell go on.
_INTERRUPT_S: Final = 2.0
#: The shell itself lives through an interrupt and leaves the loops it is in; its own two outputs
#: are kept where a command's redirections do not reach.
_SET_UP: Final = "exec 8>&1 9>&2; trap 'break 999 2>/dev/null' INT\n"
_STATUS_MAX: Final = 16


class _Capture:
    """One output of one command: everything before the word that ends it, up to a limit."""

    def __init__(self, word: str, limit_bytes: int, *, with_status: bool) -> None:
        self._word = f"\n{word}".encode()
        self._ending = re.compile(
            re.escape(self._word) + (rb" (\d{1,3})\n" if with_status else rb"\n")
        )
        self._limit = limit_bytes
        self._tail = b""
        self.kept = bytearray()
        self.truncated = False
        self.over = False
        self.status: int | None = None

    def feed(self, data: bytes) -> None:
        if self.over:
            return
        text = self._tail + data
        found = self._ending.search(text)
        if found is not None:
            self._keep(text[: found.start()])
            self.over = True
            self.status = int(found[1]) if found.lastindex else None
            return
        # The word may have come in part.
        certain = max(len(text) - len(self._word) - _STATUS_MAX, 0)
        self._keep(text[:certain])
        self._tail = text[certain:]

    def end(self) -> None:
        """Take what is left: the shell has ended without the word."""
        if not self.over:
            self._keep(self._tail)
            self._tail = b""
            self.over = True

    def _keep(self, data: bytes) -> None:
        room = self._limit - len(self.kept)
        self.kept += data[: max(room, 0)]
        self.truncated = self.truncated or len(data) > room


class Session(Closing):
    """A shell in a sandbox; made by ``Sandbox.session``.

    As an async context manager it is closed at the end, and its whole process tree with it. One
    command runs at a time; others wait.

    Attributes:
        process: the shell.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self._lock = asyncio.Lock()
        self._over = ""

    async def open(self) -> Self:
        """Prepare the shell; called by ``Sandbox.session``.

        Raises:
            DsecError: why there is no shell, such as ``not_found``.
        """
        await self._write(_SET_UP)
        return self

    async def _write(self, text: str) -> None:
        try:
            await self.process.write(text)
        except DsecError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
            self._over = "its shell has ended"
            with contextlib.suppress(DsecError):  # it may only have closed its input
                error = failure_of(await self.process.wait(_INTERRUPT_S)) or error
            raise error from None

    async def _leave(self) -> None:
        await self.process.__aexit__(None, None, None)

    @property
    def alive(self) -> bool:
        """Whether the shell is not known to have ended."""
        return not self._over

    async def run(
        self,
        command: str,
        *,
        timeout_s: float = 60.0,
        output_limit_bytes: int = MAX_OUTPUT_BYTES,
        check: bool = False,
    ) -> ExecResult:
        """Run one command line in the shell and return when it has ended.

        After ``timeout_s`` it is interrupted (INT to all it started, then KILL to all but the
        shell), and the session goes on; if the shell does not, it is ended and :attr:`alive` is
        false. So it is when the command itself ends the shell (``exit``).

        Args:
            command: any number of lines for the shell; its standard input is empty.
            timeout_s: see above; the output so far is kept.
            output_limit_bytes: kept of each output, from its beginning.
            check: raise when the command does not succeed.

        Raises:
            CommandFailed: with ``check``, unless it ended with code 0.
            DsecError: ``conflict`` when the session is over; ``invalid`` for a NUL byte;
                ``expired`` with the sandbox.
        """
        if "\0" in command:
            raise DsecError(ErrorCode.INVALID, "a command line holds a NUL byte")
        async with self._lock:
            if self._over:
                raise DsecError(
                    ErrorCode.CONFLICT,
                    f"the session is over: {self._over}; open another",
                    details={"reason": "session_over"},
                )
            began_at = time.monotonic()
            word = secrets.token_hex(16)
            outputs = {
                ExecStream.STDOUT: _Capture(word, output_limit_bytes, with_status=True),
                ExecStream.STDERR: _Capture(word, output_limit_bytes, with_status=False),
            }
            await self._write(f"command eval {shlex.quote(command)} </dev/null\n{_end(word)}")
            how = 0
            try:
                await self._collect_within(timeout_s, outputs)
            except TimeoutError:
                how = await self._interrupt(outputs)
            except asyncio.CancelledError:
                await asyncio.shield(self._interrupt(outputs))
                raise
            result = await self._result(command, outputs, how, time.monotonic() - began_at)
        return result.check() if check else result

    async def _collect_within(self, timeout_s: float, outputs: dict[ExecStream, _Capture]) -> None:
        """Collect a command's output; while its sandbox stands still its time does, too.

        Raises:
            TimeoutError: the sandbox has run for so long and the command has not ended.
        """
        until, stood_s = time.monotonic() + timeout_s, self.process.paused_s
        wait_s = min(timeout_s, _READ_S)
        while not all(capture.over for capture in outputs.values()):
            heard_s = self.process.paused_s
            self._take(await self.process.read(wait_s=max(wait_s, 0.0)), outputs)
            left_s = until + self.process.paused_s - stood_s - time.monotonic()
            # Of one that stands still there is nothing to hear, however little is left.
            stands_still = self.process.paused_s > heard_s
            wait_s = min(max(left_s, _STANDING_READ_S) if stands_still else left_s, _READ_S)
            if left_s <= 0 and not all(capture.over for capture in outputs.values()):
                raise TimeoutError

    async def _collect(self, outputs: dict[ExecStream, _Capture]) -> None:
        while not all(capture.over for capture in outputs.values()):
            self._take(await self.process.read(), outputs)

    def _take(self, events: list[ExecEvent], outputs: dict[ExecStream, _Capture]) -> None:
        for event in events:
            if event.stream is ExecStream.EXIT:
                self._over = "its shell has ended"
                for capture in outputs.values():
                    capture.end()
            else:
                outputs[event.stream].feed(event.data)

    async def _interrupt(self, outputs: dict[ExecStream, _Capture]) -> int:
        """End the command that runs; return by which signal."""
        for number, targets in (
            (signal.SIGINT, (SignalTarget.TREE,)),
            (signal.SIGKILL, (SignalTarget.DESCENDANTS,)),
        ):
            try:
                for target in targets:
                    await self.process.signal(number, target=target)
                async with asyncio.timeout(_INTERRUPT_S):
                    await self._collect(outputs)
            except TimeoutError:
                continue
            except DsecError as error:
                if error.code is not ErrorCode.CONFLICT:
                    raise
                await self._collect(outputs)  # it has just ended
            return int(number)
        self._over = "its shell did not let go of a command whose time was over, and was ended"
        await self.process.kill()
        for capture in outputs.values():
            capture.end()
        return int(signal.SIGKILL)

    async def _result(
        self, command: str, outputs: dict[ExecStream, _Capture], how: int, duration_s: float
    ) -> ExecResult:
        stdout, stderr = outputs[ExecStream.STDOUT], outputs[ExecStream.STDERR]
        code, ended_by = stdout.status, None
        if how:
            code, ended_by = None, how
        elif code is None:
            info = await self.process.inspect()
            if (failure := failure_of(info)) is not None:
                raise failure
            code, ended_by = info.exit_code, info.signal
        return ExecResult(
            sandbox_id=self.process.sandbox_id,
            argv=(command,),
            exit_code=code,
            signal=ended_by,
            stdout=bytes(stdout.kept),
            stderr=bytes(stderr.kept),
            stdout_truncated=stdout.truncated or self.process.truncated,
            stderr_truncated=stderr.truncated or self.process.truncated,
            timed_out=bool(how),
            oom=False,
            duration_s=duration_s,
        )

    async def close(self) -> None:
        """End the shell and everything it has started. Idempotent."""
        self._over = self._over or "it was closed"
        await self.process.kill()


def _end(word: str) -> str:
    return f"printf '\\n%s %d\\n' {word} \"$?\" >&8; printf '\\n%s\\n' {word} >&9\n"
