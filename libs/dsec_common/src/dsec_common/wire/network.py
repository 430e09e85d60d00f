"""What a sandbox may reach, and the way to what listens inside it."""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from typing import Final

import msgspec

from dsec_common.wire.base import Message

PORT_CHUNK_BYTES: Final = 256 * 1024
"""The most that one message of a port's connection carries; as JSON, too, it fits NATS's 1 MiB."""

NETWORK_RULES_MAX: Final = 256
"""The most rules that one policy may have, its named sets resolved."""


class NetworkMode(StrEnum):
    """What holds for a destination that no rule names."""

    NONE = "none"
    """There is no network but the sandbox's own loopback."""
    ALLOW = "allow"
    """Only what a rule allows is reachable."""
    OPEN = "open"
    """All is reachable but what is denied, and what never is."""


class NetworkPhase(StrEnum):
    """Which of its two policies a sandbox is under. It goes from setup to agent, never back."""

    SETUP = "setup"
    AGENT = "agent"


class NetworkRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some destinations: one of ``cidr`` and ``host``, or neither for all.

    Attributes:
        cidr: an address or a range of them, IPv4 or IPv6.
        host: a name, or ``*.name`` for the names below one. Its addresses are those that the
            node's resolver answers with, for as long as they are valid.
        ports: numbers and ranges, such as ``80,443,8000-8100``; empty means all.
        protocol: ``tcp``, ``udp`` or ``icmp``; empty means all, or with ``ports`` tcp and udp.
    """

    cidr: str = ""
    host: str = ""
    ports: str = ""
    protocol: str = ""


class NetworkPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox may reach. What is denied is not reachable, whatever else allows it.

    Unlike in any other message, here and in its rules a field that the reader does not know is
    refused: what narrows a rule, or denies, must never be passed over.

    Attributes:
        mode: see :class:`NetworkMode`.
        allow: what is reachable in mode ``allow``.
        deny: what is not, in every mode. By ``cidr`` it holds whatever leads there. A ``host`` is
            denied by not being resolved, so only where nothing but names is allowed; its address
            stays reachable if an allowed name has the same one. Elsewhere it is ``unsupported``.
        rule_sets: names of allowed sets of rules that the node knows, such as ``{"pypi": true}``.
    """

    mode: NetworkMode = NetworkMode.NONE
    allow: tuple[NetworkRule, ...] = ()
    deny: tuple[NetworkRule, ...] = ()
    rule_sets: dict[str, bool] = msgspec.field(default_factory=dict)


def needs_outside(policy: NetworkPolicy | None) -> bool:
    """Return whether a policy allows what only a node with an uplink leads to.

    That is all of ``open``, and names, sets of rules and public addresses of an allow-list.
    """
    if policy is None or policy.mode is NetworkMode.NONE:
        return False
    if policy.mode is NetworkMode.OPEN or any(policy.rule_sets.values()):
        return True
    return any(rule.host or not rule.cidr or _is_public(rule.cidr) for rule in policy.allow)


def _is_public(cidr: str) -> bool:
    try:
        return ipaddress.ip_network(cidr, strict=False).is_global
    except ValueError:  # whoever is to enforce it says so
        return False


class SetNetwork(Message, frozen=True, kw_only=True):
    """Put a sandbox under another policy now; what it denies is cut, open connections too."""

    policy: NetworkPolicy


class EnterAgentPhase(Message, frozen=True, kw_only=True):
    """Go from the policy for setting up to the one for the agent; there is no way back."""


class InspectNetwork(Message, frozen=True, kw_only=True):
    """Ask for a sandbox's :class:`NetworkInfo`."""


class NetworkInfo(Message, frozen=True, kw_only=True):
    """The policy in force.

    Attributes:
        phase: which of the two policies it is.
        addresses: the sandbox's own, seen by what it reaches unless the node translates them.
        denied_packets: how many the node has refused since the sandbox has a network.
        outside_missing: why nothing outside of the node can be reached whatever the policy says;
            empty when it can.
    """

    sandbox_id: str
    phase: NetworkPhase
    policy: NetworkPolicy
    addresses: tuple[str, ...] = ()
    denied_packets: int = 0
    outside_missing: str = ""


class OpenPort(Message, frozen=True, kw_only=True):
    """Connect to what listens on a TCP port inside a sandbox.

    Attributes:
        connection_id: chosen by the caller; the same again is the same connection.
        host: a loopback address, or one of the sandbox's own.
        timeout_s: how long to wait until it is connected.
    """

    connection_id: str
    port: int
    host: str = "127.0.0.1"
    timeout_s: float = 10.0


class PortOpened(Message, frozen=True, kw_only=True):
    """The connection is there."""

    connection_id: str


class ReadPort(Message, frozen=True, kw_only=True):
    """Wait for bytes from inside.

    Attributes:
        offset: how many have been received; those before it are let go of.
        length: at most so many.
        wait_s: answer with nothing after so long.
    """

    connection_id: str
    offset: int
    length: int = PORT_CHUNK_BYTES
    wait_s: float = 20.0


class PortData(Message, frozen=True, kw_only=True):
    """Bytes from inside, from ``offset`` on; with ``end`` none follow."""

    data: bytes
    offset: int
    end: bool = False


class WritePort(Message, frozen=True, kw_only=True):
    """Send bytes inside; with ``end`` none follow.

    Attributes:
        offset: how many came before; what has been taken already is not taken again.
        wait_s: answer after so long, however few have been taken.
    """

    connection_id: str
    offset: int
    data: bytes = b""
    end: bool = False
    wait_s: float = 20.0


class PortWritten(Message, frozen=True, kw_only=True):
    """How many bytes have been taken since the beginning."""

    offset: int


class ClosePort(Message, frozen=True, kw_only=True):
    """Let go of a connection; one that is not there is fine."""

    connection_id: str


class PortClosed(Message, frozen=True, kw_only=True):
    """The connection is gone."""

    connection_id: str
