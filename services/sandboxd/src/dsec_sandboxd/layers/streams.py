"""Archives as bounded byte streams: plain, gzip or zstd, told apart by their first bytes."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Final, cast

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.layers.names import shown
from dsec_sandboxd.layers.tree import refuse

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_sandboxd.layers.limits import ImportLimits, ImportWatch

CHUNK_BYTES: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_OTHER: Final = {b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}


class ArchiveStream:
    """A forward-only file object that :mod:`tarfile` may read without a risk to memory.

    ``tarfile`` reads extended headers whole, whatever length they claim; here all that is read for
    one member's headers is bounded (:meth:`begin_member`), and content is read in chunks.
    """

    def __init__(self, source: IO[bytes], raw: IO[bytes], watch: ImportWatch, total: int) -> None:
        self._source = source
        self._raw = raw
        self._watch = watch
        self._total = total
        self._position = 0
        self._budget: int | None = None
        self.last_read = b""

    def begin_member(self, header_bytes_max: int) -> None:
        """Allow this much to be read before :meth:`begin_content`."""
        self._budget = header_bytes_max

    def begin_content(self) -> None:
        """Allow any number of reads, each of at most one chunk."""
        self._budget = None

    def tell(self) -> int:
        """Return the position in the unpacked stream, in bytes."""
        return self._position

    def seek(self, position: int) -> int:
        """Skip forward to ``position``; going back is refused."""
        if position < self._position:
            raise refuse("the archive points back into itself; it is damaged")
        while self._position < position:
            if not self._take(min(CHUNK_BYTES, position - self._position)):
                break
        return self._position

    def read(self, count: int) -> bytes:
        """Return up to ``count`` bytes, fewer only at the end."""
        if self._budget is not None:
            self._budget -= count
            if self._budget < 0:
                raise refuse("an archive member has larger extended headers than a layer may have")
        elif count > CHUNK_BYTES:
            raise refuse("the archive asks for more memory than a layer may take")
        self.last_read = self._take(count)
        return self.last_read

    def drain(self) -> None:
        """Read to the end, so that checksums at the end are checked too."""
        while self._take(CHUNK_BYTES):
            pass

    def _take(self, count: int) -> bytes:
        self._watch.advance("read", self._raw.tell(), self._total)
        data = self._source.read(count)
        self._position += len(data)
        return data


@contextmanager
def open_stream(path: Path, watch: ImportWatch, limits: ImportLimits) -> Iterator[ArchiveStream]:
    """Open an archive file as an :class:`ArchiveStream`; damage found while reading is typed.

    Raises:
        DsecError: ``layer_error`` for a damaged or unknown compression; ``unsupported`` when
            zstd is needed and this host has no ``zstd`` program.
    """
    with ExitStack() as stack:
        with path.open("rb") as file:
            head = file.read(8)
        for magic, name in _OTHER.items():
            if head.startswith(magic):
                raise DsecError(
                    ErrorCode.UNSUPPORTED,
                    f"the archive {shown(path.name)} is compressed with {name}; repack it with "
                    "gzip or zstd, or not at all",
                )
        total = path.stat().st_size
        raw: IO[bytes] = stack.enter_context(path.open("rb"))
        source = raw
        if head.startswith(_GZIP):
            source = cast("IO[bytes]", stack.enter_context(gzip.GzipFile(fileobj=raw)))
        elif head.startswith(_ZSTD):
            source = stack.enter_context(_zstd(raw))
        stream = ArchiveStream(source, raw, watch, total)
        stream.begin_member(limits.header_bytes_max)
        try:
            yield stream
            stream.drain()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise refuse(f"the archive {shown(path.name)} is damaged or cut off: {error}") from None


@contextmanager
def _zstd(raw: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield the output of the ``zstd`` program, which bounds its own memory."""
    program = shutil.which("zstd")
    if program is None:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            "the archive is compressed with zstd and this host has no zstd program; install the "
            "package zstd, or repack the archive with gzip",
        )
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            [program, "-dcq"], stdin=raw, stdout=subprocess.PIPE, stderr=complaints
        )
        output = process.stdout
        if output is None:  # pragma: no cover  Popen was told to make the pipe
            raise RuntimeError
        try:
            yield output
        except BaseException:
            process.kill()
            raise
        finally:
            output.close()
            status = process.wait()
        if status:
            complaints.seek(0)
            text = complaints.read(500).decode(errors="replace").strip()
            raise refuse(f"the archive is damaged or cut off: {text}")
