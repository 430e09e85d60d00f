"""One solve from end to end: what was before, rounds, gangs, improvement, growth, reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dsec_common.compute.model import WHOLE_PERCENT, CardMode, memory_of, percent_for
from dsec_scheduler.solving.exact import cheapest
from dsec_scheduler.solving.explain import Explainer, all_without_cards, invalid
from dsec_scheduler.solving.grid import Integers, Option, Places
from dsec_scheduler.solving.improve import Improver
from dsec_scheduler.solving.matrix import Matrix
from dsec_scheduler.solving.problem import (
    Assignment,
    Constraint,
    NodeCapacity,
    Problem,
    Solution,
    Unplaced,
    Waiting,
)
from dsec_scheduler.solving.rounds import Placed, Rounds


def search(problem: Problem, left_s: Callable[[], float]) -> Solution:
    """Return the best answer found until ``left_s`` is 0."""
    flawed = {request.request_id: why for request in problem.waiting if (why := invalid(request))}
    flawed |= _gangs_of_flawed(problem, flawed)
    sound = [request for request in problem.waiting if request.request_id not in flawed]
    places = Places(problem.nodes, problem.prices)
    if not sound or not len(places):
        return Solution(unplaced=_in_order(problem, [*flawed.values(), *all_without_cards(sound)]))
    run = _Search(problem, sound, places, left_s)
    complete = run.place()
    return run.solution(flawed, complete=complete)


class _Search:
    """The state of one solve."""

    def __init__(
        self,
        problem: Problem,
        requests: Sequence[Waiting],
        places: Places,
        left_s: Callable[[], float],
    ) -> None:
        self._problem = problem
        self._requests = requests
        self._places = places
        self._matrix = Matrix(requests, places)
        self._gangs = _gangs(requests)
        self._left_s = left_s
        self._rounds = Rounds(self._matrix, places, self._expired)
        self._improver = Improver(self._matrix, places, self._gangs, self._expired)
        self._placed: Placed = {}
        self._incomplete: set[str] = set()

    def place(self) -> bool:
        """Place whom there is room for; return whether the search came to its end in time."""
        self._start_from(self._problem.previous)
        in_time = self._fill(np.arange(len(self._requests)))
        in_time = self._make_gangs_whole() and in_time
        if self._improver.is_good(self._placed):
            return in_time
        in_time = in_time and self._improver.improve(self._placed)
        return self._improver.is_good(self._placed) or (self._solve_exactly() and in_time)

    def _expired(self) -> bool:
        return self._left_s() <= 0

    def _solve_exactly(self) -> bool:
        """Take the exact answer to a small problem if it is cheaper; return whether in time."""
        best = dict(self._placed)
        self._take_back(list(best))
        exact = cheapest(self._matrix, self._places, self._gangs, self._left_s())
        if exact is not None and self._cost(exact) < self._cost(best):
            best = exact
        for option in best.values():
            self._places.take(option)
        self._placed = best
        return not self._expired()

    def _cost(self, placed: Placed) -> float:
        """Return the objective."""
        left = [row for row in range(len(self._requests)) if row not in placed]
        waiting = math.fsum(self._matrix.waiting[left])
        return waiting + math.fsum(option.cost for option in placed.values())

    def _start_from(self, previous: Sequence[Assignment]) -> None:
        """Take over what still fits of an earlier answer."""
        row_of = {request.request_id: row for row, request in enumerate(self._requests)}
        for assignment in previous:
            row = row_of.get(assignment.request_id)
            found = self._places.find(assignment.slices)
            if row is None or not found or row in self._placed:
                continue
            if (option := self._still(row, found)) is not None:
                self._places.take(option)
                self._placed[row] = option

    def _still(self, row: int, places: tuple[int, ...]) -> Option | None:
        """Return the row's option of these places, if it still is one and they are free."""
        together = len({int(group) for group in self._matrix.groups(row)[list(places)]}) == 1
        if not together or len(places) not in self._matrix.all_counts(row):
            return None
        room = self._matrix.room(row, len(places))
        return self._matrix.option(row, places) if room[list(places)].all() else None

    def _fill(self, rows: Integers) -> bool:
        waiting = rows[[row not in self._placed for row in rows.tolist()]]
        return self._rounds.place(waiting, self._placed)

    def _make_gangs_whole(self) -> bool:
        """Take back gangs that are there in part; try each again alone, the most urgent first."""
        broken = [
            name
            for name, rows in self._gangs.items()
            if 0 < sum(row in self._placed for row in rows) < len(rows)
        ]
        if not broken:
            return True
        for name in broken:
            self._take_back(self._gangs[name])
        in_time = True
        weight = self._matrix.weight
        for name in sorted(broken, key=lambda name: -max(weight[row] for row in self._gangs[name])):
            rows = self._gangs[name]
            in_time = self._fill(np.array(rows)) and in_time
            if not all(row in self._placed for row in rows):
                self._take_back(rows)
                self._incomplete.add(name)
        in_gangs = {row for rows in self._gangs.values() for row in rows}
        others = [row for row in range(len(self._requests)) if row not in in_gangs]
        return self._fill(np.array(others, dtype=np.int64)) and in_time

    def _take_back(self, rows: Sequence[int]) -> None:
        for row in rows:
            if (option := self._placed.pop(row, None)) is not None:
                self._places.give(option)

    # --- The answer ---------------------------------------------------------------------------

    def solution(self, flawed: Mapping[str, Unplaced], *, complete: bool) -> Solution:
        """Return the answer as it stands, beside the requests that make no sense."""
        placed = self._placed
        left = [row for row in range(len(self._requests)) if row not in placed]
        objective = self._cost(placed)
        why = self._why(left)
        self._grow()
        assignments = tuple(self._assignment(row, placed[row]) for row in sorted(placed))
        unplaced = _in_order(self._problem, [*flawed.values(), *why])
        return Solution(assignments, unplaced, objective, complete)

    def _why(self, left: Sequence[int]) -> list[Unplaced]:
        if not left:
            return []
        explainer = Explainer(self._matrix, self._places, self._emptied, self._incomplete)
        return [explainer.why(row) for row in left]

    def _emptied(self) -> Places:
        nodes = [NodeCapacity(node.node, node.cards) for node in self._problem.nodes]
        return Places(nodes, self._problem.prices)

    def _grow(self) -> None:
        """Give what is free on their cards to those that can use more, the most urgent first."""
        growing = [
            row
            for row in self._placed
            if self._requests[row].demand.max_cu > self._requests[row].demand.min_cu
        ]
        for row in sorted(growing, key=lambda row: (-self._matrix.weight[row], row)):
            option = self._placed[row]
            self._places.give(option)
            grown = self._grown(row, option)
            self._places.take(grown)
            self._placed[row] = grown

    def _grown(self, row: int, option: Option) -> Option:
        demand, some = self._requests[row].demand, list(option.places)
        kind = self._places.kinds[self._places.kind[some[0]]]
        if kind.mode is not CardMode.MPS:
            return option
        most = min(percent_for(demand.max_cu / len(some), kind.cu), WHOLE_PERCENT)
        percent = min(most, int(self._places.free[some].min()))
        memory_bytes = option.memory_bytes
        if not demand.memory_bytes:
            memory_free = int(self._places.memory[some].min())
            while percent > option.percent and memory_of(percent, kind.memory_bytes) > memory_free:
                percent -= 1
            memory_bytes = memory_of(percent, kind.memory_bytes)
        return option._replace(percent=percent, memory_bytes=memory_bytes)

    def _assignment(self, row: int, option: Option) -> Assignment:
        places = self._places
        request_id = self._requests[row].request_id
        return Assignment(request_id, places.node_of(option), places.cut(option), option.cost)


def _gangs(requests: Sequence[Waiting]) -> dict[str, list[int]]:
    gangs: dict[str, list[int]] = {}
    for row, request in enumerate(requests):
        if request.gang:
            gangs.setdefault(request.gang, []).append(row)
    return {name: rows for name, rows in gangs.items() if len(rows) > 1}


def _gangs_of_flawed(problem: Problem, flawed: Mapping[str, Unplaced]) -> dict[str, Unplaced]:
    """Return why the sound members of gangs cannot be placed that have one that is not."""
    of_flawed = {
        request.gang: request.request_id
        for request in problem.waiting
        if request.gang and request.request_id in flawed
    }
    return {
        request.request_id: Unplaced(
            request.request_id,
            Constraint.GANG,
            f"{of_flawed[request.gang]} of its gang {request.gang} can never be placed",
        )
        for request in problem.waiting
        if request.gang in of_flawed and request.request_id not in flawed
    }


def _in_order(problem: Problem, unplaced: Sequence[Unplaced]) -> tuple[Unplaced, ...]:
    by_id = {one.request_id: one for one in unplaced}
    return tuple(
        by_id[request.request_id] for request in problem.waiting if request.request_id in by_id
    )
