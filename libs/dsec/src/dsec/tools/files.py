"""``files``: files as text and bytes, written whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from dsec.tools.tool import Tool, tool_call
from dsec_common.errors import DsecError, ErrorCode, from_os_error, invalid

READ_MAX_BYTES: Final = 64 * 1024 * 1024


class Files(Tool):
    """``files``. Reading needs ``read_file``, changing ``write_file``.

    Errors of every call, as :class:`DsecError`: ``not_found``, ``exhausted`` when the disk is full
    or a file is longer than 64 MiB, and those of the contract.
    """

    @tool_call("read_file")
    def read(self, path: str | Path) -> str:
        """Return a file's text, which has to be UTF-8."""
        try:
            return _read(Path(path)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise invalid(
                f"{path} is no text in UTF-8: {error.reason}; read_bytes takes any"
            ) from None

    @tool_call("read_file")
    def read_bytes(self, path: str | Path) -> bytes:
        """Return what is in a file."""
        return _read(Path(path))

    @tool_call("read_file")
    def list(self, path: str | Path = ".") -> list[str]:
        """Return the names in a directory, sorted; those of directories end with ``/``."""
        try:
            with os.scandir(path) as entries:
                return sorted(it.name + "/" * it.is_dir() for it in entries)
        except OSError as error:
            raise from_os_error("list", error, str(path)) from error

    @tool_call("write_file")
    def write(self, path: str | Path, content: str | bytes) -> int:
        """Put ``content`` in place of what is in a file, and return how many bytes it has.

        A reader sees the old file or the new one, whole. Missing directories are made.
        """
        data = content.encode("utf-8") if isinstance(content, str) else content
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _put(target, data)
        except OSError as error:
            raise from_os_error("write", error, str(path)) from error
        return len(data)

    @tool_call("write_file")
    def delete(self, path: str | Path) -> None:
        """Delete a file; that there is none is an error."""
        try:
            Path(path).unlink()
        except OSError as error:
            raise from_os_error("delete", error, str(path)) from error


def _put(target: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as sink:
            sink.write(data)
            sink.flush()
            os.fchmod(descriptor, _mode_of(target))
            os.fsync(descriptor)
        draft.rename(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _mode_of(target: Path) -> int:
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        return 0o644


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as source:
            data = source.read(READ_MAX_BYTES + 1)
    except OSError as error:
        raise from_os_error("read", error, str(path)) from error
    if len(data) > READ_MAX_BYTES:
        raise DsecError(
            ErrorCode.EXHAUSTED, f"{path} is longer than {READ_MAX_BYTES} bytes", retryable=False
        )
    return data
