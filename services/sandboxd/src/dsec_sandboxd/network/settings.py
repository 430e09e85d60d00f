"""What the node's configuration says of networks, and who is told of refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dsec_common.network_policy import RULE_SETS, Network
from dsec_common.wire.network import NetworkRule
from dsec_sandboxd.network.plan import AddressPlan
from dsec_sandboxd.network.upstreams import Upstream
from dsec_sandboxd.records import SandboxRecord


class DenialLog(Protocol):
    """Is told what a sandbox was refused; the kernel and this module bound how often."""

    def __call__(self, record: SandboxRecord, attributes: Mapping[str, str]) -> None:
        """Write it down."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """What the node's configuration says of networks."""

    plan: AddressPlan = field(default_factory=AddressPlan)
    uplink: str = ""
    upstreams: tuple[Upstream, ...] = ()
    denied: tuple[Network, ...] = ()
    rule_sets: Mapping[str, Sequence[NetworkRule]] = field(default_factory=lambda: RULE_SETS)
    connections_max: int = 1024
