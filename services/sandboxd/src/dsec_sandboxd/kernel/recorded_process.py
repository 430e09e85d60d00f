"""Commands of the recording kernel: real pipes, a scripted end, no program."""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.interface import CommandResult, Stream
from dsec_sandboxd.kernel.process import Process, ProcessExit, SignalScope

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_sandboxd.kernel.interface import CommandSpec
    from dsec_sandboxd.kernel.process import OutputKeeper

_DEADLY: Final = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP})


class _Control:
    def __init__(self) -> None:
        self.process: Process | None = None

    def _end(self, number: int) -> None:
        if self.process is not None and not self.process.exited.done():
            self.process.exited.set_result(ProcessExit(exit_code=None, signal=number))

    def signal(self, run_id: int, number: int, scope: SignalScope) -> None:
        del run_id
        if number in _DEADLY and scope is not SignalScope.DESCENDANTS:
            self._end(number)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def alive(self) -> bool:
        return self.process is not None and not self.process.exited.done()

    def close_stdin(self, run_id: int) -> None:
        del run_id

    def finish(self, run_id: int) -> None:
        del run_id

    def abandon(self) -> None:
        pass

    def ended(self, status: int) -> ProcessExit:
        return ProcessExit.of(status)

    def countdown(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        return asyncio.get_running_loop().call_later(delay_s, callback).cancel


class RecordedCommands(ABC):
    """One-shot commands that are begun rather than waited for."""

    @abstractmethod
    async def exec(
        self,
        local: str,
        command: CommandSpec,
        on_output: Callable[[Stream, bytes], None] | None = None,
        keeper: OutputKeeper | None = None,
    ) -> CommandResult:
        """Answer what was scripted for the program."""

    def begin(
        self, local: str, command: CommandSpec, keeper: OutputKeeper | None = None
    ) -> asyncio.Future[CommandResult]:
        """Answer what was scripted for the program, in a while."""
        return asyncio.ensure_future(self.exec(local, command, None, keeper))

    def overheard(self, local: str) -> dict[int, CommandResult]:
        """Return none: a recorded command's end is heard of, or never was."""
        del local
        return {}


def tell_output(
    result: CommandResult, on_output: Callable[[Stream, bytes], None] | None
) -> CommandResult:
    """Return a result when whoever listens has been told what the command printed."""
    for stream, data in ((Stream.STDOUT, result.stdout), (Stream.STDERR, result.stderr)):
        if data and on_output is not None:
            on_output(stream, data)
    return result


def recorded_process(
    run_id: int, spec: CommandSpec, answer: CommandResult | DsecError | None
) -> Process:
    """Return a process that has printed and ended as scripted; without a script it runs on."""
    control = _Control()
    process = control.process = Process(run_id, spec, control)
    if isinstance(answer, DsecError):
        process.has_failed(answer)
        return process
    descriptors = []
    if spec.with_input and spec.terminal is None:
        unread, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.close(unread)
        descriptors.append(writing)
    printed = {Stream.STDOUT: b"", Stream.STDERR: b""}
    if answer is not None:
        printed = {Stream.STDOUT: answer.stdout, Stream.STDERR: answer.stderr}
    for data in list(printed.values())[: 1 if spec.merge_stderr else 2]:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.write(writing, data)
        os.close(writing)
        descriptors.append(reading)
    process.take_streams(descriptors)
    process.is_started()
    if answer is not None:
        process.exited.set_result(ProcessExit(exit_code=answer.exit_code, signal=answer.signal))
    return process
