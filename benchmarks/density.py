"""3,200 sandboxes alive on one node, all of them answering a command: their memory, and idle CPU.

Memory is all told: what the machine has available less (MemAvailable) from before the first to
after all have answered, the kernel's own memory and the growth of every process included, over
their number. Idle CPU is that of all the platform's processes, NATS and Kafka too, and of the
sandboxes themselves while nobody asks for anything. The peer is the bare C program with as many.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks.peers import run_bare_alive
from benchmarks.platform import Platform, import_three_layers, running_parts
from benchmarks.report import Options, Reach, Report
from dsec import Sandbox

ALIVE: Final = 3200
IN_FLIGHT: Final = 48
IDLE_S: Final = 30.0
SETTLE_S: Final = 5.0
SMALL: Final[dict[str, Any]] = {"cpus": 0.02, "memory_bytes": 32 << 20, "disk_bytes": 8 << 20}
SETTINGS: Final = {"DSEC_SANDBOXD_MEMORY_OVERSUBSCRIPTION": "16"}
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_MIB: Final = 1024 * 1024

T = TypeVar("T")
R = TypeVar("R")


def memory_of_machine() -> dict[str, int]:
    """Return ``/proc/meminfo`` in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def resident_bytes(pid: int) -> int:
    """Return the private memory of a process, which nobody else has."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return sum(
        int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon:")
    )


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, all threads."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS_PER_S


def wake_ups(pid: int) -> int:
    """Return how often threads of a process have waited for something and gone on."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            text = (thread / "status").read_text(encoding="ascii")
            total += int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


def sandboxes_cpu_seconds(node: str) -> float:
    """Return the processor time of all of a node's sandboxes."""
    v1 = Path(f"/sys/fs/cgroup/cpu,cpuacct/dsec-{node}/cpuacct.usage")
    for path in (v1, Path(f"/sys/fs/cgroup/cpu/dsec-{node}/cpuacct.usage")):
        if path.exists():
            return int(path.read_text(encoding="ascii")) / 1e9
    v2 = Path(f"/sys/fs/cgroup/dsec-{node}/cpu.stat")
    if v2.exists():
        return int(v2.read_text(encoding="ascii").split()[1]) / 1e6
    return 0.0


async def each(
    things: Iterable[T], act: Callable[[T], Awaitable[R]], *, at_once: int = IN_FLIGHT
) -> list[R]:
    """Do one thing to each, some at once; return the results in order."""
    gate = asyncio.Semaphore(at_once)

    async def one(thing: T) -> R:
        async with gate:
            return await act(thing)

    return await asyncio.gather(*map(one, things))


async def answers(sandbox: Sandbox) -> None:
    """Have a sandbox run a command."""
    result = await sandbox.exec(["/bin/true"])
    assert result.exit_code == 0, result


def processor_time(platform: Platform) -> dict[str, float]:
    """Return the processor time so far of each part, and of the sandboxes together."""
    parts = {name: cpu_seconds(pid) for name, pid in platform.processes().items()}
    return {**parts, "sandboxes": sandboxes_cpu_seconds(platform.node)}


def descriptors(pid: int) -> int:
    """Return how many files a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def run(options: Options) -> Report:
    """Measure once: so many sandboxes are their own statistics."""
    count = options.count or ALIVE
    bare = await run_bare_alive(count)
    async with running_parts(SETTINGS) as platform:
        client = platform.client
        layers = await import_three_layers(client)
        async with await client.create_sandbox(**layers, **SMALL) as first:
            await answers(first)
        await asyncio.sleep(SETTLE_S)
        memory = memory_of_machine()
        before = {name: resident_bytes(pid) for name, pid in platform.processes().items()}

        started = time.perf_counter()
        alive = await each(range(count), lambda _: client.create_sandbox(**layers, **SMALL))
        created_s = time.perf_counter() - started
        started = time.perf_counter()
        await each(alive, answers)
        answered_s = time.perf_counter() - started
        await asyncio.sleep(SETTLE_S)

        now = memory_of_machine()
        processes = platform.processes()
        each_bytes = (memory["MemAvailable"] - now["MemAvailable"]) / count
        parts = {
            f"{name}_growth_kib_each": (resident_bytes(pid) - before[name]) / count / 1024
            for name, pid in processes.items()
            if resident_bytes(pid) - before[name] > count * 64
        }
        kernel = {
            f"kernel_{name.lower()}_kib_each": (now[name] - memory[name]) / count / 1024
            for name in ("Slab", "PageTables", "KernelStack", "Percpu", "AnonPages", "Shmem")
        }
        open_files = {name: descriptors(processes[name]) for name in ("sandboxd", "spawner")}

        used, woken = processor_time(platform), {n: wake_ups(pid) for n, pid in processes.items()}
        started = time.perf_counter()
        await asyncio.sleep(IDLE_S)
        idle_s = time.perf_counter() - started
        wakes = {n: (wake_ups(pid) - woken[n]) / idle_s for n, pid in processes.items()}
        percent = {
            name: 100 * (seconds - used.get(name, 0.0)) / idle_s
            for name, seconds in processor_time(platform).items()
        }
        started = time.perf_counter()
        await each(alive, answers)
        again_s = time.perf_counter() - started
        await each(alive, Sandbox.delete)
    idle_percent = sum(percent.values())
    return Report(
        name="density",
        figures={
            "alive": count,
            "memory_mib_each": each_bytes / _MIB,
            "bare_memory_mib_each": bare.bytes_each / _MIB,
            **parts,
            **kernel,
            "idle_cpu_percent_of_one_core": idle_percent,
            **{f"idle_{name}_percent": value for name, value in percent.items()},
            **{f"idle_{name}_wake_ups_per_s": value for name, value in wakes.items()},
            **{f"{name}_descriptors_each": value / count for name, value in open_files.items()},
            "create_rate_per_s": count / created_s,
            "first_exec_rate_per_s": count / answered_s,
            "exec_rate_after_idle_per_s": count / again_s,
        },
        ratios={"memory_to_bare": each_bytes / bare.bytes_each},
        reach=(
            Reach.at_least("density_alive", len(alive), ALIVE if not options.count else count),
            Reach.at_most("density_memory_mib_each", each_bytes / _MIB, 1.0),
            Reach.at_most("density_idle_cpu_percent_of_one_core", idle_percent, 5.0),
        ),
    )
