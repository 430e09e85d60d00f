"""10,000 requests for a sandbox at once, on a node that holds 3,200.

Each must be answered within a bounded time: with a sandbox, or with an error that says why. Every
admitted one runs a command, then all are deleted, and nothing may be left: no cgroup, no process,
no entry in the node's books. The peer is the bare C program's rate of creations.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.density import SETTINGS, SMALL, answers, each
from benchmarks.peers import run_bare
from benchmarks.platform import Platform, import_three_layers, running_parts
from benchmarks.report import Options, Reach, Report, percentile
from dsec import DSecClient, DsecError, Sandbox

REQUESTS: Final = 10_000
HOLDS: Final = 3_200
BARE_COUNT: Final = 400
#: What a request is given, and the most that its answer may take beyond that.
TIMEOUT_S: Final = 60.0
BOUND_S: Final = 75.0
STUCK_AFTER_S: Final = 300.0
NOTHING_LEFT_S: Final = 30.0
_CGROUPS: Final = Path("/sys/fs/cgroup")


async def ask(client: DSecClient, layers: dict[str, Any]) -> tuple[float, Sandbox | BaseException]:
    """Return how long the answer took, and what it was."""
    started = time.perf_counter()
    answer: Sandbox | BaseException
    try:
        async with asyncio.timeout(STUCK_AFTER_S):
            answer = await client.create_sandbox(**layers, **SMALL, timeout_s=TIMEOUT_S)
    except (DsecError, TimeoutError) as error:
        answer = error
    return time.perf_counter() - started, answer


async def attempt(sandbox: Sandbox) -> bool:
    """Return whether a sandbox runs a command."""
    try:
        await answers(sandbox)
    except (DsecError, AssertionError):
        return False
    return True


def cgroups_of(node: str) -> int:
    """Return how many cgroups a node has, in all hierarchies."""
    tops = [top for pattern in ("", "*/") for top in _CGROUPS.glob(f"{pattern}dsec-{node}")]
    return sum(len(names) for top in tops for _, names, _ in os.walk(top))


def processes_of(node: str) -> int:
    """Return how many processes are in a node's cgroups."""
    tops = [top for pattern in ("", "*/") for top in _CGROUPS.glob(f"{pattern}dsec-{node}")]
    found: set[str] = set()
    for top in tops:
        for folder, _, _ in os.walk(top):
            with contextlib.suppress(OSError):
                found.update(Path(folder, "cgroup.procs").read_text(encoding="ascii").split())
    return len(found)


async def left_over(platform: Platform, cgroups: int, processes: int) -> dict[str, float]:
    """Return what is still there once the node has had time to let go."""
    deadline = time.monotonic() + NOTHING_LEFT_S
    while True:
        (node,) = (await platform.client.nodes()).nodes
        held = {
            "left_cgroups": max(cgroups_of(platform.node) - cgroups, 0),
            "left_processes": max(processes_of(platform.node) - processes, 0),
            "left_in_listing": len(await platform.client.list_sandboxes()),
            "left_in_ledger": node.heartbeat.allocated.sandboxes,
        }
        if not any(held.values()) or time.monotonic() > deadline:
            return {name: float(value) for name, value in held.items()}
        await asyncio.sleep(0.5)


def kinds(refusals: Sequence[BaseException]) -> Counter[str]:
    """Return how often each kind of refusal came."""
    return Counter(
        str(error.code) if isinstance(error, DsecError) else "no_answer" for error in refusals
    )


async def run(options: Options) -> Report:
    """Measure once."""
    count = options.count or REQUESTS
    bare = await run_bare(2, BARE_COUNT)
    settings = {**SETTINGS, "DSEC_SANDBOXD_SANDBOXES_MAX": str(HOLDS)}
    async with running_parts(settings) as platform:
        client = platform.client
        layers = await import_three_layers(client)
        async with await client.create_sandbox(**layers, **SMALL) as first:
            await answers(first)
        cgroups, processes = cgroups_of(platform.node), processes_of(platform.node)
        started = time.perf_counter()
        answered = await asyncio.gather(*(ask(client, layers) for _ in range(count)))
        took_s = time.perf_counter() - started
        admitted = [answer for _, answer in answered if isinstance(answer, Sandbox)]
        refused = [answer for _, answer in answered if isinstance(answer, BaseException)]
        ran = sum(await each(admitted, attempt))
        await each(admitted, Sandbox.delete)
        # Who was told that it may have been carried out finds it in the listing, and deletes it.
        untold = await client.sandboxes()
        await each(untold, Sandbox.delete)
        left = await left_over(platform, cgroups, processes)
    seconds = [seconds for seconds, _ in answered]
    by_kind = kinds(refused)
    stuck = sum(1 for one in seconds if one > BOUND_S) + by_kind["no_answer"]
    return Report(
        name="burst",
        figures={
            "requests": count,
            "admitted": len(admitted),
            "refused": len(refused),
            **{f"refused_{code}": number for code, number in sorted(by_kind.items())},
            "all_answered_s": took_s,
            "answer_p50_s": percentile(seconds, 0.5),
            "answer_p99_s": percentile(seconds, 0.99),
            "answer_max_s": max(seconds),
            "untold": len(untold),
            **left,
            "bare_rate_per_s": bare.rate_per_s,
        },
        ratios={"admission_rate_to_bare": len(admitted) / took_s / bare.rate_per_s},
        reach=(
            Reach.at_least("burst_answered", len(admitted) + len(refused), count),
            Reach.at_most("burst_answered_without_a_type", by_kind["no_answer"], 0),
            Reach.at_most("burst_answer_max_s", max(seconds), BOUND_S),
            Reach.at_most("burst_stuck", stuck, 0),
            Reach.at_least("burst_admitted_that_ran", ran, len(admitted)),
            Reach.at_most("burst_leaked", sum(left.values()), 0),
        ),
    )
