"""One running command: its streams drained, its kept output bounded."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import CommandResult, Stream

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.interface import CommandSpec
    from dsec_sandboxd.kernel.process import OutputKeeper, OutputSink

_READ_BYTES: Final = 65_536
#: Reads of one stream before others have their turn.
_READS_PER_TURN: Final = 4
#: After so long a command is one that lasts: its pipes are watched.
LASTING_S: Final = 0.005
#: How often that is put off while this process is behind: how a command ended may be waiting.
_PUT_OFF_MAX: Final = 8
#: A pipe's largest size for an unprivileged process: what an ended command may have left in it.
_LEFT_IN_PIPE_MAX: Final = 1 << 20
#: A killed tree is looked at so often, and so many times, before its command is over without it:
#: what stays in the kernel that long (a device, a dead network file system) nobody should wait for.
_LOOK_S: Final = 0.001
_LOOKS_MAX: Final = 1000


def out_of_descriptors() -> DsecError:
    """Return the error for descriptors that the kernel could not hand to this process."""
    return DsecError(
        ErrorCode.EXHAUSTED, "the daemon has no free descriptors: retry later or on another node"
    )


class MemorySink:
    """Keeps a stream's beginning in memory and drops the rest."""

    def __init__(self, limit_bytes: int, on_output: Callable[[bytes], None] | None) -> None:
        self._room = limit_bytes
        self._on_output = on_output
        self._kept = bytearray()
        self.truncated = False

    def take(self, descriptor: int) -> int:
        """See ``OutputSink``."""
        data = os.read(descriptor, _READ_BYTES)
        kept = data[: self._room]
        if len(kept) < len(data):
            self.truncated = True
        if kept:
            self._room -= len(kept)
            self._kept += kept
            if self._on_output is not None:
                self._on_output(kept)
        return len(data)

    def kept(self) -> bytes:
        """Return what is kept."""
        return bytes(self._kept)

    def close(self) -> None:
        """Nothing is held."""


