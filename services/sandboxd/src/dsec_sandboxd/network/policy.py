"""What a node says of policies that it cannot enforce. No I/O."""

from __future__ import annotations

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.network import NetworkMode, NetworkPolicy


def needs_network(policy: NetworkPolicy | None) -> bool:
    """Return whether a policy leaves more than the sandbox's own loopback."""
    return policy is not None and policy.mode is not NetworkMode.NONE


def unsupported(why: str) -> DsecError:
    """Return the refusal of a policy that this host cannot enforce."""
    return DsecError(
        ErrorCode.UNSUPPORTED,
        f"this node cannot enforce a network policy: {why}. Ask for mode 'none'",
        details={"reason": "network", "what": why},
    )


def no_outside(why: str) -> DsecError:
    """Return the refusal of a policy that needs what this node does not lead to."""
    return DsecError(
        ErrorCode.UNSUPPORTED,
        f"this node leads nowhere outside: {why}. Start it with an uplink (`dsec up --uplink`, or "
        "network_uplink=auto for dsec-sandboxd), or ask for network 'none'",
        details={"reason": "uplink", "what": why},
    )
