"""What becomes of a rollout's actions: which may begin, what their ends record and answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from dsec_chronus.contents import Contents
from dsec_chronus.draft import Draft
from dsec_chronus.effects import (
    Announce,
    Answer,
    Collect,
    Decided,
    DropCheckpoint,
    Effect,
    Outcome,
    Perform,
    Refuse,
    WaitForAction,
)
from dsec_chronus.errors import (
    acting,
    key_reused,
    no_checkpoint,
    no_room_for_branches,
    no_sandbox,
    rollout_closed,
    too_many_branches,
    too_much_state,
)
from dsec_chronus.events import ActionAsked, ActionDone, Moment, PutAsked
from dsec_chronus.kept import Checkpoint, Kept
from dsec_chronus.records import (
    ActionBegun,
    ActionEnded,
    ActionKind,
    Child,
    Record,
    RolloutBegun,
    StateTaken,
    StateWritten,
    answer_size,
    size_of,
    values_size,
)
from dsec_chronus.rollout import Rollout, goes_back
from dsec_chronus.templates import has_model_rollout, in_its_place
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import ErrorReply, Message
from dsec_common.wire.checkpoint import (
    Branch,
    RolloutBranched,
    RolloutPutBack,
    RolloutRolledBack,
    StateVersion,
)

STATE_BYTES_MAX: Final = 512 * 1024
"""Of one rollout's state, as JSON."""

ANSWER_BYTES_MAX: Final = 960 * 1024
"""Of the same state as answers carry it: one that holds all of it fits a NATS message."""

FENCED_NUMBERS: Final = 1024
"""Numbers of reports that a rollback leaves out. More are never under way from one sandbox, so
nothing that was sent before the rollback can be taken for what comes after it."""

BRANCHES_BYTES_MAX: Final = 512 * 1024
"""Of the records that branches begin with: they become durable together, in one frame."""

AUTOMATIC: Final = "\0every "
"""Begins the keys of checkpoints that are made by themselves; no caller's key does."""


def next_version(last: int, at: Moment) -> int:
    """Return a version as the StateDB has them: Unix milliseconds, and a count within one."""
    return max(last + 1, int(at.unix_s * 1000) << 16)


# --- Decisions ------------------------------------------------------------------------------------


def put(asked: PutAsked, draft: Draft, rollout_id: str) -> tuple[list[Record], Message]:
    """Return the fact that changes the state, if it does, and the answer.

    Raises:
        DsecError: ``exhausted`` when it would be too much; ``expired`` when the rollout is closed;
            ``unavailable`` while a rollback is under way.
    """
    kept = draft.kept
    if draft.is_closed:
        raise rollout_closed(rollout_id)
    need_no_rollback(kept, rollout_id)
    before = {**kept.values, **asked.values}
    after = dict(before)
    for name in asked.deletes:
        after.pop(name, None)
    if after == kept.values:
        return [], StateVersion(version=kept.version)
    if (size := values_size(after)) > STATE_BYTES_MAX:
        raise too_much_state(rollout_id, size, STATE_BYTES_MAX)
    if (size := answer_size(after)) > ANSWER_BYTES_MAX:
        raise too_much_state(rollout_id, size, ANSWER_BYTES_MAX)
    record = StateWritten(
        local=asked.local,
        at=asked.at.unix_s,
        version=next_version(kept.version, asked.at),
        puts=asked.values,
        deletes=tuple(name for name in asked.deletes if name in before),
    )
    kept.apply(record)
    return [record], StateVersion(version=record.version)


def need_no_rollback(kept: Kept, rollout_id: str) -> None:
    """Return unless the rollout is being put back: what came meanwhile would be void at once.

    Raises:
        DsecError: ``unavailable``.
    """
    if kept.action is not None and kept.action.kind is ActionKind.ROLLBACK:
        raise acting(rollout_id, kept.action.kind)


