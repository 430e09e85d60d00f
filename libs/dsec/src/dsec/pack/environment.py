"""What is installed where a package is built: which distribution a module is of, and its files."""

from __future__ import annotations

import csv
import importlib.machinery
import importlib.metadata
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec
from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from dsec_common.errors import DsecError, ErrorCode

_SUFFIXES: Final = tuple(importlib.machinery.all_suffixes())
_NATIVE: Final = (".so", ".dylib", ".pyd", ".dll")
#: Of a distribution's own directory: what code may ask for, and what a licence demands.
_METADATA_KEPT: Final = frozenset({"METADATA", "entry_points.txt", "top_level.txt"})
_LICENCES: Final = ("LICEN", "COPYING", "NOTICE", "AUTHORS")
_WALK_LEFT_OUT: Final = frozenset({"__pycache__"})


@dataclass(frozen=True, eq=False)
class Installed:
    """One installed distribution.

    Attributes:
        name: canonical: lower case, with ``-``.
        version: its version.
        root: the directory of ``sys.path`` that it is in.
        info: its ``.dist-info`` directory.
    """

    name: str
    version: str
    root: Path
    info: Path

    @cached_property
    def _record(self) -> str:
        try:
            return "\n" + (self.info / "RECORD").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    @cached_property
    def recorded(self) -> tuple[str, ...]:
        """The paths of its files from the root, as its installer recorded them."""
        return tuple(row[0] for row in csv.reader(io.StringIO(self._record)) if row)

    @cached_property
    def editable(self) -> Path | None:
        """The directory that it is developed in, when it is installed from there."""
        try:
            said = msgspec.json.decode((self.info / "direct_url.json").read_bytes(), type=_Url)
        except (OSError, msgspec.DecodeError):
            return None
        is_editable = said.dir_info is not None and said.dir_info.editable
        return Path(unquote(urlsplit(said.url).path)) if is_editable else None

    def has_top(self, top: str) -> bool:
        """Return whether modules of this name at the top of ``sys.path`` are of it."""
        # Looked for in the text: to read the records of all that is installed takes a while.
        return f"\n{top}/" in self._record or any(
            f"\n{top}{suffix}," in self._record for suffix in _SUFFIXES
        )

    def has(self, module: str) -> bool:
        """Return whether a module of this name, or modules below it, are of this distribution."""
        path = module.replace(".", "/")
        return any(one in self._modules for one in (path, f"{path}/__init__"))

    @cached_property
    def _modules(self) -> frozenset[str]:
        found = set()
        for path in self.recorded:
            if path.endswith(_SUFFIXES):
                directory, _, name = path.rpartition("/")
                module = name.partition(".")[0]
                found.add(f"{directory}/{module}" if directory else module)
        return frozenset(found)

    def requirements(self, extras: Iterable[str] = ()) -> Iterator[Requirement]:
        """Yield what it needs here, and what these extras of it need."""
        metadata = importlib.metadata.Distribution.at(self.info)
        for text in metadata.requires or ():
            requirement = Requirement(text)
            if any(_holds(requirement, extra) for extra in ("", *extras)):
                yield requirement

    def tags(self) -> tuple[str, ...]:
        """Return the tags of the wheel that it came as."""
        try:
            text = (self.info / "WHEEL").read_text(encoding="utf-8")
        except OSError:
            return ()
        lines = (line.partition(":") for line in text.splitlines())
        return tuple(sorted(value.strip() for name, _, value in lines if name == "Tag"))

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield where each file belongs below a directory of ``sys.path``, and where it is now.

        Programs, compiled files and what only an installer needs are left out.

        Raises:
            DsecError: ``unsupported`` when nobody recorded what it consists of.
        """
        if self.editable is not None:
            yield from self._metadata_files()
            return
        if not self.recorded:
            raise DsecError(
                ErrorCode.UNSUPPORTED,
                f"{self.name} {self.version} in {self.root} has no record of its files: it was not "
                "installed by pip; install it with pip into a virtual environment",
            )
        for path in self.recorded:
            parts = path.split("/")
            if os.path.isabs(path) or ".." in parts or "__pycache__" in parts:  # noqa: PTH117
                continue
            if parts[0] == self.info.name or path.endswith(".pyc"):
                continue
            yield path, self.root / path
        yield from self._metadata_files()

    def _metadata_files(self) -> Iterator[tuple[str, Path]]:
        for path in sorted(self.info.rglob("*")):
            name = path.relative_to(self.info).as_posix()
            is_licence = path.name.upper().startswith(_LICENCES)
            if path.is_file() and (name in _METADATA_KEPT or is_licence):
                yield f"{self.info.name}/{name}", path


class _DirInfo(msgspec.Struct, frozen=True):
    editable: bool = False


class _Url(msgspec.Struct, frozen=True):
    url: str = ""
    dir_info: _DirInfo | None = None


class Environment:
    """The distributions in some directories, the first one of each name."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths = [str(path) for path in paths if Path(path).is_dir()]
        self.installed: dict[str, Installed] = {}
        self._owners: dict[str, list[Installed]] = {}
        for one in map(Path, self._paths):
            for info in sorted(one.glob("*.dist-info")):
                name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
                known = canonicalize_name(name)
                found = Installed(name=known, version=version, root=one, info=info)
                self.installed.setdefault(known, found)

    @classmethod
    def here(cls, *first: Path) -> Environment:
        """Return this interpreter's, with other directories before its own."""
        return cls([*first, *(path for path in sys.path if path)])

    def _having(self, top: str) -> list[Installed]:
        if top not in self._owners:
            self._owners[top] = [one for one in self.installed.values() if one.has_top(top)]
        return self._owners[top]

    def owners(self, module: str) -> list[Installed]:
        """Return whose module this is: one, several for the top of a shared name, or none."""
        top = module.partition(".")[0]
        owners = self._having(top)
        name = module
        while len(owners) > 1 and name:
            if having := [one for one in owners if one.has(name)]:
                return having
            name = name.rpartition(".")[0]
        if owners:
            return owners
        developed = self.developed(top)
        return [developed[0]] if developed else []

    def developed(self, top: str) -> tuple[Installed, Path] | None:
        """Return whose module this is that is installed for development, and where it is."""
        if self._having(top):
            return None
        spec = importlib.machinery.PathFinder.find_spec(top, self._paths)
        if spec is None:
            return None
        place = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        if place is None:
            return None
        path = Path(place).parent if Path(place).name == "__init__.py" else Path(place)
        for one in self.installed.values():
            if one.editable is not None and path.is_relative_to(one.editable):
                return one, path
        return None

    def satisfies(self, requirement: Requirement) -> bool:
        """Return whether what is required is installed, in a version that will do."""
        found = self.installed.get(canonicalize_name(requirement.name))
        return found is not None and requirement.specifier.contains(found.version, prereleases=True)


