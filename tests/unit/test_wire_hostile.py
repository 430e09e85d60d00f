"""Bodies that no honest peer sends: each is `invalid`, none is a fault of ours."""

from __future__ import annotations

import msgspec
import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import ID_CHARACTERS_MAX, JSON, MSGPACK, decode, encode
from dsec_common.wire.rollout import SendFeedback
from dsec_common.wire.sandbox import CreateSandbox, ListSandboxes

DEEP = 100_000


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"base": "a@1", "from_the_future": ' + b"[" * DEEP + b"]" * DEEP + b"}", JSON),
        (b'{"base": "a@1", "from_the_future": ' + b"[" * DEEP, JSON),
        (b"\x82\xa4base\xa3a@1\xa1x" + b"\x91" * DEEP + b"\x90", MSGPACK),
    ],
)
def test_a_body_nested_without_end_is_invalid(body: bytes, content_type: str) -> None:
    with pytest.raises(DsecError, match="CreateSandbox") as caught:
        decode(body, CreateSandbox, content_type)
    assert caught.value.code is ErrorCode.INVALID


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
def test_an_integer_that_could_not_be_handed_on_is_invalid(number: int) -> None:
    body = b'{"base": "a@1", "limits": {"pids": %d}}' % number
    with pytest.raises(DsecError, match="64 bits") as caught:
        decode(body, CreateSandbox, JSON)
    assert caught.value.code is ErrorCode.INVALID
    with pytest.raises(DsecError, match="64 bits"):
        decode(b'{"seq": 1, "payload": [%d]}' % number, SendFeedback, JSON)


def test_whatever_decodes_from_json_can_be_handed_on_as_msgpack() -> None:
    body = b'{"base": "a@1", "limits": {"pids": %d}, "labels": {"\\u0000": ""}}' % (2**64 - 1)
    message = decode(body, CreateSandbox, JSON)
    assert decode(encode(message), CreateSandbox) == message


@pytest.mark.parametrize("name", ["message_id", "cause_id"])
@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_an_id_as_long_as_a_message_is_invalid(name: str, content_type: str) -> None:
    encoder = msgspec.json if content_type == JSON else msgspec.msgpack
    longest = encoder.encode({name: "m" * ID_CHARACTERS_MAX})
    assert decode(longest, ListSandboxes, content_type)
    with pytest.raises(DsecError, match=f"{name} has 129 characters") as caught:
        decode(encoder.encode({name: "m" * 129}), ListSandboxes, content_type)
    assert caught.value.code is ErrorCode.INVALID


def test_text_that_is_no_text_is_invalid() -> None:
    for body, content_type in (
        (b'{"labels": {"a": "\xff\xfe"}}', JSON),
        (b'{"labels": {"a": "\\ud800"}}', JSON),
        (msgspec.msgpack.encode({"labels": {"a": "bb"}}).replace(b"bb", b"\xff\xfe"), MSGPACK),
        (b"\x82\xa6labels\xdf\xff\xff\xff\xff", MSGPACK),
    ):
        with pytest.raises(DsecError) as caught:
            decode(body, ListSandboxes, content_type)
        assert caught.value.code is ErrorCode.INVALID


def _within_itself() -> list[object]:
    nested: list[object] = []
    nested.append(nested)
    return nested


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize(
    "payload",
    ["\ud800", object(), _within_itself(), 1 + 2j],
    ids=["no Unicode", "an object", "within itself", "a complex number"],
)
def test_what_no_message_can_carry_is_invalid_before_it_is_sent(
    payload: object, content_type: str
) -> None:
    with pytest.raises(DsecError, match="SendFeedback cannot be sent") as caught:
        encode(SendFeedback(seq=1, payload=payload), content_type)
    assert caught.value.code is ErrorCode.INVALID
    with pytest.raises(DsecError, match="64"):
        encode(SendFeedback(seq=10**30))