def begin(
    asked: ActionAsked, draft: Draft, shard: str, room: int
) -> tuple[list[ActionBegun], Decided]:
    """Return the intent that the journal must hold before anything is done, and who waits for it.

    Args:
        asked: what is to be done.
        draft: the rollout.
        shard: its shard.
        room: bytes that branches may take.

    Raises:
        DsecError: ``not_found`` without a fitting checkpoint; ``invalid`` without a sandbox,
            or for more branches than one frame holds; ``exhausted`` for more than there is room
            for; ``conflict`` for a key of another action; ``expired`` when the rollout is closed,
            or when the time of a sandbox that is lost is over;
            ``unavailable`` while another action is under way.
    """
    rollout_id, kept = f"{shard}.{asked.local}", draft.kept
    if (known := kept.results.get(asked.key)) is not None:
        _need_same(asked, known.begun, rollout_id)
        reply = reply_of(known.begun, known.ended, kept.checkpoints, shard)
        return [], Answer(request_id=asked.request_id, reply=reply)
    if kept.action is not None:
        if kept.action.key != asked.key:
            raise acting(rollout_id, kept.action.kind)
        _need_same(asked, kept.action, rollout_id)
        number = kept.action.number
        return [], WaitForAction(request_id=asked.request_id, local=asked.local, number=number)
    if draft.is_closed and asked.kind is not ActionKind.BRANCH:
        raise rollout_closed(rollout_id)
    intent = _intent(asked, draft, rollout_id)
    if intent.room_bytes > room:
        raise no_room_for_branches(shard, intent.count, intent.room_bytes, max(room, 0))
    kept.apply(intent)
    wait = WaitForAction(request_id=asked.request_id, local=asked.local, number=intent.number)
    return [intent], wait


def _need_same(asked: ActionAsked, begun: ActionBegun, rollout_id: str) -> None:
    same = (asked.kind, asked.count, asked.durable) == (begun.kind, begun.count, begun.durable)
    # Whoever names no sandbox means that which it was.
    same = same and asked.sandbox_id in {"", begun.sandbox_id}
    # A record of before it was kept does not say.
    if not same or begun.asked_step not in {None, asked.step}:
        raise key_reused(rollout_id, asked.key)


