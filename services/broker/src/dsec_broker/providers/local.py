"""Further nodes on this machine: ``dsec-sandboxd`` processes.

They live apart from the broker that started them, so that sandboxes outlive brokers; a file for
each says which process it is, and the next broker of this machine goes on from there.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import structlog

from dsec_broker.providers import Order, settings_of
from dsec_common.accounts import AuthDirectory
from dsec_common.errors import from_os_error, unavailable
from dsec_common.processes import ProcessIdentity
from dsec_common.subjects import validate_node

log = structlog.get_logger()

_STOP_S: Final = 60.0
"""Above what a node takes at most to end its sandboxes and close."""


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the provider ``local``.

    Attributes:
        directory: where it keeps which processes are its nodes, and their logs.
        config: the TOML file that every node is given; empty means ``DSEC_CONFIG``.
        auth_directory: makes each node's credentials; empty uses those of the configuration.
        prefix: nodes are called ``<prefix>-1``, ``<prefix>-2``, …
    """

    directory: str
    config: str = ""
    auth_directory: str = ""
    prefix: str = "elastic"

    def __post_init__(self) -> None:
        """Refuse what could only fail later."""
        if not self.directory:
            raise ValueError("directory is empty")
        validate_node(f"{self.prefix}-1")


def open_local(settings: Mapping[str, str]) -> LocalProvider:
    """Return the provider ``local``; for the entry point."""
    return LocalProvider(settings_of(LocalSettings, settings, "local"))


class LocalProvider:
    """Nodes as processes of this machine, one directory of them at a time."""

    name: Final = "local"

    def __init__(self, settings: LocalSettings) -> None:
        self._settings = settings
        self._directory = Path(settings.directory)
        self._children: list[int] = []

    def may_leave(self, nodes: Collection[str], idle: Collection[str]) -> Sequence[str]:
        """Return all idle nodes: any process can be ended."""
        del nodes
        return sorted(idle)

    async def scale(self, order: Order) -> None:
        """End the nodes that leave, and start what is missing."""
        await asyncio.to_thread(self._scale, order)

    async def close(self) -> None:
        """Leave the nodes as they are."""

    def _scale(self, order: Order) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._turn():
                running = self._running()
                for name in order.leaving:
                    if identity := running.pop(name, None):
                        log.info("ending a node", node=name)
                        identity.end(_STOP_S)
                        self._file(name).unlink(missing_ok=True)
                for name in self._free_names(running, order.wanted - len(running)):
                    self._start(name)
                self._reap()
        except OSError as error:
            raise from_os_error("scale local nodes", error, str(self._directory)) from error

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other broker of this machine scales these nodes."""
        descriptor = os.open(self._directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.json"

    def _running(self) -> dict[str, ProcessIdentity]:
        running = {}
        for file in self._directory.glob(f"{self._settings.prefix}-*.json"):
            try:
                identity = msgspec.json.decode(file.read_bytes(), type=ProcessIdentity)
            except msgspec.DecodeError:
                identity = None
            if identity is not None and identity.alive:
                running[file.stem] = identity
            else:
                log.warning("a node ended by itself", node=file.stem, log=str(self._log(file.stem)))
                file.unlink(missing_ok=True)
        return running

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _free_names(self, running: Collection[str], count: int) -> list[str]:
        names: list[str] = []
        number = 1
        while len(names) < count:
            name = f"{self._settings.prefix}-{number}"
            if name not in running:
                names.append(name)
            number += 1
        return names

    def _start(self, name: str) -> None:
        flags = {"node": name, "labels": f"provider={self.name}"}
        if self._settings.config:
            flags["config"] = self._settings.config
        if self._settings.auth_directory:
            auth = AuthDirectory.create_or_open(self._settings.auth_directory)
            flags["nats-credentials"] = str(auth.service_credentials("sandboxd", name))
        arguments = [f"--{key}={value}" for key, value in flags.items()]
        output = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "dsec_sandboxd", *arguments],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self._log(name)), output, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            # Neither the broker's end nor Ctrl-C is the node's.
            setsid=True,
        )
        self._children.append(pid)
        identity = ProcessIdentity.of(pid)
        if identity is None:
            raise unavailable(f"node {name} ended at once; see {self._log(name)}")
        self._file(name).write_bytes(msgspec.json.encode(identity))
        log.info("started a node", node=name, pid=pid)

    def _reap(self) -> None:
        """Take leave of children that have ended, so that none stays a zombie."""
        for pid in list(self._children):
            try:
                ended = os.waitpid(pid, os.WNOHANG) != (0, 0)
            except ChildProcessError:
                ended = True
            if ended:
                self._children.remove(pid)
