"""Checkpoints: whole copies of a StateDB that a damaged or lost one is restored from.

A checkpoint is a directory, made beside a running database: files that never change are hard links
where the file system allows it, and ``checkpoint.json`` names every file with its size and hash.
It appears under its name whole, or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

import msgspec
import structlog
from rocksdict import Checkpoint, Rdict

from dsec_common.errors import DsecError, ErrorCode, from_os_error, invalid
from dsec_common.statedb.engine import Engine, cannot_open, damaged, options
from dsec_common.statedb.keys import FORMAT, HEADER, packed_format, unpacked
from dsec_common.statedb.memory import WRITE_BUFFER_BYTES_MIN

_log: Final = structlog.get_logger(__name__)
_LIST: Final = "checkpoint.json"
_PARTIAL: Final = ".partial"


class _File(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    size: int
    blake2b: str


class _List(msgspec.Struct, frozen=True):
    """All of a checkpoint's files by name."""

    format: int
    files: dict[str, _File]


async def restore(checkpoint: Path, directory: Path) -> None:
    """Copy a checkpoint to where a StateDB is to be opened.

    Every file is compared with the hash that was taken when the checkpoint was made. The directory
    appears whole, or not at all; the checkpoint stays as it is.

    Raises:
        DsecError: ``conflict`` when there is something in the directory; ``invalid`` for what is no
            checkpoint; ``unsupported`` for one of a newer version; ``internal`` for a damaged one.
    """
    await asyncio.to_thread(_restore, checkpoint, directory)


async def repair(directory: Path) -> None:
    """Have RocksDB keep what can still be read of a damaged StateDB that nobody has open.

    It is the last resort, for when there is no checkpoint: writes may be missing afterwards, also
    from the middle, and a key whose newest version is lost shows an older one.

    Raises:
        DsecError: ``unavailable`` when it is open, or cannot be repaired.
    """
    await asyncio.to_thread(_repair, directory)


def take(database: Rdict, target: Path) -> None:
    """Make a checkpoint of an open database; see ``StateDB.checkpoint``.

    Raises:
        DsecError: ``conflict`` when the target exists already.
    """
    if target.exists():
        raise DsecError(ErrorCode.CONFLICT, f"the checkpoint {target} exists already")
    partial = target.with_name(target.name + _PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        Checkpoint(database).create_checkpoint(str(partial))
        partial.chmod(0o700)
        files = {path.name: _described(path) for path in sorted(partial.iterdir())}
        (partial / _LIST).write_bytes(msgspec.json.encode(_List(FORMAT, files)))
        _appear(partial, target)
    except OSError as error:
        raise from_os_error("making a checkpoint", error, str(target)) from error


def _restore(checkpoint: Path, directory: Path) -> None:
    try:
        listed = msgspec.json.decode((checkpoint / _LIST).read_bytes(), type=_List)
    except (OSError, msgspec.DecodeError) as error:
        raise invalid(f"{checkpoint} is no checkpoint of a StateDB: {error}") from error
    check_format(listed.format, checkpoint)
    partial = directory.with_name(directory.name + _PARTIAL)
    try:
        if directory.exists() and any(directory.iterdir()):
            raise DsecError(
                ErrorCode.CONFLICT,
                f"there is something in {directory}: move it away before a checkpoint is restored",
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True, mode=0o700)
        for name, expected in listed.files.items():
            if Path(name).name != name:
                raise invalid(f"{checkpoint} names {name!r}, which is no file of a checkpoint")
            _copy(checkpoint / name, partial / name, expected)
        _appear(partial, directory)
    except OSError as error:
        raise from_os_error("restoring a checkpoint", error, str(checkpoint)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(source: Path, target: Path, expected: _File) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source, target)
    if not target.exists():
        raise damaged(f"{source} is missing")
    if _described(target) != expected:
        raise damaged(f"{source} is not what it was when the checkpoint was made")


def _described(path: Path) -> _File:
    with path.open("rb") as file:
        return _File(path.stat().st_size, hashlib.file_digest(file, "blake2b").hexdigest())


def _appear(partial: Path, target: Path) -> None:
    """Give a whole directory its name, durably."""
    for path in (*partial.iterdir(), partial):
        sync(path)
    partial.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Put a file or directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _repair(directory: Path) -> None:
    directory = directory.resolve()  # by which RocksDB knows whether it is open
    _log.warning("statedb_repair", directory=str(directory))
    try:
        Rdict.repair(str(directory), options(WRITE_BUFFER_BYTES_MIN))
    except Exception as error:
        raise cannot_open(directory, error) from error
    engine = Engine(directory, WRITE_BUFFER_BYTES_MIN, on_reopened=lambda: None)
    try:
        header = engine.get(HEADER)
        if header is None:  # lost; what is left was kept by this format, which is the only one
            engine.put(HEADER, packed_format(FORMAT))
        else:
            check_format(unpacked(header), directory)
    finally:
        engine.close_now()


def check_format(number: int, where: Path) -> None:
    """Refuse what a newer version has written.

    Raises:
        DsecError: ``unsupported``.
    """
    if number > FORMAT:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            f"the state in {where} has format {number}, and this version knows {FORMAT}: it was "
            "written by a newer version of DSec; use that one",
            details={"format": number, "known": FORMAT},
        )
