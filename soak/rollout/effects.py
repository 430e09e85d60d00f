"""What an agent has applied: a file of lines, and the digest of them that its next report tells.

It stands alone, as the agent runs in a sandbox that has nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

#: What the first report tells: nothing was applied yet.
NOTHING = "0" * 16


def line_of(answer: dict[str, Any]) -> str:
    """Return an answer as the line that the agent appends."""
    kept = {name: answer[name] for name in ("seq", "payload", "reward", "done")}
    return json.dumps(kept, sort_keys=True)


def chained(digest: str, line: str) -> str:
    """Return the digest of everything up to and with ``line``."""
    return hashlib.sha256(f"{digest}{line}".encode()).hexdigest()[: len(NOTHING)]


def read_lines(path: str) -> list[str]:
    """Return the lines of a file that may not be there yet."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123  nothing that is not needed
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def append(path: str, line: str) -> None:
    """Append a line in one write: a process that is killed has written it or not."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)
