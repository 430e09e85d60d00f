"""The part of ``dsec`` that an agent takes along: modules that it reaches, not the platform.

The whole distribution has services and clients, which no sandbox has a use for and which need more
than a package may hold. So its modules are followed one by one, as the author's are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import dsec
import dsec_common
from dsec.pack.imports import Import, imports_of
from dsec.tools import BUILT_IN, GROUP, load_tool

#: Where each top-level package of the SDK is.
_ROOTS: Final = {
    name: Path(str(module.__file__)).parent.parent
    for name, module in (("dsec", dsec), ("dsec_common", dsec_common))
}


class Sdk:
    """Modules of ``dsec`` and ``dsec_common`` that are reached.

    What one of the SDK's modules can do without, such as a reader of PDF, is taken along for tools
    that the contract names, as is the distribution of one that is a plug-in.
    """

    def __init__(self, tools: Iterable[str] = ()) -> None:
        self._tools = frozenset(tools)
        self._homes: set[str] = set()
        self._files: dict[str, Path] = {}
        self._waiting: list[tuple[str, str]] = []
        self._foreign: list[Import] = []

    def take(self, one: Import) -> bool:
        """Note an import; return whether it is one of the SDK."""
        if one.module.partition(".")[0] not in _ROOTS:
            return False
        self._add(one.module)
        for name in one.names:
            # What the package gives under its own name is loaded from elsewhere when it is used.
            home = dsec._HOME_OF.get(name) if one.module == "dsec" else None  # noqa: SLF001  its own
            self._add(home or f"{one.module}.{name}")
        return True

    def followed(self) -> list[Import]:
        """Follow all that was noted, and return the imports of what is not of the SDK."""
        if self._files:
            self._add_tools()
        while self._waiting:
            key, package = self._waiting.pop()
            for one in imports_of(self._files[key].read_bytes(), key, package):
                if not self.take(one) and (key in self._homes or not one.optional):
                    self._foreign.append(one)
        return self._foreign

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield where each module belongs below a directory of ``sys.path``, and where it is."""
        yield from sorted(self._files.items())

    def _add_tools(self) -> None:
        plug_ins = {entry.name: entry.module for entry in entry_points(group=GROUP)}
        for tool in sorted(self._tools):
            if tool in BUILT_IN:
                home = load_tool(tool).__module__
                self._homes.add(f"{home.replace('.', '/')}.py")
                self._add(home)
            elif tool in plug_ins:
                self._foreign.append(Import(plug_ins[tool], (), 0, optional=False))

    def _add(self, module: str) -> None:
        root = _ROOTS[module.partition(".")[0]]
        place, package = root, ""
        for part in module.split("."):
            name = f"{package}.{part}" if package else part
            for path, within in (
                (place / part / "__init__.py", name),
                (place / f"{part}.py", package),
            ):
                key = path.relative_to(root).as_posix()
                if path.is_file() and key not in self._files:
                    self._files[key] = path
                    self._waiting.append((key, within))
            place, package = place / part, name
