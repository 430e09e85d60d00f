"""Chronus's refusals, worded once."""

from __future__ import annotations

from dsec_common.errors import (
    MAY_HAVE_HAPPENED,
    DsecError,
    ErrorCode,
    invalid,
    not_found,
    unavailable,
)


def rollout_unknown(rollout_id: str) -> DsecError:
    """Return the error for a rollout that is not there, or another project's."""
    return not_found(
        f"no rollout {rollout_id} in this project; it was never opened, or closed and forgotten",
        rollout_id=rollout_id,
    )


def rollout_closed(rollout_id: str) -> DsecError:
    """Return the error for a change to a closed rollout."""
    return DsecError(
        ErrorCode.EXPIRED,
        f"rollout {rollout_id} is closed: it takes no more reports and gets no more feedback",
        details={"rollout_id": rollout_id},
    )


def opened_otherwise(rollout_id: str) -> DsecError:
    """Return the error for an idempotency key that is used again for something else."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"this idempotency key opened rollout {rollout_id} with other labels or other "
        "checkpoints; use another key",
        details={"rollout_id": rollout_id},
    )


def nobody_waits(rollout_id: str, seq: int) -> DsecError:
    """Return the error for a part of an answer that nobody waits for."""
    return DsecError(
        ErrorCode.EXPIRED,
        f"nobody waits for feedback to report {seq} of rollout {rollout_id}",
        details={"rollout_id": rollout_id, "seq": seq},
    )


def report_gap(rollout_id: str, seq: int, expected_seq: int) -> DsecError:
    """Return the error for a report that does not follow the last one."""
    return invalid(
        f"report {seq} of rollout {rollout_id} is not the next: reports count from 1 without a "
        f"gap, {expected_seq} is expected",
        rollout_id=rollout_id,
        seq=seq,
        expected_seq=expected_seq,
    )


def reported_otherwise(rollout_id: str, seq: int, last_seq: int) -> DsecError:
    """Return the error for a report whose number another report has."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"rollout {rollout_id} has another report {seq} already; {last_seq + 1} is the next",
        details={"rollout_id": rollout_id, "seq": seq, "expected_seq": last_seq + 1},
    )


def nothing_to_answer(rollout_id: str, seq: int, last_seq: int) -> DsecError:
    """Return the error for feedback to a report that is not there."""
    return invalid(
        f"rollout {rollout_id} has no report {seq} to answer; its last is {last_seq}",
        rollout_id=rollout_id,
        seq=seq,
        last_seq=last_seq,
    )


def answered_otherwise(rollout_id: str, seq: int) -> DsecError:
    """Return the error for a second, different feedback."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"report {seq} of rollout {rollout_id} has other feedback already, which may have reached "
        "the sandbox",
        details={"rollout_id": rollout_id, "seq": seq},
    )


def too_large(what: str, size: int, limit: int, unit: str = "bytes") -> DsecError:
    """Return the error for something beyond its limit."""
    return invalid(
        f"{what} has {size} {unit}, at most {limit} are taken; put large data into a file or an "
        "object store and send where it is",
        size=size,
        limit=limit,
    )


def bad_seq(seq: int) -> DsecError:
    """Return the error for a number that no report can have."""
    return invalid(f"{seq} is no report's number: reports count from 1", seq=seq)


def bad_reward(reward: float) -> DsecError:
    """Return the error for a reward that is no number."""
    return invalid(f"a reward must be a finite number, not {reward!r}")


def shard_full(shard: str, limit_bytes: int) -> DsecError:
    """Return the error for a shard that may hold no more of a project."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"shard {shard} holds {limit_bytes} bytes of this project's rollouts, its limit; close "
        "rollouts that are done, or raise shard_bytes_max",
        retry_after_s=5.0,
        details={"shard": shard, "limit_bytes": limit_bytes},
    )