def is_native(path: str) -> bool:
    """Return whether a file is machine code."""
    name = path.rpartition("/")[2]
    return name.endswith(_NATIVE) or ".so." in name


def holds_here(requirement: Requirement) -> bool:
    """Return whether a requirement is one on this platform."""
    return _holds(requirement, "")


def parse_requirement(text: str, where: str) -> Requirement:
    """Return what a line of a requirements file requires.

    Raises:
        DsecError: ``invalid``.
    """
    try:
        return Requirement(text)
    except InvalidRequirement as error:
        raise DsecError(
            ErrorCode.INVALID, f"{where}: {text[:64]!r} is no requirement: {error}"
        ) from None


def walk_module(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a module or package by their paths from the directory it is in."""
    if path.is_file():
        yield path.name, path
        return
    for directory, names, files in os.walk(path):
        names[:] = sorted(name for name in names if name not in _WALK_LEFT_OUT)
        for name in sorted(files):
            if not name.endswith(".pyc"):
                whole = Path(directory) / name
                yield whole.relative_to(path.parent).as_posix(), whole


def _holds(requirement: Requirement, extra: str) -> bool:
    if requirement.marker is None:
        return not extra
    try:
        return requirement.marker.evaluate({"extra": extra})
    except UndefinedEnvironmentName:
        return False
