"""Many environments of one spec: seed after seed, some at once, each made once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dsec.factory.building import Hook, build_environment, pinned
from dsec.factory.spec import FactorySpec, item_of
from dsec.factory.state import Failure, Outcome, State
from dsec_common.errors import DsecError

if TYPE_CHECKING:
    from dsec.client import DSecClient

Step = Callable[[int, str], None]
"""Told a seed and the step that begins."""


async def build_many(
    client: DSecClient,
    spec: FactorySpec,
    directory: Path,
    seeds: Iterable[int],
    state: State,
    *,
    parallel: int = 1,
    retry: bool = False,
    hook: Hook | None = None,
    step: Step = lambda *_: None,
    done: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Make an environment for each seed, and return what became of them, in the seeds' order.

    One that fails holds up no other. After a kill the same call goes on: what is published is not
    made again, what was being made is removed and made anew.

    Args:
        client: connected.
        spec: what is made.
        directory: that its paths are below.
        seeds: each once.
        state: entered.
        parallel: how many at once.
        retry: also those that failed for good with the same content.
        hook: see :func:`dsec.factory.building.build_environment`.
        step: told what begins.
        done: told each outcome when it is recorded.

    Raises:
        OSError: when this machine's disk refuses.
    """
    waiting = iter(list(dict.fromkeys(seeds)))
    outcomes: list[Outcome] = []

    async def one(seed: int) -> Outcome:
        scratch = state.scratch(seed)
        key = ""
        try:
            item = await item_of(spec, directory, seed, scratch)
            item = await pinned(client, item)
            key = item.key
            known = state.outcome(seed)
            if known and known.key == key and known.failed_for_good and not retry:
                return known
            made = await build_environment(
                client,
                item,
                scratch,
                run=state.run,
                hook=hook,
                begin=lambda name: step(seed, name),
            )
            outcome = Outcome(seed=seed, key=key, environment=made)
        except DsecError as error:
            outcome = Outcome(seed=seed, key=key, failure=Failure.of(error))
        state.record(outcome)
        return outcome

    async def work(mine: Iterator[int]) -> None:
        for seed in mine:
            outcome = await one(seed)
            await asyncio.to_thread(shutil.rmtree, state.scratch(seed), ignore_errors=True)
            outcomes.append(outcome)
            done(outcome)

    workers = [asyncio.ensure_future(work(waiting)) for _ in range(max(parallel, 1))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return sorted(outcomes, key=lambda outcome: outcome.seed)
