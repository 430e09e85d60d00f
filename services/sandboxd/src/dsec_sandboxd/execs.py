"""One exec of this node: a process, its log, its input, and those who wait for news of it.

Output is taken as it comes, whether anybody reads it or not, so no reader holds up a command; what
is too old is dropped and said to be missing. When the main process has ended, what is in the pipes
then is taken, the exit is the last event, and what processes left behind print later is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode
from dsec_common.wire.exec import ExecEvent, ExecEvents, ExecInfo, ExecState, ExecStream
from dsec_common.wire.sandbox import ExecResult
from dsec_sandboxd.errors import rolled_back
from dsec_sandboxd.exec_input import Input
from dsec_sandboxd.kernel.interface import Stream
from dsec_sandboxd.kernel.process import SignalScope

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_sandboxd.exec_flow import Flow
    from dsec_sandboxd.exec_log import ExecLog
    from dsec_sandboxd.exec_store import ExecMeta, ExecStore
    from dsec_sandboxd.kernel.process import Process, ProcessExit

_log: Final = structlog.get_logger(__name__)

GRACE_S: Final = 2.0
"""Between TERM and KILL of a tree."""
#: A killed tree is looked at so often, and so many times, before its exec is over without it: what
#: stays in the kernel that long (a device, a dead network file system) nobody should wait for.
_LOOK_S: Final = 0.001
_LOOKS_MAX: Final = 1000
#: A pipe's largest size for an unprivileged process: what an ended command may have left in it.
_LEFT_MAX: Final = 1 << 20
PROCESSES_GONE: Final = "processes_gone"
"""Of errors: nothing is kept of what was asked about, because its sandbox's processes ended."""


