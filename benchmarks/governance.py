"""A change for 100,000 instances of an agent: kept in the registry and confirmed by their nodes.

From the request of the SDK to its answer, one at a time, through real NATS with accounts, a
scheduler in a process of its own, and 160 nodes in a third, each with a connection of its own and
the daemon's own code for keeping rules, bringing each instance under them and confirming that. What
the kernel would do is left out: the policies that take turns limit the rates of agent sockets, and
the permission is taken from sandboxes that have no network.

- ``push``: a policy for all instances of the agent: one document is written;
- ``revoke``: a permission taken from all of them;
- ``chosen``: a policy for each of them by its id: requests of 20,000, each document is written.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from benchmarks._governed_nodes import GovernedNodes, Plan
from benchmarks.report import Options, Reach, Report, percentile
from dsec import DSecClient
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.agent import AGENT_SOCKET, NETWORK_ACCESS, Governed

NODES: Final = 160
INSTANCES: Final = 625
TARGET_S: Final = 1.0
_AGENT: Final = "governed"
_READY_S: Final = 120.0

T = TypeVar("T")


async def run(options: Options) -> Report:
    """Measure each change in turns."""
    rounds = options.count or max(options.rounds, 3)
    async with nats_for_tests() as nats:
        scheduler = await _scheduler(nats)
        try:
            return await _measured(nats, rounds)
        finally:
            scheduler.terminate()
            await scheduler.wait()


async def _scheduler(nats: NatsForTests) -> asyncio.subprocess.Process:
    environment = {
        **os.environ,
        "DSEC_NATS_SERVERS": nats.server.url,
        "DSEC_NATS_CREDENTIALS": str(nats.auth.service_credentials("scheduler")),
        "DSEC_LOG_LEVEL": "error",
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dsec_scheduler", env=environment
    )


async def _measured(nats: NatsForTests, rounds: int) -> Report:
    names = [f"bench-{number:03}" for number in range(NODES)]
    plan = Plan(
        buses={name: nats.service_config("sandboxd", name) for name in names},
        agent=_AGENT,
        version="1",
        instances=INSTANCES,
    )
    credentials = str(nats.auth.project("default"))
    async with DSecClient([nats.server.url], credentials) as client:
        await _until(lambda: _registered(client))
        began = time.perf_counter()
        with GovernedNodes(plan):
            ids = await _until(lambda: _all_known(client))
            registered_s = time.perf_counter() - began
            taken: dict[str, list[float]] = {"push": [], "revoke": [], "chosen": []}
            for number in range(rounds):
                agents, limits = client.agents, {AGENT_SOCKET: float(number + 1)}
                for name, change in (
                    ("push", functools.partial(agents.push_policy, rate_limits=limits)),
                    ("revoke", functools.partial(agents.revoke, permissions=[NETWORK_ACCESS])),
                    (
                        "chosen",
                        functools.partial(agents.push_policy, rate_limits=limits, instances=ids),
                    ),
                ):
                    started = time.perf_counter()
                    governed = await change(_AGENT)
                    taken[name].append(time.perf_counter() - started)
                    _check(name, governed)
    figures = {f"{name}_p50_s": percentile(values, 0.5) for name, values in taken.items()}
    figures |= {f"{name}_max_s": max(values) for name, values in taken.items()}
    return Report(
        name="governance",
        figures={
            **figures,
            "instances": NODES * INSTANCES,
            "nodes": NODES,
            "all_registered_s": registered_s,
        },
        reach=(
            Reach.at_most("push_p50_s", figures["push_p50_s"], TARGET_S),
            Reach.at_most("revoke_p50_s", figures["revoke_p50_s"], TARGET_S),
        ),
    )


async def _registered(client: DSecClient) -> bool:
    await client.agents.register(_AGENT, "1", permissions=[NETWORK_ACCESS])
    return True


async def _all_known(client: DSecClient) -> list[str]:
    (version,) = (await client.agents.inspect(_AGENT)).versions
    if version.instances < NODES * INSTANCES:
        return []
    return [one.sandbox_id for one in await client.agents.instances(_AGENT)]


def _check(name: str, governed: Governed) -> None:
    assert governed.instances == NODES * INSTANCES, (name, governed)
    assert governed.nodes == NODES, (name, governed)
    assert not governed.silent_nodes, governed
    assert not governed.refused, governed


async def _until(ask: Callable[[], Awaitable[T]]) -> T:
    async with asyncio.timeout(_READY_S):
        while not (found := await ask()):  # noqa: ASYNC110  no event tells
            await asyncio.sleep(0.5)
    return found
