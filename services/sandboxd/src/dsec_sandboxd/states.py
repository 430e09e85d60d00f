"""Every state of a sandbox on a node, and what it allows: one table. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from dsec_common.wire.sandbox import SandboxState


class StateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for a sandbox while it is in one state.

    Attributes:
        meaning: the state in a sentence.
        can_exec: requests go in at once.
        can_wake: requests wait until it runs, which they themselves bring about.
        can_pause: a pause may be asked for; it need not change anything.
        can_delete: a deletion ends it, or its end is on the way or over.
        counts_against_node: what it was given is not handed out again.
        deadline_runs: its time to live counts and ends it.
        idle_runs: its idle time counts while nothing is in use.
        following: the states that may come next.
    """

    meaning: str
    can_exec: bool = False
    can_wake: bool = False
    can_pause: bool = False
    can_delete: bool = True
    counts_against_node: bool = True
    deadline_runs: bool = False
    idle_runs: bool = False
    following: tuple[SandboxState, ...] = ()


_S = SandboxState

STATES: Final[Mapping[SandboxState, StateFacts]] = {
    _S.CREATING: StateFacts(
        meaning="the intent is kept, the kernel is at work",
        following=(_S.RUNNING, _S.DELETING, _S.ENDED),
    ),
    _S.RUNNING: StateFacts(
        meaning="it answers requests",
        can_exec=True,
        can_pause=True,
        deadline_runs=True,
        idle_runs=True,
        following=(_S.PAUSING, _S.DELETING, _S.ENDED),
    ),
    _S.PAUSING: StateFacts(
        meaning="its processes are being stopped",
        can_wake=True,
        can_pause=True,
        deadline_runs=True,
        following=(_S.PAUSED, _S.RESUMING, _S.RUNNING, _S.DELETING, _S.ENDED),
    ),
    _S.PAUSED: StateFacts(
        meaning="its processes stand still; its memory that can be is given back",
        can_wake=True,
        can_pause=True,
        deadline_runs=True,
        following=(_S.RESUMING, _S.DELETING, _S.ENDED),
    ),
    _S.RESUMING: StateFacts(
        meaning="its processes are being let go on",
        can_wake=True,
        can_pause=True,
        deadline_runs=True,
        following=(_S.RUNNING, _S.PAUSED, _S.DELETING, _S.ENDED),
    ),
    _S.DELETING: StateFacts(
        meaning="its end is decided, the kernel is at work",
        following=(_S.ENDED,),
    ),
    _S.ENDED: StateFacts(
        meaning="nothing of it is left but its record, which tells why",
        counts_against_node=False,
    ),
}

#: In these the sandbox is in the kernel and its end has not been decided.
AWAKE_OR_ASLEEP: Final = frozenset(
    state for state, facts in STATES.items() if facts.can_exec or facts.can_wake
)


def facts_of(state: SandboxState) -> StateFacts:
    """Return what holds in a state."""
    return STATES[state]
