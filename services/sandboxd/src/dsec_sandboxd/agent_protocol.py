"""What is spoken on an agent socket: frames, requests, answers. See ``docs/agent-protocol.md``.

A frame is a length in four bytes, big-endian, and that many bytes of one JSON object. Everything
here is given by a sandbox, so nothing is trusted: not lengths, not text, not numbers.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.base import ErrorReply

PROTOCOL_VERSION: Final = 1
#: Of a payload, as the JSON that is sent.
PAYLOAD_MAX_BYTES: Final = 256 * 1024
#: Of a request's JSON: the payload and what stands around it.
FRAME_MAX_BYTES: Final = PAYLOAD_MAX_BYTES + 16 * 1024
#: One request waits at most so long for feedback; the agent may ask again.
WAIT_MAX_S: Final = 300.0

_LENGTH: Final = struct.Struct(">I")
HEADER_BYTES: Final = _LENGTH.size

RequestId: TypeAlias = (
    Annotated[int, msgspec.Meta(ge=0, le=2**53)] | Annotated[str, msgspec.Meta(max_length=64)]
)
_Word: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    id: RequestId


class Hello(_Request, frozen=True, kw_only=True, tag="hello"):
    """Ask who the socket says one is, and how far the rollout has come."""


class Report(_Request, frozen=True, kw_only=True, tag="report"):
    """Report a stage. ``seq`` 0 takes the next number."""

    stage: _Word
    payload: msgspec.Raw = msgspec.Raw(b"null")
    seq: _Count = 0


class Await(_Request, frozen=True, kw_only=True, tag="await"):
    """Wait for the feedback to a report."""

    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    wait_s: float = 30.0


class Step(_Request, frozen=True, kw_only=True, tag="step"):
    """Report a stage and wait for its feedback."""

    stage: _Word
    payload: msgspec.Raw = msgspec.Raw(b"null")
    seq: _Count = 0
    wait_s: float = 30.0


class Log(_Request, frozen=True, kw_only=True, tag="log"):
    """Write one record of the behaviour log."""

    action: _Word
    status: Annotated[str, msgspec.Meta(max_length=128)] = "ok"
    latency_ms: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    tokens_in: _Count = 0
    tokens_out: _Count = 0
    attributes: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=64)], str], msgspec.Meta(max_length=32)
    ] = msgspec.field(default_factory=dict)


class Tool(_Request, frozen=True, kw_only=True, tag="tool"):
    """Have the node make a call of a tool; what it returns comes in parts."""

    tool: _Word
    call: _Word
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


AgentRequest: TypeAlias = Hello | Report | Await | Step | Log | Tool


class _OnlyId(msgspec.Struct):
    id: RequestId


_decoder: Final = msgspec.json.Decoder(AgentRequest)
_id_decoder: Final = msgspec.json.Decoder(_OnlyId)
_encoder: Final = msgspec.json.Encoder()


def frame_length(header: bytes | bytearray | memoryview) -> int:
    """Return how many bytes follow a header.

    Raises:
        DsecError: ``invalid`` when it announces more than :data:`FRAME_MAX_BYTES`.
    """
    length: int = _LENGTH.unpack(header)[0]
    if length > FRAME_MAX_BYTES:
        raise invalid(
            f"a frame of {length} bytes is announced, at most {FRAME_MAX_BYTES} are taken; write "
            "larger data to a file of the sandbox and report its path",
            limit=FRAME_MAX_BYTES,
        )
    return length


def decode_request(body: bytes) -> AgentRequest:
    """Return the request in a frame.

    Raises:
        DsecError: ``invalid``, naming what is wrong.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"the frame holds no request of this protocol: {error}") from error


def request_id_of(body: bytes) -> RequestId | None:
    """Return the id in a frame that is no valid request, if it has one."""
    try:
        return _id_decoder.decode(body).id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def packed_payload(payload: msgspec.Raw) -> bytes:
    """Return a payload's JSON as MessagePack.

    Raises:
        DsecError: ``invalid`` when it is too large, nested too deep, or holds a number that does
            not fit 64 bits.
    """
    text = memoryview(payload)
    if len(text) > PAYLOAD_MAX_BYTES:
        raise invalid(
            f"the payload has {len(text)} bytes, at most {PAYLOAD_MAX_BYTES} are taken; write "
            "larger data to a file of the sandbox and report its path",
            limit=PAYLOAD_MAX_BYTES,
        )
    try:
        return msgspec.msgpack.encode(msgspec.json.decode(text))
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeError) as error:
        raise invalid(f"the payload cannot be carried: {error}") from error


def encode_result(request_id: RequestId | None, result: dict[str, Any]) -> bytes:
    """Return the frame that answers a request.

    Raises:
        DsecError: ``unsupported`` when the result is no JSON (a trainer may send what MessagePack
            knows and JSON does not).
    """
    try:
        return _frame({"id": request_id, "result": result})
    except (TypeError, ValueError, RecursionError) as error:
        raise DsecError(
            ErrorCode.UNSUPPORTED, f"the feedback cannot be written as JSON: {error}"
        ) from error


def encode_part(request_id: RequestId, data: bytes) -> bytes:
    """Return a frame with a piece of an answer, whose result comes later; as Base64."""
    return _frame({"id": request_id, "part": data})


def encode_error(request_id: RequestId | None, error: DsecError) -> bytes:
    """Return the frame that refuses a request; without an id, whatever was sent last."""
    sent = ErrorReply.of(error)
    return _frame(
        {
            "id": request_id,
            "error": {
                "code": sent.code,
                "message": sent.message,
                "retryable": sent.retryable,
                "retry_after_s": sent.retry_after_s,
                "details": sent.details,
            },
        }
    )


def _frame(answer: dict[str, Any]) -> bytes:
    body = _encoder.encode(answer)
    return _LENGTH.pack(len(body)) + body
