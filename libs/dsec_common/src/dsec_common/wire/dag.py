"""DAGs of agents: steps whose outputs are the inputs of others, typed by JSON Schema."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from dsec_common.wire.base import Message

STEPS_MAX: Final = 1000
"""Steps of one DAG."""

WHOLE: Final = "*"
"""As the name of an input: the whole of it."""


class DagRetry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a step that failed is tried again.

    The wait before attempt ``n + 1`` is ``backoff_s * factor ** (n - 1)``, at most
    ``backoff_max_s``, and by up to the share ``jitter`` of it longer or shorter.
    """

    max_attempts: int = 1
    backoff_s: float = 1.0
    factor: float = 2.0
    backoff_max_s: float = 60.0
    jitter: float = 0.1


class DagStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step: an agent's instance that reads its input as JSON and prints its output as JSON.

    Attributes:
        agent: a registered agent.
        version: of it; empty for its active one at the beginning of a run.
        command: what is run in the instance; empty for the contract's ``command``.
        inputs: where each property of the input comes from: ``step``, ``step.field``, ``$`` for the
            run's own input, ``$.field``. The name ``*`` is the whole input.
        input: JSON Schema of the input; None for the contract's ``input``.
        output: likewise.
        retry: None for the contract's ``lifecycle.retry_policy``, or one attempt.
        timeout_s: of one attempt; None for the contract's ``lifecycle.timeout``, or 60. It is never
            longer than the contract's.
    """

    agent: str
    version: str = ""
    command: tuple[str, ...] = ()
    inputs: dict[str, str] = msgspec.field(default_factory=dict)
    input: dict[str, Any] | None = None
    output: dict[str, Any] | None = None
    retry: DagRetry | None = None
    timeout_s: float | None = None


class DagSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A DAG as its author writes it.

    Attributes:
        steps: by name; the order says nothing.
        input: JSON Schema of what a run is given.
    """

    name: str
    steps: dict[str, DagStep]
    input: dict[str, Any] = msgspec.field(default_factory=dict)
    description: str = ""


class RegisterDag(Message, frozen=True, kw_only=True):
    """Check a DAG and keep it, in place of one of the same name; runs go on as they began."""

    spec: DagSpec


class DagConversion(msgspec.Struct, frozen=True, kw_only=True):
    """A value is converted on its way: by which converters, in order."""

    step: str
    input: str
    converters: tuple[str, ...]


class DagInfo(Message, frozen=True, kw_only=True):
    """A DAG that was checked: an order of its steps, and what is converted."""

    name: str
    order: tuple[str, ...]
    conversions: tuple[DagConversion, ...] = ()


class ListDags(Message, frozen=True, kw_only=True):
    """Ask for the project's DAGs, by name: a page of those after the name ``after``."""

    after: str = ""


class DagSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A DAG that is kept: how many steps it has, and what its author says of it."""

    name: str
    steps: int
    description: str = ""


class DagList(Message, frozen=True, kw_only=True):
    """A page of DAGs; ``more``: a further one exists, ask with ``after`` the last name."""

    dags: tuple[DagSummary, ...] = ()
    more: bool = False


class RemoveDag(Message, frozen=True, kw_only=True):
    """Remove a DAG; runs of it go on as they began, and are kept."""

    name: str


class DagRemoved(Message, frozen=True, kw_only=True):
    """The DAG is gone."""

    name: str


class RunDag(Message, frozen=True, kw_only=True):
    """Begin a run. The same ``run_id`` again is the same run; empty lets the platform choose."""

    name: str
    input: Any = None
    run_id: str = ""


class InspectDagRun(Message, frozen=True, kw_only=True):
    """Ask how far a run is, and for outputs: of one ``step``, or of as many as fit an answer."""

    run_id: str
    step: str = ""


class ResumeDagRun(Message, frozen=True, kw_only=True):
    """Try again what failed, and go on from there; what is done stays done."""

    run_id: str


class StepState(StrEnum):
    """Where a step is. ``blocked``: one that it needs has failed."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    BLOCKED = "blocked"


class RunState(StrEnum):
    """Where a run is. ``partial``: some steps are done, others failed."""

    RUNNING = "running"
    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"


class DagStepRun(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a run; ``error`` is why the last attempt failed."""

    state: StepState
    attempts: int = 0
    error: str = ""
    sandbox_id: str = ""
    output: Any = None


class DagRun(Message, frozen=True, kw_only=True):
    """A run and its steps."""

    run_id: str
    name: str
    state: RunState
    steps: dict[str, DagStepRun] = msgspec.field(default_factory=dict)
