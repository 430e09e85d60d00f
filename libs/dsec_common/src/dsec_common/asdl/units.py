"""Values with a unit: times and rates."""

from __future__ import annotations

import re
from typing import Any, Final

from yaml.nodes import Node, ScalarNode

from dsec_common.asdl.kinds import BAD, Kind, Reading, written
from dsec_common.asdl.problems import Path, nearest, shown
from dsec_common.wire.tools import Rate

_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([^\W\d_]*)")
_DURATION_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_RATE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:req)?/([^\W\d_]*)")
_RATE_UNITS: Final = {
    "s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0,
    "h": 3600.0, "hour": 3600.0, "d": 86_400.0, "day": 86_400.0,
}  # fmt: skip


class _WithUnit(Kind):
    """A number and a unit, as one text."""

    pattern: re.Pattern[str]
    units: dict[str, float]
    example: str

    def parts(self, node: Node, path: Path, reading: Reading) -> Any:
        """Return the number and the unit's seconds, or BAD."""
        found = self.pattern.fullmatch(node.value.strip()) if isinstance(node, ScalarNode) else None
        if found is None or not isinstance(node, ScalarNode):
            return reading.wrong(node, path, f"{written(node)} is none: write it as {self.example}")
        number, unit = found[1], found[2]
        if not unit:
            return reading.wrong(node, path, f"{number} of what? Write it as {self.example}")
        if unit not in self.units:
            return reading.wrong(
                node, path, f"the unit {shown(unit)!r} is not known{nearest(unit, self.units)}"
            )
        return float(number[:40]), self.units[unit]


class Duration(_WithUnit):
    """Seconds, written with a unit: ``120s``, ``5min``, ``1.5h``."""

    pattern = _DURATION
    units = _DURATION_UNITS
    example = "120s, 5min or 2h"

    def __init__(self, about: str, *, most_s: float) -> None:
        super().__init__(about)
        self._most_s = most_s

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        parts = self.parts(node, path, reading)
        if parts is BAD:
            return BAD
        seconds = parts[0] * parts[1]
        if not 0 < seconds <= self._most_s:
            most = f"more than 0 and at most {self._most_s / _DURATION_UNITS['d']:g}d"
            return reading.wrong(node, path, f"it is {shown(node.value)}: use {most}")
        return seconds

    def _shape(self) -> dict[str, Any]:
        return {"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)?\s*({'|'.join(self.units)})$"}


class RateLimit(_WithUnit):
    """Calls in a time: ``10req/min``."""

    pattern = _RATE
    units = _RATE_UNITS
    example = "10req/min"

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        parts = self.parts(node, path, reading)
        if parts is BAD:
            return BAD
        if not 0 < parts[0] <= 1e9:  # noqa: PLR2004  more calls than any tool takes
            return reading.wrong(node, path, f"it is {shown(node.value)}: use more than 0 calls")
        return Rate(count=parts[0], window_s=parts[1])

    def _shape(self) -> dict[str, Any]:
        units = "|".join(self.units)
        return {"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)?\s*(req)?/({units})$"}