def too_many_waiting(shard: str, what: str, limit: int) -> DsecError:
    """Return the error for a shard on which enough requests wait."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"{limit} {what} wait on shard {shard} already; try again a little later",
        retry_after_s=0.2,
        details={"shard": shard, "limit": limit},
    )


def shard_moving(shard: str) -> DsecError:
    """Return the error for a shard that this process does not own, or no more."""
    return unavailable(
        f"shard {shard} is changing its owner; ask again", retry_after_s=0.1, shard=shard
    )


def history_forgotten(rollout_id: str, seq: int, forgotten_seq: int, last_seq: int) -> DsecError:
    """Return the error for a number that was answered so long ago that it is kept no more."""
    return DsecError(
        ErrorCode.EXPIRED,
        f"report {seq} of rollout {rollout_id} was answered long ago and is kept no more: the "
        f"oldest that is kept is {forgotten_seq + 1}, the next is {last_seq + 1}. Go on from "
        "there; all that was ever reported is in the behaviour log",
        details={
            "rollout_id": rollout_id,
            "seq": seq,
            "oldest_seq": forgotten_seq + 1,
            "expected_seq": last_seq + 1,
        },
    )


def too_many_unanswered(rollout_id: str, limit: int) -> DsecError:
    """Return the error for an agent that is too far ahead of its trainer."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"{limit} reports of rollout {rollout_id} wait for their trainer already; try again when "
        "it has answered",
        retry_after_s=0.2,
        details={"rollout_id": rollout_id, "limit": limit},
    )


def group_unknown(group: str, shard: str) -> DsecError:
    """Return the error for a group that was not opened on a shard, or was forgotten."""
    return not_found(
        f"no group {group!r} on shard {shard} in this project; open it with its tasks first",
        group=group,
    )


def fenced(group: str, fence: int, newest: int) -> DsecError:
    """Return the error for a trainer whose group another has taken over."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"another trainer has taken the group {group!r} over: its fencing number is {newest}, "
        f"yours {fence}. Nothing of this was done; stop, or open the group to take it back",
        details={"group": group, "reason": "fenced", "fence": fence, "newest_fence": newest},
    )


def task_otherwise(group: str, index: int, rollout_id: str) -> DsecError:
    """Return the error for a task that differs from what its rollout was opened for."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"task {index} of the group {group!r} has rollout {rollout_id} with another task, other "
        "labels or other checkpoints; use another name for another list of tasks",
        details={"group": group, "index": index, "rollout_id": rollout_id},
    )


def answered_by_group(rollout_id: str, group: str) -> DsecError:
    """Return the error for what is asked past the trainer of a rollout's group."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"rollout {rollout_id} belongs to the group {group!r}: only the group's trainer "
        "answers and changes it",
        details={"rollout_id": rollout_id, "group": group},
    )


def bad_group(why: str) -> DsecError:
    """Return the error for a request about a group that makes no sense."""
    return invalid(f"{why}; name a group by 1 to 128 printable characters")


def rolled_back(rollout_id: str, seq: int, step: int, last_seq: int) -> DsecError:
    """Return the error for a number that a rollback has made void."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"rollout {rollout_id} was put back to step {step}: its report {seq} is void, and nothing "
        f"about it counts; {last_seq + 1} is the next",
        details={
            "rollout_id": rollout_id,
            "seq": seq,
            "reason": "rolled_back",
            "step": step,
            "expected_seq": last_seq + 1,
        },
    )


