"""The forms in which a file may hold text: as it stands, packed, encoded, one in the other.

Everything here is bounded: how deep forms are followed, and how many bytes they unfold to. What is
beyond a bound, or closed by a password, is told as such, never passed over.
"""

from __future__ import annotations

import base64
import binascii
import bz2
import contextlib
import io
import lzma
import os
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import cramjam
import msgspec

from dsec.factory.git_objects import PACK_MAGIC, PackError, pack_objects

#: Letters become small; what is changed without changing the meaning is dropped: space, control
#: characters (with them every other byte of UTF-16 and UTF-32), quotes and backslashes.
_TABLE: Final = bytes(byte + 32 if 65 <= byte <= 90 else byte for byte in range(256))  # noqa: PLR2004
_DROPPED: Final = bytes(range(0x21)) + b"\x7f\"'`\\"
#: In UTF-8: spaces of every width, marks that join or part, fillers, selectors of variants, tags.
_INVISIBLE: Final = re.compile(
    rb"\xc2[\xa0\xad]|\xcd\x8f|\xd8\x9c"
    rb"|\xe1(?:\x85[\x9f\xa0]|\x9a\x80|\x9e[\xb4\xb5]|\xa0[\x8b-\x8f])"
    rb"|\xe2(?:\x80[\x80-\x8f\xa8-\xaf]|\x81[\x9f-\xaf])"
    rb"|\xe3(?:\x80\x80|\x85\xa4)"
    rb"|\xef(?:\xb8[\x80-\x8f]|\xbb\xbf|\xbe\xa0|\xbf[\xb9-\xbb])"
    rb"|\xf3\xa0[\x80-\x87][\x80-\xbf]"
)

_BASE64: Final = re.compile(rb"[A-Za-z0-9+/_-]{16,}(?:\r?\n[ \t]*[A-Za-z0-9+/_-]+)*")
_BASE64_JOINED: Final = re.compile(rb"[A-Za-z0-9+/_-]{16,}")
_BASE32: Final = re.compile(rb"[A-Z2-7]{24,}(?:\r?\n[ \t]*[A-Z2-7]+)*")
_BETWEEN_DIGITS: Final = re.compile(rb"0[xX]|[\s:,]")
_HEX: Final = re.compile(rb"(?:(?:0[xX])?[0-9A-Fa-f]{2}(?:[\s:]|,\s*)?){12,}")
_ESCAPED: Final = re.compile(rb"\\x[0-9A-Fa-f]{2}|\\u00[0-9A-Fa-f]{2}|%[0-9A-Fa-f]{2}")
#: What stands between the pieces of a text that is cut up: in source code, quotes and a plus, or
#: the mark of a comment.
_BETWEEN: Final = re.compile(rb"[\"'][\s,+.;\\]*[\"']|\\?[\s,]+(?:[#>;*%]+[ \t]*)?")
#: What no random bytes look like.
_LONG_LETTERS: Final = re.compile(rb"[A-Za-z0-9+/_-]{64,}")
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_WIDE_SHARE: Final = 8
_STREAMS_MAX: Final = 4096
_TAR_HEAD_BYTES: Final = 512
_PIECE_BYTES: Final = 1 << 16
_DAMAGED: Final = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
_GZIP: Final = 31  # what zlib calls a gzip stream
_ENCRYPTED: Final = 1
_PACK: Final = PACK_MAGIC + b"\0\0\0"
_ZIP_MEMBER: Final = b"PK\x03\x04"
_ZIP_HEAD_BYTES: Final = 30
_ZIP_VERSION_MAX: Final = 63

