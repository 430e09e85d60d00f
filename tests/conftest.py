"""What every test is held to: it leaves no descriptor, process, mount or task behind.

Session-wide servers are set up before a test's own fixtures, so they are part of what is there
"before". The check runs last, after the test's event loop is closed.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pluggy
import pytest
import uvloop

# Set where every feature is known to be there (in CI): then a skipped test is a failed one.
NOTHING_MAY_SKIP = os.environ.get("DSEC_TESTS_MAY_NOT_SKIP", "") == "1"

# A thing that is on its way out (a reaped child's pipe, a lazily unmounted tree) gets this long.
SETTLE_S = 3.0


def _descriptors() -> dict[str, str]:
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if not target.startswith(("/dev/urandom", "/proc/self/fd", f"/proc/{os.getpid()}/fd")):
            found[entry.name] = target
    return found


def _children() -> dict[str, str]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            found[pid] = command.decode(errors="replace")
    return found


def _mounts() -> dict[str, str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split()[0]: line for line in lines}


def _leaks(before: tuple[dict[str, str], ...]) -> list[str]:
    kinds = ("descriptor", "process", "mount")
    found = []
    for kind, old, new in zip(kinds, before, (_descriptors(), _children(), _mounts()), strict=True):
        found += [f"{kind} {key}: {new[key]}" for key in new if old.get(key) != new[key]]
    return found


@pytest.fixture(scope="session", autouse=True)
def what_uvloop_keeps() -> None:
    """Let uvloop open the one pipe that a process's first loop keeps for good."""

    async def nothing() -> None:
        return

    uvloop.run(nothing())


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the test that leaked a descriptor, a child process or a mount."""
    gc.collect()
    before = (_descriptors(), _children(), _mounts())
    yield
    deadline = time.monotonic() + SETTLE_S
    while leaks := _leaks(before):
        if time.monotonic() > deadline:
            pytest.fail("the test left behind:\n  " + "\n  ".join(leaks))
        gc.collect()
        time.sleep(0.01)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Generator[None, pluggy.Result[pytest.TestReport], None]:
    """Where nothing may skip, let a skip fail with its reason."""
    outcome = yield
    report = outcome.get_result()
    if NOTHING_MAY_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be: {report.longrepr}"
