"""The solver's door: who waits and what is free in, assignments out.

``dsec_scheduler.solving`` needs numpy and scipy, which take a good part of a second to import: they
are loaded by the first round that has something to solve, never by a scheduler of CPU sandboxes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dsec_scheduler.solving.problem import Problem, Solution

__all__ = ["Problem", "Solution", "solve"]


def solve(
    problem: Problem, deadline_s: float, clock: Callable[[], float] = time.monotonic
) -> Solution:
    """Return the cheapest assignment that was found within ``deadline_s`` from now by ``clock``.

    Pure but for the clock: the same problem has the same solution as long as it is ``complete``.
    The assignments fit beside each other and beside what is held. A problem without any solution
    is no error: each request left says why.

    The caller may run it in a thread: most of its time it spends in numpy and scipy.
    """
    from dsec_scheduler.solving.search import search  # noqa: PLC0415  see above

    until = clock() + deadline_s
    return search(problem, lambda: max(0.0, until - clock()))
