"""Which policy a sandbox's network begins with, and what its children begin with. No I/O."""

from __future__ import annotations

from typing import TypeAlias

from dsec_common.wire.network import NetworkPhase, NetworkPolicy
from dsec_sandboxd.network.memory import Remembered
from dsec_sandboxd.network.policy import needs_network
from dsec_sandboxd.records import SandboxRecord

First: TypeAlias = tuple[NetworkPolicy, NetworkPhase, NetworkPolicy | None]
"""A policy, its phase, and the policy of the agent phase if that is still to come."""


def as_remembered(kept: Remembered | None) -> First | None:
    """Return what was in force, for a sandbox that is made anew; None for no network.

    Not what it was created with: its phase for setting up may be over.
    """
    return None if kept is None else (kept.policy, kept.phase, kept.agent)


def as_asked(record: SandboxRecord, governed: NetworkPolicy | None) -> First | None:
    """Return what a new sandbox begins with; None for no network.

    Args:
        record: what its owner asked for.
        governed: what its agent's policy has in place of that; None for nothing.
    """
    if governed is not None:
        return (governed, NetworkPhase.AGENT, None) if needs_network(governed) else None
    setup, agent = record.setup_network, record.network
    if setup is not None:
        return setup, NetworkPhase.SETUP, agent or NetworkPolicy()
    if agent is not None and needs_network(agent):
        return agent, NetworkPhase.AGENT, None
    return None


def inherited(kept: Remembered | None) -> tuple[NetworkPolicy | None, NetworkPolicy | None]:
    """Return ``network`` and ``setup_network`` of a child that begins where a sandbox is now.

    A phase for setting up that is over for the sandbox is over for its children.
    """
    if kept is None:
        return None, None
    if kept.phase is NetworkPhase.SETUP:
        return kept.agent, kept.policy
    return kept.policy, None
