"""The kinds of values that a contract is made of: how each is read, and its JSON Schema."""

from __future__ import annotations

import abc
import math
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dsec_common.asdl.documents import BOOL, FLOAT, INT, INTEGERS, NULL, STR, TOO_LARGE
from dsec_common.asdl.problems import Findings, Path, nearest, shown
from dsec_common.errors import DsecError

#: Characters of a text that says of itself no less.
_TEXT_MAX: Final = 4096
#: Parts of a list that says of itself no less.
_LIST_MAX: Final = 256

BAD: Final = object()
"""In place of a value that could not be read; what is wrong with it is noted."""

_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]*)")
_JSON_TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
_PLACEHOLDER: Final = re.compile(r"\{(\w*)\}")


class Reading(typing.NamedTuple):
    """What a kind needs to read a node: where problems go, and where the nodes stand."""

    findings: Findings
    nodes: dict[Path, Node]
    values: dict[Path, Any]

    def at(self, path: Path, message: str) -> None:
        """Note a problem with what was read at a path, or with the nearest part around it."""
        around = path
        while around and around not in self.nodes:
            around = around[:-1]
        self.findings.add(self.nodes[around].start_mark, path, message)

    def wrong(self, node: Node, path: Path, message: str) -> object:
        """Note a problem and return :data:`BAD`."""
        self.findings.add(node.start_mark, path, message)
        return BAD


class Kind(abc.ABC):
    """One kind of value; ``about`` says for people what the value is for."""

    def __init__(self, about: str = "") -> None:
        self.about = about

    def read(self, node: Node, path: Path, reading: Reading) -> Any:
        """Return the value, or :data:`BAD` after noting what is wrong."""
        return self._value(node, path, reading)

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of what may be written, with what it is for."""
        said = {"description": self.about} if self.about else {}
        return {**self._shape(), **said}

    @abc.abstractmethod
    def _value(self, node: Node, path: Path, reading: Reading) -> Any: ...

    @abc.abstractmethod
    def _shape(self) -> dict[str, Any]: ...


def written(node: Node) -> str:
    """Return what stands there, in a few words."""
    if isinstance(node, ScalarNode):
        return repr(shown(node.value)) if node.value else "nothing"
    return "a list" if isinstance(node, SequenceNode) else "a table"


class Text(Kind):
    """Text; numbers and dates are taken as they are written, so that version 1.10 is no 1.1."""

    def __init__(
        self,
        about: str = "",
        *,
        check: Callable[[str], object] | None = None,
        pattern: str = "",
        most: int = _TEXT_MAX,
    ) -> None:
        super().__init__(about)
        self._check = check
        self._pattern = pattern
        self._most = most

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        if not isinstance(node, ScalarNode):
            return reading.wrong(node, path, f"this is a text, not {written(node)}")
        if node.tag == BOOL:
            return reading.wrong(
                node, path, f"YAML reads {node.value} as yes or no: put it in quotes"
            )
        text = str(node.value)
        if not text.strip():
            return reading.wrong(node, path, "it is empty: say something, or leave it out")
        if len(text) > self._most:
            what = f"it has {len(text)} characters: at most {self._most} are taken"
            return reading.wrong(node, path, what)
        try:
            if self._check is not None:
                self._check(text)
        except DsecError as error:
            return reading.wrong(node, path, error.message)
        reading.values[path] = text
        return text

    def _shape(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": self._most}
        return {**schema, "pattern": self._pattern} if self._pattern else schema


class Version(Text):
    """A text that may look like a number."""

    def _shape(self) -> dict[str, Any]:
        return {**super()._shape(), "type": ["string", "number"]}


class Choice(Kind):
    """One of some words."""

    def __init__(self, about: str, words: Iterable[str]) -> None:
        super().__init__(about)
        self._words = tuple(words)

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        word = node.value if isinstance(node, ScalarNode) else ""
        if word in self._words:
            return word
        return reading.wrong(
            node, path, f"{written(node)} is not known{nearest(word, self._words)}"
        )

    def _shape(self) -> dict[str, Any]:
        return {"enum": list(self._words)}


class Permission(Kind):
    """A built-in permission, or a plug-in's own, whose name has a dot."""

    def __init__(self, about: str, known: Iterable[str]) -> None:
        super().__init__(about)
        self._known = tuple(known)
        self._pattern = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)+")

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        word = node.value if isinstance(node, ScalarNode) else ""
        if word in self._known or (len(word) <= 128 and self._pattern.fullmatch(word)):  # noqa: PLR2004  characters
            return word
        what = f"{written(node)} is no permission{nearest(word, self._known)}"
        return reading.wrong(node, path, f"{what} (a plug-in's own has a dot, as acme.send_mail)")

    def _shape(self) -> dict[str, Any]:
        return {
            "anyOf": [
                {"enum": list(self._known)},
                {"type": "string", "pattern": f"^{self._pattern.pattern}$"},
            ]
        }


