"""Writes what was measured into docs/specification.md.

``python -m benchmarks all --json > measured.jsonl`` and then
``python -m benchmarks._specification measured.jsonl [--note "otherwise idle"]``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

BEGIN: Final = "<!-- measured:begin -->"
END: Final = "<!-- measured:end -->"
_PAGE: Final = Path(__file__).parents[1] / "docs" / "specification.md"


def table(reports: Iterable[dict[str, Any]], note: str) -> str:
    """Return the table: the machine, then each report's targets, and below them its figures.

    Of two reports of one name the later one counts.
    """
    latest = {report["name"]: report for report in reports}
    lines = ["| benchmark | figure | measured | target |", "|---|---|---|---|"]
    for name, report in latest.items():
        if "skipped" in report:
            lines.append(f"| `{name}` | not measured | {report['skipped']} | |")
        for entry in report["reach"]:
            missed = "" if entry["met"] else ", **missed**"
            value, target = shown(entry["value"]), shown(entry["target"])
            lines.append(
                f"| `{name}` | `{entry['name']}` | {value}{missed} | "
                f"{entry['direction']} {target} |"
            )
        told = {entry["name"] for entry in report["reach"]}
        figures = report["figures"] | report["ratios"]
        rest = ", ".join(
            f"`{key}` {shown(value)}" for key, value in figures.items() if key not in told
        )
        if rest:
            lines.append(f"| `{name}` | beside it | {rest} | |")
    machines = [report["machine"] for report in latest.values()]
    return "\n".join([_about(machines, note), "", *lines])


def _about(machines: Sequence[dict[str, Any]], note: str) -> str:
    one = machines[0]
    memory_gib = one["memory_bytes"] / 2**30
    loads = [machine["load_1min"] for machine in machines]
    parts = [
        f"{one['cpus']} processors ({one['cpu_model']})",
        f"{memory_gib:.0f} GiB",
        f"Linux {one['kernel'].partition('-')[0]}",
        f"Python {one['python']}",
        f"load when each was done {min(loads):g} to {max(loads):g}",
        f"{datetime.now(UTC):%Y-%m-%d}",
        *([note] if note else []),
    ]
    return f"Measured on: {', '.join(parts)}."


def shown(value: float | None) -> str:
    """Return a figure as people read it."""
    if value is None:
        return "no number"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def put(page: str, text: str) -> str:
    """Return the page with ``text`` between its marks.

    Raises:
        ValueError: when the page has no marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace the table; return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._specification")
    parser.add_argument("results", type=Path, nargs="+", help="what --json printed")
    parser.add_argument("--note", default="", help="said of the machine")
    parser.add_argument("--page", type=Path, default=_PAGE)
    asked = parser.parse_args(arguments)
    lines = [line for file in asked.results for line in file.read_text().splitlines()]
    reports = [json.loads(line) for line in lines if line.startswith("{")]
    if not reports:
        parser.error("the results hold no report")
    page = asked.page.read_text(encoding="utf-8")
    asked.page.write_text(put(page, table(reports, asked.note)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
