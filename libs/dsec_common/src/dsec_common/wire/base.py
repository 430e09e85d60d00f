"""The base of every message and the two encodings it travels in.

msgpack is the default. A request whose ``content-type`` header says ``application/json`` is read
and answered as JSON, so that any NATS client in any language works without this SDK. Unknown
fields are ignored, so old readers live on; new fields carry defaults, so old writers do.
"""

from __future__ import annotations

import os
import time
from functools import cache, lru_cache
from typing import Any, Final, TypeVar

import msgspec

from dsec_common.errors import Detail, DsecError, ErrorCode

CONTENT_TYPE_HEADER: Final = "content-type"
JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"

M = TypeVar("M", bound="Message")

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS: Final = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
#: Of the characters that say the time, two at once.
_SHIFTS: Final = tuple(range(40, -1, -10))
#: For each byte a character: each is that of as many bytes.
_CHARACTER_OF: Final = (_ALPHABET * 8).encode()
_RANDOM_CHARACTERS: Final = 16
_RANDOM_AT_ONCE: Final = 400


class _Randomness:
    """The kernel's random bytes, fetched for some ids at once; a fork begins with none."""

    def __init__(self) -> None:
        self._characters = ""
        self._at = 0
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._characters = ""
        self._at = 0

    def take(self) -> str:
        start, end = self._at, self._at + _RANDOM_CHARACTERS
        if end > len(self._characters):
            fresh = os.urandom(_RANDOM_CHARACTERS * _RANDOM_AT_ONCE)
            self._characters = fresh.translate(_CHARACTER_OF).decode("ascii")
            start, end = 0, _RANDOM_CHARACTERS
        self._at = end
        return self._characters[start:end]


_randomness: Final = _Randomness()


@lru_cache(maxsize=4)
def _time_characters(milliseconds: int) -> str:
    return "".join([_PAIRS[milliseconds >> shift & 1023] for shift in _SHIFTS])


def new_id() -> str:
    """Return a fresh id of 26 characters that sorts by time: 48 bits of milliseconds, 80 random.

    The layout is ULID's (Crockford base 32), in lower case so that it is also a file name and a
    NATS token.
    """
    return _time_characters(int(time.time() * 1000)) + _randomness.take()


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """What every message carries, so that one story can be told from many logs.

    Attributes:
        message_id: this message's own id.
        cause_id: the id of the message that led to this one; empty at the start of a story.
        sent_at: Unix time in seconds at which it was made.
    """

    message_id: str = msgspec.field(default_factory=new_id)
    cause_id: str = ""
    sent_at: float = msgspec.field(default_factory=time.time)


class ErrorReply(Message, frozen=True, kw_only=True):
    """The typed body of a refused or failed request; the headers of NATS ADR-32 say the same."""

    code: ErrorCode
    message: str
    retryable: bool = False
    retry_after_s: float = 0.0
    details: dict[str, Detail] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, error: DsecError, cause_id: str = "") -> ErrorReply:
        """Return the message that carries ``error``."""
        return cls(
            cause_id=cause_id,
            code=error.code,
            message=error.message,
            retryable=error.retryable,
            retry_after_s=error.retry_after_s,
            details=error.details,
        )

    def to_error(self) -> DsecError:
        """Return the error that this message carries."""
        return DsecError(
            self.code,
            self.message,
            retryable=self.retryable,
            retry_after_s=self.retry_after_s,
            details=self.details,
        )


ID_CHARACTERS_MAX: Final = 128
"""Of ``message_id`` and ``cause_id``: they travel on into replies, events and logs."""

_json_encoder: Final = msgspec.json.Encoder()
_msgpack_encoder: Final = msgspec.msgpack.Encoder()


@cache
def _json_decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@cache
def _msgpack_decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def encode(message: Message, content_type: str = MSGPACK) -> bytes:
    """Return the bytes of ``message``; any content type but JSON means msgpack.

    Raises:
        DsecError: ``invalid`` when a field holds what no message can carry: an integer beyond 64
            bits, text that is no Unicode, a value nested in itself.
    """
    encoder = _json_encoder if content_type == JSON else _msgpack_encoder
    try:
        return encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        name = type(message).__name__
        raise DsecError(
            ErrorCode.INVALID,
            f"this {name} cannot be sent: {error}. Send numbers of at most 64 bits, text that is "
            "Unicode (other bytes as bytes), and plain values",
            details={"message": name},
        ) from error


def decode(body: bytes, kind: type[M], content_type: str = MSGPACK) -> M:
    """Return the message in ``body``; it can be encoded again, in either encoding.

    Raises:
        DsecError: ``invalid``, naming the field and what was expected, when it does not decode.
    """
    decoder = _json_decoder(kind) if content_type == JSON else _msgpack_decoder(kind)
    try:
        message: M = decoder.decode(body)
        if content_type == JSON:
            # JSON's integers know no bound; whoever this message is handed on to reads msgpack.
            _msgpack_encoder.encode(message)
    except msgspec.DecodeError as error:
        raise _undecodable(kind, content_type, str(error)) from error
    except RecursionError as error:
        raise _undecodable(kind, content_type, "it is nested too deeply") from error
    except OverflowError as error:
        raise _undecodable(kind, content_type, "it holds an integer beyond 64 bits") from error
    for name in ("message_id", "cause_id"):
        size = len(getattr(message, name))
        if size > ID_CHARACTERS_MAX:
            raise _undecodable(
                kind,
                content_type,
                f"{name} has {size} characters; {ID_CHARACTERS_MAX} are the most",
            )
    return message


def _undecodable(kind: type[Any], content_type: str, why: str) -> DsecError:
    name = getattr(kind, "__name__", str(kind))
    return DsecError(
        ErrorCode.INVALID,
        f"the body is not a valid {name} in {content_type}: {why}",
        details={"expected": name},
    )