class Flag(Kind):
    """Yes or no."""

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        if isinstance(node, ScalarNode) and node.tag == BOOL:
            return node.value.lower() in {"true", "yes", "on"}
        return reading.wrong(node, path, f"this is true or false, not {written(node)}")

    def _shape(self) -> dict[str, Any]:
        return {"type": "boolean"}


class Number(Kind):
    """A number in decimal; YAML's other ways of writing one surprise people (010 is 8)."""

    def __init__(
        self, about: str, *, least: float, most: float, above: bool = False, whole: bool = False
    ) -> None:
        super().__init__(about)
        self._least, self._most, self._above, self._whole = least, most, above, whole

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        pattern = _INTEGER if self._whole else _NUMBER
        what = "a whole number" if self._whole else "a number"
        if not isinstance(node, ScalarNode) or not pattern.fullmatch(node.value):
            return reading.wrong(node, path, f"this is {what} in decimal, not {written(node)}")
        if node.tag == STR and node.style is not None:
            return reading.wrong(node, path, f"this is {what}: take it out of its quotes")
        # More digits than any bound has are not worth reading.
        value = float(node.value) if len(node.value) < 40 else math.inf  # noqa: PLR2004  characters
        bad = value <= self._least if self._above else value < self._least
        if bad or value > self._most:
            least = f"more than {self._least:g}" if self._above else f"at least {self._least:g}"
            what = f"it is {shown(node.value)}: use {least} and at most {self._most:.12g}"
            return reading.wrong(node, path, what)
        reading.values[path] = int(node.value) if _INTEGER.fullmatch(node.value) else value
        return int(node.value) if self._whole else value

    def _shape(self) -> dict[str, Any]:
        lower = "exclusiveMinimum" if self._above else "minimum"
        kind = "integer" if self._whole else "number"
        return {"type": kind, lower: self._least, "maximum": self._most}


class Share(Number):
    """A number from 0 to 1, or yes or no for the usual one or none."""

    def __init__(self, about: str, usual: float) -> None:
        super().__init__(about, least=0, most=1)
        self._usual = usual

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        if isinstance(node, ScalarNode) and node.tag == BOOL:
            return self._usual if node.value.lower() in {"true", "yes", "on"} else 0.0
        return super()._value(node, path, reading)

    def _shape(self) -> dict[str, Any]:
        return {"anyOf": [super()._shape(), {"type": "boolean"}]}


class Template(Text):
    """Text with placeholders in braces."""

    def __init__(self, about: str, names: Iterable[str], *, most: int) -> None:
        super().__init__(about, most=most)
        self._names = tuple(names)

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        if isinstance(node, MappingNode) and len(node.value) == 1:
            # `{agent_type}` alone, within other braces: YAML's table of one name.
            name, nothing = node.value[0]
            if isinstance(name, ScalarNode) and nothing.tag == NULL and not nothing.value:
                node = ScalarNode(STR, f"{{{name.value}}}", node.start_mark, node.end_mark)
        text = super()._value(node, path, reading)
        if text is BAD:
            return BAD
        names = _PLACEHOLDER.findall(text)
        for name in names:
            if names.count(name) > 1:
                return reading.wrong(
                    node, path, f"{{{shown(name)}}} is there twice: once is enough"
                )
            if name not in self._names:
                return reading.wrong(
                    node, path, f"{{{shown(name)}}} is not known{nearest(name, self._names)}"
                )
        rest = _PLACEHOLDER.sub("", text)
        if not re.fullmatch(r"[A-Za-z0-9._:/-]*", rest):
            what = "beside {names} use letters, digits and ._:/- only"
            return reading.wrong(node, path, what)
        return text

    def _shape(self) -> dict[str, Any]:
        names = "|".join(self._names)
        pattern = rf"^([A-Za-z0-9._:/-]|\{{({names})\}})+$"
        return {**super()._shape(), "pattern": pattern}


