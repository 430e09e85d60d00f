"""Where a row of numbers leads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml


def read_words() -> Mapping[str, str]:
    """Return the words for each direction, from the file beside this module."""
    words: Mapping[str, str] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_bytes())
    return words


class Trend:
    """The latest of some readings, and their direction."""

    def __init__(self, readings: Sequence[float]) -> None:
        self.latest = readings[-1]
        self._change = readings[-1] - readings[0]

    def word(self, words: Mapping[str, str]) -> str:
        """Return the word for the direction."""
        if abs(self._change) < 1:
            return words["steady"]
        return words["rising" if self._change > 0 else "falling"]
