"""Rollouts: stages from the sandbox to the trainer, feedback back."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from dsec_common.wire.base import Message


class RolloutState(StrEnum):
    """Where a rollout is in its life."""

    OPEN = "open"
    CLOSED = "closed"


class OpenRollout(Message, frozen=True, kw_only=True):
    """Open a rollout; the same idempotency key returns the same one.

    A checkpoint is made after each report whose number ``checkpoint_every`` divides, before its
    feedback goes out; 0 makes none by itself. With ``durable_checkpoints`` it is one from which
    another node can go on when the sandbox's is lost.
    """

    labels: dict[str, str] = msgspec.field(default_factory=dict)
    idempotency_key: str = ""
    checkpoint_every: int = 0
    durable_checkpoints: bool = False


class RolloutOpened(Message, frozen=True, kw_only=True):
    """``rollout_id`` is ``<shard>.<local>``: two subject tokens."""

    rollout_id: str


class StageReport(Message, frozen=True, kw_only=True):
    """What the process in a sandbox says it has reached.

    ``seq`` counts from 1 per rollout, chosen by the process: the same number twice is the same
    report. ``payload`` is any JSON value.
    """

    seq: int
    stage: str
    payload: Any = None
    sandbox_id: str = ""


class StageAccepted(Message, frozen=True, kw_only=True):
    """The report is durable. ``duplicate`` says that it was there before."""

    seq: int
    duplicate: bool = False


class NextStages(Message, frozen=True, kw_only=True):
    """Trainer: the reports after ``after_seq``, waiting up to ``wait_s`` for the first."""

    after_seq: int = 0
    wait_s: float = 30.0
    limit: int = 64


class StageBatch(Message, frozen=True, kw_only=True):
    """Reports in order; empty when the wait ended without one."""

    reports: tuple[StageReport, ...] = ()
    state: RolloutState = RolloutState.OPEN


class SendFeedback(Message, frozen=True, kw_only=True):
    """Trainer: the answer to report ``seq``. ``done`` tells the agent to stop."""

    seq: int
    payload: Any = None
    reward: float | None = None
    done: bool = False


class FeedbackAccepted(Message, frozen=True, kw_only=True):
    """The feedback is durable. ``duplicate`` says that it was there before."""

    seq: int
    duplicate: bool = False


class AwaitFeedback(Message, frozen=True, kw_only=True):
    """Sandbox side: the feedback to report ``seq``, waiting up to ``wait_s``."""

    seq: int
    wait_s: float = 30.0


class StepRollout(Message, frozen=True, kw_only=True):
    """Sandbox side: a report and the wait for its feedback in one, answered by FeedbackState.

    The answer comes when the feedback is durable, or without it after ``wait_s``: the report is
    then durable, and asking again with the same number and content goes on waiting.
    """

    seq: int
    stage: str
    payload: Any = None
    sandbox_id: str = ""
    wait_s: float = 30.0


class FeedbackState(Message, frozen=True, kw_only=True):
    """The feedback, or ``ready`` false when the wait ended without it."""

    ready: bool
    seq: int
    payload: Any = None
    reward: float | None = None
    done: bool = False


class InspectRollout(Message, frozen=True, kw_only=True):
    """Ask for a rollout's state."""


class Restoration(msgspec.Struct, frozen=True, kw_only=True):
    """The files of the sandbox, and the rollout's state, are those after report ``step``.

    Attributes:
        reason: ``rollback``, ``node_lost``, or ``branch``; then ``step`` is the parent's.
        at: Unix time.
    """

    step: int
    reason: str
    at: float


class RolloutInfo(Message, frozen=True, kw_only=True):
    """A rollout.

    Attributes:
        last_seq: the next report has the number after it: that of the newest report, unless a
            rollback used further ones up.
        answered_seq: the newest report with feedback.
        parent: the rollout that this is a branch of, at its report ``parent_step``.
        sandbox_id: the one that last reported, or took its place.
        restoration: what the agent begins with, if that is not the beginning.
    """

    rollout_id: str
    state: RolloutState
    last_seq: int = 0
    answered_seq: int = 0
    total_reward: float = 0.0
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    parent: str = ""
    parent_step: int = 0
    sandbox_id: str = ""
    restoration: Restoration | None = None


class CloseRollout(Message, frozen=True, kw_only=True):
    """Close a rollout; it takes no more reports or feedback and stays readable for a while.

    With a ``fence``, only while that is the trainer of its group.
    """

    fence: int = 0
