"""The core of a node: who may have a sandbox here, and where each one is in its life. No I/O.

``(nothing) → creating → running → deleting → ended → (nothing)``, with ``pausing → paused →
resuming`` as a way from running back to it; :mod:`~dsec_sandboxd.states` says what each allows. A
sandbox may end from every state; what it was given is counted from the intent until nothing of it
is left, so that the node never hands out what a dying sandbox still holds.

Time is measured by a clock that does not jump; the wall clock is only written down.
"""

from __future__ import annotations

from typing import Final, assert_never

import msgspec

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.node import Resources
from dsec_common.wire.sandbox import EndCause, IdleAction, SandboxState
from dsec_sandboxd import errors, pauses
from dsec_sandboxd.admission import NodeRules, check_room
from dsec_sandboxd.changing import changed
from dsec_sandboxd.effects import (
    AnnounceEnded,
    AnnounceRunning,
    ConfirmDeletion,
    ConfirmPlacement,
    Effect,
    FailDeletion,
    ForgetRecord,
    HandOut,
    MakeSandbox,
    RefusePlacement,
    SaveRecord,
    TellTurn,
    UnmakeSandbox,
)
from dsec_sandboxd.ended import EndedRecords
from dsec_sandboxd.events import (
    ClockTicked,
    DeletionAsked,
    DrainAsked,
    DrainBegan,
    EvacuationBegan,
    Event,
    LabelsAsked,
    NodeRestarted,
    NotHandedOut,
    PauseAsked,
    PauseFailed,
    PauseSucceeded,
    PlacementAsked,
    ResumeAsked,
    ResumeFailed,
    ResumeSucceeded,
    SandboxDied,
    SandboxMade,
    SandboxNotMade,
    SandboxNotUnmade,
    SandboxPutBack,
    SandboxRebased,
    SandboxUnmade,
    SlicesChanged,
    TouchAsked,
    TurnEvent,
    VisitBegan,
    VisitEnded,
)
from dsec_sandboxd.invariants import check_invariants
from dsec_sandboxd.living import Living
from dsec_sandboxd.placing import AskedNames, answer_again, why_in_vain
from dsec_sandboxd.rebasing import rebased
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.restarts import after_restart, live_on
from dsec_sandboxd.states import AWAKE_OR_ASLEEP
from dsec_sandboxd.times import Times

_RETRY_FIRST_S: Final = 0.1
_RETRY_LONGEST_S: Final = 10.0


