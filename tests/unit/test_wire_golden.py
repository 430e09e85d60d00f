"""The bytes of every message, as older and newer peers know them.

``tests/unit/golden/<Message>.json`` and ``.msgpack`` hold one example each. A changed file is a
changed protocol: new fields need defaults, and nothing may be renamed or removed.
Write missing files with ``python tests/unit/test_wire_golden.py``.
"""

from __future__ import annotations

import sys
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire import (
    action,
    agent,
    agent_node,
    base,
    checkpoint,
    consistency,
    cost,
    dag,
    elastic,
    files,
    layer,
    lease,
    life,
    network,
    node,
    pool,
    rollout,
    rollout_group,
    rollout_stream,
    sandbox,
    snapshot,
    trace,
    waiting,
)
from dsec_common.wire import exec as exec_
from dsec_common.wire.base import JSON, MSGPACK, Message

GOLDEN = Path(__file__).parent / "golden"
MODULES = (
    action,
    agent,
    agent_node,
    dag,
    base,
    checkpoint,
    consistency,
    cost,
    elastic,
    sandbox,
    exec_,
    files,
    life,
    network,
    node,
    layer,
    lease,
    pool,
    rollout,
    rollout_group,
    rollout_stream,
    snapshot,
    trace,
    waiting,
)

MESSAGES: dict[str, type[Message]] = {
    name: kind
    for module in MODULES
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
}


def example_value(kind: Any, name: str) -> Any:  # noqa: PLR0911  one line for each kind of field
    """Return a value of ``kind`` that differs from any default."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {"any": [1, "two", None]}
    if origin in (types.UnionType, typing.Union):
        return example_value(next(a for a in arguments if a is not type(None)), name)
    if origin is tuple:
        return (example_value(arguments[0], name),)
    if origin is dict:
        return {7 if arguments[0] is int else "key": example_value(arguments[1], name)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return example(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[-1]
    scalars = {str: f"{name} é", bytes: b"\x00\xff", bool: True, int: 7, float: 1.5}
    return scalars[kind]


def example(kind: type[msgspec.Struct]) -> Any:
    """Return an instance with every field filled."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: example_value(hints[name], name) for name in kind.__struct_fields__})


@pytest.mark.parametrize("name", sorted(MESSAGES))
@pytest.mark.parametrize(("suffix", "content_type"), [("json", JSON), ("msgpack", MSGPACK)])
def test_the_bytes_of_a_message_have_not_changed(name: str, suffix: str, content_type: str) -> None:
    message = example(MESSAGES[name])
    golden = (GOLDEN / f"{name}.{suffix}").read_bytes().rstrip(b"\n" if suffix == "json" else b"")
    assert base.encode(message, content_type) == golden
    assert base.decode(golden, MESSAGES[name], content_type) == message


def test_every_golden_file_has_its_message() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(MESSAGES)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_a_field_from_the_future_is_ignored(name: str) -> None:
    document = msgspec.json.decode((GOLDEN / f"{name}.json").read_bytes())
    document["from_the_future"] = {"a": 1}
    assert base.decode(msgspec.json.encode(document), MESSAGES[name], JSON) == example(
        MESSAGES[name]
    )


def test_a_request_in_json_needs_neither_type_nor_ids() -> None:
    request = base.decode(b'{"base": "python@3.11"}', sandbox.CreateSandbox, JSON)
    assert request.base == "python@3.11"
    assert len(request.message_id) == 26


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"base": 1}', r"\$\.base"),
        (b"{}", "base"),
        (b'{"type": "DeleteSandbox", "base": "a@1"}', r"\$\.type"),
        (b"\xff\xfe", "CreateSandbox"),
        (b"", "CreateSandbox"),
        (b'{"base": "a@1", "limits": {"cpus": "many"}}', r"\$\.limits\.cpus"),
    ],
)
def test_a_body_that_does_not_decode_names_the_field(body: bytes, expected: str) -> None:
    with pytest.raises(DsecError, match=expected) as caught:
        base.decode(body, sandbox.CreateSandbox, JSON)
    assert caught.value.code is ErrorCode.INVALID


def test_an_error_travels_unchanged() -> None:
    error = DsecError(
        ErrorCode.EXHAUSTED, "full", retry_after_s=2.0, details={"free": 0, "node": "n"}
    )
    reply = base.decode(base.encode(base.ErrorReply.of(error)), base.ErrorReply)
    back = reply.to_error()
    assert (back.code, back.message, back.retryable, back.retry_after_s, back.details) == (
        error.code,
        error.message,
        True,
        2.0,
        error.details,
    )


def test_ids_sort_by_time_and_are_subject_tokens() -> None:
    ids = [base.new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert [i[:10] for i in ids] == sorted(i[:10] for i in ids)
    assert all(i.isalnum() and i == i.lower() and len(i) == 26 for i in ids)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for message_name, message_type in MESSAGES.items():
        for ending, encoding, tail in (("json", JSON, b"\n"), ("msgpack", MSGPACK, b"")):
            path = GOLDEN / f"{message_name}.{ending}"
            if not path.exists() or "--all" in sys.argv:
                path.write_bytes(base.encode(example(message_type), encoding) + tail)
