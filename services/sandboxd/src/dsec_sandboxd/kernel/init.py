"""The daemon's side of one sandbox's PID 1: requests out, replies and descriptors in."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_sandboxd.kernel.command import CommandRun
from dsec_sandboxd.kernel.protocol import (
    CONTROL_REPLY_BYTES,
    DESCRIPTORS_MAX,
    INLINE_PAYLOAD_MAX,
    PAYLOAD_MAX,
    STRINGS_MAX,
    ControlFlag,
    ControlKind,
    ControlReply,
    FileOperation,
    ReplyKind,
    pack_control,
)
from dsec_sandboxd.kernel.spawner import creation_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsec_sandboxd.kernel.interface import CommandSpec, Stream

FileAnswer = tuple[ControlReply, list[int]]


class InitClient:
    """One control socket. ``on_end`` is called once, when PID 1 is gone."""

    def __init__(self, channel_fd: int, on_end: Callable[[], None]) -> None:
        self._channel = socket.socket(fileno=channel_fd)
        self._channel.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._commands: dict[int, CommandRun] = {}
        self._files: dict[int, asyncio.Future[FileAnswer]] = {}
        self._next_id = 1
        self.alive = True
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(channel_fd, self._on_readable)

    def start_command(
        self,
        spec: CommandSpec,
        cgroup_fd: int,
        on_output: Callable[[Stream, bytes], None] | None,
    ) -> CommandRun:
        """Ask for a command; its run resolves when it has ended or could not start."""
        strings = [spec.user, spec.cwd, *spec.argv, *(f"{k}={v}" for k, v in spec.env.items())]
        _check_command(spec)
        flags = ControlFlag.WITH_CGROUP
        if spec.stdin:
            flags |= ControlFlag.WITH_STDIN
        if spec.merge_stderr:
            flags |= ControlFlag.MERGE_STDERR
        request_id = self._take_id()
        run = CommandRun(request_id, spec, on_output)
        self._send(
            ControlKind.EXEC,
            request_id,
            _pack_strings(strings),
            [cgroup_fd],
            flags=flags,
            arguments=len(spec.argv),
            environment=len(spec.env),
        )
        self._commands[request_id] = run
        return run

    def signal_tree(self, run: CommandRun, cgroup_fd: int, signal_number: int) -> None:
        """Signal every process that the command started, as PID 1 sees them."""
        header = pack_control(ControlKind.SIGNAL, run.run_id, signal_number=signal_number)
        self._send_packet(header, [cgroup_fd])

    async def file(
        self,
        operation: FileOperation,
        user: str,
        paths: Sequence[str],
        permissions: int = 0,
    ) -> FileAnswer:
        """Do one file operation; descriptors in the answer are the caller's."""
        request_id = self._take_id()
        future: asyncio.Future[FileAnswer] = self._loop.create_future()
        self._send(
            ControlKind.FILE,
            request_id,
            _pack_strings([user, *paths]),
            [],
            operation=operation,
            mode=permissions,
        )
        self._files[request_id] = future
        return await future

    def close(self) -> None:
        """Let go of the socket; what still waits fails as ``unavailable``. Idempotent."""
        self._end(notify=False)

    def _take_id(self) -> int:
        request_id = self._next_id
        self._next_id = request_id % 0xFFFF_FFFF + 1
        return request_id

    def _send(
        self,
        kind: ControlKind,
        request_id: int,
        payload: bytes,
        descriptors: list[int],
        *,
        flags: int = 0,
        arguments: int = 0,
        environment: int = 0,
        operation: int = 0,
        mode: int = 0,
    ) -> None:
        inline = len(payload) <= INLINE_PAYLOAD_MAX
        if len(payload) > PAYLOAD_MAX or arguments + environment > STRINGS_MAX:
            raise invalid(
                f"the command's arguments and environment take {len(payload)} bytes: "
                f"at most {PAYLOAD_MAX} are possible; pass a file instead"
            )
        header = pack_control(
            kind,
            request_id,
            flags=flags if inline else flags | ControlFlag.PAYLOAD_IN_FD,
            arguments=arguments,
            environment=environment,
            operation=operation,
            mode=mode,
            payload_bytes=len(payload),
        )
        if inline:
            self._send_packet(header + payload, descriptors)
            return
        memory_fd = os.memfd_create("payload", os.MFD_CLOEXEC)
        try:
            os.write(memory_fd, payload)
            self._send_packet(header, [*descriptors, memory_fd])
        finally:
            os.close(memory_fd)

    def _send_packet(self, packet: bytes, descriptors: list[int]) -> None:
        if not self.alive:
            raise ended_error()
        try:
            socket.send_fds(self._channel, [packet], descriptors)
        except BlockingIOError as error:
            raise DsecError(
                ErrorCode.EXHAUSTED, "the sandbox has too many requests waiting: retry later"
            ) from error
        except OSError as error:
            raise ended_error() from error

    def _on_readable(self) -> None:
        while self.alive:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._channel, CONTROL_REPLY_BYTES, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if len(data) != CONTROL_REPLY_BYTES:
                for descriptor in descriptors:
                    os.close(descriptor)
                self._end(notify=True)
                return
            self._handle(ControlReply.unpack(data), descriptors)

    def _handle(self, reply: ControlReply, descriptors: list[int]) -> None:
        if reply.kind == ReplyKind.STARTED and reply.request_id in self._commands:
            self._commands[reply.request_id].started(descriptors)
        elif reply.kind in (ReplyKind.EXITED, ReplyKind.FAILED):
            self._finish_command(reply)
        elif reply.kind == ReplyKind.FILE_DONE and reply.request_id in self._files:
            future = self._files.pop(reply.request_id)
            if not future.done():
                future.set_result((reply, descriptors))
                return
            _close_all(descriptors)
        elif reply.kind == ReplyKind.READY and not self.ready.done():
            self.ready.set_result(None)
        elif reply.kind == ReplyKind.BROKEN and not self.ready.done():
            self.ready.set_exception(creation_error(reply.step, reply.error))
        else:
            _close_all(descriptors)

    def _finish_command(self, reply: ControlReply) -> None:
        run = self._commands.pop(reply.request_id, None)
        if run is None:
            return
        if reply.kind == ReplyKind.EXITED:
            run.exited(reply.status)
        else:
            run.failed(command_error(run.spec, reply))
        if run.was_started and self.alive:
            # PID 1 keeps the pipes until now; what comes later it reads into nothing.
            self._send_packet(pack_control(ControlKind.DONE, reply.request_id), [])

    def _end(self, *, notify: bool) -> None:
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if not self.ready.done():
            self.ready.set_exception(ended_error())
            self.ready.exception()  # nobody may be waiting any more
        for run in self._commands.values():
            run.failed(ended_error())
        self._commands.clear()
        for future in self._files.values():
            if not future.done():
                future.set_exception(ended_error())
                future.exception()
        self._files.clear()
        if notify:
            self._on_end()


