"""What an agent that runs needs of its contract."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec.tools.allowances import Allowance, Rate

if TYPE_CHECKING:
    from dsec.contracts import ToolTerms


@dataclass(frozen=True)
class AgentContract:
    """Who the agent is, and what its tools may do.

    Attributes:
        name: the agent's.
        version: the agent's.
        allowances: by tool.
    """

    name: str = ""
    version: str = ""
    allowances: Mapping[str, Allowance] = field(default_factory=dict)


def agent_contract(given: str | Path | Mapping[str, Any]) -> AgentContract:
    """Return what a file says, or what one says as plain values.

    Raises:
        DsecError: ``invalid``, with every problem on a line of its own.
    """
    # What reads contracts is more than an agent without one needs.
    from dsec.contracts import contract_of, terms_of  # noqa: PLC0415

    contract = contract_of(given)
    allowances = {name: _allowance(name, it) for name, it in terms_of(contract).tools.items()}
    return AgentContract(contract.name, contract.version, allowances)


def _allowance(tool: str, terms: ToolTerms) -> Allowance:
    rate = terms.rate_limit
    return Allowance(
        tool=tool,
        permissions=frozenset(terms.permissions),
        rate=None if rate is None else whole_rate(rate.count, rate.window_s),
        model=terms.model,
        max_tokens=terms.max_tokens,
        temperature=terms.temperature,
    )


def whole_rate(count: float, window_s: float) -> Rate:
    """Return a rate in whole calls: 0.5 in a second are one in two."""
    calls = max(math.floor(count), 1)
    return Rate(calls, window_s * calls / count)
