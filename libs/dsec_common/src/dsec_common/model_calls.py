"""How a model call travels through a rollout: as what it adds to the call before it.

Harnesses send the whole conversation with each call, so a call is written as the bytes between
what it has in common with the last one, at its beginning and at its end; compressed, and in as
many reports as that takes. The answer is the feedback to the last of them. What Chronus keeps of a
rollout so grows with its conversation, not with the square of it.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from typing import Any, Final

import cramjam
import msgspec

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.model_errors import ModelApi

STAGE_CALL: Final = "model_call"
"""The stage of a report that is a call, or a part of one."""

STAGE_CANCELLED: Final = "model_call_cancelled"
"""The stage of a report that nobody waits for a call's answer any more."""

MODEL_BODY_BYTES_MAX: Final = 8 * 1024 * 1024
"""The largest request that a harness may send."""

#: Characters of one report; Chronus takes 256 KiB of JSON.
_PART_CHARACTERS: Final = 192 * 1024
_ANSWER_CHARACTERS_MAX: Final = 240 * 1024
#: Calls of one sandbox come one after another, each written against the last.
_BODIES_KEPT: Final = 4


class CallPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The payload of one report of a call.

    Attributes:
        api: the interface that was called.
        key: of the request; the same request has the same one.
        repeat: the harness may never have got the answer to an earlier request of this key: that
            answer is to be given again, if there is one.
        part: counts from 0.
        parts: how many there are.
        base: the number of the last report of the call that this one is written against, or 0.
        prefix: how many bytes it begins with like that one.
        suffix: how many it ends with.
        data: what is between, or a part of that.
    """

    api: ModelApi
    key: str
    part: int
    parts: int
    data: str
    repeat: bool = False
    base: int = 0
    prefix: int = 0
    suffix: int = 0


class CallCancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of the report that a call is given up: the number of its last report."""

    seq: int


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The feedback to a call: what its harness is sent.

    Attributes:
        status: of HTTP.
        content_type: of the body.
        headers: beyond those that any response has.
        data: the body, packed.
        tokens_in: of the prompt, for the behaviour log.
        tokens_out: that were sampled.
    """

    status: int
    content_type: str
    headers: dict[str, str]
    data: str
    tokens_in: int = 0
    tokens_out: int = 0

    @property
    def body(self) -> bytes:
        """The body as it is sent."""
        return _unpacked(self.data)


class WholeCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that has come whole; ``seq`` is the number of its last report."""

    seq: int
    api: ModelApi
    key: str
    repeat: bool
    body: bytes


def answer_of(status: int, content_type: str, headers: dict[str, str], body: bytes) -> CallAnswer:
    """Return what carries a response.

    Raises:
        DsecError: ``exhausted`` when it is too large, compressed, for one feedback.
    """
    data = _packed(body)
    if len(data) > _ANSWER_CHARACTERS_MAX:
        raise DsecError(
            ErrorCode.EXHAUSTED,
            f"the answer has {len(body)} bytes, {len(data)} when packed; "
            f"{_ANSWER_CHARACTERS_MAX} are the most",
            retryable=False,
        )
    return CallAnswer(status=status, content_type=content_type, headers=headers, data=data)


def parts_of(
    api: ModelApi, key: str, body: bytes, *, repeat: bool, base: int = 0, base_body: bytes = b""
) -> list[CallPart]:
    """Return the reports of a call, written against an earlier one (number and body)."""
    prefix = _common_prefix(body, base_body)
    rest, base_rest = body[prefix:], base_body[prefix:]
    suffix = _common_prefix(rest[::-1], base_rest[::-1])
    data = _packed(rest[: len(rest) - suffix])
    pieces = [data[at : at + _PART_CHARACTERS] for at in range(0, len(data), _PART_CHARACTERS)]
    return [
        CallPart(
            api=api,
            key=key,
            part=part,
            parts=len(pieces),
            data=piece,
            repeat=repeat,
            base=base,
            prefix=prefix,
            suffix=suffix,
        )
        for part, piece in enumerate(pieces)
    ]


class CallReader:
    """Puts calls together from the reports of one rollout, which come in order."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._bodies: OrderedDict[int, bytes] = OrderedDict({0: b""})

    def take(self, seq: int, payload: Any) -> WholeCall | None:
        """Take a report of a call in; return the call when it is whole.

        A call that was broken off, because its node died, is dropped when the next one begins.

        Raises:
            DsecError: ``invalid`` for what no node writes.
        """
        try:
            part = msgspec.convert(payload, CallPart)
            if part.part == 0:
                self._pieces = []
            elif part.part != len(self._pieces):
                return None  # the rest of one that was broken off
            self._pieces.append(part.data)
            if part.part + 1 < part.parts:
                return None
            base = self._bodies[part.base]
            middle = _unpacked("".join(self._pieces))
        except (msgspec.ValidationError, KeyError, ValueError, cramjam.DecompressionError) as error:
            raise invalid(f"report {seq} is no part of a model call: {error!r}") from error
        self._pieces = []
        body = base[: part.prefix] + middle + base[len(base) - part.suffix :]
        self._bodies[seq] = body
        if len(self._bodies) > _BODIES_KEPT + 1:
            for number in list(self._bodies)[1:-_BODIES_KEPT]:
                del self._bodies[number]
        return WholeCall(seq=seq, api=part.api, key=part.key, repeat=part.repeat, body=body)


def pressed(data: bytes) -> bytes:
    """Return a body as small as it can be kept."""
    return bytes(cramjam.zstd.compress(data))


def unpressed(data: bytes) -> bytes:
    """Undo :func:`pressed`."""
    return bytes(cramjam.zstd.decompress(data))


def _packed(data: bytes) -> str:
    return base64.b64encode(pressed(data)).decode()


def _unpacked(data: str) -> bytes:
    return unpressed(base64.b64decode(data, validate=True))


def _common_prefix(one: bytes, other: bytes) -> int:
    """Return how many bytes two texts begin with alike, by comparing halves."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
