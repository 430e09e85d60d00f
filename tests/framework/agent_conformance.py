"""The Python program that the conformance suite drives: requests as lines of JSON in, results out.

The programs in ``sdk/go/conformance`` and ``sdk/rust/examples`` are the same in other languages.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from typing import Any

from dsec.agent import Agent, Context, ToolCall, ToolResult
from dsec.agent_channel import AgentChannel, AgentError
from dsec_common.errors import DsecError, ErrorCode, invalid


class Adder(Agent):
    """Adds; 7 is too large, 8 breaks it."""

    def execute(self, a: int | None = None, b: int = 0) -> Any:
        if a is None:
            raise invalid("give a and b")
        if a == 7:
            return "x" * 300_000
        if a == 8:
            raise RuntimeError("eight")
        return a + b


def answer(channel: AgentChannel, asked: dict[str, Any]) -> Any:
    """Return the result of one request."""
    match asked.pop("op"):
        case "patience":
            channel.patience_s = asked["wait_s"]
        case "hello":
            return channel.hello()
        case "report":
            return channel.report(asked["stage"], asked["payload"], asked.get("seq"))
        case "step":
            return channel.step(asked["stage"], asked["payload"])
        case "await":
            return channel.await_feedback(asked["seq"], asked["wait_s"])
        case "log":
            channel.log(**asked)
        case "call":
            call(asked)
        case "tool" | "http" | "complete" as op:
            return by_node(channel, op, asked)
        case op:
            raise AssertionError(op)
    return None


def by_node(channel: AgentChannel, op: str, asked: dict[str, Any]) -> Any:
    """Have the node make a tool's call."""
    if op == "http":
        return http(channel, asked)
    if op == "complete":
        told, body = channel.call_tool(asked.pop("tool"), "complete", asked, 600)
        del told["bytes"]
        return {**told, "body": json.loads(body)}
    return channel.call_tool(asked["tool"], asked["call"], asked["arguments"], 1)[0]


def http(channel: AgentChannel, asked: dict[str, Any]) -> dict[str, Any]:
    """Have the node make a request, and return what the answer was like."""
    sent = base64.b64encode(asked.pop("body", "").encode()).decode()
    told, body = channel.call_tool("http_client", "request", {**asked, "body": sent}, 30)
    return {
        "status": told["status"],
        "url": told["url"],
        "x_site": [value for name, value in told["headers"] if name.lower() == "x-site"],
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
    }


def call(asked: dict[str, Any]) -> None:
    """Tell of a tool's call as the SDK does."""
    made = ToolCall(asked["tool"], asked["method"], asked["arguments"])
    error = DsecError(ErrorCode(asked["fails"]), "as it was told") if "fails" in asked else None
    with Context("x") as context:
        context.log_call(
            ToolResult(
                call=made,
                status=error.code.value if error else asked["status"] or "ok",
                tokens_in=asked.get("tokens_in", 0),
                tokens_out=asked.get("tokens_out", 0),
                error=error,
                notes=asked.get("attributes", {}),
            )
        )
    if error is not None:
        raise error


def main() -> None:
    """Answer until standard input ends, or serve."""
    if sys.argv[1:] == ["serve"]:
        Adder(contract={"name": "adder", "version": "2"}).serve([])
        return
    channel = AgentChannel(Context.usual_socket())
    for line in sys.stdin:
        try:
            said = {"result": answer(channel, json.loads(line))}
        except (AgentError, DsecError) as error:
            told = {"code": error.code, "retryable": error.retryable, "details": error.details}
            said = {"error": told}
        sys.stdout.write(f"{json.dumps(said)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
