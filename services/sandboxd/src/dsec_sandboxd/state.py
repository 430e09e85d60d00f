"""The core of a node: who may have a sandbox here, and where each one is in its life. No I/O.

``(nothing) → creating → running → deleting → ended → (nothing)``. A sandbox may end from every
state; what it was given is counted from the intent until nothing of it is left, so that the node
never hands out what a dying sandbox still holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, assert_never

import msgspec

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.node import Resources
from dsec_common.wire.sandbox import EndCause, SandboxState
from dsec_sandboxd import errors
from dsec_sandboxd.admission import NodeRules, check_room
from dsec_sandboxd.effects import (
    AnnounceEnded,
    AnnounceRunning,
    ConfirmDeletion,
    ConfirmPlacement,
    Effect,
    FailDeletion,
    ForgetRecord,
    MakeSandbox,
    RefusePlacement,
    SaveRecord,
    UnmakeSandbox,
)
from dsec_sandboxd.events import (
    ClockTicked,
    DeletionAsked,
    DrainBegan,
    EvacuationBegan,
    Event,
    NodeRestarted,
    PlacementAsked,
    SandboxDied,
    SandboxMade,
    SandboxNotMade,
    SandboxNotUnmade,
    SandboxUnmade,
)
from dsec_sandboxd.records import SandboxRecord

_RETRY_FIRST_S: Final = 0.1
_RETRY_LONGEST_S: Final = 10.0


@dataclass(slots=True)
class _Living:
    """A sandbox that is not over.

    ``end_cause`` is set as soon as its end is decided, which may be while it is still being made.
    ``gone`` says that the kernel lost it by itself before we heard that it had been made.
    """

    record: SandboxRecord
    valid_until: float
    end_cause: EndCause | None = None
    end_detail: str = ""
    gone: bool = False
    failed_ends: int = 0


class NodeState:
    """All sandboxes of one node. :meth:`handle` is the only way to change it."""

    def __init__(self, rules: NodeRules) -> None:
        self.rules = rules
        self.draining = False
        self._living: dict[str, _Living] = {}
        self._ended: dict[str, SandboxRecord] = {}
        """In the order in which they ended, so that the oldest is the first."""
        self._expiring: dict[str, float] = {}
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
    def lease_ids(self) -> tuple[str, ...]:
        """The Compute Unit leases of living sandboxes."""
        return tuple(
            living.record.lease_id for living in self._living.values() if living.record.lease_id
        )

    def find(self, project: str, local: str) -> SandboxRecord:
        """Return the record of the project's sandbox, ended or not.

        Raises:
            DsecError: ``not_found`` when the project has none of that id, whoever else may.
        """
        living = self._living.get(local)
        record = living.record if living else self._ended.get(local)
        if record is None or record.project != project:
            raise errors.no_such_sandbox(f"{self.rules.node}.{local}")
        return record

    def running(self, project: str, local: str) -> SandboxRecord:
        """Return the record of the project's sandbox that takes commands.

        Raises:
            DsecError: ``not_found``; ``expired`` with the cause when it is over; ``unavailable``
                when it is not ready yet or the node is stopping.
        """
        living = self._living.get(local)
        if living is None or living.record.project != project:
            raise errors.sandbox_ended(self.rules.node, self.find(project, local))
        record = living.record
        if record.state is SandboxState.RUNNING:
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

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901, PLR0911  one case per kind of event
        """Take one event and return what must be done, in order."""
        match event:
            case PlacementAsked():
                return self._place(event)
            case SandboxMade():
                return self._made(event)
            case SandboxNotMade():
                return self._not_made(event)
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
            known = self._known_placement(record)
            if known is not None:
                return known
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
        self._living[record.local] = _Living(record, event.valid_until)
        self._count(record, 1)
        return [SaveRecord(record), MakeSandbox(record)]

    def _known_placement(self, record: SandboxRecord) -> list[Effect] | None:
        """Return the answer to a placement that came before, or None for a fresh one."""
        living = self._living.get(record.local)
        known = living.record if living else self._ended.get(record.local)
        if known is None:
            return None
        if known.placement_id != record.placement_id:
            raise errors.placement_conflict(self.rules.node, record.local)
        if living is None or living.end_cause is not None:
            raise errors.sandbox_ended(self.rules.node, known)
        if known.state is SandboxState.RUNNING:
            return [ConfirmPlacement(record.placement_id, known)]
        return []  # being made: its own answer is on the way

    def _made(self, event: SandboxMade) -> list[Effect]:
        living = self._living.get(event.local)
        if living is None:
            return []
        record = living.record
        if living.gone:
            error = unavailable(
                f"sandbox {self.rules.node}.{event.local} ended while it was being created: "
                f"{living.end_detail}"
            )
            return [RefusePlacement(record.placement_id, error), *self._end(living, event.now)]
        if living.end_cause is not None:
            error = errors.sandbox_ended(
                self.rules.node, msgspec.structs.replace(record, end_cause=living.end_cause)
            )
            return [RefusePlacement(record.placement_id, error), *self._begin_end(living)]
        if event.now > living.valid_until:
            # The scheduler has gone on to another node: two sandboxes for one request must not be.
            living.end_cause = EndCause.CREATE_FAILED
            living.end_detail = "ready too late"
            error = errors.placement_lapsed(
                self.rules.node, event.local, event.now - living.valid_until
            )
            return [RefusePlacement(record.placement_id, error), *self._begin_end(living)]
        lifetime_s = record.expires_at - record.created_at if record.expires_at else 0.0
        record = living.record = msgspec.structs.replace(
            record,
            state=SandboxState.RUNNING,
            created_at=event.now,
            expires_at=event.now + lifetime_s if lifetime_s else 0.0,
            create_ms=event.create_ms,
        )
        if record.expires_at:
            self._expiring[record.local] = record.expires_at
        # A crash after the answer and before the record: the intent is there, so the restarted
        # node tells the end of a sandbox that the caller knows.
        return [
            ConfirmPlacement(record.placement_id, record),
            SaveRecord(record),
            AnnounceRunning(record),
        ]

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
        match living.record.state:
            case SandboxState.CREATING:
                living.gone = True  # the end of its making tells the rest
                return []
            case SandboxState.RUNNING:
                return self._end(living, event.now)
            case _:
                return []  # its removal is on the way and tells the rest

    def _delete(self, event: DeletionAsked) -> list[Effect]:
        living = self._living.get(event.local)
        if living is None:
            ended = self._ended.get(event.local)
            return [] if ended is None else [ConfirmDeletion(ended)]
        return self._ask_end(living, EndCause.DELETED, "")

    def _ask_end(self, living: _Living, cause: EndCause, detail: str) -> list[Effect]:
        """Decide the end of a sandbox; while it is being made, its removal waits for that."""
        if living.end_cause is None:
            living.end_cause, living.end_detail = cause, detail
        return self._begin_end(living) if living.record.state is SandboxState.RUNNING else []

    def _begin_end(self, living: _Living) -> list[Effect]:
        record = living.record = msgspec.structs.replace(living.record, state=SandboxState.DELETING)
        self._expiring.pop(record.local, None)
        return [UnmakeSandbox(record)]

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

    def _end(self, living: _Living, now: float) -> list[Effect]:
        """Move a sandbox of which nothing is left to the ended ones."""
        record = msgspec.structs.replace(
            living.record,
            state=SandboxState.ENDED,
            ended_at=now,
            end_cause=living.end_cause or EndCause.EXITED,
            end_detail=living.end_detail,
            expires_at=0.0,
            env={},
        )
        del self._living[record.local]
        self._expiring.pop(record.local, None)
        self._count(record, -1)
        return [
            SaveRecord(record),
            ConfirmDeletion(record),
            AnnounceEnded(record),
            *self._keep_ended(record),
        ]

    def _keep_ended(self, record: SandboxRecord) -> list[Effect]:
        self._ended[record.local] = record
        if len(self._ended) <= self.rules.ended_kept_max:
            return []
        return [self._forget(next(iter(self._ended)))]

    def _forget(self, local: str) -> Effect:
        del self._ended[local]
        return ForgetRecord(local)

    def _ticked(self, event: ClockTicked) -> list[Effect]:
        effects: list[Effect] = []
        for local in [local for local, at in self._expiring.items() if at <= event.now]:
            effects += self._ask_end(
                self._living[local], EndCause.EXPIRED, "its time to live is over"
            )
        oldest_kept_at = event.now - self.rules.ended_kept_s
        while self._ended:
            record = next(iter(self._ended.values()))
            if record.ended_at > oldest_kept_at:
                break
            effects.append(self._forget(record.local))
        return effects

    def _restarted(self, event: NodeRestarted) -> list[Effect]:
        """Take over the records of an earlier daemon: what was alive has ended with it."""
        effects: list[Effect] = []
        done = [record for record in event.records if record.state is SandboxState.ENDED]
        for record in sorted(done, key=lambda record: record.ended_at):
            effects += self._keep_ended(record)
        for record in event.records:
            if record.state is SandboxState.ENDED:
                continue
            self._count(record, 1)
            living = self._living[record.local] = _Living(record, 0.0)
            living.end_cause = EndCause.NODE_RESTARTED
            living.end_detail = "the node's daemon was started again"
            effects += self._end(living, event.now)
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
        records = [living.record for living in self._living.values()]
        _check(lambda: not set(self._living) & set(self._ended), "a sandbox is alive and ended")
        _check(
            lambda: self._memory_bytes == sum(record.limits.memory_bytes for record in records),
            "the memory given out is what the living were given",
        )
        _check(
            lambda: math.isclose(
                self._cpus, sum(record.limits.cpus for record in records), abs_tol=1e-6
            ),
            "the cpus given out are what the living were given",
        )
        _check(
            lambda: (
                self._memory_bytes <= self.rules.capacity.memory_bytes
                and len(records) <= self.rules.capacity.sandboxes
            ),
            "no more is given out than there is",
        )
        _check(
            lambda: all(record.state is not SandboxState.ENDED for record in records),
            "no living sandbox has ended",
        )
        _check(
            lambda: all(
                record.state is SandboxState.ENDED and record.end_cause is not None
                for record in self._ended.values()
            ),
            "every ended sandbox has a cause",
        )
        _check(
            lambda: all(
                living.end_cause is not None
                for living in self._living.values()
                if living.record.state is SandboxState.DELETING
            ),
            "every sandbox that is being removed has a cause",
        )
        _check(
            lambda: all(
                self._living[local].record.state is SandboxState.RUNNING for local in self._expiring
            ),
            "only running sandboxes expire",
        )
        _check(
            lambda: len(self._ended) <= self.rules.ended_kept_max,
            "no more ended sandboxes are kept than allowed",
        )


def _check(holds: Callable[[], bool], invariant: str) -> None:
    if not holds():
        raise AssertionError(f"the node's state is broken: {invariant}")
