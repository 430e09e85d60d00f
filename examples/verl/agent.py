"""A harness as there are many: it knows of no trainer, only of a model with one tool, a shell.

It is put into the sandbox and has what Python comes with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command line.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def ask(messages: list[Any]) -> Any:
    """Return the model's next message."""
    request = urllib.request.Request(  # noqa: S310  the platform's own
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages, "tools": [SHELL]}).encode(),
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310  as above
        return json.load(response)["choices"][0]["message"]


def run(call: Any) -> str:
    """Return what a command printed, or why there was none."""
    try:
        command = json.loads(call["function"]["arguments"])["command"]
    except (ValueError, TypeError, LookupError):
        return "this is no command"
    done = subprocess.run(  # noqa: S602  it is in a sandbox for this
        command, shell=True, check=False, capture_output=True, text=True, timeout=60
    )
    return (done.stdout + done.stderr)[-4096:]


def main() -> None:
    """Go on until the model calls its tool no more."""
    messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]
    while True:
        message = ask(messages)
        messages.append(message)
        calls = message.get("tool_calls") or []
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": run(call)} for call in calls
        ]
        if not calls:
            break


if __name__ == "__main__":
    main()