class _Output:
    """One stream: drained for ever."""

    def __init__(self, descriptor: int, sink: OutputSink, loop: asyncio.AbstractEventLoop) -> None:
        self.descriptor = descriptor
        self.sink = sink
        self._loop = loop
        self._watched = False

    def watch(self, sink: OutputSink | None) -> None:
        """Take what comes from now on, into another sink if there is one."""
        if sink is not None:
            self.sink = sink
        if self.descriptor >= 0 and not self._watched:
            self._watched = True
            self._loop.add_reader(self.descriptor, self._on_readable)

    def _on_readable(self) -> None:
        for _ in range(_READS_PER_TURN):
            if self._take() <= 0:
                return

    def drain(self) -> None:
        """Take what is there now, without waiting for a process that keeps the pipe open."""
        left = _LEFT_IN_PIPE_MAX
        while self.descriptor >= 0 and left > 0:
            size = self._take()
            if size <= 0:
                return
            left -= size

    def _take(self) -> int:
        """Take once; return the size, 0 at the end (then closed), -1 when nothing is there."""
        try:
            size = self.sink.take(self.descriptor)
        except BlockingIOError:
            return -1
        except OSError:
            size = 0
        if not size:
            self.close()
        return size

    def close(self) -> None:
        """Let go of the descriptor; what was taken stays. Idempotent."""
        if self.descriptor >= 0:
            if self._watched:
                self._loop.remove_reader(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1


class Settlement(Protocol):
    """What a command has of its sandbox's, and is to let go of at its end."""

    def is_dying(self, run: CommandRun) -> bool:
        """Return whether something of a command that is to be ended whole still lives."""
        ...

    def settle(self, run: CommandRun, result: CommandResult | None) -> CommandResult | None:
        """Let go; return the result that the command is to have."""
        ...


class CommandRun:
    """A command from its request to its end; ``done`` is its result.

    A command that ends within a few milliseconds never has its pipes watched: they are emptied
    once, at its end. So nothing of it was taken when a daemon dies so early, and whoever comes next
    finds it all.

    ``settlement`` is asked before ``done`` resolves, which it does not while something of a command
    that took too long is dying: at most for a second.

    Attributes:
        is_held: PID 1 tells of it only when it has ended, with all that it printed, unless it
            lasts or prints much.
        left_nothing: it has ended, and no process was left in the sandbox but PID 1.
    """

    keeps_streams: Final = False

    def __init__(
        self,
        run_id: int,
        spec: CommandSpec,
        on_output: Callable[[Stream, bytes], None] | None,
        keeper: OutputKeeper | None = None,
        settlement: Settlement | None = None,
    ) -> None:
        self.run_id = run_id
        self.spec = spec
        self.on_output = on_output
        self._keeper = keeper
        self._settlement = settlement
        self._lasts: asyncio.TimerHandle | None = None
        self._lasts_at = 0.0
        self._put_off = 0
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[CommandResult] = self.loop.create_future()
        self.was_started = False
        self.timed_out = False
        self._began_at = time.monotonic()
        self.is_held = not spec.stdin and on_output is None
        self.left_nothing = False
        self._is_watched = False
        self._outputs: dict[Stream, _Output] = {}
        self._printed: dict[Stream, bytes] = {}
        self._input_fd = -1
        self._input_left = memoryview(spec.stdin)

    def take_streams(self, descriptors: list[int]) -> bool:
        """Take over the command's pipes; False, and all closed, when one is missing."""
        self.was_started = True
        if len(descriptors) != 1 + bool(self.spec.stdin) + (not self.spec.merge_stderr):
            for descriptor in descriptors:
                os.close(descriptor)
            return False
        remaining = list(descriptors)
        if self.spec.stdin:
            self._input_fd = remaining.pop(0)
            self._write_input()
            if self._input_fd >= 0:
                self.loop.add_writer(self._input_fd, self._write_input)
        for stream, descriptor in zip(Stream, remaining, strict=False):
            sink = MemorySink(self.spec.output_limit_bytes, self._listener(stream))
            self._outputs[stream] = _Output(descriptor, sink, self.loop)
        return True

    def is_started(self) -> None:
        """Watch its pipes: at once when somebody listens, else when it lasts."""
        if self.on_output is not None:
            self._watch()
        else:
            self._watch_later()

    def _watch_later(self) -> None:
        self._lasts_at = time.monotonic() + LASTING_S
        self._lasts = self.loop.call_later(LASTING_S, self._watch_if_it_lasts)

    def _watch_if_it_lasts(self) -> None:
        behind_s = time.monotonic() - self._lasts_at
        if behind_s > LASTING_S and self._put_off < _PUT_OFF_MAX:
            self._put_off += 1
            self._watch_later()
        else:
            self._watch()

    def _listener(self, stream: Stream) -> Callable[[bytes], None] | None:
        listen = self.on_output
        return None if listen is None else lambda data: listen(stream, data)

    def _watch(self) -> None:
        self._is_watched = True
        places = None
        if self._keeper is not None:
            places = self._keeper.lasting(fed=self._input_fd < 0)
        for stream, output in self._outputs.items():
            output.watch(places.get(stream) if places else None)

    def has_printed(self, stdout: bytes, stderr: bytes) -> None:
        """Take all that it printed, which came with its end."""
        self._printed = {Stream.STDOUT: stdout, Stream.STDERR: stderr}

    def is_over(self, status: int) -> None:
        """Collect what is left in the pipes and resolve ``done``."""
        if self.is_held and self._outputs and not self._is_watched:
            self._watch()  # written down before it is read: who comes next knows which was first
        for output in self._outputs.values():
            output.drain()
        self._close()
        if self.done.done():
            return
        code = os.waitstatus_to_exitcode(status)
        result = CommandResult(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=self._kept(Stream.STDOUT),
            stderr=self._kept(Stream.STDERR),
            stdout_truncated=self._truncated(Stream.STDOUT),
            stderr_truncated=self._truncated(Stream.STDERR),
            timed_out=self.timed_out,
            duration_s=time.monotonic() - self._began_at,
        )
        if self._keeper is not None:
            self._keeper.over(result)
        self._take_end(result, _LOOKS_MAX)

    def _take_end(self, result: CommandResult, looks: int) -> None:
        if self.done.done():
            return
        if looks and self._settlement is not None and self._settlement.is_dying(self):
            self.loop.call_later(_LOOK_S, self._take_end, result, looks - 1)
            return
        try:
            self.done.set_result(self._settled(result) or result)
        except Exception as error:  # noqa: BLE001  whoever waits is told
            self.done.set_exception(error)

    def has_failed(self, error: DsecError) -> None:
        """Resolve ``done`` with an error."""
        self._close()
        if not self.done.done():
            try:
                self._settled(None)
            finally:
                self.done.set_exception(error)
                self.done.exception()  # its waiter may have been cancelled

    def _settled(self, result: CommandResult | None) -> CommandResult | None:
        settlement, self._settlement = self._settlement, None
        return settlement.settle(self, result) if settlement is not None else result

    def _kept(self, stream: Stream) -> bytes:
        output = self._outputs.get(stream)
        if output is not None:
            return output.sink.kept()
        return self._printed.get(stream, b"")[: self.spec.output_limit_bytes]

    def _truncated(self, stream: Stream) -> bool:
        output = self._outputs.get(stream)
        if output is not None:
            return output.sink.truncated
        return len(self._printed.get(stream, b"")) > self.spec.output_limit_bytes

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
        if self._keeper is not None:
            self._keeper.fed()

    def _close_input(self) -> None:
        if self._input_fd >= 0:
            self.loop.remove_writer(self._input_fd)
            os.close(self._input_fd)
            self._input_fd = -1

    def _close(self) -> None:
        if self._lasts is not None:
            self._lasts.cancel()
        self._close_input()
        for output in self._outputs.values():
            output.close()