def replaced(rollout_id: str, sandbox_id: str, by: str) -> DsecError:
    """Return the error for a sandbox that was taken for lost."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"sandbox {sandbox_id} was taken for lost, and {by} goes on with rollout {rollout_id}: "
        "stop, nothing that comes from here counts",
        details={"rollout_id": rollout_id, "reason": "replaced", "sandbox_id": by},
    )


def acting(rollout_id: str, kind: str) -> DsecError:
    """Return the error for what has to wait until an action is over."""
    return unavailable(
        f"a {kind} of rollout {rollout_id} is under way; ask again",
        retry_after_s=0.05,
        rollout_id=rollout_id,
    )


def no_checkpoint(rollout_id: str, step: int, kept: str) -> DsecError:
    """Return the error for a step before which no checkpoint is kept."""
    which = "no checkpoint" if step < 0 else f"no checkpoint at or before step {step}"
    return not_found(
        f"rollout {rollout_id} has {which}; kept are those of the steps {kept or '(none)'}",
        rollout_id=rollout_id,
        step=step,
    )


def no_sandbox(rollout_id: str) -> DsecError:
    """Return the error for a checkpoint of a rollout that no sandbox has reported for."""
    return invalid(
        f"no sandbox has reported for rollout {rollout_id} yet: name the one to keep",
        rollout_id=rollout_id,
    )


def key_reused(rollout_id: str, key: str) -> DsecError:
    """Return the error for a key that stands for another action."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"the key {key[:40]!r} stands for another action of rollout {rollout_id}, or for the same "
        "with another step, count, sandbox or durability; use one of its own for each",
        details={"rollout_id": rollout_id, "key": key},
    )


def too_much_state(rollout_id: str, size: int, limit: int) -> DsecError:
    """Return the error for state beyond its limit."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"the state of rollout {rollout_id} would take {size} bytes, {limit} are the most; keep "
        "large data in files of the sandbox, which a checkpoint keeps too",
        retryable=False,
        details={"rollout_id": rollout_id, "limit_bytes": limit},
    )


def node_silent(node: str, why: str) -> DsecError:
    """Return the error for an action whose node does not answer."""
    return unavailable(
        f"node {node} does not answer ({why}); nothing was recorded. See `dsec node list`",
        node=node,
    )


def no_template(sandbox_id: str) -> DsecError:
    """Return the error for a sandbox whose node does not say how another like it is made."""
    return DsecError(
        ErrorCode.UNSUPPORTED,
        f"the node of sandbox {sandbox_id} is older than this Chronus and does not say how to make "
        "another like it; update sandboxd there",
        details={"sandbox_id": sandbox_id},
    )


def time_is_over(sandbox_id: str) -> DsecError:
    """Return the error for a sandbox whose time no other may take any more."""
    return DsecError(
        ErrorCode.EXPIRED,
        f"the time that sandbox {sandbox_id} was given is over, so none takes its place; branch "
        "the rollout to go on with what was left at the checkpoint",
        details={"sandbox_id": sandbox_id},
    )


def outcome_unknown(node: str) -> DsecError:
    """Return the error for a rollback that a node may have done before it was gone."""
    return unavailable(
        f"node {node} is gone, and whether it had put the sandbox back is not known; nothing was "
        "recorded. Go back again, to a durable checkpoint or when the node is there again",
        node=node,
        **{MAY_HAVE_HAPPENED: True},
    )


def bad_count(count: int, most: int) -> DsecError:
    """Return the error for a number of branches that makes no sense."""
    return invalid(f"{count} branches: ask for 1 to {most}", count=count)


def too_many_branches(rollout_id: str, count: int, most: int) -> DsecError:
    """Return the error for more branches than begin together with labels as large as these."""
    return invalid(
        f"{count} branches of rollout {rollout_id}: with its labels, {most} are the most at once",
        rollout_id=rollout_id,
        count=count,
    )


def no_room_for_branches(shard: str, count: int, size: int, room: int) -> DsecError:
    """Return the error for branches that would take more than the project has left in a shard."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"{count} branches with their state would take {size} bytes, shard {shard} has {room} left "
        "for this project; ask for fewer, or close rollouts that are done",
        retry_after_s=5.0,
        details={"shard": shard, "size": size, "room_bytes": room},
    )


def bad_key(key: str, most: int) -> DsecError:
    """Return the error for a key that no action can have."""
    return invalid(
        f"{key[:40]!r} is no key of an action: use 1 to {most} printable characters, a new key for "
        "each action"
    )


def bad_names(names: int, most: int) -> DsecError:
    """Return the error for names of values that cannot be kept."""
    return invalid(f"a value's name has 1 to {most} characters, and {names} are the most at once")
