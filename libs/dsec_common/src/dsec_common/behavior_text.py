"""The behaviour log as text: ``[time] name=value name=value …``, one record a line.

A value stands bare when it is printable and holds no space, quote, ``=`` or backslash; otherwise it
is a JSON string. A name in quotes is always an attribute's, so an attribute may be called anything.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from dsec_common.errors import DsecError, invalid

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_BARE: Final = re.compile(r"""[^\s"'=\\\[\]]+""")
_TIME: Final = re.compile(
    r"\[(\d{4,6}-\d\d-\d\dT\d\d:\d\d:\d\d)\.(\d{3}|\d{6})Z\]",
    re.ASCII,
)
_LATENCY: Final = re.compile(r"(-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf)|nan)ms", re.ASCII)
_UINT: Final = re.compile(r"\d{1,20}", re.ASCII)
_UINT64_MAX: Final = 2**64 - 1

#: Names that stand for the record's own fields; any other bare name is an attribute's.
_FIELD_OF: Final = {
    "agent": "agent",
    "id": "agent_id",
    "action": "action",
    "status": "status",
    "latency": "latency_ms",
    "tokens_in": "tokens_in",
    "tokens_out": "tokens_out",
    "sandbox": "sandbox_id",
    "project": "project",
    "seq": "seq",
    "source": "source",
    "rollout": "rollout_id",
    "stage": "stage",
    "message_id": "message_id",
    "cause_id": "cause_id",
    "traceparent": "traceparent",
    "input_prompt": "input_prompt",
    "output_text": "output_text",
    "reward": "reward",
    "error_code": "error_code",
    "detail_shed": "detail_shed",
}
_ALWAYS: Final = ("agent", "id", "action", "status", "latency", "tokens_in", "tokens_out")
_EXTRA: Final = tuple(name for name in _FIELD_OF if name not in _ALWAYS)
_COUNTS: Final = frozenset({"seq", "tokens_in", "tokens_out"})


def to_text(fields: dict[str, Any], *, full: bool) -> str:
    """Return the line for a record's fields, as :meth:`BehaviorLog.to_text` promises."""
    words = [_time_text(fields["time_us"], full=full)]
    words += [f"{name}={_value(fields[_FIELD_OF[name]])}" for name in ("agent", "id", "action")]
    words += [f"{_name(key)}={_value(value)}" for key, value in fields["attributes"].items()]
    words.append(f"status={_value(fields['status'])}")
    words.append(f"latency={_number(fields['latency_ms'])}ms")
    words += [f"{name}={fields[name]}" for name in ("tokens_in", "tokens_out")]
    if full:
        for name in _EXTRA:
            value = fields[_FIELD_OF[name]]
            if isinstance(value, float):
                words.append(f"{name}={_number(value)}")
            elif value not in ("", 0, None):
                words.append(f"{name}={_value(str(value))}")
    return " ".join(words)


def from_text(line: str) -> dict[str, Any]:
    """Return the fields that a line holds, ready for :class:`BehaviorLog`.

    Raises:
        DsecError: ``invalid``, naming the column where the line stops making sense.
    """
    line = line.rstrip("\r\n")
    stamp = _TIME.match(line)
    if stamp is None:
        raise _broken(line, 0, "a time such as [2024-06-15T14:22:03.127Z]")
    fields: dict[str, Any] = {"time_us": _time_us(line, stamp)}
    attributes: dict[str, str] = {}
    at = stamp.end()
    while at < len(line):
        if line[at] != " ":
            raise _broken(line, at, "one space between words")
        start = at + 1
        name, quoted, at = _word(line, start)
        if at >= len(line) or line[at] != "=":
            raise _broken(line, at, "'=' after a name")
        value_start = at + 1
        value, _, at = _word(line, value_start)
        field = None if quoted else _FIELD_OF.get(name)
        if (name in attributes) if field is None else (field in fields):
            raise _broken(line, start, f"{name!r} only once")
        if field is None:
            attributes[name] = value
        else:
            fields[field] = _typed(line, value_start, name, value)
    fields["attributes"] = attributes
    return fields


def _name(key: str) -> str:
    return json.dumps(key) if key in _FIELD_OF or not _is_bare(key) else key


def _value(value: str) -> str:
    if _is_bare(value):
        return value
    return json.dumps(value, ensure_ascii=not value.isprintable())


def _is_bare(value: str) -> bool:
    return _BARE.fullmatch(value) is not None and value.isprintable()


def _number(value: float) -> str:
    """Return the shortest decimal that reads back as the same number, without a bare ``.0``."""
    return repr(float(value)).removesuffix(".0")


def _time_text(time_us: int, *, full: bool) -> str:
    try:
        moment = _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        raise invalid(f"time_us={time_us} is not a time between the years 1 and 9999") from None
    digits = f"{moment.microsecond:06d}"
    if not full or digits.endswith("000"):
        digits = digits[:3]
    return f"[{moment.replace(microsecond=0, tzinfo=None).isoformat()}.{digits}Z]"


def _time_us(line: str, stamp: re.Match[str]) -> int:
    try:
        moment = datetime.fromisoformat(stamp[1]).replace(tzinfo=UTC)
    except ValueError:
        raise _broken(line, 1, "a date and time that exist") from None
    return (moment - _EPOCH) // timedelta(microseconds=1) + int(stamp[2].ljust(6, "0"))


def _word(line: str, at: int) -> tuple[str, bool, int]:
    """Return the bare or quoted word at a column, whether it was quoted, and the column after."""
    if line.startswith('"', at):
        try:
            text, end = json.JSONDecoder().raw_decode(line, at)
        except json.JSONDecodeError as error:
            raise _broken(line, error.pos, "a JSON string") from None
        return str(text), True, end
    found = _BARE.match(line, at)
    if found is None:
        raise _broken(line, at, "a word, or a JSON string")
    return found[0], False, found.end()


def _typed(line: str, at: int, name: str, value: str) -> str | int | float | bool:
    if name in _COUNTS:
        if _UINT.fullmatch(value) is None or int(value) > _UINT64_MAX:
            raise _broken(line, at, f"a whole number for {name}")
        return int(value)
    if name == "latency":
        found = _LATENCY.fullmatch(value)
        if found is None:
            raise _broken(line, at, "a latency such as 142ms")
        return float(found[1])
    if name == "reward":
        try:
            return float(value)
        except ValueError:
            raise _broken(line, at, "a number for reward") from None
    if name == "detail_shed":
        if value != "True":
            raise _broken(line, at, "True for detail_shed")
        return True
    return value


def _broken(line: str, at: int, wanted: str) -> DsecError:
    return invalid(
        f"behaviour log text: expected {wanted} at column {at + 1} of {line[:200]!r}",
        column=at + 1,
    )
