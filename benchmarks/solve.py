"""One solve, cost matrix included, beside scipy's bare solver on the very same matrix.

1,000 requests of 20 to 25 CU, of every class, price limit and age, wait for 1,000 slices: 168 A100
with room for four each and 164 L40 with room for two, on 83 nodes, all free. The peer is
`linear_sum_assignment` alone on the matrix of all requests and slices, which it is given. Ours
makes that matrix, in the parts that it deals large problems out to, assigns, goes on until nobody
fits, and improves what it can. Beside it stands what dealing out costs: the objective in relation
to that of one assignment for all.
"""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from benchmarks.report import Options, Reach, Report, median
from dsec_common.compute.model import Card, GpuDemand, ServiceClass
from dsec_common.compute.units import DEFAULT_PRICES, DEFAULT_TABLE
from dsec_scheduler.solver import solve
from dsec_scheduler.solving.problem import NodeCapacity, Problem, Solution, Waiting

if TYPE_CHECKING:
    from dsec_scheduler.solving.grid import Floats

COUNT: Final = 1000
_CARDS_A_NODE: Final = 4
#: Nodes for each thousand requests.
_NODES: Final = {"A100": 42, "L40": 41}
RATIO_MAX: Final = 2.5


async def run(options: Options) -> Report:
    """Measure in turns; the first turn of both is not counted: it loads scipy."""
    problem = problem_of(options.count or COUNT)
    matrix, whole = _as_one(problem)
    ours, bare = [], []
    for turn in range(options.rounds + 1):
        start = time.perf_counter()
        solution = solve(problem, math.inf)
        solved = time.perf_counter()
        _bare(matrix)
        done = time.perf_counter()
        if turn:
            ours.append((solved - start) * 1e3)
            bare.append((done - solved) * 1e3)
    ratio = median(ours) / median(bare)
    return Report(
        name="solve",
        figures={
            "solve_ms": median(ours),
            "bare_ms": median(bare),
            "rows": float(matrix.shape[0]),
            "columns": float(matrix.shape[1]),
            "placed": float(len(solution.assignments)),
        },
        ratios={"solve_to_bare": ratio, "objective_to_one": solution.objective / whole.objective},
        reach=(Reach.at_most("solve_to_bare", ratio, RATIO_MAX),),
    )


def problem_of(count: int) -> Problem:
    """Return the same problem for the same count."""
    source = random.Random(count)  # noqa: S311  it must be repeatable
    nodes = tuple(
        _node(model, number)
        for model, thousand in _NODES.items()
        for number in range(max(1, thousand * count // COUNT))
    )
    waiting = tuple(
        Waiting(
            f"{number}",
            GpuDemand(min_cu=(cu := source.uniform(20, 25)), max_cu=cu),
            service_class=source.choice(list(ServiceClass)),
            priority=source.choice((0, 0, 0, 1)),
            waited_s=source.uniform(0, 30),
            duration_s=source.uniform(60, 7200),
        )
        for number in range(count)
    )
    return Problem(waiting, nodes, DEFAULT_PRICES)


def _node(model: str, number: int) -> NodeCapacity:
    name = f"{model}-{number}"
    cards = tuple(
        Card(uuid=f"{name}.{index}", model=model, cu=DEFAULT_TABLE[model])
        for index in range(_CARDS_A_NODE)
    )
    return NodeCapacity(name, cards)


def _as_one(problem: Problem) -> tuple[Floats, Solution]:
    """Return the first assignment's matrix when nothing is dealt out, and the answer."""
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415  as late as the solver

    from dsec_scheduler.solving import rounds  # noqa: PLC0415  it loads scipy

    seen: list[Floats] = []

    def noting(matrix: Floats) -> Any:
        seen.append(matrix.copy())
        return assign(matrix)

    assign = linear_sum_assignment
    with (
        mock.patch.object(rounds, "linear_sum_assignment", noting),
        mock.patch.object(rounds, "_BLOCK", 1 << 30),
    ):
        solution = solve(problem, math.inf)
    return seen[0], solution


def _bare(matrix: Floats) -> None:
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415  as above

    linear_sum_assignment(matrix)
