"""The daemon's side of the spawner: one request, one answer, matched by number."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_sandboxd.kernel.protocol import (
    DESCRIPTORS_MAX,
    SPAWNER_PROTOCOL,
    SPAWNER_REPLY_BYTES,
    SpawnerKind,
    SpawnerReply,
    SpawnerRequest,
    step_name,
)
from dsec_sandboxd.kernel.seccomp import compile_filter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_sandboxd.kernel.cgroups import Cgroup
    from dsec_sandboxd.kernel.cgroups_layout import LimitText

#: Room for thousands of creations that wait: the spawner serves one at a time.
_SEND_BUFFER_BYTES: Final = 8 << 20
_SO_SNDBUFFORCE: Final = 32
#: Of everything but creations, which the service bounds itself.
_REQUESTS_MAX: Final = 64
_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 5.0
#: A spawner that answers nothing for so long although something waits is stuck. One creation may
#: take it ``CHILD_TIMEOUT_MS``, so this is longer.
STUCK_AFTER_S: Final = 20.0
#: Of asking how a process ended whose parent has not reaped it yet: about a second.
_EXIT_ATTEMPTS: Final = 14
_EXIT_PAUSE_LONGEST_S: Final = 0.128

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


def birth_error(reply: SpawnerReply, cgroup: Cgroup, texts: Sequence[LimitText]) -> DsecError:
    """Return the typed error for a sandbox that could not be made."""
    error = creation_error(reply.step, reply.error)
    operation = error.details["operation"]
    if operation == "cgroup_make" and reply.error == errno.EEXIST:
        return DsecError(
            ErrorCode.CONFLICT,
            f"the cgroup {cgroup.directory}, or one of its name in another tree, exists already: "
            "remove it first",
            details=error.details,
        )
    if operation == "cgroup_make" and reply.error == errno.ENOENT:
        return DsecError(
            ErrorCode.UNAVAILABLE,
            f"the cgroup {os.path.dirname(cgroup.directory)} of this node, or one of its name in "  # noqa: PTH120  a string
            "another tree, is gone; start its sandboxd again",
            details=error.details,
        )
    if operation == "cgroup_limit":
        file = texts[reply.detail].file
        if reply.error == errno.ENOENT:
            return DsecError(
                ErrorCode.UNSUPPORTED,
                f"this kernel has no {file}, which a limit needs: use a newer one",
                details=error.details | {"file": file},
            )
        return DsecError(error.code, f"{error.message}: {file}", details=error.details)
    return error


class Spawner:
    """A running spawner process. Once it is dead, every request to it is ``unavailable``."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._next_id = 1
        self._window = asyncio.Semaphore(_REQUESTS_MAX)
        self._heard_at = self._loop.time()
        self._watchdog: asyncio.TimerHandle | None = None
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
        if reply.detail != SPAWNER_PROTOCOL:
            raise _other_version(str(reply.detail))

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
        if not self._waiting:
            self._heard_at = self._loop.time()  # until now there was nothing to say
        self._waiting[request_id] = future
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(STUCK_AFTER_S, self._look_whether_stuck)
        return future

    def _look_whether_stuck(self) -> None:
        """End a spawner that has been silent for too long: all that waits fails as ``timeout``."""
        self._watchdog = None
        if not self.alive or not self._waiting:
            return
        left_s = self._heard_at + STUCK_AFTER_S - self._loop.time()
        if left_s > 0:
            self._watchdog = self._loop.call_later(left_s, self._look_whether_stuck)
            return
        self._process.kill()  # stopped or hanging, it would not see the end of its socket
        self._on_death(
            DsecError(
                ErrorCode.TIMEOUT,
                f"the spawner did not answer for {STUCK_AFTER_S:g} s and is replaced: try again",
                retryable=True,
            )
        )

    async def stop(self) -> None:
        """End the process and wait for it. Idempotent."""
        self._on_death()
        if self._process.returncode is None:
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await _exited(self._process.pid)
            except TimeoutError:
                self._process.kill()  # stopped or hanging, it does not see the end of its socket
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
                self._on_death(_other_version(f"in {len(data)} bytes") if data else None)
                return
            self._heard_at = self._loop.time()
            reply = SpawnerReply.unpack(data)
            future = self._waiting.pop(reply.request_id, None)
            if future is None or future.done():
                for descriptor in descriptors:
                    os.close(descriptor)
            else:
                future.set_result((reply, descriptors))

    def _on_death(self, reason: DsecError | None = None) -> None:
        if not self.alive:
            return
        self.alive = False
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(
                    reason or unavailable("the spawner died while it worked: try again")
                )
                future.exception()  # its waiter may have gone already
        self._waiting.clear()


def _other_version(protocol: str) -> DsecError:
    return DsecError(
        ErrorCode.UNSUPPORTED,
        f"the spawner is another version's: it speaks protocol {protocol}, this daemon "
        f"{SPAWNER_PROTOCOL}; start the daemon again after an upgrade, and build its programs",
    )


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


def _status_of_unreaped(pidfd: int) -> int | None:
    """Return the wait status of an ended process that still has its number; None when reaped."""
    pid = 0
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            pid = int(line.split()[1])
    if pid <= 0:
        return None
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # After the name: the state is the first, the status the last of what stat(5) numbers from 3.
    return int(fields[49]) if fields[0] in "ZX" else None


async def exit_signal(pidfd: int) -> int | None:
    """Return the signal that ended a process that is not our child; None when unknown or none.

    The pidfd tells it once the parent has reaped the process: at once when that is the spawner.
    When that has died, the host's PID 1 may take its time, and until then ``/proc`` has it.
    """
    for attempt in range(_EXIT_ATTEMPTS):
        request = bytearray(64)
        request[0] = 1 << 3  # PIDFD_INFO_EXIT
        with contextlib.suppress(OSError):
            fcntl.ioctl(pidfd, 0xC040_FF0B, request)  # PIDFD_GET_INFO
            if request[0] & 1 << 3:
                status = int.from_bytes(request[60:64], "little", signed=True)
                return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            waiting = _status_of_unreaped(pidfd)
            if waiting is not None:
                return os.WTERMSIG(waiting) if os.WIFSIGNALED(waiting) else None
        await asyncio.sleep(min(0.001 * 2**attempt, _EXIT_PAUSE_LONGEST_S))
    return None
