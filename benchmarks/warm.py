"""Hand-out from a warm pool to the first successful exec, through NATS, the scheduler and the node.

One at a time, in two ways:

- from a pool that is held full: before each hand-out the node says that it is, which is not part of
  the time; that takes until the one before was replaced, some 30 to 40 ms. Once as two requests,
  once with the command inside the create request, once with other limits than those that wait have,
  and as a function call. Beside it in the same run, round by round: the same sandbox made cold;
- a burst: as many as wait, each as soon as the one before has run its command, while the node
  refills the pool beside it. They are deleted afterwards.

The bare C program's creation says how fast the machine is.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.peers import run_bare
from benchmarks.platform import import_three_layers, running_platform
from benchmarks.report import Options, Reach, Report, median, percentile
from dsec import DSecClient, Limits

POOL = 20
WARM_UP = 20
BARE_COUNT = 200
TRUE = ("/bin/true",)


async def until_full(client: DSecClient) -> None:
    """Return when as many wait as are wanted."""
    async with asyncio.timeout(60):
        while sum(pool.ready for pool in await client.pools.list()) < POOL:  # noqa: ASYNC110  no event tells
            await asyncio.sleep(0.002)


async def hand_out(client: DSecClient, layers: dict[str, Any], warm: str, **given: Any) -> float:
    """Create a sandbox, run ``true`` in it, delete it; return seconds from create to exec's end."""
    started = time.perf_counter()
    sandbox = await client.create_sandbox(**layers, warm=warm, **given)
    result = await sandbox.exec(TRUE)
    elapsed = time.perf_counter() - started
    assert result.exit_code == 0, result
    assert sandbox.created is not None
    assert sandbox.created.warm == (warm == "require")
    await sandbox.delete()
    return elapsed


async def hand_out_with_command(client: DSecClient, layers: dict[str, Any], warm: str) -> float:
    """Do the same with ``true`` inside the create request."""
    started = time.perf_counter()
    sandbox = await client.create_sandbox(**layers, warm=warm, command=TRUE)
    elapsed = time.perf_counter() - started
    assert sandbox.first_result is not None
    assert sandbox.first_result.exit_code == 0, sandbox.first_result
    await sandbox.delete()
    return elapsed


async def burst(client: DSecClient, layers: dict[str, Any]) -> list[float]:
    """Empty a full pool, one sandbox after the other; return what :func:`hand_out` does of each."""
    await until_full(client)
    taken: list[float] = []
    sandboxes = []
    for _ in range(POOL):
        started = time.perf_counter()
        sandbox = await client.create_sandbox(**layers, warm="require")
        result = await sandbox.exec(TRUE)
        taken.append(time.perf_counter() - started)
        assert result.exit_code == 0, result
        sandboxes.append(sandbox)
    for sandbox in sandboxes:
        await sandbox.delete()
    return taken


async def call(client: DSecClient, layers: dict[str, Any]) -> float:
    """Call a function that does nothing."""
    started = time.perf_counter()
    called = await client.call(command=TRUE, warm="require", **layers)
    elapsed = time.perf_counter() - started
    assert called.ok, called
    return elapsed


async def run(options: Options) -> Report:
    """Measure warm and cold in turns."""
    count = options.count or 200
    warm: list[float] = []
    joined: list[float] = []
    resized: list[float] = []
    calls: list[float] = []
    cold: list[float] = []
    cold_joined: list[float] = []
    bursts: list[float] = []
    bare: list[float] = []
    async with running_platform() as client:
        layers = await import_three_layers(client)
        await client.pools.set(**layers, size=POOL)
        for index in range(options.rounds * count + WARM_UP):
            await until_full(client)
            taken = await hand_out(client, layers, "require")
            if index < WARM_UP:
                continue
            warm.append(taken)
            await until_full(client)
            joined.append(await hand_out_with_command(client, layers, "require"))
            await until_full(client)
            calls.append(await call(client, layers))
            await until_full(client)
            limits = Limits(memory_bytes=128 << 20, disk_bytes=64 << 20, pids=64)
            resized.append(await hand_out(client, layers, "require", limits=limits))
            await until_full(client)
            cold.append(await hand_out(client, layers, "bypass"))
            cold_joined.append(await hand_out_with_command(client, layers, "bypass"))
            if len(warm) % POOL == 1:
                bursts += await burst(client, layers)
            if len(warm) % count == 1:
                bare.append((await run_bare(1, BARE_COUNT)).create_to_first_exec_p50_ms)
    figures = {
        f"{name}_p{int(100 * share)}_ms": 1000 * percentile(values, share)
        for name, values in (
            ("warm_to_first_exec", warm),
            ("burst_to_first_exec", bursts),
            ("warm_with_command", joined),
            ("warm_with_other_limits", resized),
            ("call", calls),
            ("cold_to_first_exec", cold),
            ("cold_with_command", cold_joined),
        )
        for share in (0.5, 0.99)
    }
    p50 = figures["warm_to_first_exec_p50_ms"]
    burst_p50 = figures["burst_to_first_exec_p50_ms"]
    return Report(
        name="warm",
        figures={
            **figures,
            "bare_create_to_first_exec_p50_ms": median(bare),
            "pool": POOL,
            "samples": len(warm),
        },
        ratios={
            "warm_to_bare_create": p50 / median(bare),
            "warm_to_cold": p50 / figures["cold_to_first_exec_p50_ms"],
            "warm_to_cold_with_command": figures["warm_with_command_p50_ms"]
            / figures["cold_with_command_p50_ms"],
        },
        reach=(
            Reach.at_most("warm_to_first_exec_p50_ms", p50, 3.0),
            Reach.at_most("burst_to_first_exec_p50_ms", burst_p50, 3.0),
        ),
    )
