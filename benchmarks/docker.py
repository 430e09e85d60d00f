"""One command in a container of its own, beside ``docker run`` of the same command and files.

Ours is create, exec and delete, each a request of the SDK; the peer is ``docker run --rm --network
none``, under an engine of this benchmark's own. Both begin with the same root file system, already
there, and take turns: one at a time, and four at once. Where no engine can run, nothing is measured
and the report says why.
"""

from __future__ import annotations

import asyncio
import sys
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.create import create_and_exec
from benchmarks.platform import running_platform
from benchmarks.report import Options, Reach, Report, median, percentile
from dsec.rootfs import build_host_rootfs

if TYPE_CHECKING:
    from docker_engine import DockerEngine

AT_ONCE: Final = 4
WARM_UP: Final = 3
IMAGE: Final = "dsec-benchmark:shell"


async def rate(act: Callable[[], Awaitable[object]], count: int) -> float:
    """Return how many a second, with four at once."""
    left = count

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await act()

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return count / (time.perf_counter() - started)


def import_image(engine: DockerEngine, tree: Path) -> None:
    """Give the engine the root file system."""
    archive = tree.with_suffix(".tar")
    with tarfile.open(archive, "w") as packed:
        packed.add(tree, arcname=".")
    engine.docker("import", str(archive), IMAGE)


async def run(options: Options) -> Report:
    """Measure ours and the peer in turns."""
    # The engine is the one that the tests of containers use.
    framework = str(Path(__file__).parents[1] / "tests" / "framework")
    if framework not in sys.path:
        sys.path.append(framework)
    from docker_engine import (  # noqa: PLC0415  see above
        DockerEngine,
        EngineUnavailableError,
        find_programs,
    )

    try:
        find_programs()
        engine = DockerEngine()
        await asyncio.to_thread(engine.start)
    except EngineUnavailableError as error:
        return Report("docker", {}, skipped=str(error))
    try:
        return await _measure(engine, options)
    finally:
        await asyncio.to_thread(engine.stop)


async def _measure(engine: DockerEngine, options: Options) -> Report:
    count = options.count or 10
    ours: list[float] = []
    theirs: list[float] = []
    our_rates: list[float] = []
    their_rates: list[float] = []

    async def docker_run() -> float:
        started = time.perf_counter()
        await asyncio.to_thread(
            engine.docker, "run", "--rm", "--network", "none", IMAGE, "/bin/true"
        )
        return time.perf_counter() - started

    with tempfile.TemporaryDirectory(prefix="dsec-bench-docker-") as scratch:
        tree = Path(scratch) / "base"
        build_host_rootfs(tree, python=False)
        await asyncio.to_thread(import_image, engine, tree)
        async with running_platform() as client:
            await client.layers.import_directory(tree, kind="base", name="shell", version="1")
            layers: dict[str, Any] = {"base": "shell@1"}

            async def dsec_run() -> float:
                started = time.perf_counter()
                await create_and_exec(client, layers)
                return time.perf_counter() - started

            for _ in range(WARM_UP):
                await dsec_run()
                await docker_run()
            for _ in range(options.rounds):
                ours += [await dsec_run() for _ in range(10 * count)]
                theirs += [await docker_run() for _ in range(count)]
                our_rates.append(await rate(dsec_run, 20 * count))
                their_rates.append(await rate(docker_run, 2 * count))
    ours_ms, theirs_ms = 1000 * percentile(ours, 0.5), 1000 * percentile(theirs, 0.5)
    our_rate, their_rate = median(our_rates), median(their_rates)
    return Report(
        name="docker",
        figures={
            "create_exec_delete_p50_ms": ours_ms,
            "create_exec_delete_p99_ms": 1000 * percentile(ours, 0.99),
            "docker_run_p50_ms": theirs_ms,
            "docker_run_p99_ms": 1000 * percentile(theirs, 0.99),
            "rate_at_4_per_s": our_rate,
            "docker_rate_at_4_per_s": their_rate,
            "samples": len(ours),
        },
        ratios={"docker_to_ours": theirs_ms / ours_ms, "rate_to_docker": our_rate / their_rate},
        reach=(Reach.at_least("docker_run_to_ours", theirs_ms / ours_ms, 20.0),),
    )
