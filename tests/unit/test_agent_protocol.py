"""The agent protocol's pure half: what a sandbox sends is understood or refused, in bounds."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_sandboxd.agent_limits import ByteBudget, RequestRate
from dsec_sandboxd.agent_protocol import (
    FRAME_MAX_BYTES,
    PAYLOAD_MAX_BYTES,
    Log,
    Step,
    decode_request,
    encode_error,
    encode_result,
    frame_length,
    packed_payload,
    request_id_of,
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)


def body(frame: bytes) -> dict[str, Any]:
    (length,) = struct.unpack(">I", frame[:4])
    assert length == len(frame) - 4
    decoded: dict[str, Any] = json.loads(frame[4:])
    return decoded


@given(st.binary(max_size=300))
def test_garbage_is_refused_never_a_crash(garbage: bytes) -> None:
    with pytest.raises(DsecError, match="no request of this protocol"):
        decode_request(garbage)
    assert request_id_of(garbage) is None


@given(JSON_VALUES)
def test_json_that_is_no_request_is_refused_never_a_crash(value: Any) -> None:
    encoded = json.dumps(value).encode("utf-8", "surrogatepass")
    with pytest.raises(DsecError):
        decode_request(encoded)
    request_id_of(encoded)


@given(JSON_VALUES)
def test_a_payload_travels_unchanged(value: Any) -> None:
    frame = json.dumps({"id": 1, "op": "step", "stage": "s", "payload": value}).encode()
    request = decode_request(frame)
    assert isinstance(request, Step)
    assert msgspec.msgpack.decode(packed_payload(request.payload)) == value


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"1" * 400, "cannot be carried"),
        (b"[" * 100_000 + b"]" * 100_000, "cannot be carried"),
        (b'"\\ud800"', "cannot be carried"),
        (b'"' + b"x" * PAYLOAD_MAX_BYTES + b'"', "at most 262144"),
        (b"{]", "cannot be carried"),
    ],
    ids=["a number of 400 digits", "deep nesting", "half a character", "too large", "no JSON"],
)
def test_a_payload_that_cannot_be_carried_is_invalid(payload: bytes, says: str) -> None:
    with pytest.raises(DsecError, match=says) as refusal:
        packed_payload(msgspec.Raw(payload))
    assert refusal.value.code == ErrorCode.INVALID


@pytest.mark.parametrize(
    "changed",
    [
        {"id": -1},
        {"id": 2**60},
        {"id": "x" * 65},
        {"id": None},
        {"id": [1]},
        {"op": "exec"},
        {"op": None},
        {"stage": ""},
        {"stage": "x" * 129},
        {"stage": 7},
        {"seq": -1},
        {"seq": 2**63},
        {"seq": 1.5},
        {"wait_s": "long"},
    ],
    ids=str,
)
def test_a_request_out_of_bounds_is_invalid(changed: dict[str, Any]) -> None:
    request = {"id": 7, "op": "step", "stage": "s", "payload": None} | changed
    with pytest.raises(DsecError) as refusal:
        decode_request(json.dumps(request).encode())
    assert refusal.value.code == ErrorCode.INVALID


def test_a_refused_request_is_answered_under_its_id() -> None:
    assert request_id_of(b'{"id": "a-7", "op": "fly"}') == "a-7"


def test_unknown_fields_are_ignored_so_that_newer_agents_are_understood() -> None:
    request = decode_request(b'{"id":1,"op":"log","action":"a","mood":"fine"}')
    assert request == Log(id=1, action="a")


def test_nothing_in_a_request_can_name_a_sandbox_or_a_rollout() -> None:
    request = decode_request(
        b'{"id":1,"op":"log","action":"a","sandbox_id":"n.other","agent":"admin","project":"p"}'
    )
    assert request == Log(id=1, action="a")


def test_a_frame_too_long_is_refused_by_its_header_alone() -> None:
    assert frame_length(struct.pack(">I", FRAME_MAX_BYTES)) == FRAME_MAX_BYTES
    for length in (FRAME_MAX_BYTES + 1, 2**32 - 1):
        with pytest.raises(DsecError, match=f"at most {FRAME_MAX_BYTES}"):
            frame_length(struct.pack(">I", length))


def test_an_error_says_code_message_and_whether_to_try_again() -> None:
    error = unavailable("away", retry_after_s=0.5, rollout_id="s0.a")
    assert body(encode_error(3, error)) == {
        "id": 3,
        "error": {
            "code": "unavailable",
            "message": "away",
            "retryable": True,
            "retry_after_s": 0.5,
            "details": {"rollout_id": "s0.a"},
        },
    }


def test_feedback_that_is_no_json_is_refused_by_name() -> None:
    with pytest.raises(DsecError, match="cannot be written as JSON"):
        encode_result(1, {"payload": {(1, 2): 3}})


def test_a_budget_is_never_exceeded_alone_or_together() -> None:
    whole = ByteBudget(100)
    first, second = ByteBudget(80, whole), ByteBudget(80, whole)
    assert first.take(70)
    assert not first.take(11)
    assert not second.take(31)
    assert second.take(30)
    assert not whole.take(1)
    first.give(70)
    assert second.take(50)
    assert whole.take(20)


@given(st.lists(st.floats(min_value=0, max_value=0.1), min_size=1, max_size=200))
def test_no_more_requests_pass_than_rate_and_burst_allow(pauses_s: list[float]) -> None:
    rate = RequestRate(per_s=50, burst=5, now=0.0)
    now, passed = 0.0, 0
    for pause_s in pauses_s:
        now += pause_s
        passed += not rate.delay_s(now)
    assert passed <= 5 + 50 * now + 1e-6


def test_the_told_delay_is_enough() -> None:
    rate = RequestRate(per_s=10, burst=1, now=0.0)
    assert rate.delay_s(0.0) == 0
    delay_s = rate.delay_s(0.0)
    assert rate.delay_s(delay_s + 1e-9) == 0
