"""The solver: its answers fit, are near the best there is, and say what stands in the way."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from dsec_common.compute.model import (
    Card,
    CardMode,
    GpuDemand,
    MigInstance,
    ServiceClass,
    Slice,
    part_of_card,
    percent_for,
)
from dsec_common.compute.slice_pool import SlicePool
from dsec_scheduler.solver import solve
from dsec_scheduler.solving import objective
from dsec_scheduler.solving.problem import (
    Constraint,
    NodeCapacity,
    Problem,
    Solution,
    Waiting,
)

PRICES = {"A100": 1.8, "L40": 1.0}
_CU = {"A100": 100.0, "L40": 65.0}
_GIB = 1 << 30
_LONG_S = 1e6


def card(uuid: str, model: str = "A100", **changed: object) -> Card:
    fields = {"island": "nvlink", "memory_bytes": 80 * _GIB} | changed
    return Card(uuid=uuid, model=model, cu=_CU[model], **fields)  # type: ignore[arg-type]


def node(name: str, *models: str, held: tuple[Slice, ...] = ()) -> NodeCapacity:
    cards = tuple(card(f"{name}.{index}", model) for index, model in enumerate(models))
    return NodeCapacity(name, cards, held)


def wants(name: str, cu: float, **changed: object) -> Waiting:
    demand = {
        key: changed.pop(key)
        for key in ("max_cu", "memory_bytes", "count", "same_island", "models")
        if key in changed
    }
    demand.setdefault("max_cu", cu)
    return Waiting(name, GpuDemand(min_cu=cu, **demand), **changed)  # type: ignore[arg-type]


def solved(*requests: Waiting, nodes: tuple[NodeCapacity, ...], **more: object) -> Solution:
    return solve(Problem(requests, nodes, PRICES, **more), 30.0)  # type: ignore[arg-type]


def models_of(solution: Solution, nodes: tuple[NodeCapacity, ...]) -> dict[str, list[str]]:
    model = {one.uuid: one.model for node in nodes for one in node.cards}
    return {
        assignment.request_id: [model[slice_.card] for slice_ in assignment.slices]
        for assignment in solution.assignments
    }


# --- Where things go ------------------------------------------------------------------------------


def test_work_goes_to_the_cheapest_units_that_are_free() -> None:
    nodes = (node("a", "A100"), node("b", "L40"))
    assert models_of(solved(wants("x", 50), nodes=nodes), nodes) == {"x": ["L40"]}


def test_the_longer_work_gets_the_cheap_card() -> None:
    nodes = (node("a", "A100"), node("b", "L40"))
    requests = (wants("short", 60, duration_s=60), wants("long", 60, duration_s=7200))
    placed = models_of(solved(*requests, nodes=nodes), nodes)
    assert placed == {"short": ["A100"], "long": ["L40"]}


def test_what_no_cheap_card_can_do_alone_several_do_together() -> None:
    nodes = (node("a", "A100"), node("b", "L40", "L40"))
    solution = solved(wants("x", 80), nodes=nodes)
    (assignment,) = solution.assignments
    assert assignment.node == "b"
    assert [slice_.percent for slice_ in assignment.slices] == [62, 62]


def test_small_work_fills_a_card_that_is_in_use_and_leaves_the_others_whole() -> None:
    nodes = (node("a", "A100", "A100", "A100"),)
    solution = solved(*(wants(f"x{i}", 25) for i in range(4)), nodes=nodes)
    assert len({slice_.card for a in solution.assignments for slice_ in a.slices}) == 1


def test_cards_of_one_request_are_distinct_and_on_one_island() -> None:
    cards = tuple(card(f"c{i}", island="left" if i % 2 else "right") for i in range(6))
    solution = solved(wants("x", 150, count=3, same_island=True), nodes=(NodeCapacity("a", cards),))
    (assignment,) = solution.assignments
    used = {slice_.card for slice_ in assignment.slices}
    assert used in ({"c0", "c2", "c4"}, {"c1", "c3", "c5"})


def test_a_mig_instance_is_given_as_the_driver_made_it() -> None:
    instances = (MigInstance(uuid="m1", cu=14, memory_bytes=10 * _GIB),)
    cards = (card("c", mode=CardMode.MIG, mig=instances),)
    (assignment,) = solved(wants("x", 10), nodes=(NodeCapacity("a", cards),)).assignments
    assert assignment.slices[0].mig_uuid == "m1"


def test_a_request_that_can_use_more_gets_what_nobody_else_wants() -> None:
    solution = solved(wants("x", 10, max_cu=70), wants("y", 40), nodes=(node("a", "A100"),))
    given_cu = {a.request_id: a.slices[0].cu for a in solution.assignments}
    assert given_cu == {"x": 60, "y": 40}


def test_a_gang_is_placed_whole_or_not_at_all() -> None:
    nodes = (node("a", "A100"), node("b", "A100"))
    gang = tuple(wants(f"g{i}", 100, gang="g") for i in range(3))
    solution = solved(*gang, wants("alone", 100, priority=-5), nodes=nodes)
    assert [a.request_id for a in solution.assignments] == ["alone"]
    assert {one.constraint for one in solution.unplaced} == {Constraint.GANG}
    assert len(solved(*gang[:2], nodes=nodes).assignments) == 2


def test_the_urgent_goes_first_and_waiting_makes_urgent() -> None:
    nodes = (node("a", "A100"),)
    urgent = wants("urgent", 100, priority=1)
    assert _who(solved(wants("x", 100), urgent, nodes=nodes)) == ["urgent"]
    old = wants("old", 100, waited_s=1000)
    assert _who(solved(old, urgent, nodes=nodes)) == ["old"]
    owed = wants("owed", 100, share=0.1)
    assert _who(solved(urgent, owed, nodes=nodes)) == ["owed"]


def test_batch_waits_for_something_cheaper_until_its_patience_ends() -> None:
    nodes = (node("a", "A100"), node("b", "L40", held=(part_of_card(card("b.0", "L40"), 100),)))
    batch = {"service_class": ServiceClass.BATCH}
    solution = solved(wants("x", 50, **batch), nodes=nodes)
    assert solution.unplaced[0].constraint is Constraint.PRICE
    patience_s = objective.PATIENCE * objective.SLA_S[ServiceClass.BATCH]
    late = solved(wants("x", 50, waited_s=patience_s, **batch), nodes=nodes)
    assert _who(late) == ["x"]


def _who(solution: Solution) -> list[str]:
    return [assignment.request_id for assignment in solution.assignments]


# --- Saying no ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "constraint"),
    [
        (wants("x", math.nan), Constraint.INVALID),
        (wants("x", -1), Constraint.INVALID),
        (wants("x", 10, max_cu=5), Constraint.INVALID),
        (wants("x", 10, waited_s=math.nan), Constraint.INVALID),
        (wants("x", 10, duration_s=math.inf), Constraint.INVALID),
        (wants("x", 10, nodes=frozenset({"gone"})), Constraint.NODES),
        (wants("x", 10, models=("H100",)), Constraint.MODEL),
        (wants("x", 10, count=5), Constraint.COUNT),
        (wants("x", 10, count=3, same_island=True), Constraint.ISLAND),
        (wants("x", 1e8), Constraint.TOO_MANY_CU),
        (wants("x", 10, memory_bytes=1 << 50), Constraint.TOO_MUCH_MEMORY),
        (wants("x", 65, models=("L40",)), Constraint.CAPACITY),
    ],
)
def test_each_request_left_says_which_constraint_is_in_its_way(
    request_: Waiting, constraint: Constraint
) -> None:
    cards = tuple(card(f"a.{i}", island="left" if i < 2 else "right") for i in range(4))
    held = (part_of_card(card("b.0", "L40"), 10),)
    nodes = (NodeCapacity("a", cards), node("b", "L40", held=held))
    (left,) = solved(request_, nodes=nodes).unplaced
    assert left.constraint is constraint
    assert left.reason


def test_without_any_card_everybody_is_told_so() -> None:
    broken = NodeCapacity("a", (card("a.0", healthy=False),))
    (left,) = solved(wants("x", 10), nodes=(broken,)).unplaced
    assert left.constraint is Constraint.NO_CARDS


def test_nothing_to_place_is_no_trouble() -> None:
    assert solved(nodes=()) == Solution()


# --- All at once ----------------------------------------------------------------------------------


def mixture(seed: int, count: int, cards: int, per_node: int = 5) -> Problem:
    draw = random.Random(seed)  # noqa: S311  the same each time
    requests = tuple(
        wants(
            f"r{index}",
            draw.choice([5, 10, 20, 25, 30, 50, 65, 80, 100, 130, draw.uniform(1, 100)]),
            count=draw.choice([0, 0, 0, 1, 2]),
            memory_bytes=draw.choice([0, 0, 10 * _GIB]),
            service_class=draw.choice(list(ServiceClass)),
            priority=draw.choice([0, 0, 1]),
            duration_s=draw.choice([60, 600, 3600]),
            waited_s=draw.uniform(0, 5),
            gang=draw.choice(["", "", "", f"g{index // 4}"]),
        )
        for index in range(count)
    )
    models = [draw.choice(["A100", "L40"]) for _ in range(math.ceil(cards / per_node))]
    nodes = tuple(node(f"n{i}", *[model] * per_node) for i, model in enumerate(models))
    return Problem(requests, nodes, PRICES)


def assert_sound(problem: Problem, solution: Solution) -> None:
    """Everybody is told one thing, gangs are whole, and a broker would grant all slices."""
    told = [
        *(a.request_id for a in solution.assignments),
        *(u.request_id for u in solution.unplaced),
    ]
    assert Counter(told) == Counter(one.request_id for one in problem.waiting)
    pools = {node.node: SlicePool(node.cards, node.held) for node in problem.nodes}
    asked = {one.request_id: one for one in problem.waiting}
    gangs: dict[str, set[bool]] = {}
    placed = {a.request_id for a in solution.assignments}
    for one in problem.waiting:
        gangs.setdefault(one.gang or one.request_id, set()).add(one.request_id in placed)
    assert all(len(states) == 1 for states in gangs.values())
    for assignment in solution.assignments:
        demand = asked[assignment.request_id].demand
        pool = pools[assignment.node]
        assert pool.has(assignment.slices)
        pool.take(assignment.slices)
        assert sum(slice_.cu for slice_ in assignment.slices) >= demand.min_cu - 1e-6
        assert demand.count in {0, len({slice_.card for slice_ in assignment.slices})}
        assert sum(s.memory_bytes for s in assignment.slices) >= demand.memory_bytes


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 40), cards=st.integers(1, 15))
def test_what_is_assigned_fits_together_and_everybody_is_told(
    seed: int, count: int, cards: int
) -> None:
    problem = mixture(seed, count, cards)
    assert_sound(problem, solve(problem, 30.0))


def test_ten_thousand_waiting_are_answered_by_the_deadline() -> None:
    problem = mixture(7, 10_000, 35)
    solution = solve(problem, _LONG_S)
    assert solution.complete
    assert_sound(problem, solution)
    held = sum(slice_.cu for a in solution.assignments for slice_ in a.slices)
    assert held >= 0.97 * sum(one.cu for node in problem.nodes for one in node.cards)


def test_the_same_problem_has_the_same_solution() -> None:
    problem = mixture(3, 60, 20)
    assert solve(problem, _LONG_S) == solve(problem, _LONG_S)


def test_after_the_deadline_the_best_so_far_is_the_answer() -> None:
    problem = mixture(3, 60, 20)
    times = itertools.count()
    whole = solve(problem, _LONG_S)
    objectives = []
    for deadline in (0, 3, 10, 1000):
        solution = solve(problem, deadline, lambda: next(times))
        assert_sound(problem, solution)
        objectives.append(solution.objective)
    assert not solve(problem, 0.0).complete
    assert objectives == sorted(objectives, reverse=True)
    assert objectives[0] > whole.objective


def test_an_earlier_answer_is_where_the_search_begins() -> None:
    problem = mixture(3, 60, 20)
    before = solve(problem, _LONG_S)
    again = Problem(problem.waiting, problem.nodes, PRICES, previous=before.assignments)
    at_once = solve(again, 0.0)
    assert at_once.objective <= before.objective * (1 + 1e-9)
    assert_sound(again, at_once)


def test_large_problems_are_dealt_out_and_still_fill_the_cluster() -> None:
    problem = mixture(5, 1600, 800)
    solution = solve(problem, _LONG_S)
    assert_sound(problem, solution)


# --- What is free is given ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "waiting",
    [
        {},
        {"priority": -1000},
        {"service_class": ServiceClass.BATCH, "waited_s": 8000.0},
        {"service_class": ServiceClass.BATCH, "waited_s": 8000.0, "priority": -1000},
    ],
)
@pytest.mark.parametrize("mode", [CardMode.MPS, CardMode.WHOLE])
def test_a_little_work_of_little_weight_gets_a_card_that_nobody_else_wants(
    mode: CardMode, waiting: dict[str, object]
) -> None:
    nodes = (NodeCapacity("n", (card("n.0", mode=mode),)),)
    solution = solved(wants("small", 0.5, **waiting), nodes=nodes)
    assert [it.request_id for it in solution.assignments] == ["small"]


def test_a_little_work_takes_no_whole_cards_that_heavier_work_could_use() -> None:
    nodes = (NodeCapacity("n", (card("n.0", mode=CardMode.WHOLE),)),)
    solution = solved(wants("small", 5.0), wants("large", 90.0), nodes=nodes)
    assert [it.request_id for it in solution.assignments] == ["large"]


def test_cards_that_cost_nothing_are_given() -> None:
    free_of_charge = {"A100": 0.0, "L40": 0.0}
    problem = Problem((wants("r", 10.0),), (node("n", "A100", "L40"),), free_of_charge)
    assert len(solve(problem, _LONG_S).assignments) == 1


@pytest.mark.parametrize(
    "absurd",
    [
        {"cu": 1e308},
        {"cu": 1.0, "max_cu": 1e308},
        {"cu": 1.0, "memory_bytes": 2**63},
        {"cu": 1.0, "memory_bytes": 2**64 - 1},
        {"cu": 1.0, "models": ("A100",) * 17},
        {"cu": 1.0, "models": ("A" * 65,)},
    ],
)
def test_what_cannot_be_meant_harms_nobody_else(absurd: dict[str, float]) -> None:
    others = [wants(f"r{index}", 50.0) for index in range(2)]
    request = wants("absurd", absurd.pop("cu"), **absurd)
    solution = solved(request, *others, nodes=(node("n", "A100"),))
    assert [it.request_id for it in solution.assignments] == ["r0", "r1"]
    (left,) = solution.unplaced
    assert (left.request_id, left.constraint) == ("absurd", Constraint.INVALID)


# --- Beside an exact solver -----------------------------------------------------------------------


def exactly(problem: Problem) -> float:
    """Return the least objective there is, by OR-tools CP-SAT over all that could be done."""
    model = cp_model.CpModel()
    cost: list[tuple[float, cp_model.IntVar]] = []
    used: dict[str, list[tuple[int, cp_model.IntVar]]] = {}
    free = {
        one.uuid: SlicePool(n.cards, n.held).free()[one.uuid][0]
        for n in problem.nodes
        for one in n.cards
    }
    rank = {uuid: at for at, uuid in enumerate(sorted(free, key=lambda it: free[it]))}
    kinds = {(PRICES[one.model], one.cu) for n in problem.nodes for one in n.cards}
    dearest = max(PRICES[one.model] for n in problem.nodes for one in n.cards)
    cheapest = min(PRICES[one.model] for n in problem.nodes for one in n.cards)
    longest = max(objective.hours(one) for one in problem.waiting)
    constant = 0.0
    for number, request in enumerate(problem.waiting):
        hours, cu = objective.hours(request), request.demand.min_cu
        count = max(1, request.demand.count)
        most = max(
            price * (count * worth * percent / 100 if percent <= 100 else cu + worth)
            for price, worth in kinds
            for percent in [percent_for(cu / count, worth)]
        )
        waiting = (1 + objective.FRAGMENTATION) * most * hours
        waiting += objective.urgency(request) * cu * dearest * longest
        constant += waiting
        limit = objective.price_limit(request.service_class, request.waited_s, cheapest, dearest)
        chosen = []
        for place in problem.nodes:
            price = PRICES[place.cards[0].model]
            if price > limit:
                continue
            whole = place.cards[0].cu
            for count in range(1, len(place.cards) + 1):
                if request.demand.count not in {0, count}:
                    continue
                percent = percent_for(cu / count, whole)
                for some in itertools.combinations(place.cards, count):
                    money = price * whole * percent / 100 * hours
                    each = sum(
                        money
                        * (
                            1
                            + objective.FRAGMENTATION * (free[one.uuid] - percent) / 100
                            + 1e-6 * rank[one.uuid] / len(free)
                        )
                        for one in some
                    )
                    if percent > min(free[one.uuid] for one in some):
                        continue
                    taken = model.new_bool_var(f"{number}")
                    chosen.append(taken)
                    cost.append((each - waiting, taken))
                    for one in some:
                        used.setdefault(one.uuid, []).append((percent, taken))
        model.add_at_most_one(chosen)
    for uuid, users in used.items():
        model.add(sum(percent * taken for percent, taken in users) <= free[uuid])
    model.minimize(sum(round(saved * 1e6) * taken for saved, taken in cost))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.relative_gap_limit = 1e-6
    assert solver.solve(model) == cp_model.OPTIMAL
    return constant + solver.objective_value / 1e6


@pytest.mark.parametrize("seed", range(12))
def test_the_objective_is_within_two_per_cent_of_an_exact_solver(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311  the same each time
    requests = tuple(
        wants(
            f"r{index}",
            draw.choice([10, 20, 25, 33, 50, 65, 80, 100, draw.uniform(5, 120)]),
            count=draw.choice([0, 0, 0, 2]),
            priority=draw.choice([0, 0, 1]),
            service_class=draw.choice([ServiceClass.STANDARD, ServiceClass.BATCH]),
            duration_s=draw.choice([60, 600, 3600]),
            waited_s=draw.uniform(0, 60),
        )
        for index in range(draw.randrange(6, 14))
    )
    nodes = tuple(
        node(f"n{i}", *[draw.choice(["A100", "L40"])] * draw.choice([1, 2, 3])) for i in range(3)
    )
    problem = Problem(requests, nodes, PRICES)
    best = exactly(problem)
    found = solve(problem, _LONG_S).objective
    assert best - 1e-6 * best <= found <= 1.02 * best


# --- What CPU sandboxes pay -----------------------------------------------------------------------


def test_numpy_and_scipy_are_not_loaded_before_something_is_solved() -> None:
    code = "import sys, dsec_scheduler.solver; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
