"""All that is durable of one shard: its rollouts and its groups, made of the journal's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsec_chronus.groups import Group
from dsec_chronus.records import (
    FeedbackGiven,
    GroupTaken,
    HistoryForgotten,
    Record,
    RolloutBegun,
    RolloutEnded,
    StageReported,
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
        rollout = self.rollouts.get(record.local)
        if rollout is None:
            return "", 0
        before = rollout.size_bytes
        if rollout.apply(record) and rollout.begun.group:
            self._tell_group(rollout, record)
        return rollout.begun.project, rollout.size_bytes - before

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

    def _tell_group(
        self,
        rollout: Rollout,
        record: StageReported | FeedbackGiven | RolloutEnded | HistoryForgotten,
    ) -> None:
        group = self.group_of(rollout)
        if group is None:
            return
        group.touched_at = max(group.touched_at, record.at)
        match record:
            case StageReported():
                group.reported(rollout, record)
            case FeedbackGiven():
                group.answered(rollout, record.seq)
            case RolloutEnded():
                group.ended(rollout)
            case HistoryForgotten():
                pass

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
            expected = list(range(rollout.forgotten_seq + 1, rollout.last_seq + 1))
            assert numbers == expected  # noqa: S101  invariant
            assert set(rollout.feedback) <= set(numbers)  # noqa: S101  invariant
            if rollout.begun.group and not rollout.closed_at:
                key = (rollout.begun.project, rollout.begun.group)
                waiting[key] |= {(local, seq) for seq in numbers if seq not in rollout.feedback}
        for key, group in self.groups.items():
            assert group.waiting() == waiting[key]  # noqa: S101  invariant
        return sizes
