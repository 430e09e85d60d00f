"""Feedback that is told while it comes about: a trainer's answer on its way to who waits for it."""

from __future__ import annotations

import msgspec

from dsec_common.wire.base import Message


class StreamFeedback(Message, frozen=True, kw_only=True):
    """Trainer: more of what the feedback to report ``seq`` is going to hold.

    It goes to the sandbox's node as it is and is kept nowhere: the feedback says all of it again.
    ``data`` follows ``offset`` bytes of the same ``stream``; another stream begins anew.
    ``headers`` are those of the response.
    """

    seq: int
    stream: str
    data: bytes
    offset: int = 0
    headers: dict[str, str] = msgspec.field(default_factory=dict)


class HandFeedback(Message, frozen=True, kw_only=True):
    """Chronus to a node: a trainer's :class:`StreamFeedback` for one of its sandboxes.

    ``project`` is the trainer's, by its connection; ``local`` names the sandbox that reported.
    """

    project: str
    local: str
    rollout_id: str
    piece: StreamFeedback


class FeedbackTaken(Message, frozen=True, kw_only=True):
    """The node: it has taken ``size`` bytes of the stream; what follows them is to be sent next."""

    size: int
