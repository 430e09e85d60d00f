"""Elasticity: what the broker tells nodes, and what a project hears of it."""

from __future__ import annotations

from dsec_common.compute.model import Slice
from dsec_common.wire.base import Message


class ResizeLease(Message, frozen=True, kw_only=True):
    """Broker to node: a lease has other slices now, of the same cards.

    Repeated until the node's heartbeats say that it is so; an older one than the node knows
    changes nothing.

    Attributes:
        resizes: how often the lease has been changed, this time included.
        slices: what it holds now.
        reason: why, in a sentence.
    """

    lease_id: str
    resizes: int
    slices: tuple[Slice, ...]
    reason: str = ""


class LeaseResized(Message, frozen=True, kw_only=True):
    """The node's answer: commands that start from now on get this share, or the sandbox is over."""

    lease_id: str


class SandboxResized(Message, frozen=True, kw_only=True):
    """Event: a sandbox has another share of its GPUs; commands that run keep theirs until they end.

    Attributes:
        cu: Compute Units that it has now.
        cu_before: those that it had.
    """

    sandbox_id: str
    lease_id: str
    cu: float
    cu_before: float
    reason: str = ""


class RetireNode(Message, frozen=True, kw_only=True):
    """Broker to node: take nothing any more, if you have nothing; you are about to be ended."""


class NodeRetired(Message, frozen=True, kw_only=True):
    """The node has no sandbox and takes none from now on."""

    node: str
