"""What a contract leaves an agent's tools, as the node that runs them has to know it."""

from __future__ import annotations

from typing import Final

import msgspec

from dsec_common.wire.network import NetworkPolicy

NODE_TOOLS: Final = frozenset({"http_client", "llm", "llm_summarizer"})
"""Tools whose calls a node carries out: what they reach, the sandbox itself need not."""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """At most ``count`` calls in any ``window_s`` seconds."""

    count: float
    window_s: float

    @property
    def per_s(self) -> float:
        """Calls a second."""
        return self.count / self.window_s


class ToolTerms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one tool may do; whoever runs the tools enforces it.

    Attributes:
        permissions: without which what needs them is ``denied``.
        model: that the tool asks; empty for its own.
        max_tokens: of one answer of the model; None for the model's own bound.
        temperature: of its answers; None for the model's own.
        rate_limit: calls over which are ``exhausted``; None for no limit.
    """

    permissions: tuple[str, ...] = ()
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    rate_limit: Rate | None = None


class NodeTools(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tools of a sandbox that its node runs for it.

    Attributes:
        terms: by name; of :data:`NODE_TOOLS` alone.
        network: what they may reach, whatever the sandbox itself may; None is nothing.
    """

    terms: dict[str, ToolTerms] = msgspec.field(default_factory=dict)
    network: NetworkPolicy | None = None
