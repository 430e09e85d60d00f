"""Requests for sandboxes that take another's place at a checkpoint, or branch off it. No I/O."""

from __future__ import annotations

from typing import Final

import msgspec

from dsec_chronus.errors import no_template, time_is_over
from dsec_chronus.records import ActionBegun, Taken
from dsec_common.wire.sandbox import CreateSandbox, SandboxInfo

_LEAST_S: Final = 0.001


def kept_of(info: SandboxInfo) -> CreateSandbox:
    """Return what is kept of how a sandbox was made; its ``deadline_s`` is what is left of it.

    Args:
        info: as its node tells it to who asks for its ``template``.

    Raises:
        DsecError: ``unsupported`` when the node does not tell.
    """
    if info.template is None:
        raise no_template(info.sandbox_id)
    whole_s = info.template.deadline_s
    # Both are by the node's clock.
    left_s = max(whole_s - (info.sent_at - info.created_at), _LEAST_S) if whole_s else 0.0
    return msgspec.structs.replace(info.template, deadline_s=left_s)


def in_its_place(begun: ActionBegun, taken: Taken, rollout_id: str) -> CreateSandbox:
    """Return the request for the sandbox in which a rollout goes on.

    It has what is left of the old one's time. The same action always makes the same request.

    Raises:
        DsecError: ``expired`` when nothing is left.
    """
    like = taken.template
    left_s = like.deadline_s
    if left_s:
        left_s -= begun.at - taken.at
        if left_s <= 0:
            raise time_is_over(begun.sandbox_id)
    is_of_model = like.model_rollout_id == rollout_id
    return msgspec.structs.replace(
        like, rollout_id=like.rollout_id if is_of_model else rollout_id, deadline_s=left_s
    )


def of_branch(taken: Taken, rollout_id: str, branch_id: str, model_id: str) -> CreateSandbox:
    """Return the request for a branch's sandbox: its time is what was left at the checkpoint.

    A rollout is of one sandbox, so none of the old one's is a branch's.

    Args:
        taken: at the checkpoint.
        rollout_id: whose branch.
        branch_id: the branch's rollout.
        model_id: the rollout of its model calls if these have one of their own.
    """
    like = taken.template
    if like.model_rollout_id == rollout_id:
        agent_id, model_id = "", branch_id
    else:
        agent_id = branch_id
    return msgspec.structs.replace(like, rollout_id=agent_id, model_rollout_id=model_id)


def has_model_rollout(taken: Taken, rollout_id: str) -> bool:
    """Return whether the sandbox's model calls went to a rollout beside this one."""
    return taken.template.model_rollout_id not in {"", rollout_id}
