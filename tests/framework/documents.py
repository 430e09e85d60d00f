"""The documents as tests read them: pages, fenced blocks, tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_UNITS = {
    "": 1,
    "bytes": 1,
    "characters": 1,
    "s": 1,
    "min": 60,
    "h": 3600,
    "day": 86_400,
    "days": 86_400,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and what is in it."""

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Page:
    """One document."""

    path: Path

    @property
    def name(self) -> str:
        """Where it is, from the repository's root."""
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text(encoding="utf-8")

    @property
    def blocks(self) -> list[Block]:
        """Its fenced blocks, in order."""
        text = self.text
        return [
            Block(found[1], found[2], text.count("\n", 0, found.start()) + 1)
            for found in _FENCE.finditer(text)
        ]

    @property
    def prose(self) -> str:
        """What is outside fenced blocks."""
        return _FENCE.sub("", self.text)

    @property
    def anchors(self) -> set[str]:
        """What links may name after ``#``: the headings, as forges write them."""
        return {
            re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
            for heading in _HEADING.findall(self.prose)
        }

    def table(self, *columns: str) -> list[list[str]]:
        """Return the cells of every row of the tables with these columns."""
        head = "| " + " | ".join(columns) + " |"
        rows: list[list[str]] = []
        inside = False
        for line in self.prose.splitlines():
            if line == head:
                inside = True
            elif not line.startswith("|"):
                inside = False
            elif inside and not line.startswith("|---"):
                rows.append([cell.strip() for cell in line.strip("|").split("|")])
        assert rows, f"{self.name} has no table {head}"
        return rows


def pages() -> list[Page]:
    """Return every document that people read."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [Page(path) for path in (*top, *sorted((ROOT / "docs").rglob("*.md")))]


def page(name: str) -> Page:
    """Return one document by its path from the root."""
    return Page(ROOT / name)


def quantity(cell: str) -> float | str:
    """Return what a cell says: ``256 MiB`` and ``1.5 h`` as numbers, anything else as text."""
    number, _, unit = cell.partition(" ")
    unit = unit.partition(",")[0]
    if re.fullmatch(r"[\d.]+", number) and unit in _UNITS:
        return float(number) * _UNITS[unit]
    return "" if cell == "empty" else cell.strip("`")
