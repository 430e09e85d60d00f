"""The frame: what the log's spool keeps as one value, some hundreds of records with a checksum."""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

import msgspec

_MAGIC: Final = b"DSF1"
_HEAD_BYTES: Final = len(_MAGIC) + 4
_ROW_BYTES: Final = 32  # msgpack's own: array, lengths, time, flag


class LogRecord(NamedTuple):
    """One message for Kafka.

    Attributes:
        topic: where it goes.
        key: decides the partition; records of one key keep their order.
        value: the payload.
        time_ms: Unix time in milliseconds, Kafka's own timestamp.
        is_behavior: the value is a BehaviorLog, whose detail may be shed.
    """

    topic: str
    key: bytes
    value: bytes
    time_ms: int
    is_behavior: bool

    @property
    def frame_bytes(self) -> int:
        """What the record takes in a frame, at most."""
        return len(self.topic) + len(self.key) + len(self.value) + _ROW_BYTES


class CorruptFrameError(Exception):
    """A frame's bytes are not what was written."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[LogRecord])


def encode_frame(records: list[LogRecord]) -> bytes:
    """Return the frame's bytes: magic, CRC-32 of the body, body in msgpack."""
    body = _encoder.encode(records)
    return b"".join((_MAGIC, zlib.crc32(body).to_bytes(4, "big"), body))


def decode_frame(frame: bytes) -> list[LogRecord]:
    """Return the frame's records, in the order they were appended.

    Raises:
        CorruptFrameError: saying what does not fit.
    """
    if frame[: len(_MAGIC)] != _MAGIC:
        raise CorruptFrameError(f"starts with {frame[:4]!r} instead of {_MAGIC!r}")
    body = memoryview(frame)[_HEAD_BYTES:]
    if zlib.crc32(body) != int.from_bytes(frame[len(_MAGIC) : _HEAD_BYTES], "big"):
        raise CorruptFrameError("its checksum does not match")
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptFrameError(str(error)) from error
