"""A task for Inspect as its users write them; its answer is in a file of the sample's sandbox."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import sandbox


@solver
def look_into_the_file() -> Solver:
    """Take what the file says for the answer."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        del generate
        result = await sandbox().exec(["sh", "-c", "cat answer.txt && id -un && pwd"])
        state.output.completion = result.stdout
        return state

    return solve


@task
def answer_in_a_file() -> Task:
    """Two samples, each with a sandbox of its own."""
    return Task(
        dataset=[
            Sample(input="What does it say?", target=word, files={"answer.txt": word})
            for word in ("alpha", "beta")
        ],
        solver=look_into_the_file(),
        scorer=includes(),
    )
