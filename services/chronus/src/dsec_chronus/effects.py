"""What a shard's core wants done."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_chronus.events import ActionDone, AwaitAsked
from dsec_chronus.records import ActionBegun, Record, Taken
from dsec_common.errors import DsecError
from dsec_common.wire.base import Message
from dsec_common.wire.checkpoint import RolloutPutBack


class WriteFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Append a frame; one is outstanding at most.

    Exactly one of ``FrameWritten``, ``FrameFailed`` and ``ShardLost`` must follow.
    """

    records: tuple[Record, ...]
    snapshot_part: int = 0
    snapshot_complete: bool = False


class PurgeJournal(msgspec.Struct, frozen=True, kw_only=True):
    """Drop the frames before ``sequence``: a complete snapshot begins there."""

    sequence: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a request."""

    request_id: int
    reply: Message


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a request with an error."""

    request_id: int
    error: DsecError


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a step: what it reported is durable, and now its feedback is waited for."""

    asked: AwaitAsked

    @property
    def request_id(self) -> int:
        """The request that waits."""
        return self.asked.request_id


class WaitForAction(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of asking for an action: it is under way, and its result is waited for."""

    request_id: int
    local: str
    number: int


class Nothing(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of what nobody asked for: an action's end, told again if it was not kept."""

    request_id: int
    done: ActionDone


class Perform(msgspec.Struct, frozen=True, kw_only=True):
    """Do what a durable intent says; ``ActionDone`` must follow, unless the shard is lost.

    Attributes:
        project: whose rollout.
        begun: the intent.
        taken: what the node kept for the checkpoint that is gone back to or branched.
        doubtful: an earlier owner may have done some of it: nodes are asked first.
    """

    project: str
    begun: ActionBegun
    taken: Taken | None = None
    doubtful: bool = False


class DropCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Delete what a node kept for a checkpoint that is kept no more."""

    project: str
    taken: Taken


class Collect(msgspec.Struct, frozen=True, kw_only=True):
    """Delete what nodes keep for checkpoints of this shard that do not exist.

    ``nodes`` says by project where there may be some.
    """

    nodes: dict[str, frozenset[str]]


class Announce(msgspec.Struct, frozen=True, kw_only=True):
    """Publish an event of a rollout."""

    project: str
    what: str
    event: RolloutPutBack


Outcome: TypeAlias = Answer | Refuse
Decided: TypeAlias = Outcome | Wait | WaitForAction | Nothing
"""What becomes of a change once its frame is durable."""

Deed: TypeAlias = Perform | DropCheckpoint | Collect
"""What is asked of nodes."""

Effect: TypeAlias = WriteFrame | PurgeJournal | Outcome | Deed | Announce
"""What the shell is to do."""
