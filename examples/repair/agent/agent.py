"""The agent in the sandbox: runs the package's tests and does what the trainer's side answers.

It needs only the Python of the base layer, pytest from the toolkit and the platform's channel. All
it knows of the outside is ``/run/dsec/agent.sock``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, "/opt/toolkit/site-packages")
sys.dont_write_bytecode = True

import pytest  # noqa: E402  the toolkit's, found by the line above
from agent_channel import AgentChannel  # noqa: E402  beside this file in the sandbox

PACKAGE = "toolz"
WORKSPACE = Path("/workspace")
TEST_LIMIT_S = 20
PYTEST_OPTIONS = ("-p", "no:cacheprovider")

Json = dict[str, Any]


class Recorder:
    """Collects what failed, with the package's own frames of each traceback."""

    def __init__(self) -> None:
        self.failures: list[Json] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of one test."""
        if report.failed:
            self._note(report.nodeid, report.longreprtext, frames_of(report.longrepr))
        elif report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that does not even import."""
        if report.failed:
            self._note(report.nodeid, str(report.longrepr), [])

    def _note(self, test: str, error: str, frames: list[Json]) -> None:
        self.failures.append({"test": test, "error": error[-2000:], "frames": frames})


def frames_of(representation: object) -> list[Json]:
    """Return the lines of the package in a traceback, the innermost first."""
    entries = getattr(getattr(representation, "reprtraceback", None), "reprentries", ())
    places = [getattr(entry, "reprfileloc", None) for entry in entries]
    frames = [
        {"path": place.path, "line": place.lineno}
        for place in places
        if place is not None and "/tests/" not in place.path
    ]
    return frames[::-1]


def in_child(work: Callable[[], Any]) -> Any:
    """Run ``work`` in a forked child and return its result, or None if it did not end well.

    Each run imports the package anew while pytest is imported already, so a run costs what the
    tests cost. One that hangs (an edit may well loop for ever) is ended after ``TEST_LIMIT_S``.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        signal.alarm(TEST_LIMIT_S)
        with os.fdopen(writer, "w") as out:
            json.dump(work(), out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as source:
        text = source.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def run_tests(tests: Sequence[str] = ()) -> Json:
    """Run tests (all when empty) and return what pytest saw."""

    def work() -> Json:
        recorder = Recorder()
        code = pytest.main([*PYTEST_OPTIONS, *(tests or (PACKAGE,))], plugins=[recorder])
        failures = recorder.failures
        if not failures and (code != 0 or recorder.passed == 0):
            # Nothing ran, or pytest itself gave up: that is no success.
            failures = [{"test": "", "error": f"pytest: {code}", "frames": []}]
        return {"passed": recorder.passed, "failed": len(failures), "failures": failures[:3]}

    started = time.monotonic()
    hung = {"test": next(iter(tests), ""), "error": "the run did not end", "frames": []}
    seen: Json = in_child(work) or {"passed": 0, "failed": 1, "failures": [hung]}
    return {**seen, "seconds": round(time.monotonic() - started, 3)}


class LineTracer:
    """Notes which lines of the package one test runs, in the order in which each last ran."""

    def __init__(self) -> None:
        self.ran: dict[tuple[str, int], None] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Trace the test itself, not its collection."""
        sys.settrace(self._called)
        yield
        sys.settrace(None)

    def _called(self, frame: FrameType, _event: str, _argument: object) -> Any:
        name = frame.f_code.co_filename
        inside = name.startswith(f"{WORKSPACE / PACKAGE}/") and "/tests/" not in name
        return self._line if inside else None

    def _line(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            key = (frame.f_code.co_filename, frame.f_lineno)
            self.ran.pop(key, None)
            self.ran[key] = None
        return self._line


def trace(test: str) -> list[Json]:
    """Run one test and return the package's lines that it ran, with when each last ran."""

    def work() -> list[Json]:
        tracer = LineTracer()
        pytest.main([*PYTEST_OPTIONS, test], plugins=[tracer])
        return [
            {
                "path": os.path.relpath(path, WORKSPACE),
                "line": line,
                "source": Path(path).read_text(encoding="utf-8").splitlines()[line - 1],
                "last_run": order,
            }
            for order, (path, line) in enumerate(tracer.ran)
        ][-400:]

    return in_child(work) or []


def edited(edit: Sequence[Any]) -> tuple[Path, str, str]:
    """Return the file of an edit, and its text before and after it."""
    path, line, column, old, new = edit
    file = WORKSPACE / path
    before = file.read_text(encoding="utf-8")
    lines = before.splitlines(keepends=True)
    text = lines[line - 1]
    if text[column : column + len(old)] != old:
        raise ValueError(f"the edit does not fit {path}:{line}")
    lines[line - 1] = text[:column] + new + text[column + len(old) :]
    return file, before, "".join(lines)


def try_edits(edits: Sequence[Sequence[Any]], tests: Sequence[str]) -> list[bool]:
    """Return for each edit whether the tests pass with it, stopping at the first that helps.

    The files are as before afterwards.
    """
    passed: list[bool] = []
    for edit in edits:
        file, before, after = edited(edit)
        file.write_text(after, encoding="utf-8")
        passed.append(run_tests(tests)["failed"] == 0)
        file.write_text(before, encoding="utf-8")
        if passed[-1]:
            break
    return passed


def keep_edit(edit: Sequence[Any]) -> Json:
    """Make an edit and run all tests; it stays only if they all pass."""
    file, before, after = edited(edit)
    file.write_text(after, encoding="utf-8")
    seen = run_tests()
    if seen["failed"]:
        file.write_text(before, encoding="utf-8")
    return seen


def main() -> None:
    """Report, ask, act, until told to stop."""
    os.chdir(WORKSPACE)
    sys.path.insert(0, str(WORKSPACE))
    channel = AgentChannel()
    started = time.monotonic()
    stage, observation = "tests_run", run_tests()
    while True:
        channel.log(
            action=stage,
            status="failed" if observation.get("failed") else "ok",
            latency_ms=round(1000 * (time.monotonic() - started)),
        )
        answer = channel.step(stage, observation)
        started = time.monotonic()
        if answer["done"]:
            break
        action = answer["payload"]
        if action["action"] == "trace":
            stage, observation = "traced", {"lines": trace(action["test"])}
        elif action["action"] == "try":
            tried = try_edits(action["edits"], action["tests"])
            stage, observation = "edits_tried", {"passed": tried}
        else:
            stage, observation = "tests_run", keep_edit(action["edit"])


if __name__ == "__main__":
    main()
