"""Tool calls as data: what was asked, and what came of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from dsec_common.errors import DsecError


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: ``ToolCall("http_client", "get", {"url": "…"})``.

    Attributes:
        tool: the tool's name in the contract.
        method: which of its calls.
        arguments: by name.
    """

    tool: str
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def action(self) -> str:
        """What the behaviour log calls it, such as ``http_client.get``."""
        return f"{self.tool}.{self.method}"

    @property
    def arguments_sha256(self) -> str:
        """SHA-256, in hexadecimal digits, of the arguments as JSON.

        The JSON has its names sorted, no white space and no escapes that it does not need, so that
        equal arguments have equal hashes. Bytes count as their own hash, what else JSON does not
        know as its type's name.
        """
        text = json.dumps(
            dict(self.arguments),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            default=_plain,
        )
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What came of a call.

    Attributes:
        call: what was asked.
        status: ``ok``, the tool's own word for it (an HTTP status), or the code of ``error``.
        latency_ms: from the request to its end, in milliseconds.
        value: what the call returned; None when it failed.
        error: why it failed; None when it did not.
        tokens_in: tokens that a model read for it.
        tokens_out: tokens that a model wrote for it.
        notes: the call's own particulars for the behaviour log.
        by_node: the node made the call, and has written it down.
    """

    call: ToolCall
    status: str = "ok"
    latency_ms: float = 0.0
    value: Any = None
    error: DsecError | None = None
    tokens_in: int = 0
    tokens_out: int = 0
    notes: Mapping[str, str] = field(default_factory=dict)
    by_node: bool = False

    @property
    def ok(self) -> bool:
        """Whether the call returned something."""
        return self.error is None

    def unwrap(self) -> Any:
        """Return the value.

        Raises:
            DsecError: why the call failed.
        """
        if self.error is not None:
            raise self.error
        return self.value


def _plain(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return hashlib.sha256(value).hexdigest()
    return str(value) if isinstance(value, PurePath) else type(value).__name__
