"""Has the host pass on packets that come in by one device, and puts that back when nobody needs it.

Only that device's own switch is touched (``net.ipv4.conf.<device>.forwarding``), and only where it
was off. Whoever needs it holds a shared lock on one file, which says that it was off before; the
last to let go puts it back. A killed process lets go, too: then the next one that takes or sweeps
does it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final, Self

_SWITCHES: Final = Path("/proc/sys/net/ipv4/conf")
_NOTES: Final = Path("/run/dsec-forwarding")
_OWN_NAMESPACE: Final = Path("/proc/thread-self/ns/net")


class Forwarding:
    """One holder's share. All of it concerns the calling thread's network namespace."""

    def __init__(self, device: str, note: int, path: Path) -> None:
        self._device = device
        self._note = note
        self._path = path

    @classmethod
    def take(cls, device: str, notes: Path = _NOTES) -> Self | None:
        """Have packets from ``device`` passed on; None when the host does it by itself.

        Raises:
            OSError: this process may not say so.
        """
        path = _note_path(device, notes)
        if forwards(device) and not path.exists():
            return None
        notes.mkdir(mode=0o700, parents=True, exist_ok=True)
        share = cls(device, _hold(path), path)
        try:
            (_SWITCHES / device / "forwarding").write_text("1")
        except OSError:
            share.let_go()
            raise
        return share

    def let_go(self) -> None:
        """Need it no longer; the last one puts it back. Idempotent."""
        if self._note >= 0:
            try:
                _put_back_if_last(self._device, self._note, self._path)
            finally:
                self.leave()

    def leave(self) -> None:
        """Let go without putting anything back: what lives on goes on needing it. Idempotent."""
        note, self._note = self._note, -1
        if note >= 0:
            os.close(note)


def _hold(path: Path) -> int:
    """Return a descriptor of the file at ``path``, made when missing, with a shared lock on it."""
    while True:
        note = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(note, fcntl.LOCK_SH)
            if _is_at(note, path):  # else the last one has just put it back
                return note
        except BaseException:
            os.close(note)
            raise
        os.close(note)


def put_back_unneeded(notes: Path = _NOTES) -> list[str]:
    """Put back what killed processes had switched on and nobody needs; return those devices."""
    suffix = f"-{_namespace_number()}"
    found = []
    for path in sorted(notes.glob(f"*{suffix}")) if notes.is_dir() else []:
        device = path.name.removesuffix(suffix)
        with contextlib.suppress(OSError):
            note = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _put_back_if_last(device, note, path):
                    found.append(device)
            finally:
                os.close(note)
    return found


def _put_back_if_last(device: str, note: int, path: Path) -> bool:
    try:
        fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if not _is_at(note, path):
        return False
    # Somebody has meanwhile had the host forward altogether: then it is theirs.
    if not forwards("all"):
        with contextlib.suppress(OSError):  # the device is gone, and the switch with it
            (_SWITCHES / device / "forwarding").write_text("0")
    path.unlink()
    return True


def forwards(device: str) -> bool:
    """Return whether packets that come in by a device of this namespace are passed on (IPv4)."""
    try:
        return (_SWITCHES / device / "forwarding").read_text().strip() == "1"
    except OSError:
        return False


def _note_path(device: str, notes: Path) -> Path:
    return notes / f"{device}-{_namespace_number()}"


def _namespace_number() -> int:
    return _OWN_NAMESPACE.stat().st_ino


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
