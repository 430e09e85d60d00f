"""The network part of the node's configuration, checked before anything starts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from dsec_common.errors import DsecError
from dsec_common.network_policy import compile_policy
from dsec_common.wire.network import NetworkMode, NetworkPolicy, NetworkRule
from dsec_sandboxd.network.upstreams import Upstream


def check_network_settings(
    *,
    deny: Sequence[str],
    resolvers: Sequence[str],
    rule_sets: Mapping[str, Sequence[NetworkRule]],
    connections_max: int,
) -> None:
    """Refuse what could only fail later.

    Raises:
        ValueError: naming the setting.
    """
    for text in deny:
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            raise ValueError(f"network_deny: {error}") from None
    for text in resolvers:
        try:
            Upstream.parse(text)
        except ValueError:
            raise ValueError(
                f"network_resolvers: {text} is not an address, or address:port"
            ) from None
    if connections_max < 1:
        raise ValueError("network_connections_max must be at least 1")
    for name, rules in rule_sets.items():
        try:
            compile_policy(NetworkPolicy(mode=NetworkMode.ALLOW, allow=tuple(rules)))
        except DsecError as error:
            raise ValueError(f"network_rule_sets.{name}: {error.message}") from None