class Exec:
    """An exec from its start until it is forgotten.

    Attributes:
        local: its sandbox.
        meta: what was asked and how it ended.
        ended: resolves when it is over, for whatever reason; it never raises.
    """

    def __init__(
        self, local: str, meta: ExecMeta, store: ExecStore, flow: Flow, on_end: Callable[[], None]
    ) -> None:
        self.local = local
        self.meta = meta
        self._store = store
        self._flow = flow
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._log: ExecLog | None = None
        self._process: Process | None = None
        self._input: Input | None = None
        self._watched: dict[Stream, int] = {}
        self._pausing: set[Stream] = set()
        self._news: list[asyncio.Future[None]] = []
        self._forget_timers: list[Callable[[], None]] = []
        self._last_seq = 0
        self._truncated: dict[Stream, bool] = {}
        self._gone = False
        self._put_back = False
        self.ended: asyncio.Future[None] = self._loop.create_future()

    # --- Its life -----------------------------------------------------------------------------

    def run(self, process: Process, log: ExecLog, spool: int) -> None:
        """Follow a process whose descriptors are here."""
        self._process, self._log = process, log
        self._note_log()
        if spool >= 0:
            self._input = Input(process, spool, self._input_closed)
            self._input.resume(ended=self.meta.input_ended)
        for stream, descriptor in process.outputs.items():
            watched = process.terminal if process.terminal >= 0 else descriptor
            self._watched[stream] = watched
            self._loop.add_reader(watched, self._on_readable, stream)
        if self.meta.deadline:
            left_s = max(self.meta.deadline - time.time(), 0.0)
            self._forget_timers.append(process.countdown(left_s, self._time_is_over))
        process.exited.add_done_callback(self._process_ended)

    def rest(self, log: ExecLog | None) -> None:
        """Be an exec that has ended, as its meta says."""
        if log is not None:
            self._log = log
            self._note_log()
            self._close_log()
        self.ended.set_result(None)

    def detach(self) -> None:
        """Let go of everything, and let the command go on for a later daemon. Idempotent."""
        self._gone = True
        self._stop_watching()
        if self._process is not None:
            self._process.abandon()
        self._close_log()
        self._tell()

    def _input_closed(self) -> None:
        self.meta.input_ended = True
        self._write_meta()

    def _write_meta(self) -> None:
        while True:
            try:
                self._store.write(self.local, self.meta)
            except OSError as error:
                if self._store.make_room(self.local, True):
                    continue
                _log.error("exec_not_kept", exec=self.meta.exec_id, error=str(error))
            return

    # --- Output -------------------------------------------------------------------------------

    def _on_readable(self, stream: Stream) -> None:
        """Take one piece: so many execs may print at once that each has to be brief."""
        try:
            taken = self._take(stream)
        except BlockingIOError:
            return
        except OSError:
            taken = 0
        if not taken:
            self._unwatch(stream)
            return
        self._note_log()
        self._tell()
        if not self._flow.spend(taken):
            self._loop.remove_reader(self._watched[stream])
            self._pausing.add(stream)
            self._flow.later(lambda: self._watch_again(stream))

    def _watch_again(self, stream: Stream) -> None:
        if stream in self._pausing:
            self._pausing.discard(stream)
            self._loop.add_reader(self._watched[stream], self._on_readable, stream)

    def _unwatch(self, stream: Stream) -> None:
        descriptor = self._watched.pop(stream, -1)
        if descriptor >= 0 and stream not in self._pausing:
            self._loop.remove_reader(descriptor)
        self._pausing.discard(stream)

    def _take(self, stream: Stream) -> int:
        process, log = self._process, self._log
        assert process is not None  # noqa: S101  it runs
        assert log is not None  # noqa: S101  as above
        over = False
        if process.terminal >= 0:
            try:
                process.relay()
            except BlockingIOError:
                pass
            except OSError:
                over = True
        try:
            return log.take(stream, process.outputs[stream])
        except BlockingIOError:
            if over:
                return 0
            raise

    def _note_log(self) -> None:
        if self._log is not None:
            self._last_seq = self._log.last_seq
            self._truncated = self._log.truncated

    def _stop_watching(self) -> None:
        for forget in self._forget_timers:
            forget()
        self._forget_timers.clear()
        for stream in list(self._watched):
            self._unwatch(stream)
        if self._input is not None:
            self._input.close()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    # --- Ends ---------------------------------------------------------------------------------

    def _time_is_over(self) -> None:
        self.meta.timed_out = True
        self._write_meta()
        self._end_tree(GRACE_S)

    def _end_tree(self, grace_s: float) -> None:
        process = self._process
        if process is None or self.ended.done():
            return
        with contextlib.suppress(DsecError):  # it has ended, which is what is wanted
            process.signal(signal.SIGTERM, SignalScope.TREE)
        self._forget_timers.append(process.countdown(grace_s, process.kill))

    def _process_ended(self, exited: asyncio.Future[ProcessExit]) -> None:
        if self._gone:
            return
        process = self._process
        assert process is not None  # noqa: S101  it ran
        if process.outputs:
            self._drain()
        if self.meta.timed_out or self.meta.cancelled:
            process.kill()  # a tree is ended whole
        self._take_end(exited, _LOOKS_MAX)

    def _take_end(self, exited: asyncio.Future[ProcessExit], looks: int) -> None:
        """Be over; one that was ended, when nothing of its tree is left."""
        if self._gone or self.ended.done():
            return
        if (self.meta.timed_out or self.meta.cancelled) and looks and self._has_processes():
            self._loop.call_later(_LOOK_S, self._take_end, exited, looks - 1)
            return
        error = exited.exception()
        if error is None:
            self._finish(exited.result())
        else:
            self.fail(error if isinstance(error, DsecError) else _unknown_end(str(error)))

    def _has_processes(self) -> bool:
        try:
            return self._process is not None and self._process.has_processes()
        except DsecError:  # without a descriptor nobody can see
            return False

    def _drain(self) -> None:
        for stream in list(self._watched):
            left = _LEFT_MAX
            with contextlib.suppress(OSError):
                while left > 0 and (taken := self._take(stream)):
                    left -= taken

    def _finish(self, how: ProcessExit) -> None:
        self.meta.exit_code, self.meta.signal = how.exit_code, how.signal
        self.meta.oom = how.oom
        if how.oom_victim is not None:
            self.meta.oom_process, self.meta.oom_pid = how.oom_victim.name, how.oom_victim.pid
        self._is_over()

    def fail(self, error: DsecError) -> None:
        """Take note that it never ran, or that its end is not known."""
        if self.ended.done():
            return
        if self._put_back:
            error = command_rolled_back()
        self.meta.error_code, self.meta.error_message = error.code.value, error.message
        self.meta.error_details = error.details
        self._is_over()

    def _is_over(self) -> None:
        # The end is written before PID 1 forgets: whoever comes next finds one of the two.
        self.meta.ended_at = time.time()
        self.meta.duration_s = max(self.meta.ended_at - self.meta.started_at, 0.0)
        self._note_log()
        self._write_meta()
        self._stop_watching()
        if self._process is not None:
            self._process.finish()
        self._close_log()
        self.ended.set_result(None)
        self._tell()
        self._on_end()

    def put_back(self) -> None:
        """Be over by a rollback, with what was printed; one that starts now will be in a moment."""
        self._put_back = True
        if self._process is not None and self.running:
            self._drain()
            self.fail(command_rolled_back())

    def discard(self) -> None:
        """Let go of everything at the sandbox's end. Idempotent."""
        self._gone = True
        self._stop_watching()
        if self._process is not None:
            self._process.finish()
        self._close_log()
        if not self.ended.done():
            self.ended.set_result(None)
        self._tell()

    # --- What is asked of it ------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return not self.ended.done() and not self._gone

    def process(self) -> Process:
        """Return its process while it runs.

        Raises:
            DsecError: ``conflict`` when it has ended.
        """
        if self._process is None or not self.running:
            raise DsecError(
                ErrorCode.CONFLICT,
                f"exec {self.meta.exec_id} has ended; start another",
                details={"exec_id": self.meta.exec_id, "reason": "ended"},
            )
        return self._process

    @property
    def input(self) -> Input | None:
        """Its input, if it has one."""
        return self._input

    async def cancel(self, grace_s: float) -> None:
        """End its tree and return when it is over."""
        if self.running and not self.meta.cancelled:
            self.meta.cancelled = True
            self._write_meta()
            self._end_tree(grace_s)
        await asyncio.shield(self.ended)

    async def news(self, after: int, wait_s: float) -> None:
        """Return when there is an event after ``after``, it is over, or the time is."""
        if wait_s <= 0 or self._last_seq > after or not self.running:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._news.append(waiter)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await waiter

    def _tell(self) -> None:
        waiting, self._news = self._news, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def read(self, after: int, max_bytes: int, cause_id: str) -> ExecEvents:
        """Return events after a number.

        Raises:
            DsecError: ``exhausted`` without free descriptors.
        """
        if self._gone:
            raise went_with_its_processes()
        log = self._log or self._store.log(self.local, self.meta)
        try:
            pieces = log.read(after, max_bytes)
            first_seq, last_seq = log.first_seq(), log.last_seq
        finally:
            if log is not self._log:
                log.close()
        events = [
            ExecEvent(seq=piece.seq, stream=ExecStream(piece.stream.value), data=piece.data)
            for piece in pieces
        ]
        read_all = (pieces[-1].seq if pieces else max(after, first_seq - 1)) >= last_seq
        ended = None
        if read_all and self.ended.done():
            ended = self.info(cause_id)
            if after <= last_seq:
                events.append(ExecEvent(seq=last_seq + 1, stream=ExecStream.EXIT))
        return ExecEvents(
            cause_id=cause_id,
            events=tuple(events),
            first_seq=first_seq,
            truncated=bool(events) and events[0].seq > after + 1,
            ended=ended,
        )

    @property
    def error(self) -> DsecError | None:
        """Why it has no end of its own, if it has none."""
        meta = self.meta
        if not meta.error_code:
            return None
        return DsecError(
            ErrorCode(meta.error_code),
            meta.error_message,
            retryable=False,
            details=dict(meta.error_details),
        )

    def info(self, cause_id: str = "") -> ExecInfo:
        """Return what is known of it."""
        meta, over = self.meta, self.ended.done()
        state = ExecState.RUNNING
        if over:
            state = ExecState.FAILED if meta.error_code else ExecState.EXITED
        return ExecInfo(
            cause_id=cause_id,
            exec_id=meta.exec_id,
            state=state,
            argv=meta.argv,
            started_at=meta.started_at,
            cwd=meta.cwd,
            user=meta.user,
            stdin=meta.with_input,
            terminal=meta.terminal is not None,
            timeout_s=meta.timeout_s,
            labels=meta.labels,
            last_seq=self._last_seq + over,
            ended_at=meta.ended_at,
            duration_s=meta.duration_s,
            exit_code=meta.exit_code,
            signal=meta.signal,
            timed_out=meta.timed_out,
            cancelled=meta.cancelled,
            oom=meta.oom,
            stdout_truncated=self._truncated.get(Stream.STDOUT, False),
            stderr_truncated=self._truncated.get(Stream.STDERR, False),
            error_code=meta.error_code,
            error_message=meta.error_message,
            error_what=str(meta.error_details.get("what", "")),
            error_reason=str(meta.error_details.get("reason", "")),
        )

    def result(self) -> ExecResult:
        """Return how a one-shot ended, with what it printed.

        Raises:
            DsecError: why it has no result.
        """
        meta = self.meta
        if (error := self.error) is not None:
            raise error
        if self._gone:
            raise went_with_its_processes()
        log = self._store.log(self.local, meta)
        try:
            result = ExecResult(
                cause_id=meta.message_id,
                exit_code=meta.exit_code,
                signal=meta.signal,
                stdout=log.streams[Stream.STDOUT].kept(),
                stderr=log.streams[Stream.STDERR].kept(),
                stdout_truncated=meta.stdout_truncated or log.truncated[Stream.STDOUT],
                stderr_truncated=meta.stderr_truncated or log.truncated[Stream.STDERR],
                timed_out=meta.timed_out,
                oom=meta.oom,
                duration_s=meta.duration_s,
            )
        finally:
            log.close()
        return msgspec.structs.replace(result, oom_process=meta.oom_process, oom_pid=meta.oom_pid)


def command_cancelled() -> DsecError:
    """Return the error about a command that was ended because its caller wanted so."""
    return DsecError(
        ErrorCode.CONFLICT,
        "the command was ended, because whoever had asked for it wanted so",
        details={"reason": "cancelled", MAY_HAVE_HAPPENED: True},
    )


def command_rolled_back() -> DsecError:
    """Return the error about a command that ran when its sandbox was put back."""
    error = rolled_back("the command")
    error.details[MAY_HAVE_HAPPENED] = True
    return error


def went_with_its_processes(what: str = "the command") -> DsecError:
    """Return the error about a command of which nothing is kept, in a sandbox that may live on."""
    return DsecError(
        ErrorCode.UNAVAILABLE,
        f"{what} went with all processes of its sandbox, which was put back to a snapshot or "
        "has ended; nothing of it is kept",
        retryable=False,
        details={MAY_HAVE_HAPPENED: True, "reason": PROCESSES_GONE},
    )


def _unknown_end(why: str) -> DsecError:
    return DsecError(ErrorCode.INTERNAL, f"how the command ended is not known: {why}")
