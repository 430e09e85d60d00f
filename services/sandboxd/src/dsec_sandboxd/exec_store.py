"""Where a node keeps its execs: one directory each, on a tmpfs that outlives the daemon.

``<root>/<sandbox>/<exec>/`` holds ``meta`` (what was asked, and how it ended), the output
(:mod:`dsec_sandboxd.exec_log`) and ``input``, the spool of what the command is still to be given.
``<root>/journal`` names the commands that were too short to get a directory.

No sandbox sees any of it: its own run directory is another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from dsec_common.errors import from_os_error
from dsec_common.wire.base import new_id
from dsec_common.wire.sandbox import MAX_OUTPUT_BYTES
from dsec_sandboxd.exec_log import ExecLog, Nowhere
from dsec_sandboxd.exec_share import SHARE_PART, Share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log: Final = structlog.get_logger(__name__)

_NOSUID_NODEV_NOEXEC: Final = 0x2 | 0x4 | 0x8
_MNT_DETACH: Final = 2
_INODES: Final = 262_144
_JOURNAL_BYTES_MAX: Final = 4 << 20

_libc: Final = ctypes.CDLL(None, use_errno=True)


class ExecMeta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is known of one exec; the ``meta`` file.

    Attributes:
        one_shot: asked for by ``exec``, whose caller waits for all of it.
        run_id: its number at PID 1.
        deadline: Unix seconds at which it is ended; 0 means never.
        input_ended: the caller has said that no more comes.
        input_cut: a one-shot's input was not all given yet.
    """

    exec_id: str
    message_id: str
    one_shot: bool
    argv: tuple[str, ...]
    cwd: str
    user: str
    started_at: float
    run_id: int = 0
    timeout_s: float = 0.0
    deadline: float = 0.0
    limit_bytes: int = 0
    merge_stderr: bool = False
    with_input: bool = False
    terminal: tuple[int, int] | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    input_ended: bool = False
    input_cut: bool = False
    timed_out: bool = False
    cancelled: bool = False
    ended_at: float = 0.0
    duration_s: float = 0.0
    exit_code: int | None = None
    signal: int | None = None
    oom: bool = False
    oom_process: str = ""
    oom_pid: int = 0
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    error_code: str = ""
    error_message: str = ""
    error_details: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """A one-shot command, written down before anything of it ran."""

    local: str
    message_id: str
    run_id: int
    asked_at: float
    has_input: bool
    deadline: float
    limit_bytes: int

    def meta(self) -> ExecMeta:
        """Return what can be written down of it now."""
        return ExecMeta(
            exec_id=new_id(),
            message_id=self.message_id,
            one_shot=True,
            argv=(),
            cwd="/",
            user="0",
            started_at=self.asked_at,
            run_id=self.run_id,
            deadline=self.deadline,
            limit_bytes=min(self.limit_bytes, MAX_OUTPUT_BYTES),
            input_cut=self.has_input,
        )


_meta_encoder: Final = msgspec.msgpack.Encoder()
_meta_decoder: Final = msgspec.msgpack.Decoder(ExecMeta)
_journal_encoder: Final = msgspec.json.Encoder()
_journal_decoder: Final = msgspec.json.Decoder(JournalEntry)