class Free(Kind):
    """JSON, kept as it is: tables, lists, texts, numbers, yes and no, nothing.

    What a kind has read as a text or a number is that, whatever YAML takes it for.
    """

    def __init__(self, about: str, types: Iterable[str] = ()) -> None:
        super().__init__(about)
        self._types = list(types)

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        return self._json(node, path, reading)

    def _json(self, node: Node, path: Path, reading: Reading) -> Any:
        reading.nodes[path] = node
        if isinstance(known := reading.values.get(path), str | int | float):
            return known
        if isinstance(node, SequenceNode):
            parts = [
                self._json(part, (*path, index), reading) for index, part in enumerate(node.value)
            ]
            return BAD if any(part is BAD for part in parts) else parts
        if isinstance(node, MappingNode):
            table = {
                name: self._json(part, at, reading)
                for name, part, at, _ in named(node, path, reading)
            }
            return BAD if any(part is BAD for part in table.values()) else table
        return self._scalar(node, path, reading)

    def _scalar(self, node: Node, path: Path, reading: Reading) -> Any:
        text = node.value
        if node.tag == BOOL:
            return text.lower() in {"true", "yes", "on"}
        if node.tag == NULL:
            return None
        # To YAML 1.1, 1e5 is text; to JSON, and whoever writes a schema, it is a number.
        is_plain = isinstance(node, ScalarNode) and node.start_mark and node.style is None
        if node.tag in {INT, FLOAT} or (is_plain and _NUMBER.fullmatch(text)):
            if not _NUMBER.fullmatch(text) or len(text) > 40 or not math.isfinite(float(text)):  # noqa: PLR2004  characters
                return reading.wrong(
                    node, path, f"{shown(text)} is no number in decimal: put text in quotes"
                )
            if not _INTEGER.fullmatch(text):
                return float(text)
            whole = int(text)
            return whole if whole in INTEGERS else reading.wrong(node, path, TOO_LARGE)
        return text

    def _shape(self) -> dict[str, Any]:
        return {"type": self._types} if self._types else {}


class SchemaOf(Free):
    """A JSON Schema. Misspelt types are found; the rest is checked where it is used."""

    def __init__(self, about: str) -> None:
        super().__init__(about, ["object"])

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        if not isinstance(node, MappingNode):
            return reading.wrong(node, path, f"this is a table, not {written(node)}")
        schema = super()._value(node, path, reading)
        return BAD if schema is BAD else self._typed(schema, path, reading)

    def _typed(self, schema: Any, path: Path, reading: Reading) -> Any:
        if not isinstance(schema, dict):
            return schema
        types = schema.get("type", [])
        for one in types if isinstance(types, list) else [types]:
            if one not in _JSON_TYPES:
                what = f"{shown(one)!r} is no type of JSON{nearest(str(one), _JSON_TYPES)}"
                reading.at((*path, "type"), what)
        for name in ("properties", "$defs"):
            parts = schema.get(name)
            for key, part in parts.items() if isinstance(parts, dict) else ():
                self._typed(part, (*path, name, key), reading)
        for name in ("anyOf", "allOf", "oneOf"):
            parts = schema.get(name)
            for index, part in enumerate(parts if isinstance(parts, list) else ()):
                self._typed(part, (*path, name, index), reading)
        for name in ("items", "additionalProperties", "not"):
            self._typed(schema.get(name), (*path, name), reading)
        return schema


