"""A child process with its output in a file, which dies with its parent and is always reaped."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_POLL_S: Final = 0.02
_LAST_BYTES: Final = 2000
_LISTEN: Final = "0A"  # TCP_LISTEN, as the kernel's table writes it


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that was free a moment ago; whoever binds it must be ready to try again."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class Child:
    """One child. Not tied to an event loop, so one may start it and another stop it."""

    def __init__(self, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self.log_file = log_file
        self._process = process

    @classmethod
    def start(cls, command: Sequence[str], *, log_file: Path, cwd: Path) -> Self:
        """Start a program in a session of its own, its output appended to ``log_file``.

        It dies with the thread that started it, so start it from the main one.

        Raises:
            OSError: when the program cannot be started.
        """
        # The kernel ends it should this process die without stopping it.
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
            )
        return cls(process, log_file)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def exit_status(self) -> int | None:
        """Return its exit status (negative: the signal that ended it); None while it runs."""
        return self._process.poll()

    def listens_on(self, port: int) -> bool:
        """Whether it is this child, and nobody else, that accepts connections on a TCP port."""
        listening = set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    listening.add(f"socket:[{fields[9]}]")
        with contextlib.suppress(FileNotFoundError):
            for descriptor in Path(f"/proc/{self.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if str(descriptor.readlink()) in listening:
                        return True
        return False

    async def wait(self, timeout_s: float) -> int | None:
        """Return its exit status, or None when it still runs after ``timeout_s``."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._process.poll() is None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110  a Popen has no event
            await asyncio.sleep(_POLL_S)
        return self._process.poll()

    async def stop(self, timeout_s: float) -> int:
        """End it with SIGTERM, after ``timeout_s`` with SIGKILL, and return its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            await self.wait(timeout_s)
        finally:
            status = self.kill()
        return status

    def kill(self) -> int:
        """End it with SIGKILL, unless it has ended, and return its exit status."""
        if self._process.poll() is None:
            self._process.kill()
        return self._process.wait()

    def last_lines(self) -> str:
        """Return the end of what it printed."""
        with self.log_file.open("rb") as log:
            log.seek(max(0, self.log_file.stat().st_size - _LAST_BYTES))
            return log.read().decode(errors="replace").strip()
