"""Which versions of a namespace are alive, after any number of rollbacks.

Versions only grow. A rollback to snapshot *s* at version *r* begins a **branch**: what comes after
*r* follows what was up to *s*, and the versions in between are dead to it. A **view** is the way
from a branch back to version 0: ascending intervals ``(start, end]`` of live versions. The gaps
between them are the dead ones, merged; nothing is written to the data itself.

A branch is kept for as long as a snapshot is in it, another branch begins in it, or it is the
present one: hence any snapshot that is held can be gone back to, also one that an earlier rollback
undid. No I/O here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from dsec_common.statedb.keys import LAST_VERSION

_ROOT: Final = 0


class View(NamedTuple):
    """Live versions as intervals ``(start, end]``, ascending; the first one starts at 0."""

    starts: list[int]
    ends: list[int]

    @property
    def newest(self) -> int:
        """The greatest version that can be seen."""
        return self.ends[-1]

    def at_most(self, version: int) -> int:
        """Return the greatest live version that is not above ``version``; it need not exist."""
        return min(version, self.ends[max(bisect_left(self.starts, version) - 1, 0)])

    def agrees_until(self, other: View) -> int:
        """Return the version up to which both see the same."""
        common = 0
        for start, end, other_start, other_end in zip(
            self.starts, self.ends, other.starts, other.ends, strict=False
        ):
            if start != other_start:
                break
            common = min(end, other_end)
            if end != other_end:
                break
        return common


class Edges(NamedTuple):
    """Versions that no view can tell apart, up to the version ``until``.

    Within one edge only the newest version of a key can be seen by anybody. A version up to
    ``until`` that is on no edge can be seen by nobody.

    Attributes:
        foldable: branches whose gap is only dead versions: without those it is no gap.
    """

    until: int
    starts: list[int]
    ends: list[int]
    numbers: list[int]
    foldable: tuple[int, ...]

    def edge_of(self, version: int) -> int | None:
        """Return the edge that a version is on; None for a dead one."""
        index = bisect_left(self.starts, version) - 1
        if index < 0 or version > self.ends[index]:
            return None
        return self.numbers[index]


@dataclass(slots=True)
class _Branch:
    """From which version of which branch it goes on, and how much refers to it."""

    base: int
    parent: int
    references: int = 0


class Rollback(NamedTuple):
    """What a rollback changes: the new branch, and those that nothing refers to any more."""

    start: int
    base: int
    parent: int
    dropped: tuple[int, ...]


class Lineage:
    """The branches and snapshots of one namespace.

    Changes are planned first and applied when they are on the disk: planning changes nothing.

    Args:
        bases: by the version that began a branch, the version that it goes on from.
        snapshots: versions that are held.
    """

    def __init__(self, bases: Mapping[int, int], snapshots: Iterable[int]) -> None:
        self._branches = {_ROOT: _Branch(0, _ROOT, references=1)}
        self._starts = [_ROOT]
        for start in sorted(bases):
            self._add(start, bases[start])
        self._current = self._starts[-1]
        self._branches[self._current].references += 1
        self._snapshots = sorted(snapshots)
        for snapshot in self._snapshots:
            self._branches[self._branch_of(snapshot)].references += 1
        self.now = self._view(self._current, LAST_VERSION)

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The held snapshots, oldest first."""
        return tuple(self._snapshots)

    @property
    def snapshot_count(self) -> int:
        """How many are held."""
        return len(self._snapshots)

    @property
    def is_straight(self) -> bool:
        """Whether every version is alive: there is nothing to look at."""
        return len(self.now.starts) == 1

    @property
    def branches(self) -> dict[int, int]:
        """The branches as they are stored: start and base."""
        return {start: self._branches[start].base for start in self._starts[1:]}

    def holds(self, snapshot: int) -> bool:
        """Return whether a snapshot is held; 0, before everything, always is."""
        index = bisect_left(self._snapshots, snapshot)
        return snapshot == 0 or self._snapshots[index : index + 1] == [snapshot]

    def at(self, snapshot: int) -> View:
        """Return what a held snapshot sees."""
        return self._view(self._branch_of(snapshot), snapshot)

    def hold(self, snapshot: int) -> None:
        """Take a snapshot of the present; it is newer than all there was."""
        self._snapshots.append(snapshot)
        self._branches[self._current].references += 1

    def releasing(self, snapshot: int) -> tuple[int, ...]:
        """Return the branches that end when a held snapshot is let go."""
        return self._unreferenced(self._branch_of(snapshot), stop=None)

    def release(self, snapshot: int) -> None:
        """Let a held snapshot go."""
        del self._snapshots[bisect_left(self._snapshots, snapshot)]
        self._drop_reference(self._branch_of(snapshot))

    def rolling_back(self, snapshot: int, version: int) -> Rollback:
        """Return the rollback to a held snapshot that is made as ``version``."""
        parent = self._branch_of(snapshot)
        return Rollback(version, snapshot, parent, self._unreferenced(self._current, stop=parent))

    def roll_back(self, rollback: Rollback) -> None:
        """Begin the branch of a rollback."""
        former, view = self._current, self.now
        self._add(rollback.start, rollback.base)
        self._branches[rollback.start].references += 1
        self._current = rollback.start
        self._drop_reference(former)
        if view.at_most(rollback.base) == rollback.base:
            index = max(bisect_left(view.starts, rollback.base) - 1, 0)
            del view.starts[index + 1 :], view.ends[index + 1 :]
            view.ends[index] = rollback.base
            view.starts.append(rollback.start)
            view.ends.append(LAST_VERSION)
        else:
            self.now = self._view(self._current, LAST_VERSION)

    def edges(self, until: int) -> Edges:
        """Return what can be told apart among the versions up to ``until``, the last one given."""
        children: dict[int, list[int]] = {}
        for start in self._starts[1:]:
            children.setdefault(self._branches[start].base, []).append(start)
        edges = Edges(until, [], [], [], self._foldable(children))
        inherited: dict[int, int] = {}
        for start, cuts in self._cuts(until, children).items():
            number = inherited.get(start, len(edges.numbers))
            low = start
            for index, cut in enumerate(cuts):
                edges.starts.append(low)
                edges.ends.append(cut)
                edges.numbers.append(number)
                low = cut
                below = children.get(cut, ())
                goes_on = index + 1 < len(cuts)
                if self.holds(cut) or len(below) + goes_on != 1:
                    number = len(edges.numbers)
                else:
                    inherited |= dict.fromkeys(below, number)
        return edges

    def folding(self, foldable: Iterable[int]) -> tuple[int, ...]:
        """Return those of the branches that are still there, once their gap is empty."""
        return tuple(start for start in foldable if start in self._branches)

    def fold(self, starts: Iterable[int]) -> None:
        """Let branches be one with what they go on from."""
        for start in sorted(starts):
            branch = self._branches.pop(start)
            self._starts.remove(start)
            parent = self._branch_of(branch.base)  # its own parent may be folded already
            self._branches[parent].references += branch.references - 1
            if self._current == start:
                self._current = parent
        for start in self._starts[1:]:
            branch = self._branches[start]
            branch.parent = self._branch_of(branch.base)
        self.now = self._view(self._current, LAST_VERSION)

    def _foldable(self, children: Mapping[int, list[int]]) -> tuple[int, ...]:
        found = []
        bases = sorted(children)
        for index, start in enumerate(self._starts[1:], start=1):
            branch = self._branches[start]
            if (
                branch.parent == self._starts[index - 1]
                and not _any_between(self._snapshots, branch.base, start)
                and not _any_between(bases, branch.base, start)
            ):
                found.append(start)
        return tuple(found)

    def _cuts(self, until: int, children: Iterable[int]) -> dict[int, list[int]]:
        """Return by branch, in order, the versions at which somebody's view of it ends."""
        cuts: dict[int, list[int]] = {start: [] for start in self._starts}
        for cut in {*self._snapshots, *children} - {0}:
            cuts[self._branch_of(cut)].append(cut)
        if until > self._current:
            cuts[self._current].append(until)
        return {start: sorted(set(found)) for start, found in cuts.items()}

    def _branch_of(self, version: int) -> int:
        return self._starts[max(bisect_left(self._starts, version) - 1, 0)]

    def _view(self, branch: int, end: int) -> View:
        starts: list[int] = []
        ends: list[int] = []
        while True:
            starts.append(branch)
            ends.append(end)
            if branch == _ROOT:
                return View(starts[::-1], ends[::-1])
            end = self._branches[branch].base
            branch = self._branches[branch].parent

    def _add(self, start: int, base: int) -> None:
        parent = self._branch_of(base)
        self._branches[start] = _Branch(base, parent)
        self._branches[parent].references += 1
        insort(self._starts, start)

    def _unreferenced(self, branch: int, stop: int | None) -> tuple[int, ...]:
        dropped = []
        while branch != stop and self._branches[branch].references == 1:
            dropped.append(branch)
            branch = self._branches[branch].parent
        return tuple(dropped)

    def _drop_reference(self, branch: int) -> None:
        self._branches[branch].references -= 1
        while not self._branches[branch].references:
            gone = self._branches.pop(branch)
            self._starts.remove(branch)
            branch = gone.parent
            self._branches[branch].references -= 1


def _any_between(ascending: list[int], low: int, high: int) -> bool:
    index = bisect_right(ascending, low)
    return index < len(ascending) and ascending[index] < high
