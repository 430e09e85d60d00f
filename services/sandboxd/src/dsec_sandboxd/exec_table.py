"""All execs of this node: started, found again, kept for a while after their end.

The same message is the same exec, whatever happens between: an exec is written down under its
message's id before anything of it runs, and so is a one-shot command. A daemon that comes after a
dead one asks each sandbox's PID 1 what it still knows and brings the two together:

- written down and known to PID 1: it goes on, or its end is noted now;
- written down with its end: PID 1 may forget it;
- written down and unknown: it never ran, and is forgotten;
- known to PID 1 and only in the journal: a one-shot so young that nothing of its output was taken;
- only in the journal, and told to the dead daemon, which did not hear it: its result is known;
- only in the journal: a one-shot whose result was lost, and nobody may run it again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import structlog

from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode, from_os_error
from dsec_common.wire.base import new_id
from dsec_sandboxd.exec_flow import Flow
from dsec_sandboxd.exec_store import ExecMeta
from dsec_sandboxd.execs import Exec, command_rolled_back
from dsec_sandboxd.kernel.interface import Stream
from dsec_sandboxd.step_log import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_sandboxd.exec_store import ExecStore, JournalEntry
    from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec, Kernel
    from dsec_sandboxd.kernel.process import Process
    from dsec_sandboxd.ports import Uses
    from dsec_sandboxd.records import SandboxRecord

_log: Final = structlog.get_logger(__name__)

_LOST_MAX: Final = 100_000
#: A PID 1 that runs answers within a millisecond.
_ADOPTION_S: Final = 1.0
#: Sandbox, message or exec.
_Key = tuple[str, str]


class ExecTable:
    """The execs of a node's sandboxes.

    Args:
        kernel: runs them.
        store: keeps them; opened by the caller.
        uses: is told when an exec begins and ends: a sandbox in which one runs is not idle.
        kept_s: how long an exec is kept after its end.
        kept_max: how many ended execs of one sandbox are kept.
        execs_max: how many may run in one sandbox.
    """

    def __init__(
        self,
        kernel: Kernel,
        store: ExecStore,
        uses: Uses,
        *,
        kept_s: float,
        kept_max: int,
        execs_max: int,
    ) -> None:
        self._kernel = kernel
        self.store = store
        self._uses = uses
        self._kept_s = kept_s
        self._kept_max = kept_max
        self._execs_max = execs_max
        self._flow = Flow()
        self._of: dict[str, dict[str, Exec]] = {}
        self._by_message: dict[_Key, Exec] = {}
        self._ended: OrderedDict[_Key, float] = OrderedDict()
        self._lost: OrderedDict[_Key, float] = OrderedDict()
        self._adopting: dict[str, asyncio.Task[None]] = {}
        #: Sandbox and message of execs that will be known here in a moment.
        self.starting: set[_Key] = set()
        self._recovered = False
        store.make_room = self._make_room

    # --- Starting -----------------------------------------------------------------------------

    def find_message(self, local: str, message_id: str) -> Exec | None:
        """Return the exec that a message has led to.

        Raises:
            DsecError: ``unavailable`` and not to be retried, when it ran and its end is lost.
        """
        one = self._by_message.get((local, message_id))
        if one is None and (local, message_id) in self._lost:
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                "this command has run, and its result is no longer kept, or was lost with its "
                "node's daemon; it is not run again",
                retryable=False,
                details={MAY_HAVE_HAPPENED: True, "reason": "result_lost"},
            )
        return one

    def new_meta(self, message_id: str, spec: CommandSpec, *, one_shot: bool) -> ExecMeta:
        """Return what is written down of a command that is about to run."""
        now = time.time()
        return ExecMeta(
            exec_id=new_id(),
            message_id=message_id,
            one_shot=one_shot,
            argv=shown(spec.argv),
            cwd=spec.cwd,
            user=spec.user,
            started_at=now,
            timeout_s=spec.timeout_s,
            deadline=now + spec.timeout_s if spec.timeout_s else 0.0,
            limit_bytes=spec.output_limit_bytes,
            merge_stderr=spec.merge_stderr,
            with_input=spec.with_input,
            terminal=spec.terminal,
        )

    async def start(self, local: str, meta: ExecMeta, spec: CommandSpec) -> Exec:
        """Start a command; the exec is known from before anything of it runs.

        Raises:
            DsecError: ``exhausted`` when too many run, or memory for their output is used up;
                what the kernel refused.
        """
        running = sum(one.running for one in self._of.get(local, {}).values())
        if running >= self._execs_max:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"{running} execs run in this sandbox, which is the most; cancel one or wait",
                details={"what": "execs", "limit": self._execs_max},
            )
        self._make_directory(local, meta)
        one = self._add(local, meta)
        spool = -1
        try:
            log = self.store.log(local, meta)
            try:
                if meta.with_input or meta.terminal is not None:
                    spool = self.store.spool(local, meta.exec_id)

                def write_down(run_id: int) -> None:
                    meta.run_id = run_id
                    try:
                        self.store.write(local, meta)
                    except OSError as error:
                        raise from_os_error("keeping an exec", error) from error

                process = self._kernel.launch(local, spec, spool_fd=spool, before=write_down)
                try:
                    await process.started
                except BaseException:
                    process.kill()
                    process.finish()
                    raise
            except BaseException:
                log.close()
                raise
        except BaseException:
            if spool >= 0:
                os.close(spool)
            self._forget(one)
            raise
        self._uses.began(local)
        one.run(process, log, spool)
        return one

    def _make_directory(self, local: str, meta: ExecMeta) -> None:
        while True:
            try:
                self.store.make(local, meta)
            except DsecError as error:
                if error.code is not ErrorCode.EXHAUSTED or not self._make_room(local, True):
                    raise
            else:
                return

    def rest(self, local: str, meta: ExecMeta) -> None:
        """Keep a one-shot that has ended, with its output."""
        one = self._add(local, meta)
        one.rest(None)
        self._has_ended(one)

    def _add(self, local: str, meta: ExecMeta) -> Exec:
        one = Exec(local, meta, self.store, self._flow, lambda: self._on_end(one))
        self._of.setdefault(local, {})[meta.exec_id] = one
        self._by_message[local, meta.message_id] = one
        return one

    # --- Looking ------------------------------------------------------------------------------

    def get(self, local: str, exec_id: str) -> Exec:
        """Return a started exec.

        Raises:
            DsecError: ``not_found``.
        """
        one = self._of.get(local, {}).get(exec_id)
        if one is None or one.meta.one_shot:
            raise DsecError(
                ErrorCode.NOT_FOUND,
                f"there is no exec {exec_id[:64]!r} in this sandbox; those that have ended are kept"
                f" for {self._kept_s:g} s",
                details={"what": "exec"},
            )
        return one

    def all(self, local: str) -> list[Exec]:
        """Return a sandbox's started execs, oldest first."""
        found = [one for one in self._of.get(local, {}).values() if not one.meta.one_shot]
        return sorted(found, key=lambda one: one.meta.exec_id)

    # --- Ends ---------------------------------------------------------------------------------

    def _on_end(self, one: Exec) -> None:
        self._uses.ended(one.local)
        self._has_ended(one)

    def _has_ended(self, one: Exec) -> None:
        self._ended[one.local, one.meta.exec_id] = one.meta.ended_at
        # By its own execs, never by the node's: each end of many would look at all of them.
        own = [(one.local, exec_id) for exec_id in self._of.get(one.local, {})]
        ended = sorted((key for key in own if key in self._ended), key=self._ended.__getitem__)
        for key in ended[: max(len(ended) - self._kept_max, 0)]:
            self._forget_key(key)

    def remove_old(self) -> None:
        """Forget what ended long enough ago; to be called now and then."""
        oldest = time.time() - self._kept_s
        while self._ended:
            key, ended_at = next(iter(self._ended.items()))
            if ended_at >= oldest:
                break
            self._forget_key(key)
        while self._lost and next(iter(self._lost.values())) < oldest:
            self._lost.popitem(last=False)

    def _make_room(self, local: str, others: bool) -> bool:
        own = (key for key in self._ended if key[0] == local)
        key = next(own, None) or (next(iter(self._ended), None) if others else None)
        if key is None:
            return False
        self._forget_key(key)
        return True

    def _forget_key(self, key: _Key) -> None:
        one = self._of.get(key[0], {}).get(key[1])
        if one is not None:
            self._forget(one)
            # Its message must not run anything again.
            self.lose(one.local, one.meta.message_id, one.meta.ended_at)
        self._ended.pop(key, None)

    def _forget(self, one: Exec) -> None:
        local, exec_id = one.local, one.meta.exec_id
        one.discard()
        execs = self._of.get(local, {})
        execs.pop(exec_id, None)
        if not execs:
            self._of.pop(local, None)
        self._by_message.pop((local, one.meta.message_id), None)
        self._ended.pop((local, exec_id), None)
        self.store.remove(local, exec_id)

    async def sandbox_ending(self, local: str) -> None:
        """Let go of a sandbox's execs. Idempotent."""
        await self._stop_adopting(local)
        for one in list(self._of.get(local, {}).values()):
            self._forget(one)
        self.store.remove_all(local)

    async def sandbox_put_back(self, local: str) -> None:
        """End what runs in a sandbox; that it ran is known, and kept like any other end."""
        await self._stop_adopting(local)
        for one in list(self._of.get(local, {}).values()):
            one.put_back()
            if one.running:  # it starts: if that fails now it may have run all the same
                self.lose(local, one.meta.message_id, time.time())

    async def _stop_adopting(self, local: str) -> None:
        task = self._adopting.get(local)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def close(self, *, keep: bool) -> None:
        """Let go of everything; with ``keep`` the execs go on for a later daemon."""
        for task in self._adopting.values():
            task.cancel()
        for execs in self._of.values():
            for one in execs.values():
                if keep:
                    one.detach()
                else:
                    one.discard()
        self._of.clear()
        self._by_message.clear()
        self._flow.close()
        self.store.close(keep=keep)

    # --- After another daemon -----------------------------------------------------------------

    async def sandbox_adopted(self, record: SandboxRecord) -> None:
        """Take over the commands of a sandbox that an earlier daemon made.

        The PID 1 of one that stands still answers when it goes on; that is not waited for here.

        Raises:
            DsecError: when its PID 1 has ended.
        """
        local = record.local
        if record.inheriting:
            self._note_rollback(local)
        task = asyncio.create_task(self._take_over_all(local), name=f"take over execs {local}")
        self._adopting[local] = task
        task.add_done_callback(lambda done: self._is_adopted(local, done))
        done, _ = await asyncio.wait({task}, timeout=_ADOPTION_S)
        if done:
            task.result()

    def _note_rollback(self, local: str) -> None:
        """Have the commands of the processes in whose place a sandbox was put back be over."""
        for meta in self.store.load(local):
            if not meta.ended_at:
                error = command_rolled_back()
                meta.error_code, meta.error_message = error.code.value, error.message
                meta.error_details = error.details
                meta.ended_at = time.time()
                try:
                    self.store.write(local, meta)
                except OSError:  # without that it must not be taken for one that runs
                    self.store.remove(local, meta.exec_id)
                    self.lose(local, meta.message_id, meta.started_at)

    def _is_adopted(self, local: str, task: asyncio.Task[None]) -> None:
        self._adopting.pop(local, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("commands_not_taken_over", local=local, error=str(error))

    async def adopted(self, local: str) -> None:
        """Return when the commands of a sandbox have been taken over; at once for any other."""
        task = self._adopting.get(local)
        if task is not None:
            await asyncio.wait({task})

    async def _take_over_all(self, local: str) -> None:
        processes = {one.run_id: one for one in await self._kernel.processes(local)}
        overheard = self._kernel.overheard(local)
        # Since the sandbox was put back its numbers may begin anew: what has ended comes last.
        ended: set[int] = set()
        for meta in self.store.load(local):
            if meta.ended_at:
                self._take_over_ended(local, meta)
                ended.add(meta.run_id)
            else:
                self._take_over(local, meta, processes.pop(meta.run_id, None))
        known = {message for where, message in self._by_message if where == local}
        since = time.time() - self._kept_s
        # For the same reason the latest first.
        for entry in reversed([*self.store.noted()]):
            if entry.local != local or entry.message_id in known or entry.asked_at < since:
                continue
            process = processes.pop(entry.run_id, None)
            if process is None and entry.run_id in overheard:
                self._take_over_result(local, entry, overheard.pop(entry.run_id))
            elif process is None:
                self.lose(local, entry.message_id, entry.asked_at)
            else:
                self._take_over_unwritten(local, entry, process)
        for process in processes.values():
            if process.run_id not in ended or not process.exited.done():
                _log.warning("unknown_command_ended", local=local, run_id=process.run_id)
                process.kill()
            process.finish()

    def recovered(self, is_living: Callable[[str], bool]) -> None:
        """Remove what is kept of sandboxes that are over; count the uses of the others.

        To be called once, after the last :meth:`sandbox_adopted`.
        """
        self._recovered = True
        for local in self.store.sandboxes():
            if not is_living(local):
                self.store.remove_all(local)
        for local, execs in self._of.items():
            for one in execs.values():
                if one.running:
                    self._uses.began(local)

    def lose(self, local: str, message_id: str, when: float) -> None:
        """Remember for a while that a message has led to a command of which no more is known."""
        self._lost[local, message_id] = when
        if len(self._lost) > _LOST_MAX:
            self._lost.popitem(last=False)

    def _take_over_ended(self, local: str, meta: ExecMeta) -> None:
        one = self._add(local, meta)
        one.rest(None if meta.one_shot else self.store.log(local, meta))
        self._has_ended(one)

    def _take_over(self, local: str, meta: ExecMeta, process: Process | None) -> None:
        one = self._add(local, meta)
        if process is None:
            # PID 1 forgets nothing before an end is written down: it never ran, and nobody was told
            # of it. Only a one-shot may have ended in the very moment in which the daemon died.
            self._forget(one)
            if meta.one_shot:
                self.lose(local, meta.message_id, meta.started_at)
            return
        self._resume(one, process)

    def _take_over_unwritten(self, local: str, entry: JournalEntry, process: Process) -> None:
        if process.exited.done() and not process.is_unread:
            # The dead daemon may have read what it printed, and nobody has it now: an empty output
            # would be a wrong result.
            process.finish()
            self.lose(local, entry.message_id, entry.asked_at)
            return
        meta = entry.meta()
        try:
            self.store.make(local, meta)
        except DsecError:
            process.kill()
            process.finish()
            self.lose(local, entry.message_id, entry.asked_at)
            return
        self._resume(self._add(local, meta), process)

    def _take_over_result(self, local: str, entry: JournalEntry, result: CommandResult) -> None:
        """Keep the result of a one-shot that had ended, of which the dead daemon had not heard."""
        meta = entry.meta()
        meta.input_cut, meta.ended_at = False, time.time()
        meta.exit_code, meta.signal = result.exit_code, result.signal
        try:
            self.store.make(local, meta)
            log = self.store.log(local, meta)
            log.streams[Stream.STDOUT].append(result.stdout)
            log.streams[Stream.STDERR].append(result.stderr)
            log.close()
        except DsecError:
            self.store.remove(local, meta.exec_id)
            self.lose(local, entry.message_id, entry.asked_at)
        else:
            self.rest(local, meta)

    def _resume(self, one: Exec, process: Process) -> None:
        if one.meta.input_cut:
            # It takes what it got for all of its input, or did: its result may be wrong.
            process.kill()
            process.finish()
            one.fail(_input_cut())
            return
        spool = process.take_spool()
        try:
            if spool < 0 and process.terminal >= 0:  # PID 1 keeps those of pipes only
                spool = self.store.spool(one.local, one.meta.exec_id)
            log = self.store.log(one.local, one.meta)
        except DsecError as error:
            if spool >= 0:
                os.close(spool)
            process.kill()
            process.finish()
            one.fail(error)
            return
        if self._recovered:
            self._uses.began(one.local)
        one.run(process, log, spool)


def _input_cut() -> DsecError:
    return DsecError(
        ErrorCode.UNAVAILABLE,
        "the node's daemon was killed while the command was given its input; it was ended, since "
        "it would have taken a part for the whole",
        retryable=False,
        details={MAY_HAVE_HAPPENED: True, "reason": "input_cut"},
    )