def ended_error() -> DsecError:
    """Return the error for a request that a sandbox's end overtook."""
    return DsecError(
        ErrorCode.UNAVAILABLE,
        "the sandbox has ended: create a new one",
        retryable=False,
    )


_COMMAND_STEPS: Final = {
    "command_user": ("user", "the user {user!r} is not known in the sandbox"),
    "command_directory": ("directory", "cannot enter the working directory {cwd!r}"),
    "command_exec": ("command", "cannot run {argv0!r}"),
}


def command_error(spec: CommandSpec, reply: ControlReply) -> DsecError:
    """Return the error for a command that never ran."""
    error = creation_error(reply.step, reply.error)
    operation = str(error.details["operation"])
    if operation not in _COMMAND_STEPS:
        return error
    what, text = _COMMAND_STEPS[operation]
    said = text.format(user=spec.user, cwd=spec.cwd, argv0=spec.argv[0])
    codes = {
        errno.ENOENT: ErrorCode.NOT_FOUND,
        errno.ENOTDIR: ErrorCode.NOT_FOUND,
        errno.EACCES: ErrorCode.DENIED,
        errno.EPERM: ErrorCode.DENIED,
        errno.ENOMEM: ErrorCode.EXHAUSTED,
        errno.EAGAIN: ErrorCode.EXHAUSTED,
    }
    return DsecError(
        codes.get(reply.error, ErrorCode.INVALID),
        f"{said}: {os.strerror(reply.error)}",
        details={**error.details, "what": what},
    )


def _check_command(spec: CommandSpec) -> None:
    if not spec.argv or not spec.argv[0]:
        raise invalid("a command needs at least the program to run in argv")
    if any("=" in name or not name for name in spec.env):
        raise invalid("an environment name is empty or holds '='")
    if not spec.cwd.startswith("/"):
        raise invalid(f"the working directory {spec.cwd!r} is not absolute")


def _pack_strings(strings: Sequence[str]) -> bytes:
    if any("\0" in text for text in strings):
        raise invalid("an argument, variable or path holds a NUL byte, which no program can get")
    return b"".join([os.fsencode(text) + b"\0" for text in strings])


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
