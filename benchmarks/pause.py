"""Pausing and resuming a sandbox in which a program sleeps, through NATS, one at a time.

The peer is the kernel's own freezing and thawing of a cgroup with as many sleeping processes, by
plain writes to its files from this process. Memory is given back later and is in neither.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.platform import import_three_layers, running_platform
from benchmarks.report import Options, Reach, Report, percentile
from dsec import Sandbox, SandboxState
from dsec_sandboxd.kernel.cgroups_layout import detect_layout

WARM_UP = 20
PROCESSES = 2
"""PID 1 and what sleeps."""


@contextlib.contextmanager
def bare_cgroup() -> Iterator[Path]:
    """Yield a cgroup of the v2 tree in which as many processes sleep as in the sandbox."""
    directory = detect_layout().unified / f"dsec-bench-pause-{os.getpid()}"
    directory.mkdir()
    processes = []
    try:
        for _ in range(PROCESSES):
            process = subprocess.Popen(["sleep", "600"])
            processes.append(process)
            (directory / "cgroup.procs").write_text(str(process.pid))
        yield directory
    finally:
        (directory / "cgroup.freeze").write_text("0")
        for process in processes:
            process.kill()
            process.wait()
        while True:  # a cgroup is busy for a moment after its last process
            try:
                directory.rmdir()
            except OSError:
                time.sleep(0.001)
            else:
                break


def freeze_and_thaw(directory: Path) -> tuple[float, float]:
    """Return the seconds of each, the first until the kernel says that all stand still."""
    freeze = os.open(directory / "cgroup.freeze", os.O_WRONLY)
    events = os.open(directory / "cgroup.events", os.O_RDONLY)
    try:
        started = time.perf_counter()
        os.write(freeze, b"1")
        while b"frozen 1" not in os.pread(events, 256, 0):
            pass
        frozen = time.perf_counter()
        os.write(freeze, b"0")
        return frozen - started, time.perf_counter() - frozen
    finally:
        os.close(freeze)
        os.close(events)


async def pause_and_resume(sandbox: Sandbox) -> tuple[float, float]:
    """Return the seconds of each request."""
    started = time.perf_counter()
    info = await sandbox.pause()
    paused = time.perf_counter()
    assert info.state is SandboxState.PAUSED, info
    info = await sandbox.resume()
    resumed = time.perf_counter()
    assert info.state is SandboxState.RUNNING, info
    return paused - started, resumed - paused


async def run(options: Options) -> Report:
    """Measure ours and the peer in turns."""
    count = options.count or 200
    ours: list[tuple[float, float]] = []
    bare: list[tuple[float, float]] = []
    async with running_platform() as client:
        layers = await import_three_layers(client)
        async with await client.create_sandbox(**layers) as sandbox:
            await sandbox.exec("sleep 600 >/dev/null 2>&1 &", check=True)
            with bare_cgroup() as directory:
                for _ in range(WARM_UP):
                    await pause_and_resume(sandbox)
                for _ in range(options.rounds):
                    ours += [await pause_and_resume(sandbox) for _ in range(count)]
                    bare += [freeze_and_thaw(directory) for _ in range(count)]
    pause_ms, resume_ms = (1000 * percentile(part, 0.5) for part in zip(*ours, strict=True))
    pause_p99_ms, resume_p99_ms = (
        1000 * percentile(part, 0.99) for part in zip(*ours, strict=True)
    )
    freeze_ms, thaw_ms = (1000 * percentile(part, 0.5) for part in zip(*bare, strict=True))
    return Report(
        name="pause",
        figures={
            "pause_p50_ms": pause_ms,
            "pause_p99_ms": pause_p99_ms,
            "resume_p50_ms": resume_ms,
            "resume_p99_ms": resume_p99_ms,
            "bare_freeze_p50_ms": freeze_ms,
            "bare_thaw_p50_ms": thaw_ms,
            "samples": len(ours),
        },
        ratios={
            "pause_to_bare_freeze": pause_ms / freeze_ms,
            "resume_to_bare_thaw": resume_ms / thaw_ms,
        },
        reach=(
            Reach.at_most("pause_p50_ms", pause_ms, 3.0),
            Reach.at_most("resume_p50_ms", resume_ms, 3.0),
        ),
    )
