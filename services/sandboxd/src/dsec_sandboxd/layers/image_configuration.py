"""What a container image's configuration says of commands: variables, directory, user.

It is not trusted: what could be no variable, directory or user is left out, with a warning.
"""

from __future__ import annotations

import posixpath
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from dsec_common.wire.layer import CommandDefaults
from dsec_sandboxd.layers.names import shown
from dsec_sandboxd.layers.tree import IMPLIED_DIRECTORY

if TYPE_CHECKING:
    from dsec_sandboxd.layers.tree import TreeWriter

_USER: Final = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,31})(?::([A-Za-z0-9_.-]*))?")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLES_BYTES_MAX: Final = 32 * 1024
_DIRECTORY_CHARACTERS_MAX: Final = 1000


class RunConfiguration(msgspec.Struct, frozen=True):
    """What it says of the image's command that commands in general have."""

    env: list[str] | None = msgspec.field(default=None, name="Env")
    working_directory: str | None = msgspec.field(default=None, name="WorkingDir")
    user: str | None = msgspec.field(default=None, name="User")


class ImageConfiguration(msgspec.Struct, frozen=True):
    """The part of an image's configuration (OCI and Docker alike) that is kept."""

    config: RunConfiguration | None = None


def defaults_of(
    configuration: ImageConfiguration,
) -> tuple[CommandDefaults | None, tuple[str, ...]]:
    """Return what is kept of a configuration, or None for nothing; and what is not, in words."""
    said = configuration.config or RunConfiguration()
    warnings: list[str] = []
    env: dict[str, str] = {}
    room = _VARIABLES_BYTES_MAX
    for text in said.env or ():
        name, _, value = text.partition("=")
        room -= len(text.encode("utf-8", "surrogateescape"))
        if room < 0 or "\0" in value or not _VARIABLE.fullmatch(name):
            warnings.append(f"the image's variable {shown(name)} is left out")
        else:
            env[name] = value
    defaults = CommandDefaults(env=env, cwd=_directory(said, warnings), user=_user(said, warnings))
    return (None if defaults == CommandDefaults() else defaults), tuple(warnings)


def _directory(said: RunConfiguration, warnings: list[str]) -> str:
    path = said.working_directory or ""
    if not path:
        return ""
    if "\0" in path or len(path) > _DIRECTORY_CHARACTERS_MAX or ".." in path.split("/"):
        warnings.append(f"the image's working directory {shown(path)} is left out")
        return ""
    return posixpath.normpath(f"/{path.lstrip('/')}")


def _user(said: RunConfiguration, warnings: list[str]) -> str:
    text = said.user or ""
    found = _USER.fullmatch(text)
    if not text:
        return ""
    if found is None:
        warnings.append(f"the image's user {shown(text)} is left out")
        return ""
    # A group by its name is not looked up; the user's own groups are.
    return f"{found[1]}:{found[2]}" if found[2] and found[2].isdecimal() else found[1]


def make_working_directory(root: Path, tree: TreeWriter, directory: str) -> None:
    """Make an image's working directory where no layer brings it, as a container's start does."""
    path = root
    for name in filter(None, directory.split("/")):
        path /= name
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            tree.add_directory(tree.parts(directory.lstrip("/")), IMPLIED_DIRECTORY)
            return
        if not stat.S_ISDIR(mode):
            return  # a link leads on inside the sandbox, which finds out where
