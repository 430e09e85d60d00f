"""What the parts of a contract say together: combinations that cannot be meant."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Any, Final

from yaml.nodes import Node

from dsec_common.asdl.kinds import BAD, Free, Reading
from dsec_common.asdl.problems import Path, shown
from dsec_common.errors import DsecError, invalid
from dsec_common.network_policy import RULE_SETS, compile_policy
from dsec_common.network_words import network_policy
from dsec_common.wire.agent import NETWORK_ACCESS, validate_name
from dsec_common.wire.network import NetworkMode

if TYPE_CHECKING:
    from dsec_common.asdl.model import Capability, Contract, Resources

CAPABILITIES_MAX: Final = 64
"""Tools of one agent."""

TOOL_NEEDS: Final = {
    "http_client": NETWORK_ACCESS,
    "pdf_parser": "read_file",
    "shell": "run_command",
}
"""What built-in tools cannot do without."""


class NetworkKind(Free):
    """A network policy, in a few words or many."""

    def __init__(self, about: str) -> None:
        super().__init__(about, ["string", "object"])

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        written = super()._value(node, path, reading)
        if written is BAD:
            return BAD
        try:
            policy = network_policy(written)
            if policy is None:
                return None
            # Which sets of rules there are beside the built-in ones is known to each node alone.
            others = dict.fromkeys(policy.rule_sets.keys() - RULE_SETS.keys(), ())
            compile_policy(policy, {**RULE_SETS, **others})
        except DsecError as error:
            return reading.wrong(node, path, error.message)
        return policy


def check_name(text: str) -> None:
    """Return when a text is an agent's name.

    Raises:
        DsecError: ``invalid``, with a name that is near to it.
    """
    try:
        validate_name(text)
    except DsecError as error:
        plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
        near = re.sub(r"[^a-z0-9_-]+", "_", plain).strip("_-")[:63]
        hint = f"; did you mean {near!r}?" if near else ""
        raise invalid(f"{error.message}{hint} Its description may be in any language") from None


def check_capability(capability: Capability, path: Path, reading: Reading) -> None:
    """Note what a tool lacks, and what only a model has."""
    needed = TOOL_NEEDS.get(capability.tool)
    if needed is not None and needed not in capability.permissions:
        # One that is misspelt is told of by itself.
        written = reading.values.get((*path, "permissions", 0))
        if written is not BAD:
            what = f"{capability.tool} can do nothing without it: add permissions: [{needed}]"
            reading.at((*path, "permissions"), what)
    for name in ("max_tokens", "temperature"):
        if getattr(capability, name) is not None and not capability.model:
            what = f"it is the model's, and {capability.tool} has no model here: add model"
            reading.at((*path, name), what)


def check_resources(resources: Resources, path: Path, reading: Reading) -> None:
    """Note bounds that are the wrong way round."""
    least, most = resources.min_cu, resources.max_cu
    if least is not None and most is not None and least > most:
        what = f"min_cu {least:g} is more than max_cu {most:g}: swap them, or raise max_cu"
        reading.at((*path, "min_cu"), what)


def check_contract(contract: Contract, path: Path, reading: Reading) -> None:
    """Note tools that are there twice, and a network that contradicts the permissions."""
    seen: dict[str, int] = {}
    for index in range(CAPABILITIES_MAX):
        capability = reading.values.get(("capabilities", index), BAD)
        if capability is BAD:
            continue
        tool = capability.tool
        if tool in seen:
            what = f"{shown(tool)} is there twice (capabilities[{seen[tool]}]): make it one"
            reading.at(("capabilities", index, "tool"), what)
        seen.setdefault(tool, index)
    if bool(contract.depends_on) != bool(contract.synchronise):
        given = "synchronise" if contract.synchronise else "depends_on"
        what = "depends_on and synchronise go together: write both, or neither"
        reading.at((*path, given), what)
    if contract.network is None or contract.capabilities is None:
        return
    allowed = NETWORK_ACCESS in contract.permissions
    if contract.network.mode is not NetworkMode.NONE and not allowed:
        what = f"no capability has the permission {NETWORK_ACCESS}: add it where it is used"
        reading.at((*path, "network"), what)
    elif contract.network.mode is NetworkMode.NONE and allowed:
        what = f"a capability has the permission {NETWORK_ACCESS}: take it away, or allow something"
        reading.at((*path, "network"), what)
