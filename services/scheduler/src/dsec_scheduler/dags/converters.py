"""Converters between types of JSON, put where a value does not fit and nothing is lost. No I/O.

A converter that loses something is never inserted: whoever wants that has a step for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_scheduler.dags.schemas import Schema, fits, types_of

CHAIN_MAX: Final = 3
"""Converters on the way of one value; a longer chain is nobody's intention."""


@dataclass(frozen=True, slots=True)
class Converter:
    """One way to convert.

    Attributes:
        name: for people.
        takes: what it converts.
        gives: the schema of what comes of a value of a schema.
        convert: does it.
        lossless: the value could be had back.
    """

    name: str
    takes: Schema
    gives: Callable[[Schema], Schema]
    convert: Callable[[Any], Any]
    lossless: bool = True


def _text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


BUILT_IN: Final = (
    Converter(
        "number_to_text", {"type": ["integer", "number"]}, lambda _: {"type": "string"}, _text_of
    ),
    Converter(
        "boolean_to_text",
        {"type": "boolean"},
        lambda _: {"type": "string", "enum": ["false", "true"]},
        _text_of,
    ),
    Converter(
        "json_to_text", {"type": ["object", "array"]}, lambda _: {"type": "string"}, _text_of
    ),
    Converter(
        "boolean_to_integer",
        {"type": "boolean"},
        lambda _: {"type": "integer", "minimum": 0, "maximum": 1},
        int,
    ),
    Converter(
        "one_to_list",
        {},
        lambda schema: {"type": "array", "items": dict(schema), "minItems": 1, "maxItems": 1},
        lambda value: [value],
    ),
    Converter(
        "text_to_integer", {"type": "string"}, lambda _: {"type": "integer"}, int, lossless=False
    ),
)


@dataclass(slots=True)
class Converters:
    """A registry of converters; the first that leads there with the fewest steps is taken."""

    known: dict[str, Converter] = field(default_factory=lambda: {one.name: one for one in BUILT_IN})

    def add(self, converter: Converter) -> None:
        """Know another one, in place of one of the same name."""
        self.known[converter.name] = converter

    def chain(self, written: Schema, read: Schema) -> tuple[str, ...] | None:
        """Return which lossless converters lead from one schema to another, or None."""
        paths: list[tuple[tuple[str, ...], Schema]] = [((), written)]
        for _ in range(CHAIN_MAX + 1):
            for names, schema in paths:
                if fits(schema, read):
                    return names
            paths = [
                ((*names, one.name), one.gives(schema))
                for names, schema in paths
                for one in self.known.values()
                if one.lossless and one.name not in names and fits(schema, one.takes)
            ]
        return None

    def lossy(self, written: Schema, read: Schema) -> str:
        """Return a converter that would lead there and lose something; empty for none."""
        for one in self.known.values():
            if not one.lossless and fits(written, one.takes) and fits(one.gives(written), read):
                return one.name
        return ""

    def convert(self, names: Sequence[str], value: Any) -> Any:
        """Return the value after all of these.

        Raises:
            DsecError: ``invalid`` when one of them raises; nothing is tried again for that.
        """
        for name in names:
            try:
                value = self.known[name].convert(value)
            except Exception as error:  # whatever a converter raises is about the value
                raise DsecError(
                    ErrorCode.INVALID,
                    f"the converter {name} cannot convert a value: {type(error).__name__}: {error}",
                    details={"converter": name},
                ) from error
        return value


def kinds(schema: Schema) -> str:
    """Return the types of a schema for people."""
    return " or ".join(sorted(types_of(schema)))
