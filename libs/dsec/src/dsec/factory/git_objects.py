"""What is in a git pack, read without git: nothing of a repository is run or believed.

Every object of a pack is read, whether a ref, a commit or nothing leads to it. The format is git's
``gitformat-pack``: a header, then entries that are whole (zlib) or deltas over others.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from typing import Final

PACK_MAGIC: Final = b"PACK"

_HEADER_BYTES: Final = 12
_HASH_BYTES: Final = 20
_PIECE_BYTES: Final = 1 << 14
_COMMIT, _TREE, _BLOB, _TAG, _OFFSET_DELTA, _NAME_DELTA = 1, 2, 3, 4, 6, 7
_NAMES: Final = {_COMMIT: b"commit", _TREE: b"tree", _BLOB: b"blob", _TAG: b"tag"}
_CONTINUES: Final = 0x80
_COPY_DEFAULT: Final = 0x10000


class PackError(Exception):
    """A pack that cannot be read to its end."""


class _Pack:
    """One pack while it is read."""

    def __init__(self, data: memoryview, bytes_max: int) -> None:
        self._data = data
        self._left = bytes_max
        self._kept: dict[int, tuple[int, bytes]] = {}
        self._by_name: dict[bytes, int] = {}
        self._late: list[tuple[int, bytes, bytes]] = []

    def objects(self) -> Iterator[bytes]:
        count = int.from_bytes(self._data[8:_HEADER_BYTES], "big")
        at = _HEADER_BYTES
        for _ in range(count):
            begin = at
            kind, base, at = self._entry_head(at)
            body, at = self._inflated(at)
            if kind == _OFFSET_DELTA:
                origin = self._kept.get(begin - int.from_bytes(base, "big"))
                if origin is None:
                    raise PackError("a delta over nothing")
                yield self._keep(begin, origin[0], self._patched(origin[1], body))
            elif kind == _NAME_DELTA:
                self._late.append((begin, base, body))
            elif kind in _NAMES:
                yield self._keep(begin, kind, body)
            else:
                raise PackError(f"an object of kind {kind}")
        yield from self._named_deltas()

    def _named_deltas(self) -> Iterator[bytes]:
        """Yield deltas over objects by name, in any order; a delta alone when its base is not here.

        What a delta adds stands in it as it is, so that it is looked through all the same.
        """
        late = self._late
        while late:
            missing = []
            for begin, name, body in late:
                origin = self._kept.get(self._by_name.get(name, -1))
                if origin is None:
                    missing.append((begin, name, body))
                else:
                    yield self._keep(begin, origin[0], self._patched(origin[1], body))
            if len(missing) == len(late):
                yield from (body for _, _, body in missing)
                return
            late = missing

    def _keep(self, begin: int, kind: int, body: bytes) -> bytes:
        self._kept[begin] = (kind, body)
        # The name that git gave it; nothing is trusted because of it.
        named = hashlib.sha1(b"%s %d\0" % (_NAMES[kind], len(body)), usedforsecurity=False)
        named.update(body)
        self._by_name[named.digest()] = begin
        return body

    def _entry_head(self, at: int) -> tuple[int, bytes, int]:
        """Return an entry's kind, what its delta is over, and where its content begins."""
        byte = self._byte(at)
        kind = byte >> 4 & 7
        at += 1
        while byte & _CONTINUES:
            byte = self._byte(at)
            at += 1
        if kind == _NAME_DELTA:
            return kind, bytes(self._data[at : at + _HASH_BYTES]), at + _HASH_BYTES
        if kind != _OFFSET_DELTA:
            return kind, b"", at
        byte = self._byte(at)
        at += 1
        back = byte & 0x7F
        while byte & _CONTINUES:
            byte = self._byte(at)
            at += 1
            back = (back + 1) << 7 | (byte & 0x7F)
            if back > len(self._data):
                raise PackError("a delta over nothing")
        return kind, back.to_bytes(8, "big"), at

    def _inflated(self, at: int) -> tuple[bytes, int]:
        inflater = zlib.decompressobj()
        body = bytearray()
        while not inflater.eof:
            # In pieces: what is behind an object is copied with each of them.
            piece = self._data[at : at + _PIECE_BYTES]
            if not piece:
                raise PackError("an object without an end")
            try:
                body += inflater.decompress(piece, self._left - len(body) + 1)
            except zlib.error as error:
                raise PackError(str(error)) from None
            if len(body) > self._left:
                break
            at += len(piece)
        self._spend(len(body))
        return bytes(body), at - len(inflater.unused_data)

    def _patched(self, origin: bytes, delta: bytes) -> bytes:
        """Return what a delta makes of an object."""
        at = self._size_end(delta, self._size_end(delta, 0))
        made = bytearray()
        while at < len(delta):
            code = delta[at]
            at += 1
            if code & _CONTINUES:
                offset, at = _number(delta, at, code, 4)
                size, at = _number(delta, at, code >> 4, 3)
                piece = origin[offset : offset + (size or _COPY_DEFAULT)]
            else:
                piece = delta[at : at + code]
                at += code
            self._spend(len(piece))
            made += piece
        return bytes(made)

    @staticmethod
    def _size_end(delta: bytes, at: int) -> int:
        while at < len(delta) and delta[at] & _CONTINUES:
            at += 1
        return at + 1

    def _byte(self, at: int) -> int:
        if at >= len(self._data):
            raise PackError("it ends too early")
        return self._data[at]

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise PackError("it holds more than is looked through")


def _number(delta: bytes, at: int, present: int, width: int) -> tuple[int, int]:
    """Return a little-endian number of which only the bytes that ``present`` marks are there."""
    value = 0
    for place in range(width):
        if present >> place & 1:
            value |= (delta[at] if at < len(delta) else 0) << 8 * place
            at += 1
    return value, at


def pack_objects(data: bytes | memoryview, bytes_max: int) -> Iterator[bytes]:
    """Yield the content of every object in a pack, reachable or not.

    Args:
        data: the pack, as its file holds it; what is behind its objects is not looked at.
        bytes_max: of all objects together.

    Raises:
        PackError: when it cannot be read to its end or holds more than that.
    """
    return _Pack(memoryview(data), bytes_max).objects()
