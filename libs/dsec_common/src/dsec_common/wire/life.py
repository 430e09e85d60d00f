"""A sandbox's life after its creation: pausing it, keeping it for longer, labelling it."""

from __future__ import annotations

import msgspec

from dsec_common.wire.base import Message


class PauseSandbox(Message, frozen=True, kw_only=True):
    """Stop every process of a sandbox, and answer with its info when all stand still.

    Commands that run stand still with it, and so do their time limits. The next request has it go
    on. Its time to live counts on. A paused one is answered at once.

    Attributes:
        reason: why, for the behaviour log and the event; empty is told as ``asked``.
    """

    reason: str = ""


class ResumeSandbox(Message, frozen=True, kw_only=True):
    """Have a paused sandbox go on, and answer with its info; one that runs is answered at once."""


class TouchSandbox(Message, frozen=True, kw_only=True):
    """Keep a sandbox for longer: its time to live and its idle time begin anew. Wakes nothing.

    A ``deadline_s`` that it was created with, as by a contract's timeout, stays where it is.

    Attributes:
        ttl_s: from now on; 0 means no end. None keeps what it was created or last touched with.
        idle_ttl_s: likewise.
    """

    ttl_s: float | None = None
    idle_ttl_s: float | None = None


class PatchSandbox(Message, frozen=True, kw_only=True):
    """Change a sandbox's labels and leave those that are not named. Wakes nothing.

    Attributes:
        labels: the new values; None removes a label.
    """

    labels: dict[str, str | None] = msgspec.field(default_factory=dict)


class SandboxPaused(Message, frozen=True, kw_only=True):
    """Event: a sandbox stands still.

    ``reason`` is ``asked``, ``idle``, or what who asked for it gave as one.
    """

    sandbox_id: str
    reason: str


class SandboxResumed(Message, frozen=True, kw_only=True):
    """Event: a paused sandbox runs again."""

    sandbox_id: str
