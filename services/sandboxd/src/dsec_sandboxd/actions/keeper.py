"""The life of a node's actions: begun whole or not at all, ended in any case, and all returned.

``(nothing) → beginning → running → ending → ended``. An action ends when its owner says so, when
its time is over, when nobody has wanted it for a while, when its lease is lost, with the action
that it is a part of, and with its sandbox. What it had is returned before it has ended; what cannot
be returned is tried again until it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, Protocol

import msgspec
import structlog

from dsec_common.clock import Clock
from dsec_common.compute.model import Slice
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.action import (
    ACTION_COMMANDS_MAX,
    AcquiredKind,
    ActionOutcome,
    ActionState,
    BeginAction,
)
from dsec_sandboxd import metrics
from dsec_sandboxd.actions.book import ActionBook, ended
from dsec_sandboxd.actions.records import ActionRecord
from dsec_sandboxd.actions.resources import Lenders, Resources
from dsec_sandboxd.actions.store import ActionStore
from dsec_sandboxd.errors import as_dsec_error
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog

_log: Final = structlog.get_logger(__name__)
_RETRY_FIRST_S: Final = 0.1
_RETRY_LONGEST_S: Final = 10.0
_NEVER_RAN: Final = frozenset({ActionOutcome.REFUSED, ActionOutcome.INTERRUPTED})
_Key = tuple[str, str]


class CommandEnder(Protocol):
    """Ends commands by the messages that they run for."""

    async def end(self, local: str, message_id: str) -> None:
        """Kill a command's whole tree and return when it is over; one that is over is fine."""
        ...


