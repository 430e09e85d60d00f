"""Small edits of Python source: what a mutation does, and what a search may try.

An edit swaps one token for another of its family. The task maker draws one at random to break a
package; the searching policy goes through the same families, without knowing which was drawn or
where.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

_SWAPS: dict[str, tuple[str, ...]] = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "+": ("-",),
    "-": ("+",),
    "*": ("//",),
    "//": ("*",),
    "+=": ("-=",),
    "-=": ("+=",),
    "and": ("or",),
    "or": ("and",),
    "True": ("False",),
    "False": ("True",),
}


class Edit(NamedTuple):
    """Replace ``old`` by ``new`` at a place in a file (line from 1, column from 0)."""

    path: str
    line: int
    column: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old} -> {self.new}"


def edits_of_line(path: str, line: int, source: str) -> Iterator[Edit]:
    """Yield every edit of one line of source, from left to right."""
    # A line out of its context does not always tokenize to its end; what came before still counts.
    tokens = tokenize.generate_tokens(io.StringIO(source.strip() + "\n").readline)
    indent = len(source) - len(source.lstrip())
    try:
        for token in tokens:
            column = indent + token.start[1]
            if token.type in (tokenize.OP, tokenize.NAME):
                for new in _SWAPS.get(token.string, ()):
                    yield Edit(path, line, column, token.string, new)
            elif token.type == tokenize.NUMBER and token.string.isdigit():
                number = int(token.string)
                for other in (number + 1, number - 1):
                    if other >= 0:
                        yield Edit(path, line, column, token.string, str(other))
    except (tokenize.TokenError, SyntaxError):
        return


def edits_of_source(path: str, source: str) -> Iterator[Edit]:
    """Yield every edit of a file's code; strings, docstrings and comments are left alone."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER):
            for edit in edits_of_line(path, token.start[0], lines[token.start[0] - 1]):
                if edit.column == token.start[1]:
                    yield edit


def apply_edit(source: str, edit: Edit) -> str:
    """Return ``source`` with the edit made.

    Raises:
        ValueError: the source does not hold ``edit.old`` at that place.
    """
    lines = source.splitlines(keepends=True)
    line = lines[edit.line - 1]
    end = edit.column + len(edit.old)
    if line[edit.column : end] != edit.old:
        raise ValueError(f"line {edit.line} does not hold {edit.old!r} at column {edit.column}")
    lines[edit.line - 1] = line[: edit.column] + edit.new + line[end:]
    return "".join(lines)
