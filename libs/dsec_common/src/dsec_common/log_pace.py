"""How long a reader of the log waits before it asks a quiet Kafka again. No I/O."""

from __future__ import annotations

from typing import Final

SHORTEST_S: Final = 0.01
LONGEST_S: Final = 1.0
_SHARE: Final = 8


class Pace:
    """The longer nothing has come, the longer the pause: an eighth of the quiet, within bounds.

    So a record that follows others is read soon, one after a long quiet within
    :data:`LONGEST_S`, and a reader that has nothing to do asks once in that time. Times are in
    seconds of a clock that never goes backwards.
    """

    def __init__(self, now_s: float) -> None:
        self._quiet_since_s = now_s

    def hurry(self, now_s: float) -> None:
        """Begin anew: something came, or somebody waits for what comes."""
        self._quiet_since_s = now_s

    def pause_s(self, now_s: float) -> float:
        """Return how long to wait before the next question."""
        return min(max((now_s - self._quiet_since_s) / _SHARE, SHORTEST_S), LONGEST_S)
