"""A sandbox's cgroups: made with every limit and removed, beside bare directories.

They are made from here, by the system calls that the spawner makes; their removal is the daemon's.

The peer makes and removes one empty directory in each tree that the driver uses, by system call: no
node in between, no limit, no notice of memory. Both take turns on the same trees.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from benchmarks.report import Options, Reach, Report, median, percentile
from dsec_sandboxd.kernel.cgroups import CgroupLimits, Layout, detect_layout, open_driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_sandboxd.kernel.cgroups import Cgroup, CgroupDriver

COUNT: Final = 300
CREATE_P50_MS: Final = 0.35
_LIMITS: Final = CgroupLimits(memory_bytes=256 << 20, cpus=2, pids=256)
_BASE_UID: Final = 1_000_000


@dataclass(slots=True)
class _Round:
    """Milliseconds of each operation in one round."""

    create: list[float] = field(default_factory=list)
    remove: list[float] = field(default_factory=list)
    exec_directory: list[float] = field(default_factory=list)
    bare_make: list[float] = field(default_factory=list)
    bare_remove: list[float] = field(default_factory=list)


async def run(options: Options) -> Report:
    """Measure one at a time; medians of the rounds' percentiles."""
    layout = detect_layout()
    node = f"benchmark-{os.getpid()}"
    driver = open_driver(layout, node)
    try:
        rounds = [_measure(driver, layout, options.count or COUNT) for _ in range(options.rounds)]
    finally:
        for local in driver.leftovers():
            driver.adopt(local).remove()
        driver.close()

    def over_rounds(name: str, part: float) -> float:
        return median(percentile(getattr(one, name), part) for one in rounds)

    figures = {
        f"{name}_p{part}_ms": over_rounds(name, part / 100)
        for name in ("create", "remove", "exec_directory", "bare_make", "bare_remove")
        for part in (50, 99)
    }
    ratios = {
        "create_to_bare_make_p50": figures["create_p50_ms"] / figures["bare_make_p50_ms"],
        "remove_to_bare_remove_p50": figures["remove_p50_ms"] / figures["bare_remove_p50_ms"],
    }
    reach = Reach.at_most("create_p50_ms", figures["create_p50_ms"], CREATE_P50_MS)
    return Report("cgroup", figures, ratios, (reach,))


def _measure(driver: CgroupDriver, layout: Layout, count: int) -> _Round:
    one = _Round()
    trees = [f"{tree}/dsec-benchmark-bare-{os.getpid()}" for tree in _trees(layout)]
    for _ in range(count):
        one.bare_make.append(_timed(lambda: _for_each(os.mkdir, trees)))
        one.bare_remove.append(_timed(lambda: _for_each(os.rmdir, trees)))

        start = time.perf_counter()
        cgroup = _make(driver, "sandbox")
        cgroup.delegate_exec(_BASE_UID)
        one.create.append((time.perf_counter() - start) * 1e3)

        start = time.perf_counter()
        os.close(cgroup.create_exec("1"))
        cgroup.kill_exec("1")
        cgroup.remove_exec("1")
        one.exec_directory.append((time.perf_counter() - start) * 1e3)

        one.remove.append(_timed(cgroup.remove))
    return one


def _make(driver: CgroupDriver, local: str) -> Cgroup:
    cgroup = driver.adopt(local)
    directories = []
    for parent in driver.parent_fds():
        os.mkdir(local, dir_fd=parent)
        directories.append(os.open(local, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent))
    for tree, file, text in driver.limit_texts(_LIMITS):
        descriptor = os.open(file, os.O_WRONLY, dir_fd=directories[tree])
        os.write(descriptor, text)
        os.close(descriptor)
    for directory in directories:
        os.close(directory)
    cgroup.watch_oom(end_all=_LIMITS.end_all_on_oom)
    return cgroup


def _trees(layout: Layout) -> list[str]:
    return [str(layout.unified), *map(str, layout.v1.values())]


def _for_each(call: Callable[[str], object], paths: list[str]) -> None:
    for path in paths:
        call(path)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
