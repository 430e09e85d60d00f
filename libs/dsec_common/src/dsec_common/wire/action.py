"""Actions: steps of an agent's run, each with resources of its own for just as long as it lasts."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from dsec_common.compute.model import GpuDemand
from dsec_common.wire.base import Message
from dsec_common.wire.network import NetworkPolicy

ACTION_NAME_MAX: Final = 64
"""Characters of an action's name."""

ACTION_DETAIL_MAX: Final = 1024
"""Characters of what is said at its end."""

ACTION_VOLUMES_MAX: Final = 16
"""Volumes of one action."""

ACTIONS_OPEN_MAX: Final = 16
"""Actions of one sandbox that may be open at once."""

ACTIONS_KEPT_MAX: Final = 1000
"""Actions of one sandbox that are remembered; of those that have ended the oldest go first."""

ACTION_COMMANDS_MAX: Final = 1000
"""Commands that one action may run."""

ACTION_TIMEOUT_MAX_S: Final = 86_400.0
"""The longest that an action may last."""

ACTION_HOLD_MAX_S: Final = 3600.0
"""The longest that an action may go on without a word from its owner."""


class ActionState(StrEnum):
    """Where an action is in its life."""

    BEGINNING = "beginning"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


class ActionOutcome(StrEnum):
    """How an action ended."""

    OK = "ok"
    """Its owner said so."""
    FAILED = "failed"
    """Its owner said so."""
    REFUSED = "refused"
    """It did not get what it asked for, and never ran."""
    TIMEOUT = "timeout"
    """Its time was over."""
    ABANDONED = "abandoned"
    """Nobody said any more that it is wanted."""
    LEASE_LOST = "lease_lost"
    """Its Compute Units were taken from it."""
    INTERRUPTED = "interrupted"
    """Its sandbox ended, was put back to a snapshot, or its node's daemon died while it began."""
    PARENT_ENDED = "parent_ended"
    """The action that it was a part of ended."""


class AcquiredKind(StrEnum):
    """What an action was given."""

    UNITS = "units"
    VOLUME = "volume"
    LAYER = "layer"
    NETWORK = "network"


class ActionVolume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directory that is there for one action: a new empty one, or a layer, read-only.

    Attributes:
        name: of the directory.
        size_bytes: of a new one, which is in memory and counts for the sandbox.
        inodes: how many files and directories a new one may have.
        layer: reference of a layer of the project, in place of a new one.
    """

    name: str
    size_bytes: int = 0
    inodes: int = 16_384
    layer: str = ""


class Acquired(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that an action was given, and when.

    Attributes:
        name: the lease, the volume, or the network's mode.
        amount: Compute Units, or bytes.
        acquired_at: Unix time in seconds.
        returned_at: 0 while the action has it.
    """

    kind: AcquiredKind
    name: str
    acquired_at: float
    returned_at: float = 0.0
    amount: float = 0.0


class ActionTerms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the contract of a sandbox's agent allows its actions. None: it says nothing of it.

    Attributes:
        agent: whose, for errors.
        max_cu: Compute Units that the instance may hold at once, its own lease included.
        network_allowed: whether it may reach anything but itself.
        network: what it may reach.
    """

    agent: str
    max_cu: float | None = None
    network_allowed: bool | None = None
    network: NetworkPolicy | None = None


class BeginAction(Message, frozen=True, kw_only=True):
    """Give a sandbox an action, with all that it asks for or not at all.

    The same message again is the same action. Its id is the action's.

    Attributes:
        name: what people call it.
        parent: the id of the open action that it is a part of, or empty.
        gpu: Compute Units: its commands, and no others, are told of them.
        volumes: directories in the one that its commands find named in ``DSEC_ACTION_VOLUMES``.
        network: what the whole sandbox may reach while it lasts; None leaves that as it is.
        timeout_s: it ends so long after it began.
        hold_s: it ends when its owner has not said for so long that it is wanted; 0: never.
    """

    name: str
    parent: str = ""
    gpu: GpuDemand | None = None
    volumes: tuple[ActionVolume, ...] = ()
    network: NetworkPolicy | None = None
    timeout_s: float = 3600.0
    hold_s: float = 60.0


class KeepAction(Message, frozen=True, kw_only=True):
    """Say that an action is wanted for another ``hold_s``."""

    action_id: str


class EndAction(Message, frozen=True, kw_only=True):
    """End an action: answered when all that it was given is returned. Repeating it is fine.

    Attributes:
        outcome: ``ok`` or ``failed``.
        detail: for the record, at most :data:`ACTION_DETAIL_MAX` characters.
    """

    action_id: str
    outcome: ActionOutcome = ActionOutcome.OK
    detail: str = ""


class ActionInfo(Message, frozen=True, kw_only=True):
    """An action as its node knows it; times are Unix seconds, 0 for what has not been yet.

    Attributes:
        parent: the action that it was a part of.
        outcome: how it ended; None before.
        detail: why, in a sentence, or what its owner said.
        asked_at: when the node heard of it.
        began_at: when it had all that it asked for.
        expires_at: when its time is over.
        acquired: what it was given, in that order.
        commands: ids of the messages that its commands run for; steps of the behaviour log have
            them as their cause.
        cu: Compute Units that it has, or had.
        volumes: directories inside, by name.
    """

    action_id: str
    sandbox_id: str
    name: str
    state: ActionState
    asked_at: float
    parent: str = ""
    outcome: ActionOutcome | None = None
    detail: str = ""
    began_at: float = 0.0
    ended_at: float = 0.0
    expires_at: float = 0.0
    acquired: tuple[Acquired, ...] = ()
    commands: tuple[str, ...] = ()
    cu: float = 0.0
    volumes: dict[str, str] = msgspec.field(default_factory=dict)


class ListActions(Message, frozen=True, kw_only=True):
    """Ask for a sandbox's actions, in the order in which they were asked for.

    Attributes:
        after: the id of the last action of the page before; empty for the first page.
    """

    after: str = ""


class ActionList(Message, frozen=True, kw_only=True):
    """One page of a sandbox's actions; ``more`` says that a further page exists."""

    actions: tuple[ActionInfo, ...] = ()
    more: bool = False