class ExecStore:
    """The directories of a node's execs.

    Args:
        root: made when missing, on a tmpfs of its own where it is on none.
        size_bytes: the most that all execs together keep.
        output_bytes: kept of each stream of a started exec.
    """

    def __init__(self, root: Path, *, size_bytes: int, output_bytes: int) -> None:
        self.root = root
        self._size_bytes = size_bytes
        self._output_bytes = output_bytes
        self._journal = -1
        self._journal_bytes = 0
        self._nowhere: Nowhere | None = None
        self._shares: dict[str, Share] = {}
        self._kept: set[str] = set()  # sandboxes that may have a directory
        self.make_room: Callable[[str, bool], bool] = lambda _local, _others: False
        """Frees memory by forgetting an exec of this sandbox, or else, if asked to, of another;
        set by whoever knows which execs have ended."""

    def open(self) -> None:
        """Make the place.

        Raises:
            DsecError: naming the call that failed.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.root.is_mount():
                self._mount()
            self._nowhere = Nowhere()
            self._kept.update(self.sandboxes())
            self._open_journal()
        except OSError as error:
            raise from_os_error("preparing", error, str(self.root)) from error

    def _mount(self) -> None:
        options = f"mode=0700,size={self._size_bytes},nr_inodes={_INODES}".encode()
        target = os.fsencode(self.root)
        if _libc.mount(b"dsec-execs", target, b"tmpfs", _NOSUID_NODEV_NOEXEC, options) < 0:
            number = ctypes.get_errno()
            if number == errno.EPERM and os.geteuid() != 0:
                return  # nobody but root runs sandboxes; the recording kernel does without
            raise OSError(number, os.strerror(number), str(self.root))

    def close(self, *, keep: bool = False) -> None:
        """Let go of the place; unless it is to be kept, remove it. Idempotent."""
        if self._journal >= 0:
            os.close(self._journal)
            self._journal = -1
        if self._nowhere is not None:
            self._nowhere.close()
            self._nowhere = None
        if not keep:
            with contextlib.suppress(OSError):
                if self.root.is_mount():
                    _libc.umount2(os.fsencode(self.root), _MNT_DETACH)
                shutil.rmtree(self.root, ignore_errors=True)

    # --- Execs --------------------------------------------------------------------------------

    def directory(self, local: str, exec_id: str) -> Path:
        """Return where an exec is kept."""
        return self.root / local / exec_id

    def make(self, local: str, meta: ExecMeta) -> None:
        """Make an exec's directory with what was asked in it.

        Raises:
            DsecError: ``exhausted`` when the tmpfs is full.
        """
        directory = self.directory(local, meta.exec_id)
        self._kept.add(local)
        try:
            try:
                directory.mkdir(mode=0o700)
            except FileNotFoundError:
                directory.mkdir(mode=0o700, parents=True)
            self.write(local, meta)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise from_os_error("keeping an exec", error) from error

    def write(self, local: str, meta: ExecMeta) -> None:
        """Keep what is known of an exec now.

        Raises:
            OSError: the tmpfs is full, or the exec's directory is gone.
        """
        directory = self.directory(local, meta.exec_id)
        data = _meta_encoder.encode(meta)
        fresh = f"{directory}/meta.new"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
        os.rename(fresh, f"{directory}/meta")  # noqa: PTH104  a Path costs as much as the call

    def log(self, local: str, meta: ExecMeta) -> ExecLog:
        """Open an exec's output.

        Raises:
            DsecError: ``exhausted`` when the tmpfs is full or descriptors are used up.
        """
        assert self._nowhere is not None  # noqa: S101  the store is open
        share = self._share(local)
        return ExecLog(
            self.directory(local, meta.exec_id),
            limit_bytes=meta.limit_bytes if meta.one_shot else self._output_bytes,
            nowhere=self._nowhere,
            make_room=lambda: self.make_room(local, True),
            ordered=not meta.one_shot,
            note=lambda stream, kept: share.note(meta.exec_id, stream.value, kept),
            has_room=share.has_room,
        )

    def _share(self, local: str) -> Share:
        if local not in self._shares:
            self._shares[local] = Share(
                self._size_bytes // SHARE_PART,
                lambda: self.make_room(local, False),
            )
        return self._shares[local]

    def spool(self, local: str, exec_id: str) -> int:
        """Open an exec's input; the caller closes the descriptor.

        Raises:
            DsecError: ``exhausted`` when the tmpfs is full or descriptors are used up.
        """
        try:
            return os.open(
                self.directory(local, exec_id) / "input",
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                0o600,
            )
        except OSError as error:
            raise from_os_error("opening an exec's input", error) from error

    def remove(self, local: str, exec_id: str) -> None:
        """Forget an exec. Idempotent."""
        share = self._shares.get(local)
        if share is not None:
            share.forget(exec_id)
            if share.is_empty:
                del self._shares[local]
        shutil.rmtree(self.directory(local, exec_id), ignore_errors=True)

    def remove_all(self, local: str) -> None:
        """Forget a sandbox's execs. Idempotent."""
        self._shares.pop(local, None)
        if local not in self._kept:
            return  # most sandboxes never have one
        self._kept.discard(local)
        directory = self.root / local
        try:
            directory.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)

    def sandboxes(self) -> list[str]:
        """Return the sandboxes of which execs are kept."""
        return sorted(entry.name for entry in self.root.iterdir() if entry.is_dir())

    def load(self, local: str) -> list[ExecMeta]:
        """Return what a dead daemon kept of a sandbox's execs; what cannot be read is removed."""
        found: list[ExecMeta] = []
        directory = self.root / local
        if not directory.is_dir():
            return found
        for entry in sorted(directory.iterdir()):
            try:
                found.append(_meta_decoder.decode((entry / "meta").read_bytes()))
            except (OSError, msgspec.DecodeError) as error:
                _log.warning("exec_unreadable", local=local, exec=entry.name, error=str(error))
                shutil.rmtree(entry, ignore_errors=True)
        return found

    # --- The journal --------------------------------------------------------------------------

    def _open_journal(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._journal = os.open(self.root / "journal", flags, 0o600)
        self._journal_bytes = os.fstat(self._journal).st_size

    def note(self, entry: JournalEntry) -> None:
        """Write down a one-shot command; nothing of it may have run yet."""
        line = _journal_encoder.encode(entry) + b"\n"
        with contextlib.suppress(OSError):  # a full tmpfs costs no command, only this guarantee
            self._journal_bytes += os.write(self._journal, line)
        if self._journal_bytes > _JOURNAL_BYTES_MAX:
            with contextlib.suppress(OSError):
                (self.root / "journal").rename(self.root / "journal.old")
                os.close(self._journal)
                self._open_journal()

    def noted(self) -> Iterator[JournalEntry]:
        """Yield what is written down, oldest first; a line cut short by a crash is left out."""
        for name in ("journal.old", "journal"):
            with contextlib.suppress(FileNotFoundError):
                for line in (self.root / name).read_bytes().splitlines():
                    with contextlib.suppress(msgspec.DecodeError):
                        yield _journal_decoder.decode(line)
