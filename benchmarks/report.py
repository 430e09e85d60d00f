"""What a benchmark reports, and how it is shown.

A benchmark is a module of this package with::

    async def run(options: Options) -> Report

Figures carry their unit in their name (``create_p50_ms``, ``rate_per_s``); ratios compare with a
peer that was measured in the same run; each target has one entry in ``reach``.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure.

    Attributes:
        rounds: how often ours and the peer take turns; medians of rounds are reported.
        count: operations in each round; 0 lets the benchmark choose.
    """

    rounds: int = 5
    count: int = 0


@dataclass(frozen=True, slots=True)
class Reach:
    """One target, and whether it was met. A value that is not a number meets nothing."""

    name: str
    value: float
    target: float
    direction: Literal["at most", "at least"]

    @classmethod
    def at_most(cls, name: str, value: float, target: float) -> Reach:
        """Return a target that a smaller value meets."""
        return cls(name, value, target, "at most")

    @classmethod
    def at_least(cls, name: str, value: float, target: float) -> Reach:
        """Return a target that a greater value meets."""
        return cls(name, value, target, "at least")

    @property
    def met(self) -> bool:
        """Return whether the value reaches the target."""
        if self.direction == "at most":
            return self.value <= self.target
        return self.value >= self.target


@dataclass(frozen=True, slots=True)
class Report:
    """What one benchmark measured.

    Attributes:
        skipped: why nothing could be measured on this machine; empty when it was.
    """

    name: str
    figures: dict[str, float]
    ratios: dict[str, float] = field(default_factory=dict)
    reach: tuple[Reach, ...] = ()
    skipped: str = ""

    @property
    def met(self) -> bool:
        """Return whether every target was met."""
        return all(entry.met for entry in self.reach)


def percentile(values: Iterable[float], part: float) -> float:
    """Return the smallest value that at least ``part`` (0 to 1) of the values do not exceed.

    Raises:
        ValueError: without any value, or for a part outside 0 to 1.
    """
    ordered = sorted(values)
    if not ordered or not 0 <= part <= 1:
        raise ValueError(f"no percentile {part} of {len(ordered)} values")
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def median(values: Iterable[float]) -> float:
    """Return the middle value; of an even number, the lower one, which was really measured."""
    return percentile(values, 0.5)


def machine() -> dict[str, str | int | float]:
    """Return what the figures depend on, the load from others included."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def to_json(report: Report) -> str:
    """Return the report as one line of JSON. A figure that is not a number becomes null."""
    document: dict[str, Any] = {
        "name": report.name,
        "machine": machine(),
        "figures": report.figures,
        "ratios": report.ratios,
        "reach": [
            {
                "name": entry.name,
                "value": entry.value,
                "target": entry.target,
                "direction": entry.direction,
                "met": entry.met,
            }
            for entry in report.reach
        ],
    }
    if report.skipped:
        document["skipped"] = report.skipped
    return msgspec.json.encode(document).decode()


def to_table(report: Report) -> Table:
    """Return the report for people."""
    table = Table(title=report.name, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("target", justify="right")
    table.add_column("met")
    for name, value in (report.figures | report.ratios).items():
        table.add_row(name, _shown(value), "", "")
    if report.skipped:
        table.add_row("skipped", report.skipped, "", "")
    table.add_section()
    for entry in report.reach:
        met = "[green]yes[/]" if entry.met else "[bold red]no[/]"
        target = f"{entry.direction} {_shown(entry.target)}"
        table.add_row(entry.name, _shown(entry.value), target, met)
    return table


def all_met(reports: Sequence[Report]) -> bool:
    """Return whether every target of every report was met."""
    return all(report.met for report in reports)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
