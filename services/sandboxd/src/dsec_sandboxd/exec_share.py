"""How much of the store of outputs one sandbox's commands may take, so that none fills it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_Key = tuple[str, str]

SHARE_PART: Final = 8
"""One sandbox may keep this part of the store: an eighth."""


class Share:
    """What the commands of one sandbox keep, by exec and stream, against the sandbox's part.

    Args:
        limit_bytes: the part.
        make_room: forgets the oldest ended exec of this sandbox; False when there is none.
    """

    def __init__(self, limit_bytes: int, make_room: Callable[[], bool]) -> None:
        self._limit_bytes = limit_bytes
        self._make_room = make_room
        self._kept: dict[_Key, int] = {}
        self.used_bytes = 0

    def note(self, exec_id: str, stream: str, kept_bytes: int) -> None:
        """Take note of how much of a stream is kept now."""
        key = exec_id, stream
        self.used_bytes += kept_bytes - self._kept.get(key, 0)
        self._kept[key] = kept_bytes

    def forget(self, exec_id: str) -> None:
        """Take note that nothing of an exec is kept any more. Idempotent."""
        for key in [key for key in self._kept if key[0] == exec_id]:
            self.used_bytes -= self._kept.pop(key)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._kept

    def has_room(self, size_bytes: int) -> bool:
        """Return whether so much more may be kept, after forgetting what has ended."""
        while self.used_bytes + size_bytes > self._limit_bytes:
            if not self._make_room():
                return False
        return True
