"""Weighted fair sharing of Compute Units between projects, with nested quotas. No I/O.

The quotas are a tree whose leaves are projects. Whose turn it is is found from the top down: at
each step the child goes first that holds least for its weight. So a team that sends much gets its
team's part and no more while others wait, and all of the cluster when nobody does; within the team
the same holds for its projects. This is max-min fairness, level by level, as in fair-share
schedulers of clusters (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011, with one resource).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from dsec_common.subjects import validate_project

T = TypeVar("T")

_DEPTH_MAX: Final = 16
_TOLERANCE: Final = 1e-9


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a project, or all projects below together, may have of the cluster's Compute Units.

    A quota without children is a project's and has its name. Projects that no quota names are
    beside the topmost quotas, with weight 1 and no limit.

    Attributes:
        name: a project's name, or any name for a group.
        weight: its part in relation to its siblings' while all of them want more than there is.
        cu_max: never more than this at once; 0 for no limit.
        children: who shares it.
    """

    name: str
    weight: float = 1.0
    cu_max: float = 0.0
    children: tuple[Quota, ...] = ()


def check_quotas(quotas: Sequence[Quota]) -> None:
    """Return when the quotas make a tree that can be shared by.

    Raises:
        ValueError: naming the quota and what is allowed.
        DsecError: ``invalid`` when a leaf's name is no project's.
    """
    seen: set[str] = set()

    def check(quota: Quota, depth: int) -> None:
        if depth > _DEPTH_MAX:
            raise ValueError(f"quotas are nested deeper than {_DEPTH_MAX}")
        if quota.name in seen:
            raise ValueError(f"quota {quota.name!r} is there twice: each name has one place")
        seen.add(quota.name)
        if not 0 < quota.weight < math.inf:
            raise ValueError(f"quota {quota.name!r}: weight must be a number above 0")
        if not 0 <= quota.cu_max < math.inf:
            raise ValueError(f"quota {quota.name!r}: cu_max must be a number, 0 for no limit")
        if not quota.children:
            validate_project(quota.name)
        for child in quota.children:
            check(child, depth + 1)

    for quota in quotas:
        check(quota, 1)


class _Share:
    """One place in the tree while a round goes on."""

    __slots__ = ("children", "cu_max", "held_cu", "name", "parent", "turns", "waits", "weight")

    def __init__(self, name: str, weight: float, cu_max: float, parent: _Share | None) -> None:
        self.name = name
        self.weight = weight
        self.cu_max = cu_max or math.inf
        self.parent = parent
        self.children: list[_Share] = []
        self.held_cu = 0.0
        #: A project's: something of it may still be waiting.
        self.waits = False
        #: Children with something waiting, the one that goes first at the top.
        self.turns: list[tuple[float, str, int, _Share]] = []
        if parent is not None:
            parent.children.append(self)

    def path(self) -> Iterator[_Share]:
        """Yield this place and all above it, the root last."""
        place: _Share | None = self
        while place is not None:
            yield place
            place = place.parent

    def turn(self) -> tuple[float, str, int, _Share]:
        """Return its entry in its parent's heap; a group and a project may share a name."""
        return self.held_cu / self.weight, self.name, id(self), self

    def prepare(self) -> bool:
        """Fill the heaps with what has something waiting; return whether anything has."""
        if self.waits:
            return True
        self.turns = [child.turn() for child in self.children if child.prepare()]
        heapq.heapify(self.turns)
        return bool(self.turns)


class FairShare:
    """The tree of quotas; see the module."""

    def __init__(self, quotas: Sequence[Quota] = ()) -> None:
        self._quotas = tuple(quotas)

    def _places(self, projects: Mapping[str, float]) -> tuple[_Share, dict[str, _Share]]:
        """Return the root, and each project's place with what it holds counted all the way up."""
        root: _Share = _Share("", 1.0, 0.0, None)
        leaves: dict[str, _Share] = {}

        def add(quota: Quota, parent: _Share) -> None:
            place = _Share(quota.name, quota.weight, quota.cu_max, parent)
            if not quota.children:
                leaves[quota.name] = place
            for child in quota.children:
                add(child, place)

        for quota in self._quotas:
            add(quota, root)
        for project, held_cu in projects.items():
            leaf = leaves.get(project)
            if leaf is None:
                leaf = leaves[project] = _Share(project, 1.0, 0.0, root)
            for place in leaf.path():
                place.held_cu += held_cu
        return root, leaves

    def order(
        self,
        waiting: Mapping[str, Sequence[T]],
        held_cu: Mapping[str, float],
        cu_of: Callable[[T], float],
    ) -> Iterator[tuple[T, str]]:
        """Yield what waits in the order in which it is to be served.

        With each comes the name of the quota that keeps it waiting however much is free, or the
        empty string. Whatever is yielded without one counts as held from then on.

        Args:
            waiting: by project, each in its own order.
            held_cu: by project, now.
            cu_of: what one of the waiting wants, at least.
        """
        root, leaves = self._places({**dict.fromkeys(waiting, 0.0), **held_cu})
        left = {leaves[project]: iter(items) for project, items in waiting.items() if items}
        for leaf in left:
            leaf.waits = True
        root.prepare()
        while root.turns:
            place = root
            while not place.waits:
                *_, place = heapq.heappop(place.turns)
            item = next(left[place], None)
            if item is None:
                place.waits = False
            else:
                yield item, self._count(place, cu_of(item))
            for below, above in itertools.pairwise(place.path()):
                if below.waits or below.turns:
                    heapq.heappush(above.turns, below.turn())

    @staticmethod
    def _count(place: _Share, cu: float) -> str:
        """Count units up to the root, or return the quota that does not allow them."""
        for quota in place.path():
            if quota.held_cu + cu > quota.cu_max + _TOLERANCE:
                return quota.name
        for quota in place.path():
            quota.held_cu += cu
        return ""

    def shares(
        self, projects: Sequence[str], held_cu: Mapping[str, float], total_cu: float
    ) -> dict[str, float]:
        """Return for each of ``projects`` what it holds over what it is entitled to.

        Entitled it is to its weight's part, level by level, among all that wait or hold something:
        below 1 it is owed more. Without any units there is nothing to be owed: 1.
        """
        _, leaves = self._places({**dict.fromkeys(projects, 0.0), **held_cu})
        active = {id(place) for name in {*projects, *held_cu} for place in leaves[name].path()}
        found = {}
        for project in projects:
            part = 1.0
            for place in leaves[project].path():
                if place.parent is not None:
                    siblings = (it for it in place.parent.children if id(it) in active)
                    part *= place.weight / math.fsum(it.weight for it in siblings)
            entitled = part * total_cu
            found[project] = leaves[project].held_cu / entitled if entitled > 0 else 1.0
        return found

    def limit_of(self, project: str) -> tuple[str, float]:
        """Return the tightest quota above a project and its units; no name when there is none."""
        _, leaves = self._places({project: 0.0})
        tightest = min(leaves[project].path(), key=lambda place: place.cu_max)
        return (tightest.name, tightest.cu_max) if tightest.cu_max < math.inf else ("", math.inf)
