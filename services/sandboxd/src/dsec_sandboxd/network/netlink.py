"""Netlink: attributes, requests and their acknowledgements, as plain bytes.

A general library spends more time on building one message than the kernel on doing what it says
(see ADR 0019), and the path of a creation is short.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, Self

from dsec_common.errors import DsecError, ErrorCode

NETLINK_ROUTE: Final = 0
NETLINK_NETFILTER: Final = 12

NLM_F_REQUEST: Final = 0x1
NLM_F_ACK: Final = 0x4
NLM_F_DUMP: Final = 0x300
NLM_F_EXCL: Final = 0x200
NLM_F_CREATE: Final = 0x400
NLM_F_APPEND: Final = 0x800

_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_NLA_NESTED: Final = 0x8000
_NLA_TYPE_MASK: Final = 0x3FFF
_HEADER: Final = struct.Struct("=IHHII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_RECEIVE_BYTES: Final = 256 * 1024
_ANSWER_TIMEOUT_S: Final = 10
_SOL_NETLINK: Final = 270
_NETLINK_EXT_ACK: Final = 11
_NETLINK_CAP_ACK: Final = 10
_PADDING: Final = (b"", b"\0\0\0", b"\0\0", b"\0")

Message = tuple[int, int, bytes]
"""Type, flags without ``NLM_F_REQUEST``, and body."""


def attribute(kind: int, data: bytes) -> bytes:
    """Return one attribute, padded."""
    return _ATTRIBUTE.pack(len(data) + 4, kind) + data + _PADDING[len(data) & 3]


def nested(kind: int, *parts: bytes) -> bytes:
    """Return an attribute that holds others."""
    return attribute(kind | _NLA_NESTED, b"".join(parts))


def text(kind: int, value: str) -> bytes:
    """Return an attribute of NUL-terminated text."""
    return attribute(kind, value.encode() + b"\0")


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and value of each attribute; what is malformed ends it."""
    offset = 0
    while offset + 4 <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < 4 or offset + length > len(data):  # noqa: PLR2004  an attribute's header
            return
        yield kind & _NLA_TYPE_MASK, data[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield type, sequence number and body of each message in a datagram."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size or offset + length > len(data):
            return
        yield kind, sequence, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def packed(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """Return one message with its header."""
    header = _HEADER.pack(_HEADER.size + len(body), kind, flags | NLM_F_REQUEST, sequence, 0)
    return header + body + _PADDING[len(body) & 3]


def refused(operation: str, number: int) -> DsecError:
    """Return the typed error for what the kernel's network refused."""
    name = os.strerror(number)
    return DsecError(
        ErrorCode.INTERNAL,
        f"the kernel refused {operation}: {name}",
        details={"operation": operation, "errno": number},
    )


class Netlink:
    """A blocking netlink socket of the namespace that the calling thread is in when it is made."""

    def __init__(self, protocol: int, groups: int = 0) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol
        )
        self._sequence = 0
        try:
            self._socket.bind((0, groups))
            self._socket.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
            self._socket.setsockopt(
                socket.SOL_SOCKET,
                socket.SO_RCVTIMEO,
                struct.pack("ll", _ANSWER_TIMEOUT_S, 0),
            )
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close it. Idempotent."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def send(self, requests: Sequence[Message], operation: str) -> None:
        """Have the kernel do all requests, in order; on return it has.

        Raises:
            DsecError: ``internal`` with the first refusal; what came after was still tried.
        """
        numbered = [self._numbered(request) for request in requests]
        last = numbered[-1][0]
        self._socket.send(b"".join(data for _, data in numbered))
        self._await(last, operation)

    def send_batch(self, begin: Message, requests: Sequence[Message], end: Message) -> None:
        """Have the kernel do all requests or none.

        Raises:
            DsecError: ``internal`` with the first refusal; then nothing was done.
        """
        first = self._packed(begin)
        numbered = [self._packed(request) for request in requests[:-1]]
        last, data = self._numbered(requests[-1])
        self._socket.send(b"".join([first, *numbered, data, self._packed(end)]))
        self._await(last, "a change of the rules")

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """Return the bodies of all that there is of a kind."""
        self._sequence += 1
        sequence = self._sequence
        self._socket.send(packed(kind, NLM_F_DUMP, sequence, body))
        found: list[bytes] = []
        while True:
            for answer, number, content in self._receive():
                if number != sequence:
                    continue
                if answer in {_NLMSG_DONE, _NLMSG_ERROR}:
                    return found
                found.append(content)

    def ask(self, kind: int, body: bytes) -> bytes:
        """Return the body of the one answer to a question."""
        self._sequence += 1
        sequence = self._sequence
        self._socket.send(packed(kind, 0, sequence, body))
        while True:
            for answer, number, content in self._receive():
                if number != sequence:
                    continue
                if answer == _NLMSG_ERROR:
                    raise refused("a question", -struct.unpack_from("=i", content)[0])
                return content

    def receive(self) -> bytes:
        """Return one datagram that the kernel sent unasked."""
        return self._socket.recv(_RECEIVE_BYTES)

    def _packed(self, request: Message) -> bytes:
        kind, flags, body = request
        self._sequence += 1
        return packed(kind, flags, self._sequence, body)

    def _numbered(self, request: Message) -> tuple[int, bytes]:
        kind, flags, body = request
        data = self._packed((kind, flags | NLM_F_ACK, body))
        return self._sequence, data

    def _receive(self) -> Iterator[tuple[int, int, bytes]]:
        try:
            return messages(self._socket.recv(_RECEIVE_BYTES))
        except BlockingIOError as error:
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                "the kernel's network did not answer; is the host overloaded?",
            ) from error

    def _await(self, last: int, operation: str) -> None:
        failure = 0
        while True:
            for kind, sequence, content in self._receive():
                if kind != _NLMSG_ERROR:
                    continue
                number = -struct.unpack_from("=i", content)[0]
                failure = failure or number
                if sequence >= last:
                    if failure:
                        raise refused(operation, failure)
                    return
