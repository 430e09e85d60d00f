"""Where everything lies below a state directory, and who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from typing import Final, Self

import msgspec

from dsec.connection import CONTEXT_FILE
from dsec.stack.sweep import hold_node_name, remove_run_directory, sweep_node
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.processes import ProcessIdentity

#: A node daemon's part is called this and the node's name.
NODE_PART_PREFIX: Final = "sandboxd-"


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One running part: NATS, Kafka or a service."""

    name: str
    process: ProcessIdentity | None = None
    address: str = ""
    log: str = ""


class StackRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor writes down about itself: for ``status``, ``down`` and the next ``up``.

    ``state`` is ``starting``, ``running`` or ``stopping``.
    """

    supervisor: ProcessIdentity
    state: str
    parts: tuple[PartRecord, ...] = ()


class Layout:
    """The paths of one stack. Nothing is made before :meth:`prepare`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.auth = self.directory / "auth"
        self.nats = self.directory / "nats"
        self.kafka = self.directory / "kafka"
        self.logs = self.directory / "logs"
        self.layers = self.directory / "layers"
        self.services = self.directory / "services"
        self.runtime = self.directory / "runtime"
        self.record = self.directory / "supervisor.json"
        # Sandboxes' sockets want a short path in memory; one folder for each stack of the machine.
        digest = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:8]
        self.run = Path("/run") / f"dsec-{digest}"

    def prepare(self) -> None:
        """Make the directories that every part shares.

        Raises:
            DsecError: ``invalid`` when the place cannot be written.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (self.logs, self.layers, self.services, self.runtime):
                path.mkdir(exist_ok=True)
        except OSError as error:
            raise invalid(
                f"cannot use {self.directory} as state directory: {error.strerror} "
                f"({error.filename}); choose another with --state-directory"
            ) from error

    def read_record(self) -> StackRecord | None:
        """Return what the last supervisor wrote, or None when it went in order."""
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=StackRecord)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except msgspec.DecodeError:
            # Written by another version, or not by us: nothing can be said of its processes.
            return None

    def write_record(self, record: StackRecord) -> None:
        """Replace the record whole."""
        temporary = self.record.with_suffix(".new")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        temporary.replace(self.record)

    def remove_traces(self) -> None:
        """Remove what only a running stack has: context, record, runtime files, sockets."""
        for path in (self.directory / CONTEXT_FILE, self.record):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.runtime, ignore_errors=True)
        remove_run_directory(self.run)

    def clean_after_crash(self) -> list[str]:
        """End what a killed supervisor left running; return the names of those parts.

        Only call it while holding the stack's lock: then no supervisor is alive. A node whose name
        another platform of this machine has taken since is that platform's, and left alone.
        """
        record = self.read_record()
        # Services first: what stores their state goes last.
        parts = reversed(record.parts) if record else ()
        ended = [part.name for part in parts if part.process and part.process.end()]
        for part in record.parts if record else ():
            _, is_node, node = part.name.partition(NODE_PART_PREFIX)
            holder = hold_node_name(node) if is_node else None
            if holder is None:
                continue
            with holder:
                if sweep_node(node):
                    ended.append(f"sandboxes of {node}")
        self.remove_traces()
        return ended


class StackLock:
    """Held by a supervisor for as long as it lives: one stack for each state directory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def try_take(cls, layout: Layout) -> Self | None:
        """Return the lock, or None while another process holds it.

        Raises:
            DsecError: ``invalid`` when the state directory cannot be used.
        """
        layout.prepare()
        path = layout.directory / "supervisor.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise invalid(
                f"cannot open {path}: {error.strerror}; run as the user who owns it"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    @classmethod
    def take(cls, layout: Layout) -> Self:
        """Return the lock.

        Raises:
            DsecError: ``conflict`` while another process holds it.
        """
        lock = cls.try_take(layout)
        if lock is not None:
            return lock
        record = layout.read_record()
        who = f" (process {record.supervisor.pid}, {record.state})" if record else ""
        raise DsecError(
            ErrorCode.CONFLICT,
            f"a platform already runs in {layout.directory}{who}; see `dsec status`, stop it with "
            "`dsec down`, or give another --state-directory",
        )

    def release(self) -> None:
        """Let go; the file stays, since removing it would let two hold it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
