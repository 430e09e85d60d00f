"""Which names files of a package may have: plain relative paths, each of them once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dsec.pack.errors import refused

PATH_MAX_BYTES: Final = 1024
NAME_MAX_BYTES: Final = 255
DEPTH_MAX: Final = 64
#: What overlayfs and container images take for a deletion.
_WHITEOUT: Final = ".wh."


def check_path(path: str) -> str:
    """Return a path unchanged when it leads nowhere but below the directory it is unpacked in.

    Raises:
        DsecError: ``invalid``.
    """
    parts = path.split("/")
    if (
        not path.isprintable()
        or "\\" in path
        or len(path.encode()) > PATH_MAX_BYTES
        or len(parts) > DEPTH_MAX
    ):
        raise refused("bad_path", f"{path[:64]!r} is no name that a file of a package may have")
    for part in parts:
        if part in {"", ".", ".."}:
            raise refused("bad_path", f"{path[:64]!r} is absolute, or leads elsewhere")
        if len(part.encode()) > NAME_MAX_BYTES or part.startswith(_WHITEOUT):
            raise refused("bad_path", f"{part[:64]!r} is no name that a file of a package may have")
    return path


def check_tree(paths: Iterable[str]) -> None:
    """Return when every path is there once, and none is a file and a directory.

    Raises:
        DsecError: ``invalid``.
    """
    files: set[str] = set()
    directories: set[str] = set()
    for path in paths:
        if path in files:
            raise refused("duplicate", f"{path!r} is there twice")
        files.add(path)
        while path := path.rpartition("/")[0]:
            directories.add(path)
    for path in files & directories:
        raise refused("duplicate", f"{path!r} is a file, and other files are below it")
