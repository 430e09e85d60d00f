"""The daemon's side of the spawner: one request, one answer, matched by number."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import subprocess
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_sandboxd.kernel.protocol import (
    DESCRIPTORS_MAX,
    SPAWNER_REPLY_BYTES,
    SpawnerKind,
    SpawnerReply,
    SpawnerRequest,
    step_name,
)
from dsec_sandboxd.kernel.seccomp import compile_filter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: Room for thousands of creations that wait: the spawner serves one at a time.
_SEND_BUFFER_BYTES: Final = 8 << 20
_SO_SNDBUFFORCE: Final = 32
#: Of everything but creations, which the service bounds itself.
_REQUESTS_MAX: Final = 64
_START_TIMEOUT_S: Final = 10.0

Answer = tuple[SpawnerReply, list[int]]

_LAYER_STEPS: Final = frozenset({"layer_mount", "layer_clone", "layer_id_map"})
_EXHAUSTED: Final = frozenset(
    {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EAGAIN}
)


def creation_error(step: int, error: int) -> DsecError:
    """Return the typed error for a failed step of the spawner or of a sandbox being born."""
    operation = step_name(step)
    name = errno.errorcode.get(error, str(error))
    code = ErrorCode.INTERNAL
    if error in _EXHAUSTED:
        code = ErrorCode.EXHAUSTED
    elif operation in _LAYER_STEPS:
        code = ErrorCode.LAYER_ERROR
    return DsecError(
        code,
        f"the kernel refused {operation.replace('_', ' ')}: {name} ({os.strerror(error)})",
        details={"operation": operation, "errno": name},
    )


class Spawner:
    """A running spawner process. Once it is dead, every request to it is ``unavailable``."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._next_id = 1
        self._window = asyncio.Semaphore(_REQUESTS_MAX)
        self.alive = True
        channel.setblocking(False)
        channel.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BUFFER_BYTES)
        self._hello: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[0] = self._hello
        self._loop.add_reader(channel.fileno(), self._on_readable)

    @classmethod
    async def start(cls, program: Path, init_program: Path) -> Spawner:
        """Start the spawner; on return it has prepared its mount namespace.

        Raises:
            DsecError: ``internal`` when the host refuses a step, ``unsupported`` when the programs
                were not built.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        filter_fd = os.memfd_create("filter", os.MFD_CLOEXEC)
        try:
            os.write(filter_fd, compile_filter())
            process = subprocess.Popen(  # noqa: ASYNC220  once per daemon, and its death signal
                [program, str(theirs.fileno()), init_program, str(filter_fd)],  # is per thread
                pass_fds=(theirs.fileno(), filter_fd),
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            raise DsecError(
                ErrorCode.UNSUPPORTED,
                f"cannot start {program}: {error.strerror}; build it with make in its folder",
            ) from error
        finally:
            theirs.close()
            os.close(filter_fd)
        spawner = cls(process, ours)
        try:
            await spawner._greet()
        except BaseException:
            await spawner.stop()
            raise
        return spawner

    async def _greet(self) -> None:
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                reply, _ = await self._hello
        except TimeoutError as error:
            raise unavailable("the spawner did not start: is the host overloaded?") from error
        if reply.error:
            raise creation_error(reply.step, reply.error)

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    async def request(self, request: SpawnerRequest, descriptors: Sequence[int] = ()) -> Answer:
        """Send one request; return its reply and the descriptors with it, which are the caller's.

        Raises:
            DsecError: the failed step, typed; ``unavailable`` when the spawner is dead.
        """
        async with self._window:
            future = self.send(request, descriptors)
            reply, received = await future
        if reply.error:
            raise creation_error(reply.step, reply.error)
        return reply, received

    def send(
        self, request: SpawnerRequest, descriptors: Sequence[int] = ()
    ) -> asyncio.Future[Answer]:
        """Send one request at once; the future is its raw answer."""
        if not self.alive:
            raise unavailable("the spawner has died; it is being restarted, try again")
        request_id = self._next_id
        self._next_id = request_id % 0xFFFF_FFFF + 1
        try:
            socket.send_fds(self._channel, [request.pack(request_id)], list(descriptors))
        except BlockingIOError as error:
            raise DsecError(
                ErrorCode.EXHAUSTED, "too many sandboxes are being created at once: retry"
            ) from error
        except OSError as error:
            self._on_death()
            raise unavailable("the spawner has died; it is being restarted, try again") from error
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[request_id] = future
        return future

    async def stop(self) -> None:
        """End the process and wait for it. Idempotent."""
        self._on_death()
        if self._process.returncode is None:
            await _exited(self._process.pid)
            self._process.wait()

    def _on_readable(self) -> None:
        while self.alive:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._channel, SPAWNER_REPLY_BYTES, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if len(data) != SPAWNER_REPLY_BYTES:
                self._on_death()
                return
            reply = SpawnerReply.unpack(data)
            future = self._waiting.pop(reply.request_id, None)
            if future is None or future.done():
                for descriptor in descriptors:
                    os.close(descriptor)
            else:
                future.set_result((reply, descriptors))

    def _on_death(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(unavailable("the spawner died while it worked: try again"))
                future.exception()  # its waiter may have gone already
        self._waiting.clear()


async def _exited(pid: int) -> None:
    """Return once a child of ours has ended, without reaping it."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await readable(pidfd)
    finally:
        os.close(pidfd)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def readable(descriptor: int) -> None:
    """Return once a descriptor is readable."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _resolve, future)
    try:
        await future
    finally:
        loop.remove_reader(descriptor)


def request_hold(handle: int) -> SpawnerRequest:
    """Return the request that mounts a layer under a handle."""
    return SpawnerRequest(kind=SpawnerKind.HOLD, layer=handle)


def exit_signal(pidfd: int) -> int | None:
    """Return the signal that ended a process that is not our child; None when unknown or none."""
    request = bytearray(64)
    request[0] = 1 << 3  # PIDFD_INFO_EXIT
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, 0xC040_FF0B, request)  # PIDFD_GET_INFO
        status = int.from_bytes(request[60:64], "little", signed=True)
        if request[0] & 1 << 3 and os.WIFSIGNALED(status):
            return os.WTERMSIG(status)
    return None
