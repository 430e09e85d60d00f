"""The example that learns: a policy solves its shell task more often the more rollouts it had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from documents import ROOT
from examples.learn.task import make_task
from examples.learn.trainer import LABELS, Settings, train
from stack import Stack


def _told(number: int, success_rate: float) -> None:
    assert 0.0 <= success_rate <= 1.0, number


async def test_a_tabular_policy_learns_to_solve_a_shell_task(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        settings = Settings(groups=4, size=8, learning_rate=6.0)
        training = await train(client, base, settings, _told)
        assert await client.list_sandboxes(labels=LABELS) == []
    # The seed alone says what is drawn: so many of each group's episodes are solved.
    assert training.success_rates == [1 / 8, 4 / 8, 8 / 8, 7 / 8]
    assert training.has_learnt


async def test_a_random_policy_does_not_pass_for_one_that_learns(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        settings = Settings(groups=2, size=8, learning_rate=0.0)
        training = await train(client, base, settings, _told)
    assert training.success_rates == [1 / 8, 0.0]
    assert not training.has_learnt


def test_what_was_learnt_is_drawn(tmp_path: Path) -> None:
    # In a process of its own: matplotlib keeps fonts open.
    code = (
        "import sys; from pathlib import Path; from examples.learn.plot import plot; "
        "plot([0.0, 0.25, 0.5, 1.0, 1.0], 12, Path(sys.argv[1]))"
    )
    picture = tmp_path / "new" / "learn.png"
    subprocess.run([sys.executable, "-c", code, str(picture)], cwd=ROOT, check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_each_group_has_another_answer_and_a_report_is_only_right_for_its_own() -> None:
    tasks = [make_task(f"1/{number}") for number in range(8)]
    assert len({task.answer for task in tasks}) > 4
    assert tasks[0].is_solved_by(b"%d\n" % tasks[0].answer)
    assert not tasks[0].is_solved_by(b"%d\n" % (tasks[0].answer + 1))
    assert not tasks[0].is_solved_by(b"")
