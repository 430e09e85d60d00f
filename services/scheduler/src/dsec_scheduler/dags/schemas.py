"""Whether every value of one JSON Schema is a value of another. No I/O.

The answer "no" may be too careful, the answer "yes" is not: what is not understood counts as a
demand of the reader that nothing fulfils but the very same words of the writer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError

from dsec_common.errors import DsecError, ErrorCode, invalid

Schema = Mapping[str, Any]

_ALL_TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
#: They say something for people, or where something is kept.
_NOTES: Final = frozenset(
    {"title", "description", "$schema", "$id", "$comment", "default", "examples", "deprecated"}
)
_UNDERSTOOD: Final = frozenset(
    {"type", "enum", "const", "properties", "required", "additionalProperties", "items", "anyOf"}
)
#: Bounds of the reader that the writer's own must be within: which is the tighter.
_LOWER: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_ERROR_CHARACTERS: Final = 300
_PARTS_MAX: Final = 5000
_DEPTH_MAX: Final = 64
#: ``uniqueItems`` costs the square of a value's length.
_REFUSED: Final = frozenset(
    {
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "pattern",
        "patternProperties",
        "$dynamicAnchor",
        "uniqueItems",
    }
)
#: Comparisons of two schemas, or of a value with one, for one request: a second or two.
_COMPARISONS_MAX: Final = 100_000
#: Parts of a value times parts of its schema.
_CHECKS_MAX: Final = 1_000_000

_comparisons_left: Final[ContextVar[list[int] | None]] = ContextVar(
    "comparisons left", default=None
)


@contextlib.contextmanager
def bounded_effort() -> Iterator[None]:
    """Have all that is compared within take no longer than a request may.

    Where that is not enough :func:`fits` raises ``invalid``.
    """
    token = _comparisons_left.set([_COMPARISONS_MAX])
    try:
        yield
    finally:
        _comparisons_left.reset(token)


def _spend(comparisons: int) -> None:
    left = _comparisons_left.get()
    if left is None:
        return
    left[0] -= comparisons
    if left[0] < 0:
        raise invalid("its schemas take too long to compare: use fewer steps, or fewer choices")


def check_schema(schema: Schema, what: str) -> None:
    """Return when ``schema`` is a JSON Schema (2020-12).

    Raises:
        DsecError: ``invalid``, with where it is wrong; it is ``what``'s.
    """
    _refuse_costly(schema, what)
    try:
        Draft202012Validator.check_schema(dict(schema))
    except SchemaError as error:
        path = "/".join(map(str, error.absolute_path)) or "/"
        raise invalid(f"{what} is no JSON Schema: at {path}: {error.message}") from None


def _refuse_costly(schema: Any, what: str) -> None:
    """Refuse what leads elsewhere, or could keep a scheduler busy: others wait for that, too."""
    todo = [(schema, 0)]
    seen = 0
    while todo:
        one, depth = todo.pop()
        seen += 1
        if seen > _PARTS_MAX:
            raise invalid(f"{what} has more than {_PARTS_MAX} parts: make it simpler")
        if depth > _DEPTH_MAX:
            raise invalid(f"{what} is nested deeper than {_DEPTH_MAX}: make it simpler")
        if isinstance(one, Mapping):
            if found := _REFUSED & one.keys():
                raise DsecError(
                    ErrorCode.UNSUPPORTED,
                    f"{what} uses {', '.join(sorted(found))}, which is not supported; write it out",
                )
            todo += [(part, depth + 1) for part in one.values()]
        elif isinstance(one, list):
            todo += [(part, depth + 1) for part in one]


def _parts(value: Any) -> int:
    """Return of how many parts a JSON value is made."""
    todo, seen = [value], 0
    while todo:
        one = todo.pop()
        seen += 1
        if isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, list):
            todo += one
    return seen


def check_value(value: Any, schema: Schema, what: str) -> None:
    """Return when ``value`` is one of ``schema``; that may take seconds.

    Raises:
        DsecError: ``invalid``, with where it differs, or for what would take minutes.
    """
    parts, choices = _parts(value), _parts(schema)
    if parts * choices > _CHECKS_MAX:
        raise invalid(
            f"{what} has {parts} parts and its schema {choices}, which is too much to check: give "
            "less, or use a simpler schema"
        )
    try:
        Draft202012Validator(dict(schema)).validate(value)
    except ValidationError as error:
        path = "/".join(map(str, error.absolute_path)) or "/"
        shown = error.message[:_ERROR_CHARACTERS]
        raise invalid(f"{what} does not fit its schema: at {path}: {shown}") from None
    except RecursionError:
        raise DsecError(ErrorCode.INVALID, f"{what} is nested too deeply") from None


def at(schema: Schema, fields: tuple[str, ...]) -> Schema | None:
    """Return the schema of a field that each value of ``schema`` has; None when some may not."""
    for field in fields:
        if types_of(schema) != {"object"} or field not in schema.get("required", ()):
            return None
        found = schema.get("properties", {}).get(field)
        if found is None:
            return None
        schema = as_mapping(found)
    return schema


def types_of(schema: Schema) -> frozenset[str]:
    """Return the types that values may have."""
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    if "enum" in schema:
        return frozenset(map(_type_of, schema["enum"]))
    named = schema.get("type", None)
    if named is None:
        return _ALL_TYPES
    return frozenset([named] if isinstance(named, str) else named)


def fits(written: Any, read: Any) -> bool:
    """Return whether every value that ``written`` allows, ``read`` allows, too.

    Raises:
        DsecError: ``invalid`` for more than :func:`bounded_effort` allows.
    """
    _spend(1)
    if read is True or written is False or _same(written, read):
        return True
    if read is False:
        return False
    writer, reader = as_mapping(written), as_mapping(read)
    if "anyOf" in writer:
        rest = {key: value for key, value in writer.items() if key != "anyOf"}
        return all(fits({**rest, **as_mapping(one)}, reader) for one in writer["anyOf"])
    if "anyOf" in reader:
        rest = {key: value for key, value in reader.items() if key != "anyOf"}
        return fits(writer, rest) and any(fits(writer, one) for one in reader["anyOf"])
    values = _values(writer)
    if values is not None:
        _spend(len(values))
        validator = Draft202012Validator(dict(reader))
        return all(validator.is_valid(value) for value in values)
    return (
        _values(reader) is None
        and _types_fit(types_of(writer), types_of(reader))
        and _bounds_fit(writer, reader)
        and _objects_fit(writer, reader)
        and _items_fit(writer, reader)
        and _rest_is_the_same(writer, reader)
    )


def _same(one: Any, other: Any) -> bool:
    # Not by == alone, to which true is 1.
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def as_mapping(schema: Any) -> Schema:
    """Return a schema as a mapping, though it was written as true or false."""
    if schema is True:
        return {}
    return {"enum": []} if schema is False else schema


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if "enum" in schema else None


def _types_fit(written: frozenset[str], read: frozenset[str]) -> bool:
    return all(one in read or (one == "integer" and "number" in read) for one in written)


def _bounds_fit(writer: Schema, reader: Schema) -> bool:
    lower = all(name not in reader or writer.get(name, -1e400) >= reader[name] for name in _LOWER)
    upper = all(name not in reader or writer.get(name, 1e400) <= reader[name] for name in _UPPER)
    return lower and upper


def _objects_fit(writer: Schema, reader: Schema) -> bool:
    if "object" not in types_of(writer):
        return True
    if not set(reader.get("required", ())) <= set(writer.get("required", ())):
        return False
    written, read = writer.get("properties", {}), reader.get("properties", {})
    others_written = writer.get("additionalProperties", True)
    others_read = reader.get("additionalProperties", True)
    named = all(fits(written.get(name, others_written), one) for name, one in read.items())
    unread = all(fits(one, others_read) for name, one in written.items() if name not in read)
    return named and unread and fits(others_written, others_read)


def _items_fit(writer: Schema, reader: Schema) -> bool:
    if "array" not in types_of(writer):
        return True
    return fits(writer.get("items", True), reader.get("items", True))


def _rest_is_the_same(writer: Schema, reader: Schema) -> bool:
    known = _NOTES | _UNDERSTOOD | set(_LOWER) | set(_UPPER)
    return all(writer.get(name) == one for name, one in reader.items() if name not in known)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
