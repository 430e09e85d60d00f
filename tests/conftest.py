"""What every test is held to: it leaves no descriptor, process, mount or task behind.

Session-wide servers are set up before a test's own fixtures, so they are part of what is there
"before". The check runs last, after the test's event loop is closed.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pluggy
import pytest

from sharing_out import (
    SESSION_PLATFORM,
    pytest_collection_modifyitems,  # noqa: F401  a hook
    pytest_configure,  # noqa: F401  a hook
)

# Set where every feature is known to be there (in CI): then a skipped test is a failed one.
NOTHING_MAY_SKIP = os.environ.get("DSEC_TESTS_MAY_NOT_SKIP", "") == "1"
# But for libraries of a gigabyte, which no environment for development has.
_TOO_LARGE = ("dsec[openenv]", "dsec[trl]", "dsec[verifiers]", "dsec[verl]")

# A thing that is on its way out (a reaped child's pipe, a lazily unmounted tree) gets this long.
SETTLE_S = 3.0


def _log_errors_as_lines() -> None:
    """Tell what is logged with an error in lines: frames with all variables take 0.5 s each."""
    if importlib.util.find_spec("structlog") is None:  # an emulated machine has less
        return
    import structlog  # noqa: PLC0415  see above

    structlog.configure(
        processors=[
            *structlog.get_config()["processors"][:-1],
            structlog.dev.ConsoleRenderer(
                colors=False, exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    )


def _judge_no_example_by_its_time() -> None:
    """Let the examples of properties take as long as a busy machine has them take."""
    if importlib.util.find_spec("hypothesis") is None:  # as above
        return
    from hypothesis import settings  # noqa: PLC0415  see above

    settings.register_profile("any time", deadline=None)
    settings.load_profile("any time")


_log_errors_as_lines()
_judge_no_example_by_its_time()


@pytest.fixture(autouse=True)
def logs_go_where_they_went() -> Iterator[None]:
    """Undo what a command line in this process set up: it logs to what is closed by now."""
    if importlib.util.find_spec("structlog") is None:  # as above
        yield
        return
    import structlog  # noqa: PLC0415  as above

    before = structlog.get_config()
    yield
    if structlog.get_config() != before:
        structlog.reset_defaults()
        structlog.configure(**before)


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


def _cgroups() -> dict[str, str]:
    """Return the nodes' directories in every hierarchy: the v1 controllers', v2's own, or both."""
    root = Path("/sys/fs/cgroup")
    found = (path for pattern in ("dsec-*", "*/dsec-*") for path in root.glob(pattern))
    return {str(path): "" for path in found if _may_be_a_tests(path.name)}


def _may_be_a_tests(name: str) -> bool:
    """Return whether one of this process's tests may have made a node of this name.

    Tests name their nodes after their process, as several run on one machine. The platform of all
    end-to-end tests says itself what it leaves.
    """
    if name.startswith(f"dsec-{SESSION_PLATFORM}{os.getpid()}-"):
        return False
    return str(os.getpid()) in re.findall(r"\d+", name)


_KINDS = {
    "descriptor": _descriptors,
    "process": _children,
    "mount": _mounts,
    "cgroup": _cgroups,
}


def _held() -> dict[str, dict[str, str]]:
    return {kind: look() for kind, look in _KINDS.items()}


def _leaks(before: dict[str, dict[str, str]]) -> list[str]:
    return [
        f"{kind} {key}: {value}"
        for kind, held in _held().items()
        for key, value in held.items()
        if before[kind].get(key) != value
    ]


@pytest.fixture(scope="session", autouse=True)
def nothing_is_ignored() -> None:
    """Let what the tests start hear signals, though the suite runs in the background itself."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def what_uvloop_keeps() -> None:
    """Let uvloop open the one pipe that a process's first loop keeps for good."""
    if importlib.util.find_spec("uvloop") is None:  # an emulated machine has less
        return
    import uvloop  # noqa: PLC0415  see above

    async def nothing() -> None:
        return

    uvloop.run(nothing())


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the test that leaked a descriptor, a child process, a mount or a cgroup."""
    gc.collect()
    # What is there now is not the test's, and looking at it again takes longer than most tests.
    gc.freeze()
    before = _held()
    yield
    deadline = time.monotonic() + SETTLE_S
    while leaks := _leaks(before):
        if time.monotonic() > deadline:
            pytest.fail("the test left behind:\n  " + "\n  ".join(leaks))
        gc.collect()
        time.sleep(0.01)


def _may_not_skip(report: pytest.TestReport | pytest.CollectReport) -> bool:
    reason = str(report.longrepr)
    return NOTHING_MAY_SKIP and report.skipped and not any(it in reason for it in _TOO_LARGE)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Generator[None, pluggy.Result[pytest.TestReport], None]:
    """Where nothing may skip, let a skip fail with its reason."""
    outcome = yield
    report = outcome.get_result()
    if _may_not_skip(report) and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be: {report.longrepr}"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Generator[None, pluggy.Result[pytest.CollectReport], None]:
    """Where nothing may skip, let a module that is skipped whole fail, too."""
    outcome = yield
    report = outcome.get_result()
    if _may_not_skip(report):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be: {report.longrepr}"


@pytest.fixture(autouse=True)
async def no_task_is_left(nothing_is_left_behind: None) -> AsyncIterator[None]:
    """Fail the test whose tasks outlive it and all its fixtures."""
    before = asyncio.all_tasks()
    yield
    deadline = time.monotonic() + SETTLE_S
    while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        if time.monotonic() > deadline:
            pytest.fail("the test left tasks:\n  " + "\n  ".join(map(repr, left)))
        await asyncio.sleep(0.01)
