"""One-shot commands by the message that asked for them: the same message never runs twice.

Who lost the connection, or heard nothing, asks again with the same message: it gets the answer of
the one that runs, or the result that is kept. Results live in memory as long as they are few and
young; those of commands that last are on the tmpfs beside (:mod:`dsec_sandboxd.exec_table`), and
outlive the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Final

import structlog

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.exec_store import JournalEntry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsec_common.wire.sandbox import ExecResult
    from dsec_sandboxd.exec_store import ExecMeta
    from dsec_sandboxd.exec_table import ExecTable
    from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec, Stream
    from dsec_sandboxd.kernel.process import OutputSink

_log: Final = structlog.get_logger(__name__)

#: How many may wait for one command. Who asks again has stopped waiting before.
_WAITING_MAX: Final = 4
#: Beside its output, what a kept result takes.
_RESULT_BYTES: Final = 1024
#: Sandbox, message.
_Key = tuple[str, str]


class OneShots:
    """Commands that run and results that are kept."""

    def __init__(self, table: ExecTable, *, kept_s: float, kept_bytes: int) -> None:
        self._table = table
        self._kept_s = kept_s
        self._kept_bytes = kept_bytes
        self._running: dict[_Key, asyncio.Future[ExecResult]] = {}
        self._waiting: dict[_Key, deque[asyncio.Future[None]]] = {}
        self._results: OrderedDict[_Key, tuple[float, ExecResult, int]] = OrderedDict()
        self._bytes = 0
        self._put_back: set[_Key] = set()

    def running(self, key: _Key) -> asyncio.Future[ExecResult] | None:
        """Return what tells the result of a command that runs."""
        return self._running.get(key)

    def result(self, key: _Key) -> ExecResult | None:
        """Return a kept result."""
        kept = self._results.get(key)
        return kept[1] if kept is not None else None

    def begin(self, key: _Key) -> asyncio.Future[ExecResult]:
        """Note a command that begins; return what is to tell its result."""
        over: asyncio.Future[ExecResult] = asyncio.get_running_loop().create_future()
        self._running[key] = over
        return over

    def end(self, key: _Key, result: ExecResult) -> None:
        """Tell how a command ended, and keep it."""
        self._running.pop(key).set_result(result)
        self._put_back.discard(key)
        self._wake(key)
        size = _RESULT_BYTES + len(result.stdout) + len(result.stderr)
        self._results[key] = (time.monotonic(), result, size)
        self._bytes += size
        self.remove_old()

    def fail(self, key: _Key, error: BaseException) -> None:
        """Tell why a command has no result."""
        over = self._running.pop(key)
        self._put_back.discard(key)
        if isinstance(error, asyncio.CancelledError):
            over.cancel()
        else:
            over.set_exception(error)
            over.exception()  # whoever waited for it may be gone
        self._wake(key)

    def put_back(self, local: str) -> None:
        """Note that what runs in a sandbox is about to end with all its processes."""
        self._put_back.update(key for key in self._running if key[0] == local)

    def is_put_back(self, key: _Key) -> bool:
        """Return whether a command that runs is about to end, or has ended, by a rollback."""
        return key in self._put_back

    def _wake(self, key: _Key) -> None:
        for mine in self._waiting.get(key, ()):
            if not mine.done():
                mine.set_result(None)

    async def wait(self, key: _Key, over: asyncio.Future[Any]) -> None:
        """Return when ``over`` is done; the oldest of too many that wait for one is sent away.

        Whoever waits may go away; the command does not.

        Raises:
            DsecError: ``conflict``: the same message was asked again meanwhile.
        """
        if over.done():
            return
        waiting = self._waiting.setdefault(key, deque())
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        if len(waiting) > _WAITING_MAX:
            oldest = waiting.popleft()
            if not oldest.done():
                oldest.set_result(None)

        def wake(_: object) -> None:
            if not mine.done():
                mine.set_result(None)

        if self._running.get(key) is not over:  # else it is woken at once
            over.add_done_callback(wake)
        try:
            await mine
        finally:
            over.remove_done_callback(wake)
            if mine in waiting:
                waiting.remove(mine)
            if not waiting:
                self._waiting.pop(key, None)
        if not over.done():
            raise DsecError(
                ErrorCode.CONFLICT,
                "the same message was asked again; its latest callers are answered",
                details={"reason": "asked_again"},
            )

    def remove_old(self) -> None:
        """Forget what is too old or too much; to be called now and then."""
        oldest = time.monotonic() - self._kept_s
        while self._results:
            ended_at, _, size = next(iter(self._results.values()))
            if ended_at >= oldest and self._bytes <= self._kept_bytes:
                break
            (local, message_id), _ = self._results.popitem(last=False)
            self._bytes -= size
            self._table.lose(local, message_id, time.time() - (time.monotonic() - ended_at))

    def all_running(self) -> list[asyncio.Future[ExecResult]]:
        """Return what tells the results of the commands that run."""
        return list(self._running.values())


class Keeper:
    """Keeps one one-shot command's output where a daemon's death does not reach it."""

    def __init__(self, table: ExecTable, local: str, message_id: str, spec: CommandSpec) -> None:
        self._table = table
        self._local = local
        self._message_id = message_id
        self._spec = spec
        self._run_id = 0
        self._meta: ExecMeta | None = None

    def asked(self, run_id: int) -> None:
        """Write the command down before anything of it runs."""
        self._run_id = run_id
        now = time.time()
        self._table.store.note(
            JournalEntry(
                self._local,
                self._message_id,
                run_id,
                now,
                bool(self._spec.stdin),
                now + self._spec.timeout_s if self._spec.timeout_s else 0.0,
                self._spec.output_limit_bytes,
            )
        )

    def lasting(self, *, fed: bool) -> Mapping[Stream, OutputSink] | None:
        """Return the files that its output goes to; None when there is no room for them."""
        meta = self._table.new_meta(self._message_id, self._spec, one_shot=True)
        meta.run_id = self._run_id
        meta.input_cut = not fed
        try:
            self._table.store.make(self._local, meta)
            log = self._table.store.log(self._local, meta)
        except DsecError as error:
            _log.warning("output_kept_in_memory", local=self._local, error=str(error))
            self._table.store.remove(self._local, meta.exec_id)
            return None
        self._meta = meta
        self._log = log
        return log.streams

    def fed(self) -> None:
        """Write down that the command has been given all of its input."""
        if self._meta is not None:
            self._meta.input_cut = False
            self._write()

    def _write(self) -> None:
        if self._meta is not None:
            with contextlib.suppress(OSError):  # in memory it is kept all the same
                self._table.store.write(self._local, self._meta)

    def over(self, result: CommandResult) -> None:
        """Write down how it ended."""
        meta = self._meta
        if meta is None:
            return
        self._log.close()
        meta.ended_at = time.time()
        meta.exit_code, meta.signal = result.exit_code, result.signal
        meta.timed_out, meta.duration_s = result.timed_out, result.duration_s
        meta.oom, meta.input_cut = result.oom, False
        meta.stdout_truncated = result.stdout_truncated
        meta.stderr_truncated = result.stderr_truncated
        if result.oom_victim is not None:
            meta.oom_process, meta.oom_pid = result.oom_victim.name, result.oom_victim.pid
        self._write()

    def settle(self, result: CommandResult | None, *, keep: bool) -> None:
        """Hand what is kept to the table, or remove it: the command failed."""
        meta = self._meta
        if meta is None:
            return
        self._log.close()
        if result is not None:
            if result.oom:
                self.over(result)
            self._table.rest(self._local, meta)
        elif not keep:
            self._table.store.remove(self._local, meta.exec_id)
