"""Which modules an agent reaches from the file that is run, and whose they are."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dsec.pack.environment import Environment, Installed
from dsec.pack.imports import Import, imports_of
from dsec.pack.project import Project
from dsec.pack.sdk import Sdk
from dsec_common.errors import not_found

_PYTHONS_OWN: Final = sys.stdlib_module_names | {"__main__"}
_COMMAND_LINE: Final = "the command line"


class Reached:
    """Follows imports through the author's modules, and no further than into a distribution.

    What a distribution needs is what it requires: its own code has imports of much that it does
    without. Of ``dsec`` itself the modules are followed.

    Attributes:
        files: the author's modules.
        distributions: whose modules are imported.
        developed: where those of distributions are that are installed for development.
        sdk: modules of ``dsec``.
        left_out: optional imports of what is not installed, with where they are.
    """

    def __init__(self, project: Project, environment: Environment, excluded: Iterable[str]) -> None:
        self._project = project
        self._environment = environment
        self._excluded = frozenset(excluded)
        self._seen: set[tuple[str, bool]] = set()
        self._waiting: list[tuple[Path, str]] = []
        self.files: set[Path] = set()
        self.distributions: dict[str, Installed] = {}
        self.developed: dict[Path, Installed] = {}
        self.sdk = Sdk(project.tools)
        self.left_out: dict[str, str] = {}

    def follow(self, included: Iterable[str], traced: Iterable[str]) -> None:
        """Follow the entry, what is included by name, and what a run was seen to import.

        Raises:
            DsecError: ``not_found`` for an import that nobody has here.
        """
        entry = self._project.root / self._project.entry
        self.files.add(entry)
        self._waiting.append((entry, ""))
        self._drain()
        for module in included:
            names = (module, *self._project.below(module))
            for name in names:
                self._take(Import(name, (), 0, optional=False), _COMMAND_LINE)
        for module in sorted(traced):
            self._take(Import(module, (), 0, optional=True), "")
        self._drain()
        for one in self.sdk.followed():
            self._take_foreign(one, "dsec")

    def _drain(self) -> None:
        while self._waiting:
            path, package = self._waiting.pop()
            if path.suffix != ".py":
                continue
            where = path.relative_to(self._project.root).as_posix()
            for one in imports_of(path.read_bytes(), where, package):
                self._take(one, where)

    def _take(self, one: Import, where: str) -> None:
        local = self._project.module_files(one.module)
        if local is None:
            if self._is_local(one.module):
                self._missing(one, where)
            else:
                self._take_foreign(one, where)
            return
        self._add(local)
        for name in one.names:
            below = f"{one.module}.{name}"
            if (files := self._project.module_files(below)) is not None:
                self._add(files)

    def _is_local(self, module: str) -> bool:
        top = module.partition(".")[0]
        return "." in module and self._project.module_files(top) is not None

    def _add(self, files: list[Path]) -> None:
        for file in files:
            if file not in self.files:
                self.files.add(file)
                self._waiting.append((file, _package_of(file, self._project)))

    def _take_foreign(self, one: Import, where: str) -> None:
        top = one.module.partition(".")[0]
        if top in _PYTHONS_OWN or top in self._excluded:
            return
        if self.sdk.take(one):
            return
        names = [f"{one.module}.{name}" for name in one.names] or [one.module]
        for name in names:
            owners = self._environment.owners(name)
            for owner in owners:
                if owner.name not in self._excluded:
                    self.distributions[owner.name] = owner
                    if (place := self._environment.developed(top)) is not None:
                        self.developed[place[1]] = owner
            if not owners:
                self._missing(one, where)
                return

    def _missing(self, one: Import, where: str) -> None:
        if one.optional:
            if where:
                self.left_out.setdefault(one.module, f"{where}:{one.line}")
            return
        at = f"{where}:{one.line}" if one.line else where
        raise not_found(
            f"{at} imports {one.module}, and nothing that is installed here has it: install it, "
            "name its package in requirements.txt, or leave it to the base with --exclude",
            module=one.module,
            where=at,
        )


def _package_of(file: Path, project: Project) -> str:
    """Return the package that relative imports of a file start from."""
    directory = file.parent.relative_to(project.modules_root)
    return ".".join(directory.parts)
