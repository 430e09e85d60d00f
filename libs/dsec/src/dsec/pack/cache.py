"""What earlier builds made, found by the content that it was made of.

Nothing in it can be out of date, and what is damaged is made again: each piece is checked when it
is read. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec.pack.container import deflated

CACHE_MAX_BYTES: Final = 1024 * 1024 * 1024
"""What the packed files are cut back to after a build; the least recently used goes first."""

TREES_MAX: Final = 32
"""So many fetched sets of distributions are kept, likewise."""

#: To look at all of it takes longer than a build that finds everything there.
_TRIM_EVERY_S: Final = 86_400
_RAW: Final = -15
_MAKING: Final = "making-"
#: Other versions of zlib pack the same to other bytes.
_PACKED: Final = f"packed-{zlib.ZLIB_RUNTIME_VERSION}"


class Cache:
    """Packed files and fetched distributions; any number of builds may share it."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or _default_directory()

    def deflated(self, content: bytes, sha256: str) -> bytes:
        """Return content packed, from an earlier build if it is there."""
        path = self._directory / _PACKED / sha256[:2] / sha256
        with contextlib.suppress(OSError):
            packed = path.read_bytes()
            if _is_packed(packed, content):
                with contextlib.suppress(OSError):
                    os.utime(path)
                return packed
        packed = deflated(content)
        with contextlib.suppress(OSError):  # a cache that cannot be written is none
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, packed, durable=False)
        return packed

    def tree(self, key: str) -> Path:
        """Return where a directory with this key is, or is to be put by :meth:`keep_tree`."""
        path = self._directory / "fetched" / hashlib.sha256(key.encode()).hexdigest()
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Give an empty directory on the same disk; what is not kept of it goes."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=_MAKING, dir=self._directory))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def keep_tree(self, made: Path, key: str) -> Path:
        """Move a directory to where :meth:`tree` finds it, and return it there."""
        path = self.tree(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another build was faster: its content is the same
            made.rename(path)
        return path

    def trim(self) -> None:
        """Delete what has not been used for longest, down to what may be kept; once a day."""
        marker = self._directory / "trimmed"
        with contextlib.suppress(OSError):
            if time.time() < marker.stat().st_mtime + _TRIM_EVERY_S:
                return
        with contextlib.suppress(OSError):
            marker.touch()
        trees = sorted((self._directory / "fetched").glob("*"), key=_used_at)
        left = [
            path
            for path in self._directory.glob(f"{_MAKING}*")  # by builds that were killed
            if _used_at(path) < time.time() - _TRIM_EVERY_S
        ]
        for path in (*trees[:-TREES_MAX], *left):
            shutil.rmtree(path, ignore_errors=True)
        found = []
        for path in self._directory.glob("packed*/*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.is_file():
                    found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= CACHE_MAX_BYTES:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another build has trimmed it
        return 0.0


def _default_directory() -> Path:
    if named := os.environ.get("DSEC_PACK_CACHE"):
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dsec" / "pack"


def _is_packed(packed: bytes, content: bytes) -> bool:
    unpacker = zlib.decompressobj(_RAW)
    try:
        return (
            unpacker.decompress(packed, len(content) + 1) == content
            and unpacker.eof
            and not unpacker.unused_data
        )
    except zlib.error:
        return False


def write_whole(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file that is there whole or not at all, with the mode that a new file has.

    Without ``durable`` it may be cut off after a power failure.
    """
    descriptor, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    scratch = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(descriptor)
        mask = os.umask(0)
        os.umask(mask)
        scratch.chmod(0o666 & ~mask)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
