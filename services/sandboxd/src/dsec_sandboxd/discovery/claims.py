"""One machine's cards shared out among the nodes that run on it: each card has one node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path
from typing import Final

DIRECTORY: Final = Path("/run/dsec/gpus")
"""Shared by all daemons of a machine; what is in it is gone with the boot."""

_NAME_MAX: Final = 64


class GpuClaims:
    """The cards that this daemon alone offers, for as long as it lives."""

    def __init__(self, node: str, directory: Path = DIRECTORY) -> None:
        """Take the name to leave for others."""
        self._node = node
        self._directory = directory
        self._held: dict[str, int] = {}

    def claim(self, uuid: str) -> str:
        """Take a card, or return the name of the node that has it; empty once it is ours."""
        if uuid in self._held:
            return ""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / re.sub(r"[^A-Za-z0-9-]", "_", uuid)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                return os.pread(descriptor, _NAME_MAX, 0).decode() or "another node"
            finally:
                os.close(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self._node.encode(), 0)
        self._held[uuid] = descriptor
        return ""

    def close(self) -> None:
        """Let others have the cards. Idempotent."""
        while self._held:
            _, descriptor = self._held.popitem()
            with contextlib.suppress(OSError):
                os.close(descriptor)
