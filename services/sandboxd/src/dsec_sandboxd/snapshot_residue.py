"""Which paths are left out of a layer: patterns, and what builds leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dsec_sandboxd.errors import invalid_field

PATTERNS_MAX: Final = 64
"""The most patterns of one request."""
PATTERN_MAX: Final = 512
"""Characters of one pattern."""

#: Never part of a layer: what every sandbox gets anew, or has its own name in.
ALWAYS: Final = ("/proc", "/dev", "/sys", "/run/dsec", "/etc/hosts")

#: What ``clean`` leaves out; the one list of it.
RESIDUE: Final = (
    "/tmp/*",  # noqa: S108  a path inside
    "/var/tmp/*",  # noqa: S108  as above
    "/run/*",
    "/root/.bash_history",
    "/root/.ash_history",
    "/root/.sh_history",
    "/root/.python_history",
    "/root/.node_repl_history",
    "/root/.sqlite_history",
    "/root/.lesshst",
    "/root/.viminfo",
    "/root/.wget-hsts",
    "/root/.cache",
    "/root/.npm/_cacache",
    "/root/.cargo/registry/cache",
    "/home/*/.bash_history",
    "/home/*/.ash_history",
    "/home/*/.sh_history",
    "/home/*/.python_history",
    "/home/*/.node_repl_history",
    "/home/*/.lesshst",
    "/home/*/.viminfo",
    "/home/*/.cache",
    "/home/*/.npm/_cacache",
    "/var/cache/apt/archives/*",
    "/var/cache/apt/*.bin",
    "/var/cache/apk/*",
    "/var/cache/dnf/*",
    "/var/cache/yum/*",
    "/var/lib/apt/lists/*",
    "/var/log/*",
    "**/__pycache__",
    "**/.pytest_cache",
    "**/.mypy_cache",
    "**/.ruff_cache",
    "**/.hypothesis",
    "**/.tox",
    "**/.nox",
    "**/.ipynb_checkpoints",
    "**/.coverage",
    "**/htmlcov",
    "**/*~",
    "**/.*.swp",
    "**/.*.swo",
    "**/*.orig",
    "**/*.rej",
)


#: One name of a pattern: itself, or the texts between its stars.
_Name = str | tuple[str, ...]


class Exclusion:
    """Tells which paths match any of a few patterns."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Take patterns: ``*`` is any text within one name, ``**/`` any number of directories.

        Raises:
            DsecError: ``invalid`` for a pattern that is not absolute, too long, or one of too many.
        """
        if len(patterns) > PATTERNS_MAX:
            raise invalid_field("exclude", f"{len(patterns)} patterns; {PATTERNS_MAX} are the most")
        for pattern in patterns:
            if len(pattern) > PATTERN_MAX or not pattern.startswith(("/", "**/")):
                raise invalid_field(
                    "exclude",
                    f"{pattern[:80]!r}: use an absolute path, or **/ and a name, of at most "
                    f"{PATTERN_MAX} characters",
                )
        self._names = [[*_split(pattern)] for pattern in patterns]

    def matches(self, path: Sequence[str]) -> bool:
        """Return whether a path, given as its names from the root, is left out."""
        return any(_matches(pattern, path) for pattern in self._names)


def exclusion(patterns: Sequence[str], *, clean: bool) -> Exclusion:
    """Return what a request leaves out; see :class:`Exclusion`."""
    asked = Exclusion(patterns)
    standing = Exclusion(ALWAYS)
    residue = _residue() if clean else []
    standing._names += [*asked._names, *residue]  # noqa: SLF001  of the same class
    return standing


def import_exclusion(patterns: Sequence[str], *, clean: bool) -> Exclusion | None:
    """Return what an import leaves out, ``None`` for nothing; see :class:`Exclusion`."""
    if not patterns and not clean:
        return None
    asked = Exclusion(patterns)
    asked._names += _residue() if clean else []  # noqa: SLF001  of this module
    return asked


def _residue() -> list[list[_Name]]:
    return [[*_split(pattern)] for pattern in RESIDUE]


def _split(pattern: str) -> list[_Name]:
    """Return the names of a pattern: text, ``**``, or the texts between stars."""
    return [
        part if part == "**" or "*" not in part else tuple(part.split("*"))
        for part in pattern.strip("/").split("/")
    ]


def _fits(part: _Name, name: str) -> bool:
    """Match one name; each text is looked for once, behind the one before, so no time is lost."""
    if isinstance(part, str):
        return part == name
    first, *middle, last = part
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for text in middle:
        at = name.find(text, at, end)
        if at < 0:
            return False
        at += len(text)
    return True


def _matches(pattern: Sequence[_Name], path: Sequence[str]) -> bool:
    """Match name by name; the reachable places in the pattern are kept, so the time is bounded."""
    places = _open(pattern, {0})
    for name in path:
        following = set()
        for place in places:
            if place == len(pattern):
                continue
            if pattern[place] == "**":
                following.add(place)
            elif _fits(pattern[place], name):
                following.add(place + 1)
        places = _open(pattern, following)
        if not places:
            return False
    return len(pattern) in places


def _open(pattern: Sequence[_Name], places: set[int]) -> set[int]:
    """Add the places behind ``**``, which may stand for no directory at all."""
    found = set(places)
    for place in sorted(places):
        at = place
        while at < len(pattern) and pattern[at] == "**":
            at += 1
            found.add(at)
    return found