_CLOSED: Final = {
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"Salted__": "encrypted by openssl",
    b"-----BEGIN PGP MESSAGE": "encrypted by PGP",
    b"age-encryption.org/": "encrypted by age",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xff\x06\0\0sNaPpY": "snappy",
    b"\x89LZO\0": "lzop",
    b"LZIP\1": "lzip",
    b"\x1f\x9d\x90": "what compress packed",
    b"hsqs": "a squashfs image",
}


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far files are followed.

    Attributes:
        depth: forms in one another, such as a tar in a gzip in base64: 3.
        file_bytes: of one file, or one form of it.
        unfolded_bytes: of all forms of one file together.
    """

    depth: int = 5
    file_bytes: int = 64 << 20
    unfolded_bytes: int = 256 << 20


class View(msgspec.Struct, frozen=True):
    """One form of a file.

    Attributes:
        how: the way to it: ``gzip``, ``tar:name``; empty for the file as it stands.
        data: what is there.
        problem: why it could not be looked into; empty when it could.
    """

    how: tuple[str, ...]
    data: bytes
    problem: str = ""


def plain(data: bytes) -> bytes:
    """Return text without what can be changed at no cost: case, space, quotes, NUL bytes."""
    if not data.isascii():
        data = _INVISIBLE.sub(b"", data)
    return data.translate(_TABLE, _DROPPED)


class _TooMuch(Exception):  # noqa: N818  ends the unfolding of one file
    """More than the bounds allow."""


class _Unfolding:
    """The forms of one file."""

    def __init__(self, bounds: Bounds, *, wide: bool) -> None:
        self._bounds = bounds
        self._wide = wide
        self._left = bounds.unfolded_bytes
        #: Bytes of the last stream, if it had an end.
        self._used = 0

    def views(self, data: bytes, how: tuple[str, ...] = ()) -> Iterator[View]:
        yield View(how, data)
        for magic, name in _CLOSED.items():
            if data.startswith(magic):
                yield View(how, b"", f"{name} is not looked into")
        if len(how) >= self._bounds.depth:
            if _goes_on(data):
                yield View(how, b"", f"packed more than {self._bounds.depth} times")
            return
        try:
            for step, inner in self._packed(data):
                self._spend(len(inner))
                yield from self.views(inner, (*how, step))
            text = data.replace(b"\0", b"")
            followed = set()
            for step, inner in _encoded(text):
                self._spend(len(inner))
                followed.add(inner)
                yield from self.views(inner, (*how, step))
            if how[-1:] != ("base64",):
                yield from self._joined(text, (*how, "base64"), followed)
        except _TooMuch as error:
            yield View(how, b"", str(error))
            return
        if self._wide:
            yield from (View((*how, step), inner) for step, inner in _wide(data))

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _TooMuch(f"it unfolds to more than {self._bounds.unfolded_bytes} bytes")

    def _joined(self, text: bytes, how: tuple[str, ...], followed: set[bytes]) -> Iterator[View]:
        """Yield base64 that is cut into pieces, or begins anywhere: from each of four places."""
        others = []
        for run in _BASE64_JOINED.finditer(_BETWEEN.sub(b"", text)):
            for start in range(4):
                inner = _base64(run[0][start:])
                if not _is_packed(inner):
                    others.append(inner)
                elif inner not in followed:
                    self._spend(len(inner))
                    yield from self.views(inner, how)
        if others:
            whole = b"\n".join(others)
            yield View(how, whole)
            for step, inner in self._within(whole):
                self._spend(len(inner))
                yield from self.views(inner, (*how, step))

    def _packed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        for magic, (name, unpack) in _MAGICS.items():
            if data.startswith(magic):
                yield from ((name, inner) for inner in unpack(self, data))
        yield from self._within(data)
        if _is_zlib(data):
            yield from (("zlib", inner) for inner in self._zlib(data))
        if _ZIP_MEMBER in data:
            yield from self._zip(data)
        if _is_tar(data):
            yield from self._tar(data)

    def _inflated(self, make: Callable[[], Any], data: bytes | memoryview) -> bytes:
        """Return what a decompressor makes of data; what is there before a fault, too."""
        inner = bytearray()
        inflater = make()
        self._used = 0
        for at in range(0, len(data), _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            try:
                self._inflate(inflater, piece, inner)
            except _DAMAGED:
                return self._before_fault(make, data[: at + _PIECE_BYTES], at)
            if inflater.eof:
                self._used = at + len(piece) - len(inflater.unused_data)
                break
        return bytes(inner)

    def _before_fault(self, make: Callable[[], Any], data: bytes | memoryview, last: int) -> bytes:
        """Return what comes before a fault in the last piece: a false checksum hides nothing."""
        inner = bytearray()
        inflater = make()
        with contextlib.suppress(*_DAMAGED):
            for at in range(0, last, _PIECE_BYTES):
                self._inflate(inflater, data[at : at + _PIECE_BYTES], inner)
            for at in range(last, len(data)):
                self._inflate(inflater, data[at : at + 1], inner)
        return bytes(inner)

    def _inflate(self, inflater: Any, piece: bytes | memoryview, inner: bytearray) -> None:
        limit = min(self._left, self._bounds.file_bytes) + 1
        inner += inflater.decompress(piece, limit - len(inner))
        if len(inner) >= limit:
            raise _TooMuch(f"a part of it unfolds to more than {limit - 1} bytes")

    def _within(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield the streams that begin behind other content; most of what looks so is none."""
        seen = memoryview(data)
        for name, mark, back, make in _STREAMS:
            at = data.find(mark, 1 + back)
            for _ in range(_STREAMS_MAX):
                if at < 0:
                    break
                if inner := self._inflated(make, seen[at - back :]):
                    yield name, inner
                # What has no proper end may be there to hide the next.
                at = data.find(mark, max(at - back + self._used, at + 1))
            if at >= 0:
                raise _TooMuch(f"more than {_STREAMS_MAX} places where {name} may begin")
        at = data.find(_PACK, 1)  # in a bundle of git, too
        for _ in range(_STREAMS_MAX):
            if at < 0:
                return
            with contextlib.suppress(PackError):
                yield from (("git pack", inner) for inner in pack_objects(seen[at:], self._left))
            at = data.find(_PACK, at + 1)
        if at >= 0:
            raise _TooMuch(f"more than {_STREAMS_MAX} places where a git pack may begin")

    def _members(self, make: Callable[[], Any], data: bytes) -> Iterator[bytes]:
        """Yield streams that stand one behind the other, as ``cat a.gz b.gz`` leaves them."""
        while data:
            yield self._inflated(make, data)
            data = data[self._used :] if self._used else b""

    def _gzip(self, data: bytes) -> Iterator[bytes]:
        yield b"".join(self._members(lambda: zlib.decompressobj(_GZIP), data))

    def _bzip2(self, data: bytes) -> Iterator[bytes]:
        yield b"".join(self._members(bz2.BZ2Decompressor, data))

    def _xz(self, data: bytes) -> Iterator[bytes]:
        yield b"".join(self._members(lzma.LZMADecompressor, data))

    def _zlib(self, data: bytes) -> Iterator[bytes]:
        if inner := self._inflated(zlib.decompressobj, data):
            yield inner

    def _zstd(self, data: bytes) -> Iterator[bytes]:
        room = bytearray(min(self._left, self._bounds.file_bytes))
        try:
            size = cramjam.zstd.decompress_into(data, room)
        except cramjam.DecompressionError:
            raise _TooMuch("zstandard that is damaged or unfolds to too much") from None
        yield bytes(memoryview(room)[:size])

    def _pack(self, data: bytes) -> Iterator[bytes]:
        try:
            yield from pack_objects(data, self._left)
        except PackError as error:
            raise _TooMuch(f"a git pack that cannot be read: {error}") from None

    def _zip(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield what an archive lists, and what is in it and not listed."""
        listed: set[int] = set()
        with (
            contextlib.suppress(zipfile.BadZipFile, OSError, ValueError),
            zipfile.ZipFile(io.BytesIO(data)) as archive,
        ):
            for member in archive.infolist():
                yield f"zip:{member.filename}", member.filename.encode() + member.comment
                if member.flag_bits & _ENCRYPTED:
                    raise _TooMuch("a zip archive with a password")
                if inner := self._zipped(archive, member):
                    yield f"zip:{member.filename}", inner
                    listed.add(member.header_offset)
        at = data.find(_ZIP_MEMBER)
        while at >= 0:
            if at not in listed:
                yield from self._unlisted(data, at)
            at = data.find(_ZIP_MEMBER, at + 1)

    def _zipped(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
        try:
            with archive.open(member) as content:
                return self._bounded(content)
        except NotImplementedError as error:
            raise _TooMuch(f"a zip archive that cannot be read: {error}") from None
        except (zipfile.BadZipFile, EOFError, OSError, zlib.error, lzma.LZMAError):
            return b""  # damaged: what comes before is had as one that is not listed

    def _unlisted(self, data: bytes, at: int) -> Iterator[tuple[str, bytes]]:
        """Yield the member whose head is there, if it is one: programs hold these bytes, too."""
        head = data[at + 4 : at + _ZIP_HEAD_BYTES]
        if len(head) < _ZIP_HEAD_BYTES - 4:
            return
        version, flags, method = struct.unpack_from("<3H", head)
        name_bytes, extra_bytes = struct.unpack_from("<2H", head, 22)
        begin = at + _ZIP_HEAD_BYTES + name_bytes
        name = data[at + _ZIP_HEAD_BYTES : begin].decode(errors="replace")
        if version > _ZIP_VERSION_MAX or not name.isprintable():
            return
        if flags & _ENCRYPTED:
            raise _TooMuch("a zip archive with a password")
        if method == zipfile.ZIP_DEFLATED:
            rest = data[begin + extra_bytes :]
            yield f"zip:{name}", self._inflated(lambda: zlib.decompressobj(-15), rest)
        elif method != zipfile.ZIP_STORED:
            raise _TooMuch(f"a damaged zip archive with the compression {method}")

    def _tar(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        try:
            with tarfile.open(
                fileobj=io.BytesIO(data), mode="r:", ignore_zeros=True
            ) as archive:  # others may be behind its end
                for member in archive:
                    names = f"{member.name}\n{member.linkname}\n{member.pax_headers}"
                    name = os.fsencode(member.name).decode(errors="backslashreplace")
                    yield f"tar:{name}", os.fsencode(names)
                    if member.isreg() and (content := archive.extractfile(member)):
                        yield f"tar:{name}", self._bounded(content)
        except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
            raise _TooMuch(f"a tar archive that cannot be read: {error}") from None

    def _bounded(self, content: Any) -> bytes:
        limit = min(self._left, self._bounds.file_bytes) + 1
        inner: bytes = content.read(limit)
        if len(inner) >= limit:
            raise _TooMuch(f"a file in it has more than {limit - 1} bytes")
        return inner


_MAGICS: Final[dict[bytes, tuple[str, Callable[[_Unfolding, bytes], Iterator[bytes]]]]] = {
    b"\x1f\x8b": ("gzip", _Unfolding._gzip),  # noqa: SLF001  of this module
    b"BZh": ("bzip2", _Unfolding._bzip2),  # noqa: SLF001  as above
    b"\xfd7zXZ\x00": ("xz", _Unfolding._xz),  # noqa: SLF001  as above
    b"\x5d\x00\x00": ("lzma", _Unfolding._xz),  # noqa: SLF001  as above
    b"\x28\xb5\x2f\xfd": ("zstandard", _Unfolding._zstd),  # noqa: SLF001  as above
    _PACK: ("git pack", _Unfolding._pack),  # noqa: SLF001  as above
    # Frames that are passed over, which may be before those that are not.
    **dict.fromkeys(
        (bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60)),
        ("zstandard", _Unfolding._zstd),  # noqa: SLF001  as above
    ),
}
_BEGINNINGS: Final = tuple(_MAGICS)

_STREAMS: Final[tuple[tuple[str, bytes, int, Callable[[], Any]], ...]] = (
    ("gzip", b"\x1f\x8b\x08", 0, lambda: zlib.decompressobj(_GZIP)),
    ("bzip2", b"1AY&SY", 4, bz2.BZ2Decompressor),  # "BZh9" is before it
    ("xz", b"\xfd7zXZ\x00", 0, lzma.LZMADecompressor),
)


def _is_zlib(data: bytes) -> bool:
    """Return whether data begins as zlib does: what a loose object of git is."""
    return len(data) > 2 and data[0] & 0x8F == 0x08 and not (data[0] << 8 | data[1]) % 31  # noqa: PLR2004


def _is_tar(data: bytes) -> bool:
    """Return whether data begins with a member of a tar, be it one of 1979."""
    if len(data) < _TAR_HEAD_BYTES:
        return False
    if data[257:262] == b"ustar":
        return True
    said = data[148:156].strip(b" \0")
    if not data[0] or not said.isdigit():
        return False
    others = sum(data[:148]) + sum(data[156:_TAR_HEAD_BYTES])
    return said.lstrip(b"0") == b"%o" % (others + 8 * ord(" "))


def _goes_on(data: bytes) -> bool:
    """Return whether data is packed or encoded; text that only looks so is not."""
    if data.startswith(_BEGINNINGS) or _is_tar(data) or _LONG_LETTERS.search(data):
        return True
    with contextlib.suppress(zlib.error):
        return _is_zlib(data) and bool(zlib.decompressobj().decompress(data, 1))
    return False


def _base64(text: bytes) -> bytes:
    text = text.translate(_URL_SAFE)
    whole = text[: len(text) - len(text) % 4]
    rest = text[len(whole) :]
    decoded = binascii.a2b_base64(whole)
    if len(rest) > 1:
        decoded += binascii.a2b_base64(rest + b"=" * (4 - len(rest)))
    return decoded


def _encoded(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what stands in a text in letters that mean other bytes.

    What is packed comes by itself, all else at once: there are many words that may be base64.
    """
    for name, decoded in (
        ("base64", (_base64(b"".join(run[0].split())) for run in _BASE64.finditer(text))),
        ("base32", (_base32(b"".join(run[0].split())) for run in _BASE32.finditer(text))),
        ("hexadecimal", (_hexadecimal(run[0]) for run in _HEX.finditer(text))),
    ):
        others = []
        for inner in decoded:
            if _is_packed(inner):
                yield name, inner
            else:
                others.append(inner)
        if others:
            yield name, b"\n".join(others)
    unescaped = text
    for escape in (b"\\n", b"\\r", b"\\t"):
        unescaped = unescaped.replace(escape, b"\n")
    if _ESCAPED.search(unescaped):
        unescaped = _ESCAPED.sub(lambda found: bytes([int(found[0][-2:], 16)]), unescaped)
    if unescaped != text:
        yield "escapes", unescaped


def _is_packed(data: bytes) -> bool:
    return data.startswith(_BEGINNINGS) or _is_zlib(data) or _is_tar(data) or _ZIP_MEMBER in data


def _base32(letters: bytes) -> bytes:
    return base64.b32decode(letters[: len(letters) - len(letters) % 8])


def _hexadecimal(text: bytes) -> bytes:
    digits = _BETWEEN_DIGITS.sub(b"", text)
    return binascii.unhexlify(digits[: len(digits) & ~1])


def _wide(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what is there when characters have two or four bytes, from each place they may begin.

    Letters of ASCII need no decoding: the NUL bytes between them are dropped anyway.
    """
    if data.count(0) * _WIDE_SHARE < len(data) and data[:2] not in {b"\xff\xfe", b"\xfe\xff"}:
        return
    for encoding, width in (("utf-16-le", 2), ("utf-16-be", 2), ("utf-32-le", 4), ("utf-32-be", 4)):
        for start in range(width):
            part = data[start:]
            text = part[: len(part) - len(part) % width].decode(encoding, "ignore")
            yield encoding, text.encode("utf-8", "ignore")


def views(data: bytes, bounds: Bounds, *, wide: bool = False) -> Iterator[View]:
    """Yield every form of a file's content, itself first; those not looked into say why.

    Args:
        data: all of it.
        bounds: how far forms are followed.
        wide: also decode UTF-16 and UTF-32, for text that is not ASCII.
    """
    return _Unfolding(bounds, wide=wide).views(data)
