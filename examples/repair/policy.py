"""The trainer's side: a small search that learns nothing but what the sandbox tells it.

It never sees the mutation. It reads the failing test's traceback, asks which lines that test ran,
proposes single-token edits of these lines, the ones nearest to the failure first, and is rewarded
when the package's own tests pass again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from examples.repair.edits import Edit, edits_of_line

BATCH = 8
"""Edits that the agent tries between two conversations."""


@dataclass
class Decision:
    """What to tell the agent."""

    action: dict[str, Any]
    reward: float | None = None
    done: bool = False


@dataclass
class RepairPolicy:
    """One rollout's search. ``decide`` is called with each stage that the agent reports."""

    limit: int = 400
    tried: int = 0
    solution: Edit | None = None
    _candidates: Iterator[Edit] = field(default_factory=lambda: iter(()))
    _waiting: list[Edit] = field(default_factory=list)
    _failing: list[str] = field(default_factory=list)
    _frames: list[tuple[str, int]] = field(default_factory=list)

    def decide(self, stage: str, observation: dict[str, Any]) -> Decision:
        """Return the next action for what the agent has seen."""
        if stage == "tests_run":
            return self._after_tests(observation)
        if stage == "traced":
            self._candidates = self._rank(observation["lines"])
            return self._propose()
        if stage == "edits_tried":
            return self._after_tries(observation["passed"])
        raise ValueError(f"the agent reported the unknown stage {stage!r}")

    def _after_tests(self, observation: dict[str, Any]) -> Decision:
        if not observation["failures"]:
            # The package's own tests pass, all of them: the only thing that is rewarded.
            return Decision({"action": "stop"}, reward=1.0, done=True)
        if self.solution is not None:
            # The edit helped the first failing test and broke, or left, another: go on.
            self.solution = None
            return self._propose(reward=-0.1)
        first = observation["failures"][0]
        self._failing = [first["test"]]
        self._frames = [(frame["path"], frame["line"]) for frame in first["frames"]]
        return Decision({"action": "trace", "test": first["test"]})

    def _rank(self, lines: list[dict[str, Any]]) -> Iterator[Edit]:
        """Yield edits of the lines that ran: those in the traceback first, then the latest run."""
        in_traceback = set(self._frames)
        ranked = sorted(
            lines,
            key=lambda ran: ((ran["path"], ran["line"]) not in in_traceback, -ran["last_run"]),
        )
        for ran in ranked:
            yield from edits_of_line(ran["path"], ran["line"], ran["source"])

    def _propose(self, reward: float = 0.0) -> Decision:
        if not self._waiting:
            self._waiting = [edit for _, edit in zip(range(BATCH), self._candidates, strict=False)]
        if not self._waiting or self.tried >= self.limit:
            return Decision({"action": "stop"}, reward=-1.0, done=True)
        edits = [list(edit) for edit in self._waiting]
        return Decision({"action": "try", "edits": edits, "tests": self._failing}, reward=reward)

    def _after_tries(self, passed: list[bool]) -> Decision:
        self.tried += len(passed)
        tried, self._waiting = self._waiting[: len(passed)], self._waiting[len(passed) :]
        for edit, helped in zip(tried, passed, strict=True):
            if helped:
                self.solution = edit
                return Decision({"action": "apply", "edit": list(edit)}, reward=0.1)
        return self._propose(reward=-0.01 * len(passed))