def _intent(asked: ActionAsked, draft: Draft, rollout_id: str) -> ActionBegun:
    kept = draft.kept
    checkpoint: Checkpoint | None = None
    sandbox_id = asked.sandbox_id or draft.sandbox_id
    step = draft.last_step
    if asked.kind is not ActionKind.CHECKPOINT:
        checkpoint = kept.newest_durable() if asked.lost else kept.newest_at(asked.step)
        if checkpoint is None:
            steps = ", ".join(str(it.begun.step) for it in kept.checkpoints.values())
            raise no_checkpoint(rollout_id, asked.step, steps)
        step, sandbox_id = checkpoint.begun.step, sandbox_id or checkpoint.begun.sandbox_id
    if not sandbox_id:
        raise no_sandbox(rollout_id)
    each_bytes = size_of(_of_branch(draft.rollout.begun))
    if checkpoint is not None and has_model_rollout(checkpoint.taken, rollout_id):
        each_bytes *= 2
    if asked.count > (most := BRANCHES_BYTES_MAX // each_bytes):
        raise too_many_branches(rollout_id, asked.count, most)
    state_bytes = 0 if checkpoint is None else checkpoint.values_bytes
    room_bytes = asked.count * (each_bytes + state_bytes)
    intent = ActionBegun(
        local=asked.local,
        at=asked.at.unix_s,
        number=kept.number + 1,
        kind=asked.kind,
        key=asked.key,
        step=step,
        checkpoint=0 if checkpoint is None else checkpoint.begun.number,
        sandbox_id=sandbox_id,
        count=asked.count,
        durable=asked.durable,
        reward=draft.reward,
        lost=asked.lost,
        asked_step=asked.step,
        room_bytes=room_bytes,
    )
    if asked.lost and checkpoint is not None:
        in_its_place(intent, checkpoint.taken, rollout_id)  # is asked for again and again
    return intent


def _of_branch(begun: RolloutBegun) -> RolloutBegun:
    return msgspec.structs.replace(begun, group="", task=b"")


def automatic(draft: Draft, seq: int, at: Moment) -> ActionBegun | None:
    """Return the intent of the checkpoint that is due after a report; None when none is."""
    begun = draft.rollout.begun
    if not begun.checkpoint_every or seq % begun.checkpoint_every:
        return None
    if draft.kept.action is not None or not draft.sandbox_id:
        return None
    asked = ActionAsked(
        request_id=0,
        project=begun.project,
        local=begun.local,
        at=at,
        kind=ActionKind.CHECKPOINT,
        key=f"{AUTOMATIC}{seq}",
        durable=begun.durable,
    )
    intent = _intent(asked, draft, "")
    draft.kept.apply(intent)
    return intent


def end(asked: ActionDone, draft: Draft, shard: str) -> list[Record]:
    """Return the facts that an action's end makes, all of them or none; none when it is over."""
    begun, kept = draft.kept.action, draft.kept
    if begun is None or begun.number != asked.number:
        return []
    ended = ActionEnded(
        local=asked.local,
        at=asked.at.unix_s,
        number=asked.number,
        error=None if asked.error is None else ErrorReply.of(asked.error),
        taken=asked.taken,
        sandbox_id=asked.sandbox_id,
        last_seq=draft.last_seq + FENCED_NUMBERS,
        version=next_version(kept.version, asked.at),
        children=asked.children,
    )
    records: list[Record] = [ended]
    checkpoint = kept.checkpoints.get(begun.checkpoint)
    for child in asked.children:
        if child.error is None and checkpoint is not None:
            records += _branch(child, asked, draft.rollout, checkpoint, shard)
    kept.apply(ended)
    return records


def _branch(
    child: Child, asked: ActionDone, parent: Rollout, checkpoint: Checkpoint, shard: str
) -> Iterator[Record]:
    begun = parent.begun
    if child.model_local:
        yield RolloutBegun(
            local=child.model_local,
            at=asked.at.unix_s,
            project=begun.project,
            labels=begun.labels,
            parent=checkpoint.taken.template.model_rollout_id,
        )
    yield RolloutBegun(
        local=child.local,
        at=asked.at.unix_s,
        project=begun.project,
        labels=begun.labels,
        checkpoint_every=begun.checkpoint_every,
        durable=begun.durable,
        parent=f"{shard}.{begun.local}",
        parent_step=checkpoint.begun.step,
    )
    if checkpoint.values:
        yield StateTaken(
            local=child.local,
            at=asked.at.unix_s,
            parent=begun.local,
            checkpoint=checkpoint.begun.number,
        )


def reply_of(
    begun: ActionBegun, ended: ActionEnded, checkpoints: dict[int, Checkpoint], shard: str
) -> Message:
    """Return the answer to whoever asked for an action that came to something.

    Raises:
        DsecError: ``not_found`` when the checkpoint that was made then is kept no more.
    """
    match begun.kind:
        case ActionKind.CHECKPOINT:
            checkpoint = checkpoints.get(begun.number)
            if checkpoint is None:
                raise no_checkpoint(f"{shard}.{begun.local}", begun.step, "newer ones")
            return checkpoint.info()
        case ActionKind.ROLLBACK:
            return RolloutRolledBack(
                checkpoint=begun.checkpoint,
                step=begun.step,
                sandbox_id=ended.sandbox_id,
                recreated=ended.sandbox_id != begun.sandbox_id,
                last_seq=ended.last_seq,
            )
        case ActionKind.BRANCH:
            branches = tuple(
                Branch(error=child.error)
                if child.error is not None
                else Branch(
                    rollout_id=f"{shard}.{child.local}",
                    sandbox_id=child.sandbox_id,
                    model_rollout_id=child.model_local and f"{shard}.{child.model_local}",
                )
                for child in ended.children
            )
            return RolloutBranched(checkpoint=begun.checkpoint, step=begun.step, branches=branches)


# --- Once it is durable ---------------------------------------------------------------------------


@dataclass(slots=True)
class Actions:
    """Who waits for which action of a shard, and what nodes are to be asked."""

    shard: str
    contents: Contents
    _waiting: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    # A snapshot that was given up may still be taken.
    _may_leave: bool = False

    def wait(self, outcome: WaitForAction) -> Iterator[Effect]:
        """Have a request wait for its action, which may have ended in the same frame."""
        rollout = self.contents.rollouts.get(outcome.local)
        pending = None if rollout is None else rollout.kept.action
        if pending is not None and pending.number == outcome.number:
            self._waiting.setdefault((outcome.local, outcome.number), []).append(outcome.request_id)
            return
        error = acting(f"{self.shard}.{outcome.local}", "change")
        yield Refuse(request_id=outcome.request_id, error=error)

    def recorded(self, before: ActionBegun | None, record: Record) -> Iterator[Effect]:
        """Yield what a durable fact asks for; ``before`` was under way until then."""
        if isinstance(record, ActionBegun):
            yield from self.begun(record)
        elif isinstance(record, ActionEnded) and before is not None:
            yield from self.ended(before, record)

    def begun(self, record: ActionBegun, *, doubtful: bool = False) -> Iterator[Effect]:
        """Yield what a durable intent asks for."""
        rollout = self.contents.rollouts[record.local]
        checkpoint = rollout.kept.checkpoints.get(record.checkpoint)
        yield Perform(
            project=rollout.begun.project,
            begun=record,
            taken=None if checkpoint is None else checkpoint.taken,
            doubtful=doubtful,
        )

    def ended(self, begun: ActionBegun, record: ActionEnded) -> Iterator[Effect]:
        """Yield the answers to those who wait for an action, and what is to be dropped now."""
        for request_id in self._waiting.pop((record.local, record.number), ()):
            yield self._outcome(request_id, begun, record)
        self._may_leave |= record.error is not None
        rollout = self.contents.rollouts[record.local]
        if goes_back(begun, record):
            yield Announce(
                project=rollout.begun.project,
                what="put_back",
                event=RolloutPutBack(
                    # The same for whoever tells it.
                    message_id=f"{self.shard}.{record.local}-{record.number}",
                    rollout_id=f"{self.shard}.{record.local}",
                    step=begun.step,
                    sandbox_id=record.sandbox_id,
                    reason="node_lost" if begun.lost else "rollback",
                    last_seq=record.last_seq,
                ),
            )
        yield from self.dropped(rollout)

    def _outcome(self, request_id: int, begun: ActionBegun, record: ActionEnded) -> Outcome:
        if record.error is not None:
            return Refuse(request_id=request_id, error=record.error.to_error())
        kept = self.contents.rollouts[record.local].kept
        reply = reply_of(begun, record, kept.checkpoints, self.shard)
        return Answer(request_id=request_id, reply=reply)

    def dropped(self, rollout: Rollout) -> Iterator[Effect]:
        """Yield what a rollout has dropped since this was asked last."""
        dropped, rollout.kept.dropped = rollout.kept.dropped, []
        for checkpoint in dropped:
            yield DropCheckpoint(project=rollout.begun.project, taken=checkpoint.taken)

    def forgotten(self, rollout: Rollout) -> Iterator[Effect]:
        """Yield what is to be dropped with a rollout that is forgotten."""
        for checkpoint in rollout.kept.checkpoints.values():
            yield DropCheckpoint(project=rollout.begun.project, taken=checkpoint.taken)

    def resume(self) -> Iterator[Effect]:
        """Yield what an earlier owner has begun and not ended, and have its leavings collected."""
        for rollout in self.contents.rollouts.values():
            rollout.kept.dropped = []  # collected below, as far as it is still there
            if rollout.kept.action is not None:
                yield from self.begun(rollout.kept.action, doubtful=True)
        yield from self.collect()

    def collect(self) -> Iterator[Effect]:
        """Yield the collection of what no checkpoint needs, where there may be any."""
        nodes: dict[str, set[str]] = {}
        for rollout in self.contents.rollouts.values():
            kept, known = rollout.kept, nodes.setdefault(rollout.begun.project, set())
            for checkpoint in kept.checkpoints.values():
                known.add(_node_of(checkpoint.taken.snapshot_id))
            if kept.action is not None:
                known.add(_node_of(kept.action.sandbox_id))
        found = {project: frozenset(names) for project, names in nodes.items() if names}
        if found:
            yield Collect(nodes=found)

    def leavings(self) -> Iterator[Effect]:
        """Yield the collection of what actions that failed may have left."""
        may_leave, self._may_leave = self._may_leave, False
        if may_leave:
            yield from self.collect()

    def needs(self, local: str, snapshot_id: str) -> bool:
        """Return whether a checkpoint of a rollout has this snapshot, or soon may."""
        rollout = self.contents.rollouts.get(local)
        if rollout is None:
            return False
        kept = rollout.kept.checkpoints.values()
        is_known = any(it.taken.snapshot_id == snapshot_id for it in kept)
        return is_known or rollout.kept.action is not None

    def lost_with(self, node: str) -> list[tuple[str, str, str]]:
        """Return project, id and sandbox of the rollouts that can go on without this node."""
        return [
            (rollout.begun.project, local, rollout.kept.sandbox_id)
            for local, rollout in self.contents.rollouts.items()
            if not rollout.closed_at
            and rollout.kept.sandbox_id.partition(".")[0] == node
            and rollout.kept.newest_durable() is not None
        ]

    def nodes(self) -> set[str]:
        """Return the nodes of the sandboxes that rollouts could be put back from, or now are."""
        acting = {
            _node_of(rollout.kept.action.sandbox_id)
            for rollout in self.contents.rollouts.values()
            if rollout.kept.action is not None
        }
        return acting | {
            _node_of(rollout.kept.sandbox_id)
            for rollout in self.contents.rollouts.values()
            if rollout.kept.checkpoints and rollout.kept.sandbox_id and not rollout.closed_at
        }

    def clear(self) -> list[int]:
        """Forget who waits; return them."""
        waiting = [request_id for ids in self._waiting.values() for request_id in ids]
        self._waiting.clear()
        return waiting


def _node_of(scoped: str) -> str:
    return ScopedId.parse(scoped).owner
