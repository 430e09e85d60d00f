"""What is kept of a rollout beside its reports: state, checkpoints, and the action under way.

An action is recorded before it is begun and once more with its result, and only the result changes
anything. Whoever owns the shard in between carries it to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

import msgspec

from dsec_chronus.records import (
    ActionBegun,
    ActionEnded,
    ActionKind,
    KeptRecord,
    RolloutKept,
    StateWritten,
    Taken,
    size_of,
    values_size,
)
from dsec_common.wire.checkpoint import CheckpointInfo

CHECKPOINTS_MAX: Final = 16
"""Of one rollout; a new one takes the place of the oldest."""

RESULTS_KEPT: Final = 16
"""Actions whose result is told again to whoever asks with the same key."""

REPLACED_KEPT: Final = 8

_CHUNK_BYTES: Final = 128 * 1024

Values = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A version of the state, and what the node kept of the sandbox."""

    begun: ActionBegun
    ended: ActionEnded
    taken: Taken
    values: Values
    version: int
    values_bytes: int
    reward: float

    def info(self) -> CheckpointInfo:
        """Return what a trainer may know."""
        return CheckpointInfo(
            checkpoint=self.begun.number,
            step=self.begun.step,
            version=self.version,
            created_at=self.begun.at,
            sandbox_id=self.begun.sandbox_id,
            snapshot_id=self.taken.snapshot_id,
            layer=self.taken.layer,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """An action that came to something."""

    begun: ActionBegun
    ended: ActionEnded


@dataclass(slots=True)
class Kept:
    """All of it. Values are never changed in place, so a checkpoint costs no copy of them.

    Attributes:
        values: the state now, as JSON by name.
        version: of the state; grows with each change of it.
        number: of the newest action.
        action: the one that is under way.
        sandbox_id: the one that last reported, or took its place.
        replaced: sandboxes whose place others took: they are not listened to any more.
        back_to: the step that the rollout was last put back to; -1 when it never was.
        back_at: when.
        lost: it was put back because its sandbox was gone.
        dropped: checkpoints that are kept no more and whose snapshots nobody was told to delete.
    """

    values: Values = field(default_factory=dict)
    version: int = 0
    values_bytes: int = 0
    number: int = 0
    action: ActionBegun | None = None
    sandbox_id: str = ""
    replaced: tuple[str, ...] = ()
    back_to: int = -1
    back_at: float = 0.0
    lost: bool = False
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    dropped: list[Checkpoint] = field(default_factory=list)
    _begun_with: tuple[Values, int, int, float] = ({}, 0, 0, 0.0)

    def copy(self) -> Kept:
        """Return one that may be changed without this one changing."""
        return replace(
            self,
            checkpoints=dict(self.checkpoints),
            results=dict(self.results),
            dropped=list(self.dropped),
        )

    @property
    def size_bytes(self) -> int:
        """About how much all of it takes."""
        begun = 0 if self.action is None else self._begun_with[2] + self.action.room_bytes
        kept = sum(it.values_bytes + size_of(it.ended) for it in self.checkpoints.values())
        told = sum(size_of(it.ended) for it in self.results.values())
        return self.values_bytes + begun + kept + told

    @property
    def is_pristine(self) -> bool:
        """Whether there is nothing to record that the reports do not tell."""
        return not (self.version or self.number)

    # --- What became durable ------------------------------------------------------------------

    def apply(self, record: KeptRecord) -> bool:
        """Take in a durable fact; return False for one that was there, which changes nothing.

        What the end of a rollback means for reports is the rollout's own matter.
        """
        match record:
            case StateWritten():
                return self._write(record)
            case ActionBegun():
                return self._begin(record)
            case ActionEnded():
                return self._end(record)
            case RolloutKept():
                self.number = record.number
                self.sandbox_id, self.replaced = record.sandbox_id, record.replaced
                self.back_to, self.back_at = record.back_to, record.back_at
                self.lost = record.lost
                return True
            case _:
                assert_never(record)

    def _write(self, record: StateWritten) -> bool:
        if record.version < self.version:
            return False
        values = {**self.values, **record.puts}
        for name in record.deletes:
            values.pop(name, None)
        self._hold(values, record.version)
        return True

    def _hold(self, values: Values, version: int) -> None:
        self.values, self.version = values, version
        self.values_bytes = values_size(values)

    def _begin(self, record: ActionBegun) -> bool:
        self.number = max(self.number, record.number)
        self.action = record
        self._begun_with = (self.values, self.version, self.values_bytes, record.reward)
        return True

    def _end(self, record: ActionEnded) -> bool:
        begun = self.action
        if begun is None or begun.number != record.number:
            return False
        values, version, values_bytes, reward = self._begun_with
        self.action, self._begun_with = None, ({}, 0, 0, 0.0)
        if record.error is not None:
            return True
        self._keep_result(begun, record)
        if record.told:
            return True
        if record.taken is not None:
            kept = Checkpoint(begun, record, record.taken, values, version, values_bytes, reward)
            self.checkpoints[begun.number] = kept
            self.sandbox_id = self.sandbox_id or begun.sandbox_id
            if len(self.checkpoints) > CHECKPOINTS_MAX:
                self._drop(min(self.checkpoints))
        elif begun.kind is ActionKind.ROLLBACK:
            self._go_back(begun, record)
        return True

    def _keep_result(self, begun: ActionBegun, record: ActionEnded) -> None:
        self.results[begun.key] = Result(begun, record)
        if len(self.results) > RESULTS_KEPT:
            oldest = min(self.results.values(), key=lambda it: it.begun.number)
            del self.results[oldest.begun.key]

    def _drop(self, number: int) -> None:
        self.dropped.append(self.checkpoints.pop(number))

    def _go_back(self, begun: ActionBegun, record: ActionEnded) -> None:
        checkpoint = self.checkpoints[begun.checkpoint]
        self._hold(checkpoint.values, record.version)
        for number in [it for it in self.checkpoints if it > begun.checkpoint]:
            self._drop(number)
        if record.sandbox_id != self.sandbox_id:
            self.replaced = (*self.replaced, self.sandbox_id)[-REPLACED_KEPT:]
            self.sandbox_id = record.sandbox_id
        self.back_to, self.back_at, self.lost = begun.step, record.at, begun.lost

    def reported(self, sandbox_id: str) -> None:
        """Note which sandbox speaks for the rollout."""
        self.sandbox_id = sandbox_id or self.sandbox_id

    def rewarded(self, seq: int, reward: float) -> None:
        """Count the reward of a report that checkpoints were made after."""
        for number, checkpoint in self.checkpoints.items():
            if checkpoint.begun.step >= seq:
                more = checkpoint.reward + reward
                self.checkpoints[number] = replace(checkpoint, reward=more)
        if self.action is not None and self.action.step >= seq:
            values, version, size, before = self._begun_with
            self._begun_with = (values, version, size, before + reward)

    # --- What there is ------------------------------------------------------------------------

    def newest_at(self, step: int) -> Checkpoint | None:
        """Return the newest checkpoint at or before a step; a negative one means the newest."""
        fitting = (
            it for it in reversed(self.checkpoints.values()) if step < 0 or it.begun.step <= step
        )
        return next(fitting, None)

    def newest_durable(self) -> Checkpoint | None:
        """Return the newest checkpoint that another node can go on from."""
        return next((it for it in reversed(self.checkpoints.values()) if it.taken.layer), None)

    @property
    def holds_feedback(self) -> bool:
        """Whether the agent is to stand still: a checkpoint is being made, or a rollback."""
        return self.action is not None and self.action.kind is not ActionKind.BRANCH

    def records(self, local: str, at: float, last_seq: int) -> Iterator[KeptRecord]:
        """Yield the facts that make what is kept like this."""
        if self.is_pristine:
            return
        values: Values = {}
        for result in sorted(self._told(), key=lambda it: it.begun.number):
            yield result.begun
            yield _as_told(result.ended)
        for checkpoint in self.checkpoints.values():
            yield from _change(local, at, values, checkpoint.values, checkpoint.version)
            values = checkpoint.values
            yield _with_reward(checkpoint.begun, checkpoint.reward)
            yield checkpoint.ended
        if self.action is not None:
            begun_values, version, _, reward = self._begun_with
            yield from _change(local, at, values, begun_values, version)
            values = begun_values
            yield _with_reward(self.action, reward)
        yield from _change(local, at, values, self.values, self.version)
        yield RolloutKept(
            local=local,
            at=at,
            last_seq=last_seq,
            number=self.number,
            sandbox_id=self.sandbox_id,
            replaced=self.replaced,
            back_to=self.back_to,
            back_at=self.back_at,
            lost=self.lost,
        )

    def validate_state(self) -> None:
        """Raise ``AssertionError`` when an invariant is broken."""
        numbers = list(self.checkpoints)
        assert numbers == sorted(numbers)  # noqa: S101  invariant
        assert all(number <= self.number for number in numbers)  # noqa: S101  invariant
        assert self.values_bytes == values_size(self.values)  # noqa: S101  invariant

    def _told(self) -> Iterator[Result]:
        """Yield the results that no checkpoint of ours carries."""
        for result in self.results.values():
            if result.begun.number not in self.checkpoints:
                yield result


def _as_told(ended: ActionEnded) -> ActionEnded:
    return msgspec.structs.replace(ended, told=True)


def _with_reward(begun: ActionBegun, reward: float) -> ActionBegun:
    return msgspec.structs.replace(begun, reward=reward)


def _change(
    local: str, at: float, before: Values, after: Values, version: int
) -> Iterator[StateWritten]:
    """Yield what makes one state of another, in records that are small enough for a frame."""
    deletes = tuple(name for name in before if name not in after)
    puts: dict[str, bytes] = {}
    size = 0
    for name, value in after.items():
        if before.get(name) == value:
            continue
        if puts and size + len(value) > _CHUNK_BYTES:
            yield StateWritten(local=local, at=at, version=version, puts=puts)
            puts, size = {}, 0
        puts[name] = value
        size += len(name) + len(value)
    yield StateWritten(local=local, at=at, version=version, puts=puts, deletes=deletes)
