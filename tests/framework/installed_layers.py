"""Python packages as layers: as they are installed here, with all that they need."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from importlib.metadata import Distribution, PackagePath, distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stack import Stack

_UNPACKED = "/var/lib/packages"
FOUND = {"PYTHONPATH": f"/opt/packages/pure.zip:/opt/packages:{_UNPACKED}"}
"""Where a sandbox's Python finds them: a layer of few files is made sooner."""


def import_installed(
    stack: Stack,
    directory: Path,
    name: str,
    *packages: str,
    in_files: tuple[str, ...] = (),
    to_unpack: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
) -> str:
    """Make a toolkit of packages; return its name and version.

    Args:
        stack: which imports it.
        directory: to work in; it is removed.
        name: of the toolkit.
        packages: which are wanted.
        in_files: those that look for files beside their own; all with libraries do.
        to_unpack: those of thousands of files that cannot be in an archive which Python imports
            from: each is an archive of its own, :func:`unpacked` by who uses it.
        without: which are left out, with what only they need.
    """
    place = directory / "opt" / "packages"
    place.mkdir(parents=True)
    with zipfile.ZipFile(place / "pure.zip", "w") as pure:
        for found in _installed(packages, set(without)):
            files = [it for it in found.files or () if it.suffix != ".pyc" and ".." not in it.parts]
            known_as = canonicalize_name(found.name)
            if known_as in to_unpack:
                _pack(place / f"{known_as}.tar", files)
            elif known_as in in_files or any(file.suffix == ".so" for file in files):
                for file in files:
                    (place / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(str(file.locate()), place / file)
            else:
                _add(pure, files)
    stack.dsec(
        *("layer", "import", str(directory), "--kind", "toolkit"),
        *("--name", name, "--version", "1"),
    )
    shutil.rmtree(directory)
    return f"{name}@1"


def unpacked(package: str) -> str:
    """Return the command that has a sandbox's Python find a package that is to be unpacked."""
    return f"mkdir -p {_UNPACKED} && tar -xf /opt/packages/{package}.tar -C {_UNPACKED}"


def _installed(names: tuple[str, ...], without: set[str]) -> list[Distribution]:
    """Return distributions, and all that they need."""
    found: dict[tuple[str, str], Distribution] = {}
    wanted = [(name, "") for name in names]
    while wanted:
        name, extra = wanted.pop()
        name = canonicalize_name(name)
        if (name, extra) in found or name in without:
            continue
        found[name, extra] = distribution(name)
        for need in map(Requirement, found[name, extra].requires or ()):
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                wanted += [(need.name, ""), *((need.name, it) for it in need.extras)]
    return list({name: it for (name, _), it in found.items()}.values())


def _pack(archive: Path, files: list[PackagePath]) -> None:
    """Pack a distribution with what was compiled of it, but for web pages."""
    with tarfile.open(archive, "w") as packed:
        for file in files:
            source = Path(str(file.locate()))
            if "_experimental" in file.parts:
                continue
            packed.add(source, str(file))
            if file.suffix == ".py" and (compiled := Path(cache_from_source(source))).exists():
                packed.add(compiled, str(file.parent / "__pycache__" / compiled.name))


def _add(pure: zipfile.ZipFile, files: list[PackagePath]) -> None:
    """Add a distribution to an archive that Python imports from, compiled where it is here."""
    known = set(pure.namelist())
    for file in files:
        for parent in list(file.parents)[-2::-1]:
            if f"{parent}/" not in known:  # a name space of packages is found by its directory
                pure.mkdir(str(parent))
                known.add(f"{parent}/")
        source = Path(str(file.locate()))
        compiled = Path(cache_from_source(source)) if file.suffix == ".py" else source
        if compiled == source or not compiled.exists():
            pure.write(source, str(file))
        else:
            pure.write(compiled, str(file.with_suffix(".pyc")))
