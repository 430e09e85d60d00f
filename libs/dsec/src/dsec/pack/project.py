"""What an author wrote: the contract, the file that is run, modules, and what lies beside them."""

from __future__ import annotations

import fnmatch
import importlib.machinery
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from dsec.contracts import read_contract
from dsec.pack.errors import refused
from dsec.pack.fetching import LOCK
from dsec_common.errors import invalid, not_found
from dsec_common.wire.agent import validate_name, validate_version

_ENTRIES: Final = ("agent.py", "__main__.py", "main.py")
_CONTRACTS: Final = ("agent.yaml", "agent.yml")
_YAML: Final = (".yaml", ".yml")
_MODULE_SUFFIXES: Final = (".py", *importlib.machinery.EXTENSION_SUFFIXES)
#: What is beside code and no part of it. Whatever begins with a dot is left out, too.
_LEFT_OUT: Final = frozenset(
    {"__pycache__", "node_modules", "tests", "requirements.txt", LOCK, "build", "dist"}
)
_LEFT_OUT_ENDINGS: Final = (".dsec", ".pyc", ".key", ".egg-info", ".dist-info", ".whl")
_IS_ENVIRONMENT: Final = "pyvenv.cfg"


@dataclass(frozen=True)
class Project:
    """A directory with an agent's code, or one file and the modules beside it.

    Attributes:
        root: the directory.
        entry: the file that is run, from the root.
        contract: the contract's file.
        name: of the agent, by its contract.
        version: likewise.
        tools: that its contract names.
        single: only modules that are imported belong to it, and no other files.
    """

    root: Path
    entry: str
    contract: Path
    name: str
    version: str
    tools: frozenset[str]
    single: bool

    @property
    def modules_root(self) -> Path:
        """Where the entry's imports are looked for first: the directory that it is in."""
        return (self.root / self.entry).parent

    def other_files(self, excluded: Iterable[str] = ()) -> Iterator[tuple[str, Path]]:
        """Yield the files that are no Python modules, by their paths from the root.

        Args:
            excluded: patterns of such paths, or of names, that are left out.

        Raises:
            DsecError: ``invalid`` for a link that leads out of the directory, and for what is
                neither a file nor a directory.
        """
        if self.single:
            return
        patterns = tuple(excluded)
        for path, whole in _walk(self.root):
            name = path.rpartition("/")[2]
            matches = any(fnmatch.fnmatch(it, one) for one in patterns for it in (path, name))
            if not matches and not name.endswith(_MODULE_SUFFIXES) and whole != self.contract:
                yield path, checked_file(whole, self.root)

    def module_files(self, module: str) -> list[Path] | None:
        """Return the files of a module and of the packages it is in; None when it is not here."""
        found: list[Path] = []
        place = self.modules_root
        parts = module.split(".")
        for depth, part in enumerate(parts, start=1):
            file = _module_file(place, part)
            place = place / part
            if file is not None:
                found.append(checked_file(file, self.root))
            elif not place.is_dir() or (depth == len(parts) and not any(place.glob("*.py"))):
                return None
        return found

    def below(self, module: str) -> Iterator[str]:
        """Yield the names of all modules below a package."""
        directory = self.modules_root.joinpath(*module.split("."))
        for path in sorted(directory.rglob("*")):
            if path.name.endswith(_MODULE_SUFFIXES) and "__pycache__" not in path.parts:
                parts = path.relative_to(self.modules_root).parts
                name = parts[-1].partition(".")[0]
                yield ".".join(parts[:-1] if name == "__init__" else (*parts[:-1], name))


