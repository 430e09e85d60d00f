"""All that is durable of one shard: its rollouts and its groups, made of the journal's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsec_chronus.groups import Group
from dsec_chronus.records import (
    ActionEnded,
    FeedbackGiven,
    GroupTaken,
    HistoryForgotten,
    KeptRecord,
    Record,
    RolloutBegun,
    RolloutEnded,
    StageReported,
    StateTaken,
    StateWritten,
    size_of,
)
from dsec_chronus.rollout import Rollout


@dataclass(slots=True)
class Contents:
    """Rollouts by id, and groups by what stands for their name."""

    rollouts: dict[str, Rollout] = field(default_factory=dict)
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)

    def apply(self, record: Record) -> tuple[str, int]:
        """Take in a durable fact; one about a rollout that is forgotten is forgotten too.

        Returns:
            The project whose rollouts grew, and by how many bytes.
        """
        if isinstance(record, GroupTaken):
            self._take(record)
            return record.project, 0
        if isinstance(record, RolloutBegun):
            return record.project, self._begin(record)
        if isinstance(record, StateTaken):
            record = self._taken(record)
        rollout = self.rollouts.get(record.local)
        if rollout is None:
            return "", 0
        before = rollout.size_bytes
        group = self.group_of(rollout)
        waiting = rollout.waiting() if group is not None and isinstance(record, ActionEnded) else ()
        if rollout.apply(record) and group is not None:
            _tell_group(group, rollout, record)
            for seq in waiting:
                if rollout.report(seq) is None:  # void
                    group.answered(rollout, seq)
        return rollout.begun.project, rollout.size_bytes - before

    def _taken(self, record: StateTaken) -> StateWritten:
        parent = self.rollouts.get(record.parent)
        checkpoint = None if parent is None else parent.kept.checkpoints.get(record.checkpoint)
        return StateWritten(
            local=record.local,
            at=record.at,
            version=0 if checkpoint is None else checkpoint.version,
            puts={} if checkpoint is None else dict(checkpoint.values),
        )

    def _take(self, record: GroupTaken) -> None:
        key = (record.project, record.group)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(record.local, record.project, record.group)
        group.fence = max(group.fence, record.fence)
        group.touched_at = max(group.touched_at, record.at)

    def _begin(self, record: RolloutBegun) -> int:
        if record.local in self.rollouts:
            return 0
        rollout = Rollout(record, touched_at=record.at, size_bytes=size_of(record))
        self.rollouts[record.local] = rollout
        group = self.group_of(rollout)
        if group is not None:
            group.opened(rollout)
        return rollout.size_bytes

    def group_of(self, rollout: Rollout) -> Group | None:
        """Return a rollout's group; None when it has none."""
        begun = rollout.begun
        return self.groups.get((begun.project, begun.group)) if begun.group else None

    def forget(self, rollout: Rollout) -> None:
        """Drop a rollout that is over."""
        del self.rollouts[rollout.begun.local]
        group = self.group_of(rollout)
        if group is not None:
            group.forgot(rollout)

    def forget_groups(self, before: float) -> list[Group]:
        """Drop the groups without rollouts that nobody used since ``before``; return them."""
        over = [
            group
            for group in self.groups.values()
            if not group.members and max(group.touched_at, group.used_at) < before
        ]
        for group in over:
            del self.groups[group.project, group.name]
        return over

    def records(self) -> Iterator[Record]:
        """Yield the facts that make contents like these."""
        for group in self.groups.values():
            yield group.record()
        for rollout in self.rollouts.values():
            yield from rollout.records()

    def validate_state(self) -> Counter[str]:
        """Return the bytes by project; raise ``AssertionError`` when an invariant is broken."""
        sizes: Counter[str] = Counter()
        waiting: dict[tuple[str, str], set[tuple[str, int]]] = {key: set() for key in self.groups}
        for local, rollout in self.rollouts.items():
            sizes[rollout.begun.project] += rollout.size_bytes
            assert rollout.begun.local == local  # noqa: S101  invariant
            numbers = [report.seq for report in rollout.reports]
            assert numbers == sorted(set(numbers))  # noqa: S101  invariant
            first, last = rollout.forgotten_seq, rollout.last_seq
            assert all(first < seq <= last for seq in numbers)  # noqa: S101  invariant
            if rollout.kept.back_to < 0:
                assert numbers == list(range(first + 1, last + 1))  # noqa: S101  invariant
            rollout.kept.validate_state()
            assert set(rollout.feedback) <= set(numbers)  # noqa: S101  invariant
            if rollout.begun.group and not rollout.closed_at:
                key = (rollout.begun.project, rollout.begun.group)
                waiting[key] |= {(local, seq) for seq in numbers if seq not in rollout.feedback}
        for key, group in self.groups.items():
            assert group.waiting() == waiting[key]  # noqa: S101  invariant
        return sizes


def _tell_group(
    group: Group,
    rollout: Rollout,
    record: StageReported | FeedbackGiven | RolloutEnded | HistoryForgotten | KeptRecord,
) -> None:
    group.touched_at = max(group.touched_at, record.at)
    match record:
        case StageReported():
            group.reported(rollout, record)
        case FeedbackGiven():
            group.answered(rollout, record.seq)
        case RolloutEnded():
            group.ended(rollout)
        case _:
            pass
