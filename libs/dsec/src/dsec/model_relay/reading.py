"""Reading a request strictly: what is not known is refused, never dropped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from dsec_common.model_errors import ModelCallError

T = TypeVar("T")

#: Where msgspec says that the trouble is.
_PLACE: Final = re.compile(r" - at `\$\.?(?P<place>[^`]*)`$")
_UNKNOWN: Final = re.compile(r"unknown field `(?P<name>[^`]*)`")


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a request. A field that it does not name makes the request invalid."""


def json_object(body: bytes) -> dict[str, Any]:
    """Return the object that a body is.

    Raises:
        ModelCallError: 400 when it is none.
    """
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise ModelCallError(400, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelCallError(400, "the body is not a JSON object")
    return found


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
