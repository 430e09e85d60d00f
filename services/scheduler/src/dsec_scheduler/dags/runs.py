"""A run of a DAG, step by step: what to begin, what became of it, what is left. No I/O.

A step begins when all that it needs is done. A step that fails for good blocks those that need it,
and no others: the rest of the DAG goes on. What is done stays done when the run is resumed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final

import msgspec

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message, new_id
from dsec_common.wire.dag import DagRetry, RunState, StepState
from dsec_scheduler.dags.plans import Plan

_ERROR_CHARACTERS: Final = 500


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a run.

    Attributes:
        attempts: begun so far; with the run's and the step's name they make the attempt's key, so
            that one which another scheduler takes over is not run twice.
        round: of resuming; attempts begin anew with each.
        begins_at: Unix time before which the next attempt does not begin.
        version_ms: of the output of a step that is done: see
            :mod:`dsec_common.compute.consistency`.
    """

    state: StepState = StepState.WAITING
    attempts: int = 0
    round: int = 0
    begins_at: float = 0.0
    error: str = ""
    sandbox_id: str = ""
    version_ms: int = 0


class RunRecord(Message, frozen=True, kw_only=True):
    """A run as it is kept. Inputs and outputs are kept beside it, each by itself.

    Attributes:
        owner: the scheduler that is at work on it.
        owned_until: Unix time; after that another one may go on.
    """

    run_id: str
    plan: Plan
    state: RunState = RunState.RUNNING
    steps: dict[str, StepRecord]
    owner: str = ""
    owned_until: float = 0.0


def begun(run_id: str, plan: Plan) -> RunRecord:
    """Return a run of which nothing is done yet."""
    return RunRecord(run_id=run_id, plan=plan, steps={name: StepRecord() for name in plan.steps})


def owned(run: RunRecord, owner: str, until: float) -> RunRecord:
    """Return the run in the hands of a scheduler."""
    return _changed(run, owner=owner, owned_until=until)


def ready(run: RunRecord, now: float) -> list[str]:
    """Return the steps whose next attempt may begin, those of an earlier owner among them."""
    return [
        name
        for name, step in run.steps.items()
        if step.state is StepState.RUNNING
        or (
            step.state is StepState.WAITING
            and step.begins_at <= now
            and all(run.steps[one].state is StepState.DONE for one in run.plan.steps[name].needs)
        )
    ]


def due_at(run: RunRecord) -> float | None:
    """Return when the next step is due that waits for nothing but its time; None for none."""
    times = [
        step.begins_at
        for name, step in run.steps.items()
        if step.state is StepState.WAITING
        and all(run.steps[one].state is StepState.DONE for one in run.plan.steps[name].needs)
    ]
    return min(times, default=None)


def started(run: RunRecord, name: str) -> RunRecord:
    """Return the run with a step's next attempt begun; one that was begun stays as it is."""
    step = run.steps[name]
    if step.state is StepState.RUNNING:
        return run
    return _with(run, name, state=StepState.RUNNING, attempts=step.attempts + 1)


def succeeded(run: RunRecord, name: str, sandbox_id: str, version_ms: int) -> RunRecord:
    """Return the run with a step done."""
    done = _with(
        run,
        name,
        state=StepState.DONE,
        error="",
        sandbox_id=sandbox_id,
        version_ms=version_ms,
    )
    return _settled(done)


def failed(
    run: RunRecord,
    name: str,
    error: DsecError,
    now: float,
    randomness: random.Random,
) -> RunRecord:
    """Return the run after an attempt failed: it waits for the next one, or has failed for good.

    A mistake in what was asked, or in a converter, is not tried again.
    """
    step, retry = run.steps[name], run.plan.steps[name].retry
    told = error.message[:_ERROR_CHARACTERS]
    final = error.code in {ErrorCode.INVALID, ErrorCode.UNSUPPORTED, ErrorCode.DENIED}
    if final or step.attempts >= retry.max_attempts:
        after = _with(run, name, state=StepState.FAILED, error=told)
        return _settled(_blocked(after, name))
    begins_at = now + wait_s(retry, step.attempts, randomness)
    return _with(run, name, state=StepState.WAITING, begins_at=begins_at, error=told)


def wait_s(retry: DagRetry, attempts: int, randomness: random.Random) -> float:
    """Return the seconds before the attempt after so many."""
    grown = min(retry.backoff_s * retry.factor ** min(attempts - 1, 64), retry.backoff_max_s)
    return grown * (1 + retry.jitter * randomness.uniform(-1, 1))


def resumed(run: RunRecord) -> RunRecord:
    """Return the run with everything waiting again that has failed or was blocked."""
    again = {StepState.FAILED, StepState.BLOCKED}
    if run.state is RunState.RUNNING or not any(one.state in again for one in run.steps.values()):
        return run
    steps = {
        name: StepRecord(round=step.round + 1) if step.state in again else step
        for name, step in run.steps.items()
    }
    return _changed(run, state=RunState.RUNNING, steps=steps, owner="", owned_until=0.0)


def _blocked(run: RunRecord, name: str) -> RunRecord:
    """Return the run with all steps blocked that need a failed one, or one that is blocked."""
    lost = {name}
    steps = dict(run.steps)
    for one, planned in run.plan.steps.items():  # in order, so one look is enough
        if lost & set(planned.needs):
            lost.add(one)
            steps[one] = msgspec.structs.replace(steps[one], state=StepState.BLOCKED)
    return _changed(run, steps=steps)


def _settled(run: RunRecord) -> RunRecord:
    states = {step.state for step in run.steps.values()}
    if states & {StepState.WAITING, StepState.RUNNING}:
        return run
    return _changed(run, state=_end_of(states))


def _end_of(states: Iterable[StepState]) -> RunState:
    states = set(states)
    if states == {StepState.DONE}:
        return RunState.DONE
    return RunState.PARTIAL if StepState.DONE in states else RunState.FAILED


def _with(run: RunRecord, name: str, **changes: object) -> RunRecord:
    step = msgspec.structs.replace(run.steps[name], **changes)
    return _changed(run, steps={**run.steps, name: step})


def _changed(run: RunRecord, **changes: object) -> RunRecord:
    return msgspec.structs.replace(run, message_id=new_id(), **changes)
