"""Checkpoints of rollouts: a trainer's state and a sandbox, kept and put back together."""

from __future__ import annotations

from typing import Any

import msgspec

from dsec_common.wire.base import ErrorReply, Message


class PutState(Message, frozen=True, kw_only=True):
    """Trainer: keep values with a rollout, all of them or none; any JSON value each.

    Here and in the other requests that change a rollout ``fence`` is that of its group's trainer;
    0 for a rollout without a group.
    """

    values: dict[str, Any] = msgspec.field(default_factory=dict)
    deletes: tuple[str, ...] = ()
    fence: int = 0


class StateVersion(Message, frozen=True, kw_only=True):
    """The state is durable. ``version`` grows with each change, as the StateDB's do."""

    version: int


class GetState(Message, frozen=True, kw_only=True):
    """Trainer: what is kept with a rollout.

    Attributes:
        names: only these; empty for all.
        checkpoint: as it was at this checkpoint; 0 for now.
    """

    names: tuple[str, ...] = ()
    checkpoint: int = 0


class RolloutStateValues(Message, frozen=True, kw_only=True):
    """The values that are there, by name."""

    version: int
    values: dict[str, Any] = msgspec.field(default_factory=dict)


class MakeCheckpoint(Message, frozen=True, kw_only=True):
    """Trainer: keep a rollout as it is: its state, and a snapshot of its sandbox.

    Attributes:
        key: the same key is the same checkpoint, however often it is asked for.
        sandbox_id: which sandbox; empty for the one that last reported.
        durable: also make a layer of the snapshot, from which another node can go on.
    """

    key: str
    sandbox_id: str = ""
    durable: bool = False
    fence: int = 0


class CheckpointInfo(Message, frozen=True, kw_only=True):
    """A checkpoint: a version of the state and a snapshot, recorded together.

    Attributes:
        checkpoint: its number in the rollout.
        step: the newest report when it was begun.
        version: of the state.
        sandbox_id: of which sandbox.
        snapshot_id: on that sandbox's node.
        layer: made of the snapshot, for all nodes; empty when it is not durable.
    """

    checkpoint: int
    step: int
    version: int
    created_at: float
    sandbox_id: str
    snapshot_id: str
    layer: str = ""


class ListCheckpoints(Message, frozen=True, kw_only=True):
    """Trainer: the checkpoints that a rollout can be put back to, the oldest first."""


class CheckpointList(Message, frozen=True, kw_only=True):
    """Those that are kept."""

    checkpoints: tuple[CheckpointInfo, ...] = ()


class RollBackRollout(Message, frozen=True, kw_only=True):
    """Trainer: put a rollout back to its newest checkpoint at or before a step.

    Attributes:
        key: the same key is the same rollback, however often it is asked for.
        step: -1 for the newest checkpoint.
    """

    key: str
    step: int = -1
    fence: int = 0


class RolloutRolledBack(Message, frozen=True, kw_only=True):
    """The state and the sandbox are those of the checkpoint; what came after it is void.

    Attributes:
        checkpoint: to which.
        step: of the checkpoint: reports after it, and those without an answer, are void.
        sandbox_id: where to go on.
        recreated: that is a new sandbox, since the old one is gone.
        last_seq: the next report has the number after it; none before has it again.
    """

    checkpoint: int
    step: int
    sandbox_id: str
    recreated: bool
    last_seq: int


class RolloutPutBack(Message, frozen=True, kw_only=True):
    """Event: a rollout is as it was after report ``step``, and goes on in ``sandbox_id``.

    ``reason`` is ``rollback``, or ``node_lost``: nobody asked, start the agent there. Told at most
    once; the rollout itself says so until it is put back again (``restoration``).
    """

    rollout_id: str
    step: int
    sandbox_id: str
    reason: str
    last_seq: int


class BranchRollout(Message, frozen=True, kw_only=True):
    """Trainer: make rollouts of the newest checkpoint at or before a step, each with a sandbox.

    Attributes:
        key: the same key is the same branches, however often it is asked for.
        count: how many.
        step: -1 for the newest checkpoint.
    """

    key: str
    count: int
    step: int = -1
    fence: int = 0


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """One branch: a rollout with its sandbox, or why there is none.

    ``model_rollout_id`` is a new rollout for its model calls, where the other sandbox had one.
    """

    rollout_id: str = ""
    sandbox_id: str = ""
    error: ErrorReply | None = None
    model_rollout_id: str = ""


class RolloutBranched(Message, frozen=True, kw_only=True):
    """One entry for each branch that was asked for."""

    checkpoint: int
    step: int
    branches: tuple[Branch, ...]