class NodeState:
    """All sandboxes of one node. :meth:`handle` is the only way to change it."""

    def __init__(self, rules: NodeRules, times: Times | None = None) -> None:
        self.rules = rules
        self.draining = False
        self._living: dict[str, Living] = {}
        self._names = AskedNames()
        self._ended = EndedRecords(rules.ended_kept_s, rules.ended_kept_max)
        self._times = times or Times()
        self._cpus = 0.0
        self._memory_bytes = 0

    # --- Looking ------------------------------------------------------------------------------

    @property
    def allocated(self) -> Resources:
        """What living sandboxes have been given."""
        return Resources(
            cpus=self._cpus, memory_bytes=self._memory_bytes, sandboxes=len(self._living)
        )

    @property
    def leases(self) -> dict[str, str]:
        """The living sandboxes that live on Compute Unit leases, by those."""
        living = (it.record for it in self._living.values())
        return {record.lease_id: record.local for record in living if record.lease_id}

    @property
    def lease_resizes(self) -> dict[str, int]:
        """How often leases of living sandboxes got other slices; those that did."""
        living = (it.record for it in self._living.values())
        return {it.lease_id: it.lease_resizes for it in living if it.lease_resizes}

    def find(self, project: str, local: str) -> SandboxRecord:
        """Return the record of the project's sandbox, ended or not.

        Raises:
            DsecError: ``not_found`` when the project has none of that id, whoever else may.
        """
        local = self._names.meant(local)
        living = self._living.get(local)
        record = living.record if living else self._ended.get(local)
        if record is None or record.project != project:
            raise errors.no_such_sandbox(f"{self.rules.node}.{local}")
        return record

    def running(self, project: str, local: str) -> SandboxRecord:
        """Return the record of the project's sandbox that takes commands, or will once it wakes.

        Raises:
            DsecError: ``not_found``; ``expired`` with the cause when it is over; ``unavailable``
                when it is not ready yet or the node is stopping.
        """
        living = self._living.get(local)
        if living is None or living.record.project != project:
            raise errors.sandbox_ended(self.rules.node, self.find(project, local))
        record = living.record
        if record.state in AWAKE_OR_ASLEEP:
            if self.draining:
                raise errors.node_draining(self.rules.node)
            return record
        if record.state is SandboxState.CREATING and living.end_cause is None:
            raise errors.still_creating(f"{self.rules.node}.{local}")
        raise errors.sandbox_ended(
            self.rules.node,
            msgspec.structs.replace(
                record, end_cause=living.end_cause, end_detail=living.end_detail
            ),
        )

    def records(self, project: str, *, include_ended: bool) -> list[SandboxRecord]:
        """Return the project's sandboxes, oldest first."""
        found = [
            living.record for living in self._living.values() if living.record.project == project
        ]
        if include_ended:
            found += [record for record in self._ended.values() if record.project == project]
        return sorted(found, key=lambda record: (record.created_at, record.local))

    def idle_s(self, local: str) -> float:
        """Return how long nobody has used a sandbox, as of the last tick."""
        living = self._living.get(local)
        if living is None or living.in_use or not living.facts.idle_runs:
            return 0.0
        return max(self._times.now_s - living.used_s, 0.0)

    def is_living(self, local: str) -> bool:
        """Return whether a sandbox of this id is not over."""
        return local in self._living

    def is_creating(self, local: str) -> bool:
        """Return whether a sandbox of this id is being made."""
        living = self._living.get(local)
        return living is not None and living.record.state is SandboxState.CREATING

    @property
    def living_count(self) -> int:
        """How many sandboxes are not over."""
        return len(self._living)

    # --- Changing -----------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901, PLR0911, PLR0912  one case per kind of event
        """Take one event and return what must be done, in order."""
        match event:
            case VisitBegan():
                return self._visit_began(event)
            case VisitEnded():
                return self._visit_ended(event)
            case PlacementAsked():
                return self._place(event)
            case SandboxMade():
                return self._made(event)
            case SandboxNotMade():
                return self._not_made(event)
            case NotHandedOut():
                return self._not_handed_out(event)
            case SandboxDied():
                return self._died(event)
            case DeletionAsked():
                return self._delete(event)
            case SandboxUnmade():
                return self._unmade(event)
            case SandboxNotUnmade():
                return self._not_unmade(event)
            case ClockTicked():
                return self._ticked(event)
            case NodeRestarted():
                return self._restarted(event)
            case (
                PauseAsked()
                | PauseSucceeded()
                | PauseFailed()
                | ResumeAsked()
                | ResumeSucceeded()
                | ResumeFailed()
            ):
                return self._turned(event)
            case TouchAsked() | DrainAsked():
                return self._touch(event)
            case LabelsAsked() | SlicesChanged():
                return changed(self._living.get(event.local), event)
            case SandboxRebased() | SandboxPutBack():
                return rebased(self._living.get(event.local), event)
            case DrainBegan():
                self.draining = True
                return []
            case EvacuationBegan():
                return self._evacuate(event)
            case _:
                assert_never(event)

    def _place(self, event: PlacementAsked) -> list[Effect]:
        record = event.record
        try:
            name = self._names.meant(record.asked_as or record.local)
            living = self._living.get(name)
            known = living.record if living else self._ended.get(name)
            if known is not None:
                return answer_again(record, known, living, self.rules.node)
            if self.draining:
                raise errors.node_draining(self.rules.node)
            if event.now > event.valid_until:
                # Under overload, work for an answer that nobody waits for would make more of it.
                raise errors.placement_lapsed(
                    self.rules.node, record.local, event.now - event.valid_until
                )
            check_room(self.rules, self.allocated, record.limits, event.memory_bytes_available)
        except DsecError as error:
            return [RefusePlacement(record.placement_id, error)]
        self._living[record.local] = Living(record, event.valid_until)
        self._count(record, 1)
        return self._begin(record)

    def _begin(self, record: SandboxRecord) -> list[Effect]:
        """Return what gives a record its sandbox."""
        self._names.note(record)
        if record.asked_as:
            return [HandOut(record)]  # kept once it is the record's: what nobody has is removed
        return [SaveRecord(record), MakeSandbox(record)]

    def _not_handed_out(self, event: NotHandedOut) -> list[Effect]:
        living = self._living.get(event.local)
        if living is None:
            return []
        if not living.begin_anew(event.instead):
            return self._in_vain(living, event.now)
        self._names.forget([event.local])
        self._living[event.instead.local] = self._living.pop(event.local)
        return self._begin(event.instead)

    def _made(self, event: SandboxMade) -> list[Effect]:
        living = self._living.get(event.local)
        if living is None:
            return []
        if in_vain := self._in_vain(living, event.now):
            return in_vain
        record = living.record
        record = living.move_to(
            SandboxState.RUNNING,
            created_at=event.now,
            expires_at=record.expires_with(record.ttl_s, event.now, began_at=event.now),
            create_ms=event.create_ms,
            identity=event.identity,
        )
        self._times.begin(living, event.now, event.monotonic_s)
        # Kept before it is told: what a caller knows of, the next daemon takes over.
        return [
            SaveRecord(record),
            ConfirmPlacement(record.placement_id, record),
            AnnounceRunning(record),
        ]

    def _in_vain(self, living: Living, now: float) -> list[Effect]:
        """Return how one ends that is no answer to its placement; nothing if it is one."""
        error = why_in_vain(living, self.rules.node, now)
        if error is None:
            return []
        ending = self._end(living, now) if living.gone else self._begin_end(living)
        return [RefusePlacement(living.record.placement_id, error), *ending]

    def _not_made(self, event: SandboxNotMade) -> list[Effect]:
        living = self._living.get(event.local)
        if living is None:
            return []
        if living.end_cause is None:
            living.end_cause = EndCause.CREATE_FAILED
            living.end_detail = event.error.message
        return [
            RefusePlacement(living.record.placement_id, event.error),
            *self._end(living, event.now),
        ]

    def _died(self, event: SandboxDied) -> list[Effect]:
        living = self._living.get(event.local)
        if living is None:
            return []
        if living.end_cause is None:
            living.end_cause, living.end_detail = event.cause, event.detail
        if living.record.state is SandboxState.CREATING:
            living.gone = True  # the end of its making tells the rest
            return []
        if living.record.state in AWAKE_OR_ASLEEP:
            return self._end(living, event.now)
        return []  # its removal is on the way and tells the rest

    def _delete(self, event: DeletionAsked) -> list[Effect]:
        living = self._living.get(event.local)
        if living is None:
            ended = self._ended.get(event.local)
            return [] if ended is None else [ConfirmDeletion(ended)]
        return self._ask_end(living, event.cause, event.detail)

    def _ask_end(self, living: Living, cause: EndCause, detail: str) -> list[Effect]:
        """Decide the end of a sandbox; while it is being made, its removal waits for that."""
        if living.end_cause is None:
            living.end_cause, living.end_detail = cause, detail
        return self._begin_end(living) if living.record.state in AWAKE_OR_ASLEEP else []

    def _begin_end(self, living: Living) -> list[Effect]:
        # Kept, so that a crash on the way ends it for the reason that was given.
        record = living.move_to(
            SandboxState.DELETING, end_cause=living.end_cause, end_detail=living.end_detail
        )
        self._times.stop(record.local)
        return [SaveRecord(record), TellTurn(record.local, None), UnmakeSandbox(record)]

    def _unmade(self, event: SandboxUnmade) -> list[Effect]:
        living = self._living.get(event.local)
        return [] if living is None else self._end(living, event.now)

    def _not_unmade(self, event: SandboxNotUnmade) -> list[Effect]:
        living = self._living.get(event.local)
        if living is None:
            return []
        delay_s = min(_RETRY_FIRST_S * 2**living.failed_ends, _RETRY_LONGEST_S)
        living.failed_ends = min(living.failed_ends + 1, 16)
        told = DsecError(
            ErrorCode.UNAVAILABLE,
            f"sandbox {self.rules.node}.{event.local} is not gone yet, the node tries again: "
            f"{event.error.message}",
            retry_after_s=delay_s,
            details=event.error.details,
        )
        return [FailDeletion(event.local, told), UnmakeSandbox(living.record, delay_s)]

    def _end(self, living: Living, now: float) -> list[Effect]:
        """Move a sandbox of which nothing is left to the ended ones."""
        record = living.move_to(
            SandboxState.ENDED,
            ended_at=now,
            end_cause=living.end_cause or EndCause.EXITED,
            end_detail=living.end_detail,
            expires_at=0.0,
            paused_at=0.0,
            env={},
        )
        del self._living[record.local]
        self._times.stop(record.local)
        self._count(record, -1)
        return [
            SaveRecord(record),
            TellTurn(record.local, None),
            ConfirmDeletion(record),
            AnnounceEnded(record),
            *self._keep_ended(record),
        ]

    def _keep_ended(self, record: SandboxRecord) -> list[Effect]:
        return self._forget(self._ended.add(record, self._times.now_s))

    def _forget(self, names: list[str]) -> list[Effect]:
        self._names.forget(names)
        return [ForgetRecord(local) for local in names]

    # --- Time and use -------------------------------------------------------------------------

    def _ticked(self, event: ClockTicked) -> list[Effect]:
        now_s = self._times.heard(event.monotonic_s)
        effects: list[Effect] = []
        for local in self._times.take_due(now_s):
            living = self._living[local]
            if living.deadline_s and living.deadline_s <= now_s:
                effects += self._ask_end(living, EndCause.EXPIRED, "its time to live is over")
                continue
            if living.is_idle(now_s):
                effects += self._idle_over(living)
            elif living.in_use:
                living.used_s = now_s
            if living.record.state in AWAKE_OR_ASLEEP:
                self._times.look_again(living)
        return effects + self._forget(self._ended.drop_old(now_s))

    def _idle_over(self, living: Living) -> list[Effect]:
        if living.record.idle_action is IdleAction.PAUSE:
            return pauses.begin_pause(living, "idle")
        detail = f"nobody used it for {living.record.idle_ttl_s:g} s"
        return self._ask_end(living, EndCause.IDLE, detail)

    def _visit_began(self, event: VisitBegan) -> list[Effect]:
        living = self._living.get(event.local)
        if living is None:
            return []
        living.in_use += 1
        living.used_s = event.monotonic_s
        if not event.wakes or living.record.state is SandboxState.RUNNING:
            return []
        return pauses.wake(living)

    def _visit_ended(self, event: VisitEnded) -> list[Effect]:
        living = self._living.get(event.local)
        if living is not None and living.in_use:
            living.in_use -= 1
            living.used_s = event.monotonic_s
        return []

    def _turned(self, event: TurnEvent) -> list[Effect]:
        living = self._living.get(event.local)
        if living is None:
            return [TellTurn(event.local, None)]
        effects = pauses.turn(living, event)
        if living.record.state in AWAKE_OR_ASLEEP:
            self._times.look_again(living)
        return effects

    def _touch(self, event: TouchAsked | DrainAsked) -> list[Effect]:
        living = self._living.get(event.local)
        if living is None or living.record.state not in AWAKE_OR_ASLEEP:
            return []
        living.retime(event)
        self._times.begin(living, event.now, event.monotonic_s)
        return [SaveRecord(living.record)]

    # --- The node itself ----------------------------------------------------------------------

    def _restarted(self, event: NodeRestarted) -> list[Effect]:
        """Take over the records of an earlier daemon, and the sandboxes that live on."""
        self._times.heard(event.monotonic_s)
        effects: list[Effect] = []
        self._names.note(*event.records)
        done = [record for record in event.records if record.state is SandboxState.ENDED]
        for record in sorted(done, key=lambda record: record.ended_at):
            effects += self._keep_ended(record)
        for record in event.records:
            if record.state is SandboxState.ENDED:
                continue
            living = self._living[record.local] = after_restart(record, event)
            self._count(record, 1)
            if living.end_cause is not None:
                effects += self._end(living, event.now)
                continue
            effects += live_on(living, event.now)
            self._times.begin(living, event.now, event.monotonic_s)
        return effects

    def _evacuate(self, event: EvacuationBegan) -> list[Effect]:
        self.draining = True
        effects: list[Effect] = []
        for living in list(self._living.values()):
            effects += self._ask_end(living, EndCause.NODE_RESTARTED, event.detail)
        return effects

    def _count(self, record: SandboxRecord, sign: int) -> None:
        self._memory_bytes += sign * record.limits.memory_bytes
        self._cpus += sign * record.limits.cpus
        if not self._living:
            self._cpus = 0.0  # fractions of a cpu do not add up exactly; an empty node has none

    # --- Checking -----------------------------------------------------------------------------

    def validate_state(self) -> None:
        """Return if every invariant holds; tests call it after each event.

        Raises:
            AssertionError: naming the invariant.
        """
        check_invariants(self.rules, self.allocated, self._living, self._ended, self._times.due)