def open_project(source: Path, contract: Path | None = None, entry: str = "") -> Project:
    """Return the project that a directory or a file is.

    Args:
        source: the directory, or the one file that is run.
        contract: its contract; else ``agent.yaml``, a YAML file of the same name as the file that
            is run, or the only one there.
        entry: the file that is run, from the directory; else ``agent.py``, ``__main__.py``,
            ``main.py``, one of the contract's name, or the only one there.

    Raises:
        DsecError: ``not_found``; ``invalid`` when it cannot be told, or the contract is none.
    """
    if source.is_file():
        if entry:
            raise invalid(f"{source} is a file, so it is what is run: no entry is taken")
        root, chosen = source.parent, source.name
    elif source.is_dir():
        root = source
        chosen = entry or _found_entry(root, contract)
    else:
        raise not_found(f"there is nothing at {source}")
    root = root.resolve()
    program = checked_file(root / chosen, root)
    contract = (contract or _found_contract(root, Path(chosen).stem)).resolve()
    written, said = read_contract(contract)
    return Project(
        root=root,
        entry=program.relative_to(root).as_posix(),
        contract=contract,
        name=validate_name(said.name),
        version=validate_version(said.version),
        tools=frozenset(_tools_of(written)),
        single=source.is_file(),
    )


def checked_file(path: Path, root: Path) -> Path:
    """Return a plain file below ``root``, by its own name where ``path`` is a link to it.

    Raises:
        DsecError: ``invalid``.
    """
    try:
        real = path.resolve(strict=True)
        status = real.stat()
    except (OSError, RuntimeError) as error:
        raise invalid(f"{path} cannot be read: {error}") from None
    if not real.is_relative_to(root):
        raise refused("link_out", f"{path} leads to {real}, outside of {root}: copy it instead")
    if not stat.S_ISREG(status.st_mode):
        raise refused("no_file", f"{path} is no plain file: only files can be packed")
    # A link keeps its name: only what it leads to had to be looked at.
    return path if path.is_relative_to(root) else real


def _tools_of(contract: Mapping[str, Any]) -> Iterator[str]:
    for capability in contract.get("capabilities") or ():
        if isinstance(capability, dict) and isinstance(capability.get("tool"), str):
            yield capability["tool"]


def _found_entry(root: Path, contract: Path | None) -> str:
    for name in (*_ENTRIES, *([f"{contract.stem}.py"] if contract else [])):
        if (root / name).is_file():
            return name
    programs = sorted(path.name for path in root.glob("*.py"))
    yaml = {path.stem for path in root.iterdir() if path.suffix in _YAML}
    named = [name for name in programs if name.removesuffix(".py") in yaml]
    for candidates in (named, programs):
        if len(candidates) == 1:
            return candidates[0]
    raise invalid(
        f"which file of {root} is run? Name it with --entry: {', '.join(programs) or 'it has none'}"
    )


def _found_contract(root: Path, stem: str) -> Path:
    for name in (*_CONTRACTS, *(f"{stem}{suffix}" for suffix in _YAML)):
        if (root / name).is_file():
            return root / name
    found = sorted(path for path in root.iterdir() if path.suffix in _YAML and path.is_file())
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.name for path in found) or "there is none"
    raise invalid(f"which file is the contract of {root}? Name it with --asdl: {names}")


def _module_file(place: Path, part: str) -> Path | None:
    for suffix in _MODULE_SUFFIXES:
        for path in (place / part / f"__init__{suffix}", place / f"{part}{suffix}"):
            if path.is_file():
                return path
    return None


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    try:
        yield from _below(root)
    except OSError as error:
        what = f"{error.strerror}: {error.filename}"
        raise invalid(f"{root} cannot be read whole: {what}") from None


def _below(root: Path) -> Iterator[tuple[str, Path]]:
    for directory, names, files in os.walk(root, onerror=_raised):
        here = Path(directory)
        names[:] = sorted(name for name in names if not _is_left_out(here / name))
        for name in names:
            if (here / name).is_symlink():
                raise refused("link", f"{here / name} is a link to a directory: copy it instead")
        for name in sorted(files):
            if not _is_left_out(here / name):
                yield (here / name).relative_to(root).as_posix(), here / name


def _raised(error: OSError) -> NoReturn:
    raise error


def _is_left_out(path: Path) -> bool:
    return (
        path.name.startswith(".")
        or path.name in _LEFT_OUT
        or path.name.endswith(_LEFT_OUT_ENDINGS)
        or (path / _IS_ENVIRONMENT).is_file()
    )
