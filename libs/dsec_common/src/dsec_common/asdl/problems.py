"""What is wrong with a contract: where it stands, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

import msgspec
import yaml

PROBLEMS_MAX: Final = 100
"""So many are told; who has more has another file in mind."""

Path = tuple[str | int, ...]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong.

    Attributes:
        path: which part of the contract, such as ``capabilities[0].tool``; empty for all of it.
        message: what is wrong and what to do.
        line: where it stands, from 1; 0 for a contract that is no file.
        column: from 1; 0 likewise.
    """

    path: str
    message: str
    line: int = 0
    column: int = 0

    def told(self, name: str) -> str:
        """Return it as one line, as compilers write them."""
        place = f"{name}:{self.line}:{self.column}" if self.line else name
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class Findings:
    """Collects problems; the same place is found fault with once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, str], Problem] = {}

    def add(self, mark: yaml.Mark | None, path: Path, message: str) -> None:
        """Note a problem."""
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        problem = Problem(path=path_text(path), message=message, line=line, column=column)
        if not self.full:
            self._found.setdefault((line, column, problem.path), problem)

    @property
    def full(self) -> bool:
        """Whether no more are told."""
        return len(self._found) >= PROBLEMS_MAX

    def all(self) -> tuple[Problem, ...]:
        """Return them in the order of the file."""
        return tuple(sorted(self._found.values(), key=lambda one: (one.line, one.column)))


def path_text(path: Path) -> str:
    """Return a path as one would write it."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{shown(part)}" if text else shown(part)
    return text


def shown(text: object) -> str:
    """Return what was written, as far as it reads well in a sentence."""
    whole = text if isinstance(text, str) else repr(text)
    whole = "".join(one if one.isprintable() else "?" for one in whole)
    return whole if len(whole) <= 60 else f"{whole[:60]}…"  # noqa: PLR2004  what reads well


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that says what may have been meant, or what there is."""
    there = sorted(known)
    near = difflib.get_close_matches(word[:64].lower(), there, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; use {', '.join(there)}"