class ListOf(Kind):
    """A list of one kind."""

    def __init__(self, about: str, part: Kind, *, most: int = _LIST_MAX, least: int = 0) -> None:
        super().__init__(about)
        self.part = part
        self._most, self._least = most, least

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        if not isinstance(node, SequenceNode):
            hint = f": write [{shown(node.value)}]" if isinstance(node, ScalarNode) else ""
            return reading.wrong(node, path, f"this is a list, not {written(node)}{hint}")
        if not self._least <= len(node.value) <= self._most:
            what = f"it has {len(node.value)} parts: use {self._least} to {self._most}"
            return reading.wrong(node, path, what)
        for index, part in enumerate(node.value):
            at = (*path, index)
            reading.nodes[at] = part
            reading.values[at] = self.part.read(part, at, reading)
        values = [reading.values[*path, index] for index in range(len(node.value))]
        return tuple(value for value in values if value is not BAD)

    def _shape(self) -> dict[str, Any]:
        few = {"minItems": self._least} if self._least else {}
        return {"type": "array", "items": self.part.schema(), "maxItems": self._most, **few}


class Table(Kind):
    """A table of known names: the fields of a struct, each annotated with its kind.

    What cannot be read of it is left out, so that the rest is found fault with, too.
    """

    def __init__(
        self,
        about: str,
        struct: type[msgspec.Struct],
        check: Callable[[Any, Path, Reading], None] | None = None,
    ) -> None:
        super().__init__(about)
        self.struct = struct
        self._check = check

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kind of each field."""
        hints = typing.get_type_hints(self.struct, include_extras=True)
        return {name: hint.__metadata__[0] for name, hint in hints.items()}

    @property
    def required(self) -> list[str]:
        """The names that must be there."""
        return [one.name for one in msgspec.structs.fields(self.struct) if one.required]

    def _value(self, node: Node, path: Path, reading: Reading) -> Any:
        if not isinstance(node, MappingNode):
            return reading.wrong(node, path, f"this is a table of names, not {written(node)}")
        kinds = self.kinds
        reading.nodes[path] = node
        values: dict[str, Any] = {}
        for name, part, at, key in named(node, path, reading):
            if reading.findings.full:
                break
            if name not in kinds:
                reading.wrong(key, at, f"{shown(name)!r} is not known here{nearest(name, kinds)}")
                continue
            reading.nodes[at] = part
            if part.tag == NULL and isinstance(part, ScalarNode):
                continue  # nothing is said of it
            values[name] = kinds[name].read(part, at, reading)
        for name in self.required:
            if name not in values:
                reading.findings.add(node.start_mark, (*path, name), missing(name, kinds[name]))
        good = {name: value for name, value in values.items() if value is not BAD}
        if not good.keys() >= set(self.required):
            return BAD
        struct = self.struct(**good)
        if self._check is not None:
            self._check(struct, path, reading)
        return struct

    def _shape(self) -> dict[str, Any]:
        required = {"required": self.required} if self.required else {}
        return {
            "type": "object",
            "properties": {name: kind.schema() for name, kind in self.kinds.items()},
            **required,
            "additionalProperties": False,
        }


def missing(name: str, kind: Kind) -> str:
    """Return what is said of a name that has to be there."""
    return f"{name} is missing: {kind.about[0].lower()}{kind.about[1:]}"


def named(node: MappingNode, path: Path, reading: Reading) -> list[tuple[str, Node, Path, Node]]:
    """Return the names of a table, their values, and where both stand.

    What is no name, or there twice, is noted.
    """
    found: dict[str, tuple[str, Node, Path, Node]] = {}
    for key, value in node.value:
        if not isinstance(key, ScalarNode) or key.tag != STR:
            reading.wrong(key, path, f"a name is text, not {written(key)}: put it in quotes")
            continue
        at = (*path, key.value)
        if key.value in found:
            reading.wrong(key, at, f"{shown(key.value)!r} is there twice: remove one")
            continue
        found[key.value] = (key.value, value, at, key)
    return list(found.values())
