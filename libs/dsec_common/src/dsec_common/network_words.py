"""Network policies as people write them, in a few words or many. No I/O."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dsec_common.errors import invalid
from dsec_common.wire.network import NetworkMode, NetworkPolicy, NetworkRule

Rule = NetworkRule | str | Mapping[str, str]
Policy = NetworkPolicy | str | Mapping[str, Any]


def network_policy(policy: Policy | None) -> NetworkPolicy | None:
    """Return a policy written in one of the short ways.

    ``"none"`` and ``"open"`` are modes. A mapping has ``mode``, ``allow`` and ``deny``, and any
    other key names a set of rules of the node: ``{"pypi": True, "allow": ["10.1.0.0/16"]}``. A
    rule may be text: an address, a range or a host name, then ``:ports``, then ``/protocol``:
    ``"*.example.org:443/tcp"``, ``"[fd00::1]:80,443"``.

    Without a ``mode`` only what is allowed is reachable; where something is denied and nothing is
    said to be allowed, all else is: ``{"deny": ["10.0.0.0/8"]}`` is open but for that.

    Raises:
        DsecError: ``invalid``; what only the node can know, it says.
    """
    if policy is None or isinstance(policy, NetworkPolicy):
        return policy
    if isinstance(policy, str):
        return NetworkPolicy(mode=_mode(policy))
    if not isinstance(policy, Mapping):
        raise invalid(
            f"network is {_shown(policy)}; it is 'none', 'open', or a mapping such as "
            "{'pypi': True, 'allow': ['10.1.0.0/16']}",
            field="network",
        )
    rest = dict(policy)
    allow = _rules(rest.pop("allow", ()), "allow")
    deny = _rules(rest.pop("deny", ()), "deny")
    only_denies = bool(deny) and not rest and "allow" not in policy
    mode = _mode(rest.pop("mode", "open" if only_denies else "allow"))
    rule_sets = rest.pop("rule_sets", {})
    if not isinstance(rule_sets, Mapping):
        raise invalid(f"network.rule_sets is a mapping, not {_shown(rule_sets)}", field="network")
    rule_sets = {**rule_sets, **rest}
    for name, wanted in rule_sets.items():
        if not isinstance(wanted, bool) or not isinstance(name, str):
            raise invalid(
                f"network: {name!r} is {_shown(wanted)}; a set of rules is True or False",
                field="network",
            )
    return NetworkPolicy(mode=mode, allow=allow, deny=deny, rule_sets=rule_sets)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"  # noqa: PLR2004  what reads well


def _mode(text: Any) -> NetworkMode:
    try:
        return NetworkMode(text)
    except ValueError:
        raise invalid(
            f"network mode {_shown(text)} is none of {', '.join(NetworkMode)}; a set of rules is "
            "written {'pypi': True}, a destination {'allow': ['example.org']}",
            field="network.mode",
        ) from None


def _rules(rules: Any, name: str) -> tuple[NetworkRule, ...]:
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise invalid(
            f"network.{name} is a list of rules, not {_shown(rules)}", field=f"network.{name}"
        )
    return tuple(_rule(rule, name) for rule in rules)


def _rule(rule: Rule, name: str) -> NetworkRule:
    if isinstance(rule, NetworkRule):
        return rule
    if isinstance(rule, Mapping):
        try:
            return msgspec.convert(dict(rule), NetworkRule)
        except msgspec.ValidationError as error:
            raise invalid(f"network.{name}: {error}", field=f"network.{name}") from None
    if not isinstance(rule, str):
        raise invalid(f"network.{name}: {_shown(rule)} is no rule", field=f"network.{name}")
    return parse_rule(rule)


def parse_rule(text: str) -> NetworkRule:
    """Return the rule of ``destination[:ports][/protocol]``.

    Raises:
        DsecError: ``invalid`` when it is none.
    """
    whole = text.strip()
    if "://" in whole:
        host = whole.partition("://")[2].partition("/")[0] or "example.org"
        raise invalid(
            f"{_shown(text)} is a URL, and a rule knows no paths: write {host!r}, or with a port "
            f"and protocol '{host.partition(':')[0]}:443/tcp'",
            field="network",
        )
    protocol = ""
    head, slash, tail = whole.rpartition("/")
    if slash and tail.isalpha():
        whole, protocol = head, tail
    if whole.startswith("["):
        destination, _, rest = whole[1:].partition("]")
        ports = rest.removeprefix(":")
        if rest.startswith("/"):
            suffix, _, ports = rest.partition(":")
            destination += suffix
    elif whole.count(":") > 1:
        destination, ports = whole, ""
    else:
        destination, _, ports = whole.partition(":")
    if not destination:
        raise invalid(f"{text!r} names no destination", field="network")
    if destination == "*":
        return NetworkRule(ports=ports, protocol=protocol)
    try:
        ipaddress.ip_network(destination, strict=False)
    except ValueError:
        if "/" in destination:
            raise invalid(f"{text!r} is not an address, a range or a name", field="network") from (
                None
            )
        return NetworkRule(host=destination, ports=ports, protocol=protocol)
    return NetworkRule(cidr=destination, ports=ports, protocol=protocol)