class ActionKeeper:
    """All actions of a node.

    Attributes:
        book: what there is.
    """

    def __init__(
        self,
        state: NodeState,
        store: ActionStore,
        steps: StepLog,
        lenders: Lenders,
        commands: CommandEnder,
    ) -> None:
        self.book = ActionBook()
        self._state = state
        self._store = store
        self._steps = steps
        self._clock: Clock = lenders.clock
        self._commands = commands
        self._uses = lenders.uses
        self._resources = Resources(lenders, self.book, self._save, self._unheard)
        self._beginnings: dict[_Key, asyncio.Task[None]] = {}
        self._endings: dict[_Key, asyncio.Task[None]] = {}
        self._timers: dict[_Key, asyncio.TimerHandle] = {}
        self._ends_at: dict[_Key, float] = {}
        self._kept_at: dict[_Key, float] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._going: set[str] = set()  # sandboxes that are being removed
        self._closed = False

    # --- Beginning ----------------------------------------------------------------------------

    async def begin(
        self, asked: BeginAction, record: SandboxRecord, check: Callable[[], None]
    ) -> ActionRecord:
        """Give a sandbox an action; the same message again is the same action.

        One that never ran, since there was no room say, is begun anew by it.

        Args:
            asked: valid.
            record: of the sandbox, which runs.
            check: raises when it may not begin; called in the moment in which it does.

        Raises:
            DsecError: why it did not begin; then nothing of it is left but its record.
        """
        key = (record.local, asked.message_id)
        if _may_begin(self.book.find(*key)):
            volumes = await self._resources.wanted(record.project, asked)
        known = self.book.find(*key)
        if _may_begin(known):  # nor has it been begun meanwhile
            check()
            now = self._clock.now()
            action = ActionRecord(
                action_id=asked.message_id,
                local=record.local,
                project=record.project,
                name=asked.name,
                state=ActionState.BEGINNING,
                asked_at=known.asked_at if known is not None else now,
                parent=asked.parent,
                timeout_s=asked.timeout_s,
                hold_s=asked.hold_s,
                gpu=asked.gpu,
                lease_id=f"{self._state.rules.node}.{asked.message_id}" if asked.gpu else "",
                volumes=volumes,
                network=asked.network,
            )
            self._save(action)
            self._uses.began(record.local)
            self._beginnings[key] = self._spawn(self._begin(action, record), f"begin {key}")
        if (beginning := self._beginnings.get(key)) is not None:
            await asyncio.shield(beginning)
        action = self.book.get(*key)
        if action.state is not ActionState.RUNNING:
            raise ended(action)
        return action

    async def _begin(self, action: ActionRecord, record: SandboxRecord) -> None:
        key = _key(action)
        try:
            action = await self._resources.take(action, record)
            now = self._clock.now()
            self._save(
                msgspec.structs.replace(
                    action,
                    state=ActionState.RUNNING,
                    began_at=now,
                    expires_at=now + action.timeout_s,
                )
            )
        except asyncio.CancelledError:
            return  # whoever cancelled it ends it
        except Exception as error:
            told = as_dsec_error("beginning an action", error)
            await self.end(self.book.get(*key), ActionOutcome.REFUSED, told.message)
            raise told from error
        finally:
            self._beginnings.pop(key, None)
        self._watch(self.book.get(*key), action.timeout_s)
        self._step(self.book.get(*key), record, "action_begin")

    def keep(self, action: ActionRecord) -> ActionRecord:
        """Note that an action is wanted."""
        self._kept_at[_key(action)] = self._clock.monotonic()
        return action

    def admit(self, record: SandboxRecord, action_id: str, message_id: str) -> SandboxRecord:
        """Note that a command is about to run in an action; return the sandbox as it sees it.

        Raises:
            DsecError: ``not_found``; ``expired`` when the action has ended; ``exhausted`` after
                too many commands; ``unavailable`` when that cannot be written down.
        """
        action = self.book.running(record.local, action_id)
        if message_id not in action.commands:
            if len(action.commands) >= ACTION_COMMANDS_MAX:
                raise DsecError(
                    ErrorCode.EXHAUSTED,
                    f"{ACTION_COMMANDS_MAX} commands have run in this action, which is the most; "
                    "begin another",
                    details={"what": "commands", "limit": ACTION_COMMANDS_MAX},
                )
            action = msgspec.structs.replace(action, commands=(*action.commands, message_id))
            self._save(action)
        self.keep(action)
        return action.for_commands(record)

    # --- Ending -------------------------------------------------------------------------------

    async def end(self, action: ActionRecord, outcome: ActionOutcome, detail: str) -> ActionRecord:
        """End an action and return when all that it had is returned; one that has ended is fine.

        Raises:
            DsecError: ``unavailable`` when something could not be returned yet; that goes on.
        """
        key = _key(action)
        beginning = self._beginnings.get(key)
        if beginning is not None and beginning is not asyncio.current_task():
            beginning.cancel()
            await asyncio.wait({beginning})
        action = self.book.get(*key)
        if not action.is_open:
            return action
        if action.state is not ActionState.ENDING:
            self._save(
                msgspec.structs.replace(
                    action, state=ActionState.ENDING, outcome=outcome, detail=detail
                )
            )
        ending = self._endings.get(key)
        if ending is None:
            ending = self._endings[key] = self._spawn(self._finish(key), f"end {key}")
            ending.add_done_callback(lambda _: self._endings.pop(key, None))
        try:
            await asyncio.shield(ending)
        except DsecError as error:
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                f"action {action.name!r} has not returned everything yet, its node tries again: "
                f"{error.message}",
                retry_after_s=_RETRY_FIRST_S,
                details=error.details,
            ) from error
        return self.book.get(*key)

    async def _finish(self, key: _Key, attempt: int = 0) -> None:
        self._unwatch(key)
        action = self.book.get(*key)
        try:
            for child in self.book.children(action):
                await self.end(child, ActionOutcome.PARENT_ENDED, f"{action.name!r} ended")
            for message_id in action.commands:
                with contextlib.suppress(DsecError):  # it is not known, or known no more
                    await self._commands.end(action.local, message_id)
            record = self._living(action)
            action = await self._resources.give_back(
                action, record, restore_network=action.local not in self._going
            )
        except Exception as raised:
            error = as_dsec_error("ending an action", raised)
            if not self._closed:
                _log.warning("action_not_returned", action=action.action_id, error=str(error))
                delay_s = min(_RETRY_FIRST_S * 2**attempt, _RETRY_LONGEST_S)
                self._later(key, delay_s, lambda: self._again(key, attempt + 1))
            raise error from raised
        self._save(
            msgspec.structs.replace(action, state=ActionState.ENDED, ended_at=self._clock.now())
        )
        self._uses.ended(action.local)
        action = self.book.get(*key)
        metrics.ACTIONS.labels(action.outcome.value if action.outcome else "").inc()
        record = self._found(action)
        if record is not None:
            self._step(action, record, "action_end")

    def _unheard(self, action: ActionRecord) -> None:
        """Have a lease be over though no broker heard of it."""
        name = f"release {action.lease_id}"
        self._spawn(self._resources.release_again(action), name).add_done_callback(_look_at)

    def _again(self, key: _Key, attempt: int) -> None:
        if key not in self._endings and self.book.get(*key).is_open:
            ending = self._endings[key] = self._spawn(self._finish(key, attempt), f"end {key}")
            ending.add_done_callback(lambda _: self._endings.pop(key, None))
            ending.add_done_callback(_look_at)

    def end_soon(self, action: ActionRecord, outcome: ActionOutcome, detail: str) -> None:
        """Have an action end in the background."""
        task = self._spawn(self._end(action, outcome, detail), f"end {action.action_id}")
        task.add_done_callback(_look_at)

    async def _end(self, action: ActionRecord, outcome: ActionOutcome, detail: str) -> None:
        await self.end(action, outcome, detail)

    # --- Time ---------------------------------------------------------------------------------

    def _watch(self, action: ActionRecord, left_s: float) -> None:
        key, now = _key(action), self._clock.monotonic()
        self._ends_at[key] = now + left_s
        self._kept_at[key] = now
        self._look(key)

    def _look(self, key: _Key) -> None:
        """End an action whose time is over, or look again when it may be."""
        action = self.book.find(*key)
        if action is None or action.state is not ActionState.RUNNING:
            return
        now = self._clock.monotonic()
        left_s = self._ends_at[key] - now
        unkept_s = self._kept_at[key] + action.hold_s - now if action.hold_s else left_s
        if left_s <= 0:
            self.end_soon(action, ActionOutcome.TIMEOUT, f"after {action.timeout_s:g} s")
        elif unkept_s <= 0:
            detail = f"nobody wanted it for {action.hold_s:g} s"
            self.end_soon(action, ActionOutcome.ABANDONED, detail)
        else:
            self._later(key, min(left_s, unkept_s), lambda: self._look(key))

    def _later(self, key: _Key, delay_s: float, work: Callable[[], None]) -> None:
        self._timers[key] = asyncio.get_running_loop().call_later(delay_s, work)

    def _unwatch(self, key: _Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        self._ends_at.pop(key, None)
        self._kept_at.pop(key, None)

    # --- What happens to sandboxes and leases -------------------------------------------------

    async def sandbox_ending(self, local: str) -> None:
        """End the actions of a sandbox that is about to be removed. Idempotent."""
        self._going.add(local)
        await self._interrupt(local, "its sandbox ended")
        if not self.book.open(local):
            self._going.discard(local)
            self._resources.forget(local)

    async def sandbox_put_back(self, local: str) -> None:
        """End the actions of a sandbox that is about to be put back to a snapshot."""
        await self._interrupt(local, "its sandbox was put back to a snapshot")

    async def _interrupt(self, local: str, detail: str) -> None:
        for action in self.book.open(local):
            try:
                await self.end(action, ActionOutcome.INTERRUPTED, detail)
            except DsecError as error:  # what is left goes with the sandbox, and is tried again
                _log.warning("action_not_returned", action=action.action_id, error=str(error))

    def lost(self, lease_id: str, reason: str) -> bool:
        """End the action that lives on a lease; return whether there is one."""
        action = self.book.of_lease(lease_id)
        if action is None:
            return False
        self.end_soon(action, ActionOutcome.LEASE_LOST, reason)
        return True

    def resized(self, lease_id: str, slices: tuple[Slice, ...], resizes: int) -> bool:
        """Give the next commands of a lease's action other slices; return whether there is one."""
        action = self.book.of_lease(lease_id)
        if action is None:
            return False
        if resizes > action.lease_resizes:
            self._save(msgspec.structs.replace(action, slices=slices, lease_resizes=resizes))
        return True

    def recovered(self, adopted: Iterable[str]) -> None:
        """Take over the actions of an earlier daemon; end those that cannot go on.

        Those of sandboxes that live on go on, with as much time left as they had. To be called
        before any request.
        """
        living = set(adopted)
        for action in sorted(self._store.load(), key=lambda it: (it.asked_at, it.action_id)):
            self.book.put(action)
            if not action.is_open:
                continue
            self._uses.began(action.local)
            record = self._found(action)
            if action.local in living and record is not None:
                self._resources.adopt(action, record)
            if action.state is ActionState.RUNNING and action.local in living:
                self._watch(action, max(action.expires_at - self._clock.now(), 0.0))
            elif action.state is ActionState.ENDING:
                outcome = action.outcome or ActionOutcome.INTERRUPTED
                self.end_soon(action, outcome, action.detail)
            else:
                self.end_soon(action, ActionOutcome.INTERRUPTED, "its node's daemon was restarted")

    async def close(self) -> None:
        """Stop: what is open goes on for a later daemon."""
        self._closed = True
        for key in list(self._timers):
            self._unwatch(key)
        for task in self._work:
            task.cancel()
        while self._work:
            await asyncio.wait(set(self._work))

    # --- Parts --------------------------------------------------------------------------------

    def _save(self, action: ActionRecord) -> None:
        self._store.put(action)
        for old in self.book.put(action):
            with contextlib.suppress(Exception):  # it stays until its sandbox's record goes
                self._store.delete(old.local, old.action_id)

    def _found(self, action: ActionRecord) -> SandboxRecord | None:
        try:
            return self._state.find(action.project, action.local)
        except DsecError:
            return None

    def _living(self, action: ActionRecord) -> SandboxRecord | None:
        return self._found(action) if self._state.is_living(action.local) else None

    def _step(self, action: ActionRecord, record: SandboxRecord, what: str) -> None:
        units = action.has(AcquiredKind.UNITS) or what == "action_end"
        self._steps.step(
            record,
            what,
            status=action.outcome.value if action.outcome else "ok",
            latency_ms=((action.ended_at or action.began_at) - action.asked_at) * 1000,
            attributes={
                "action_name": action.name,
                "action": action.action_id,
                "parent": action.parent,
                "detail": action.detail,
                "cu": f"{action.cu:g}" if units and action.cu else "",
                "acquired": " ".join(f"{it.kind.value}:{it.name}" for it in action.acquired),
                "commands": str(len(action.commands)) if action.commands else "",
            },
            cause_id=action.action_id,
        )

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task


def _may_begin(known: ActionRecord | None) -> bool:
    """Return whether what is known of a message does not stand in the way of its action."""
    return known is None or (
        known.state is ActionState.ENDED and known.outcome in _NEVER_RAN and not known.began_at
    )


def _key(action: ActionRecord) -> _Key:
    return action.local, action.action_id


def _look_at(task: asyncio.Task[None]) -> None:
    """Have an error that nobody waits for, and that was logged, be no surprise."""
    if not task.cancelled():
        task.exception()
