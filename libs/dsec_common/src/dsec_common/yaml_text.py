"""YAML files into structs, strictly: what is wrong is told with its line and column.

Every name must be known and stand there once; a misspelt one is answered with the nearest. No
tags, so that a file makes nothing but text, numbers, lists and tables.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from typing import Any, Final, TypeVar

import msgspec
import yaml

from dsec_common.errors import DsecError, ErrorCode

T = TypeVar("T")

_NEEDS_QUOTES: Final = tuple(f"Expected `str`, got `{kind}`" for kind in ("bool", "int", "float"))

Path = tuple[str | int, ...]


def read_yaml(text: str, kind: type[T], name: str) -> T:
    """Return the document as ``kind``; an empty one is as good as an empty table.

    Args:
        text: the document.
        kind: a struct; its fields may be structs, tables of free names and lists in turn.
        name: of the file, for errors.

    Raises:
        DsecError: ``invalid``: ``<name>:<line>:<column>: <what is wrong, and what to do>``.
    """
    document = _Document(name)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        value = {} if root is None else document.read(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise document.refusal(mark, error.problem or "this is not YAML") from None
    except (yaml.YAMLError, ValueError) as error:
        raise document.refusal(None, str(error).replace("\n", " ")) from None
    except RecursionError:
        raise document.refusal(None, "it is nested too deeply, or contains itself") from None
    document.check(value, kind, ())
    return msgspec.convert(value, kind)


def text_of(document: str, name: str) -> str:
    """Return what stands behind a name at the top of a document, letter by letter; or nothing."""
    root = yaml.compose(document, Loader=yaml.SafeLoader)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == name and isinstance(value, yaml.ScalarNode):
            return str(value.value)
    return ""


class _Document:
    """One document, and where each part of it stands."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._marks: dict[Path, yaml.Mark] = {}

    def refusal(self, mark: yaml.Mark | None, problem: str) -> DsecError:
        place = f"{self._name}:{mark.line + 1}:{mark.column + 1}" if mark else self._name
        return DsecError(ErrorCode.INVALID, f"{place}: {problem}")

    def read(self, node: yaml.Node, path: Path) -> Any:
        """Return what a node holds, and note where its parts stand."""
        self._marks.setdefault(path, node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(part, (*path, index)) for index, part in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = key_node.value
                if not isinstance(key, str):
                    raise self.refusal(key_node.start_mark, "a name must be plain text")
                if key in found:
                    raise self.refusal(key_node.start_mark, f"{key!r} is there twice: remove one")
                self._marks[(*path, key)] = key_node.start_mark
                found[key] = self.read(value_node, (*path, key))
            return found
        return yaml.constructor.SafeConstructor().construct_object(node)

    def check(self, value: Any, kind: Any, path: Path) -> None:
        """Refuse the first part of a value that is not what ``kind`` says, the innermost first."""
        plain = _plain(kind)
        origin, arguments = typing.get_origin(plain), typing.get_args(plain)
        if isinstance(value, dict) and _is_struct(plain):
            hints = typing.get_type_hints(plain, include_extras=True)
            for key, part in value.items():
                if key not in hints:
                    known = f"{key!r} is not known here{_nearest(key, list(hints))}"
                    raise self.refusal(self._marks[(*path, key)], known)
                self.check(part, hints[key], (*path, key))
        elif isinstance(value, dict) and origin is dict:
            for key, part in value.items():
                self._convert(key, arguments[0], (*path, key))
                self.check(part, arguments[1], (*path, key))
        elif isinstance(value, list) and origin in (list, tuple):
            for index, part in enumerate(value):
                self.check(part, arguments[0], (*path, index))
        self._convert(value, kind, path)

    def _convert(self, value: Any, kind: Any, path: Path) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refusal(self._marks[path], f"{value} is no amount")
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problem = str(error)
            hint = ": put it in quotes" if problem.startswith(_NEEDS_QUOTES) else ""
            # An empty document has no place.
            raise self.refusal(self._marks.get(path), problem + hint) from None


def _plain(kind: Any) -> Any:
    """Return a type without its bounds, and without the None that says that it may be left out."""
    if typing.get_origin(kind) is typing.Annotated:
        return _plain(typing.get_args(kind)[0])
    if typing.get_origin(kind) in {types.UnionType, typing.Union}:
        others = [part for part in typing.get_args(kind) if part is not types.NoneType]
        return _plain(others[0]) if len(others) == 1 else kind
    return kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f": use {', '.join(sorted(known))}"
