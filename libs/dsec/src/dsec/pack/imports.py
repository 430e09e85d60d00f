"""What a Python file imports, found without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Final

from dsec_common.errors import invalid

#: What a program catches that does without a module.
_CATCHES: Final = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
_IMPORTERS: Final = frozenset({"import_module", "__import__"})
#: Imports under a question about these are for other platforms or versions.
_ABOUT_THE_HOST: Final = frozenset({"platform", "version_info", "name", "implementation"})


@dataclass(frozen=True, slots=True)
class Import:
    """One import.

    Attributes:
        module: its whole name.
        names: what is taken from it; any of them may be a module below it.
        line: where.
        optional: the program says what it does without it.
    """

    module: str
    names: tuple[str, ...]
    line: int
    optional: bool


def imports_of(source: bytes, where: str, package: str = "") -> tuple[Import, ...]:
    """Return the imports of a file, wherever in it they stand; not those for type checkers.

    ``importlib.import_module`` and ``__import__`` count when the name is written out.

    Args:
        source: the file's content.
        where: its name, for errors.
        package: the package that the file's module is in, which relative imports start from.

    Raises:
        DsecError: ``invalid`` when it is no Python, with the line.
    """
    try:
        tree = ast.parse(source, where)
    except SyntaxError as error:
        raise invalid(f"{where}:{error.lineno or 1}: this is no Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise invalid(f"{where}: this is no Python: {error}") from None
    finder = _Finder(package)
    try:
        finder.visit(tree)
    except RecursionError:
        raise invalid(f"{where}: it is nested too deeply to be looked through") from None
    return tuple(finder.found)


class _Finder(ast.NodeVisitor):
    """Collects imports in order."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._optional = 0
        self.found: list[Import] = []

    def _add(self, module: str, names: tuple[str, ...], line: int) -> None:
        if module:
            self.found.append(Import(module, names, line, optional=self._optional > 0))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, (), node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        names = tuple(alias.name for alias in node.names if alias.name != "*")
        module = node.module or ""
        if node.level:
            above = self._package.split(".")
            kept = above[: len(above) - node.level + 1]
            module = ".".join([*kept, *([module] if module else [])])
        self._add(module, names, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in _IMPORTERS and node.args and isinstance(node.args[0], ast.Constant):
            module = node.args[0].value
            if isinstance(module, str) and not module.startswith("."):
                self._add(module, (), node.lineno)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        said = {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node.test)}
        if "TYPE_CHECKING" in said and not isinstance(node.test, ast.UnaryOp):
            self._visit_all(node.orelse)
            return
        about_the_host = bool(said & _ABOUT_THE_HOST) and bool(said & {"sys", "os"})
        self._visit_all(node.body, optional=about_the_host)
        self._visit_all(node.orelse, optional=about_the_host)
        self.visit(node.test)

    def visit_Try(self, node: ast.Try) -> None:
        does_without = any(_catches_imports(handler.type) for handler in node.handlers)
        self._visit_all(node.body, optional=does_without)
        for handler in node.handlers:
            self._visit_all(handler.body, optional=does_without)
        self._visit_all([*node.orelse, *node.finalbody])

    def visit_With(self, node: ast.With) -> None:
        calls = (item.context_expr for item in node.items)
        does_without = any(
            isinstance(call, ast.Call)
            and getattr(call.func, "attr", getattr(call.func, "id", "")) == "suppress"
            and any(_catches_imports(argument) for argument in call.args)
            for call in calls
        )
        for item in node.items:
            self.visit(item)
        self._visit_all(node.body, optional=does_without)

    def _visit_all(self, nodes: list[ast.stmt], *, optional: bool = False) -> None:
        self._optional += optional
        for node in nodes:
            self.visit(node)
        self._optional -= optional


def _catches_imports(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(getattr(part, "attr", getattr(part, "id", "")) in _CATCHES for part in parts)
