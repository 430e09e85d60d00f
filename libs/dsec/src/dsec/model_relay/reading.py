"""Reading a request strictly: what is not known is refused, never dropped.

But a field that is null counts as left out: clients send answers back with all the fields that
their own types have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from dsec_common.model_errors import ModelCallError

T = TypeVar("T")

_VERBATIM: Final = frozenset(
    {
        *("parameters", "input_schema", "schema", "response_format"),
        *("metadata", "chat_template_kwargs"),
    }
)

#: Where msgspec says that the trouble is.
_PLACE: Final = re.compile(r" - at `\$\.?(?P<place>[^`]*)`$")
_UNKNOWN: Final = re.compile(r"unknown field `(?P<name>[^`]*)`")


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a request. A field that it does not name makes the request invalid."""


def json_object(body: bytes) -> dict[str, Any]:
    """Return the object that a body is, without fields that are null.

    Raises:
        ModelCallError: 400 when it is none.
    """
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise ModelCallError(400, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelCallError(400, "the body is not a JSON object")
    without: dict[str, Any] = _without_nulls(found)
    return without


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: field if _is_verbatim(name, field) else _without_nulls(field)
        for name, field in value.items()
        if field is not None
    }


def _is_verbatim(name: str, field: Any) -> bool:
    """Return whether a field is data of the caller's, in which a null means something."""
    return name in _VERBATIM or (name == "input" and isinstance(field, dict))


def convert(value: Any, wanted: type[T]) -> T:
    """Return ``value`` as a ``wanted``.

    Raises:
        ModelCallError: 400, naming the field and what is wrong with it.
    """
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PLACE.search(text)
        what = _PLACE.sub("", text)
        param = place["place"] if place else ""
        unknown = _UNKNOWN.search(what)
        if unknown:
            param = f"{param}.{unknown['name']}" if param else unknown["name"]
            raise ModelCallError(
                400,
                f"this endpoint does not support {param!r}; leave it out",
                param=param,
                code="unsupported_parameter",
            ) from error
        raise ModelCallError(
            400, f"{param or 'the request'}: {what}", param=param or None, code="invalid_value"
        ) from error


def refuse_unless(condition: bool, param: str, why: str) -> None:
    """Refuse a field whose value is not supported.

    Raises:
        ModelCallError: 400, naming it.
    """
    if not condition:
        raise ModelCallError(400, f"{param}: {why}", param=param, code="unsupported_value")


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that have a value."""
    return {name: value for name, value in options.items() if value is not None}
