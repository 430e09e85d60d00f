"""One running command: its streams drained, its kept output bounded."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import CommandResult, Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_sandboxd.kernel.interface import CommandSpec

_READ_BYTES: Final = 65_536
#: Reads of one stream before others have their turn.
_READS_PER_TURN: Final = 16
#: A pipe's largest size for an unprivileged process: what an ended command may have left in it.
_LEFT_IN_PIPE_MAX: Final = 1 << 20


def out_of_descriptors() -> DsecError:
    """Return the error for descriptors that the kernel could not hand to this process."""
    return DsecError(
        ErrorCode.EXHAUSTED, "the daemon has no free descriptors: retry later or on another node"
    )


class _Output:
    """One stream: drained for ever, kept up to a limit."""

    def __init__(self, descriptor: int, stream: Stream, run: CommandRun) -> None:
        self.descriptor = descriptor
        self._stream = stream
        self._run = run
        self._room = run.spec.output_limit_bytes
        self.kept = bytearray()
        self.truncated = False

    def on_readable(self) -> None:
        for _ in range(_READS_PER_TURN):
            if self._read_once() <= 0:
                return

    def drain(self) -> None:
        """Take what is there now, without waiting for a process that keeps the pipe open."""
        left = _LEFT_IN_PIPE_MAX
        while self.descriptor >= 0 and left > 0:
            size = self._read_once()
            if size <= 0:
                return
            left -= size

    def _read_once(self) -> int:
        """Read once; return the size, 0 at the end (then closed), -1 when nothing is there."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return -1
        except OSError:
            data = b""
        if not data:
            self.close()
            return 0
        if self._room > 0:
            kept = data[: self._room]
            self._room -= len(kept)
            self.kept += kept
            if self._run.on_output is not None:
                self._run.on_output(self._stream, kept)
            self.truncated = self.truncated or len(kept) < len(data)
        else:
            self.truncated = True
        return len(data)

    def close(self) -> None:
        if self.descriptor >= 0:
            self._run.loop.remove_reader(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1


class CommandRun:
    """A command from its request to its end; ``done`` is its result."""

    def __init__(
        self,
        run_id: int,
        spec: CommandSpec,
        on_output: Callable[[Stream, bytes], None] | None,
    ) -> None:
        self.run_id = run_id
        self.spec = spec
        self.on_output = on_output
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[CommandResult] = self.loop.create_future()
        self.was_started = False
        self.timed_out = False
        self._began_at = time.monotonic()
        self._outputs: dict[Stream, _Output] = {}
        self._input_fd = -1
        self._input_left = memoryview(spec.stdin)

    def started(self, descriptors: list[int]) -> None:
        """Take over the command's pipes."""
        self.was_started = True
        if len(descriptors) != 1 + bool(self.spec.stdin) + (not self.spec.merge_stderr):
            for descriptor in descriptors:
                os.close(descriptor)
            self.failed(out_of_descriptors())
            return
        remaining = list(descriptors)
        if self.spec.stdin:
            self._input_fd = remaining.pop(0)
            self._write_input()
            if self._input_fd >= 0:
                self.loop.add_writer(self._input_fd, self._write_input)
        for stream, descriptor in zip(Stream, remaining, strict=False):
            output = _Output(descriptor, stream, self)
            self._outputs[stream] = output
            self.loop.add_reader(descriptor, output.on_readable)

    def exited(self, status: int) -> None:
        """Collect what is left in the pipes and resolve ``done``."""
        for output in self._outputs.values():
            output.drain()
        self._close()
        if self.done.done():
            return
        code = os.waitstatus_to_exitcode(status)
        self.done.set_result(
            CommandResult(
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                stdout=self._kept(Stream.STDOUT),
                stderr=self._kept(Stream.STDERR),
                stdout_truncated=self._truncated(Stream.STDOUT),
                stderr_truncated=self._truncated(Stream.STDERR),
                timed_out=self.timed_out,
                duration_s=time.monotonic() - self._began_at,
            )
        )

    def failed(self, error: DsecError) -> None:
        """Resolve ``done`` with an error."""
        self._close()
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # its waiter may have been cancelled

    def _kept(self, stream: Stream) -> bytes:
        output = self._outputs.get(stream)
        return bytes(output.kept) if output is not None else b""

    def _truncated(self, stream: Stream) -> bool:
        output = self._outputs.get(stream)
        return output is not None and output.truncated

    def _write_input(self) -> None:
        try:
            while self._input_left:
                written = os.write(self._input_fd, self._input_left)
                self._input_left = self._input_left[written:]
        except BlockingIOError:
            return
        except OSError:
            pass  # the command closed its standard input: not an error
        self._close_input()

    def _close_input(self) -> None:
        if self._input_fd >= 0:
            self.loop.remove_writer(self._input_fd)
            os.close(self._input_fd)
            self._input_fd = -1

    def _close(self) -> None:
        self._close_input()
        for output in self._outputs.values():
            output.close()
