"""Patterns of paths, as layers leave paths out by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from dsec_common.errors import invalid


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return what tells whether a path, or a directory above it, fits one of the patterns.

    ``*`` is any text within one name, ``**`` any number of directories.

    Raises:
        DsecError: ``invalid`` for one that is not absolute and does not begin with ``**/``.
    """
    found = [_expression(pattern) for pattern in patterns]
    if not found:
        return lambda _: False
    whole = re.compile("|".join(found), re.DOTALL)
    return lambda path: whole.fullmatch(path) is not None


def _expression(pattern: str) -> str:
    if not pattern.startswith(("/", "**/")):
        raise invalid(f"{pattern!r} is no pattern of paths: begin it with / or **/")
    parts = []
    for part in pattern.strip("/").split("/"):
        if part == "**":
            parts.append("(?:/[^/]+)*")
        else:
            parts.append("/" + "[^/]*".join(map(re.escape, part.split("*"))))
    return f"(?:{''.join(parts)}(?:/.*)?)"
