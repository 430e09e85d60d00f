"""Calls travel as what they add to the last one, and arrive as they were sent."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_common.errors import DsecError
from dsec_common.model_calls import CallPart, CallReader, answer_of, parts_of
from dsec_common.model_errors import ModelApi

BODIES = st.lists(st.text("ab", max_size=12).map(str.encode), min_size=1, max_size=6)


def _payload(part: CallPart) -> object:
    """Return what a reader gets of it, JSON in between."""
    return msgspec.json.decode(msgspec.json.encode(part))


@settings(deadline=None)
@given(BODIES)
def test_each_body_arrives_as_it_was_sent_whatever_it_shares_with_the_last(
    bodies: list[bytes],
) -> None:
    reader = CallReader()
    seq, base, base_body = 0, 0, b""
    for body in bodies:
        for part in parts_of(
            ModelApi.CHAT, "k", body, repeat=False, base=base, base_body=base_body
        ):
            seq += 1
            whole = reader.take(seq, _payload(part))
        assert whole is not None
        assert (whole.seq, whole.body) == (seq, body)
        base, base_body = seq, body


def test_a_long_conversation_costs_what_is_new() -> None:
    noise = random.Random(5).randbytes(400_000).hex()  # noqa: S311  no secret
    first = f'{{"messages":["{noise}"],"model":"m"}}'.encode()
    second = f'{{"messages":["{noise}","and this"],"model":"m"}}'.encode()
    parts = parts_of(ModelApi.CHAT, "a", first, repeat=False)
    assert len(parts) > 1
    assert all(len(msgspec.json.encode(part)) < 256 * 1024 for part in parts)
    (added,) = parts_of(ModelApi.CHAT, "b", second, repeat=False, base=len(parts), base_body=first)
    assert len(msgspec.json.encode(added)) < 300
    reader = CallReader()
    wholes = [reader.take(seq, _payload(part)) for seq, part in enumerate([*parts, added], 1)]
    assert [whole.body for whole in wholes if whole] == [first, second]


def test_a_call_that_was_broken_off_is_dropped_for_the_next() -> None:
    noise = random.Random(6).randbytes(400_000).hex()  # noqa: S311  no secret
    cut, *rest = parts_of(ModelApi.CHAT, "a", noise.encode(), repeat=False)
    (other,) = parts_of(ModelApi.CHAT, "b", b"{}", repeat=True)
    reader = CallReader()
    assert reader.take(1, _payload(cut)) is None
    whole = reader.take(2, _payload(other))
    assert whole is not None
    assert (whole.body, whole.repeat) == (b"{}", True)
    assert reader.take(3, _payload(rest[0])) is None


@pytest.mark.parametrize(
    "payload",
    [
        None,
        {},
        {"api": "telnet", "key": "k", "part": 0, "parts": 1, "data": ""},
        {"api": "chat", "key": "k", "part": 0, "parts": 1, "data": "!"},
        {"api": "chat", "key": "k", "part": 0, "parts": 1, "data": "AAAA"},
        {"api": "chat", "key": "k", "part": 0, "parts": 1, "data": "", "base": 7},
    ],
)
def test_what_no_node_writes_is_refused(payload: object) -> None:
    with pytest.raises(DsecError, match="no part of a model call"):
        CallReader().take(1, payload)


def test_an_answer_is_carried_with_its_status_and_headers() -> None:
    answer = answer_of(200, "text/event-stream", {"x": "1"}, b"data: x\n\n" * 9999)
    assert answer.body == b"data: x\n\n" * 9999
    assert len(msgspec.json.encode(answer)) < 1000
    with pytest.raises(DsecError, match="are the most"):
        answer_of(200, "application/json", {}, random.Random(7).randbytes(300_000))  # noqa: S311
