"""The daemon's side of one sandbox's PID 1: requests out, replies and descriptors in."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_sandboxd.kernel.command import CommandRun, Settlement, out_of_descriptors
from dsec_sandboxd.kernel.init_packets import (
    ANCILLARY_BYTES,
    check_command,
    close_all,
    descriptors_in,
    pack_strings,
)
from dsec_sandboxd.kernel.overheard import Overheard
from dsec_sandboxd.kernel.process import Process, SignalScope
from dsec_sandboxd.kernel.protocol import (
    CONTROL_REPLY_BYTES,
    INLINE_OUTPUT_MAX,
    INLINE_PAYLOAD_MAX,
    PAYLOAD_MAX,
    STRINGS_MAX,
    ControlFlag,
    ControlKind,
    ControlReply,
    ExitedFlag,
    FileOperation,
    ListedFlag,
    ReplyKind,
    pack_control,
)
from dsec_sandboxd.kernel.spawner import creation_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsec_sandboxd.kernel.interface import CommandSpec, Stream
    from dsec_sandboxd.kernel.process import OutputKeeper, ProcessControl

FileAnswer = tuple[ControlReply, list[int]]
#: Requests that may wait for PID 1 to take them.
_OUTBOX_MAX: Final = 2048
#: How long PID 1 may keep what belongs to a command that is over, so that it need not wake for that
#: alone: most commands are followed by another, or by the sandbox's end.
_FORGET_LATEST_S: Final = 0.05
_SANDBOX_OVER: Final = "sandbox_over"
_SCOPE_FLAGS: Final = {
    SignalScope.MAIN: ControlFlag.MAIN_ONLY,
    SignalScope.TREE: ControlFlag.NONE,
    SignalScope.DESCENDANTS: ControlFlag.SPARE_MAIN,
}


@dataclass(frozen=True, slots=True)
class ListedCommand:
    """A command that an earlier client asked for, as PID 1 tells of it."""

    reply: ControlReply
    descriptors: list[int]

    @property
    def flags(self) -> ListedFlag:
        """What is said of it."""
        return ListedFlag(self.reply.file_mode)

    @property
    def directory(self) -> int:
        """The name of its cgroup."""
        return self.reply.user_id


class InitClient:
    """One control socket. ``on_end`` is called once, when PID 1 is gone."""

    def __init__(
        self, channel_fd: int, on_end: Callable[[], None], *, adopted: bool = False
    ) -> None:
        """Take the daemon's end of a control socket, which is this client's from now on.

        Args:
            channel_fd: the daemon's end.
            on_end: called once, when PID 1 is gone.
            adopted: an earlier daemon had this end. What it asked for may still be answered here,
                so this client's numbers begin anywhere, and answers to unknown ones are dropped.
        """
        # All named, so that Python need not ask the kernel for each.
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, channel_fd)
        self._channel.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._commands: dict[int, CommandRun | Process] = {}
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._finished: list[int] = []  # commands that PID 1 may forget
        self._finished_timer: asyncio.TimerHandle | None = None
        self._listed: list[ListedCommand] = []
        self._listing: asyncio.Future[list[ListedCommand]] = self._loop.create_future()
        self._list_id = 0
        self._files: dict[int, asyncio.Future[FileAnswer]] = {}
        self.overheard = Overheard(adopted=adopted)
        self._next_id = secrets.randbelow(0xFFFF_FFFF) + 1 if adopted else 1
        self.alive = True
        self.ready: asyncio.Future[None] = self._loop.create_future()
        if adopted:
            self.ready.set_result(None)
        self._loop.add_reader(channel_fd, self._on_readable)

    def start_command(
        self,
        spec: CommandSpec,
        cgroup_fd: int,
        directory: int,
        on_output: Callable[[Stream, bytes], None] | None,
        *,
        keeper: OutputKeeper | None = None,
        settlement: Settlement | None = None,
    ) -> CommandRun:
        """Ask for a command; its run resolves when it has ended or could not start."""
        check_command(spec)
        run = CommandRun(self._take_id(), spec, on_output, keeper, settlement)
        if keeper is not None:
            keeper.asked(run.run_id)
        if run.is_held:
            flags = ControlFlag.HOLD
        else:
            flags = ControlFlag.WITH_STDIN if spec.stdin else ControlFlag.NONE
        self._send_command(run, flags, [cgroup_fd], directory)
        return run

    def start_process(
        self,
        spec: CommandSpec,
        cgroup_fd: int,
        directory: int,
        control: ProcessControl,
        *,
        spool_fd: int,
        before: Callable[[int], None],
    ) -> Process:
        """Ask for a process; ``before`` is told its number before anything of it runs."""
        check_command(spec)
        process = Process(self._take_id(), spec, control)
        before(process.run_id)
        flags, descriptors = ControlFlag.NONE, [cgroup_fd]
        if spec.terminal is not None:
            flags |= ControlFlag.TERMINAL
        elif spec.with_input:
            flags |= ControlFlag.WITH_STDIN
            if spool_fd >= 0:
                flags |= ControlFlag.KEEP_STDIN
                descriptors.append(spool_fd)
        self._send_command(process, flags, descriptors, directory)
        return process

    def _send_command(
        self, run: CommandRun | Process, flags: int, descriptors: list[int], directory: int
    ) -> None:
        spec = run.spec
        strings = [spec.user, spec.cwd, *spec.argv, *(f"{k}={v}" for k, v in spec.env.items())]
        if spec.merge_stderr:
            flags |= ControlFlag.MERGE_STDERR
        rows, columns = spec.terminal or (0, 0)
        self._send(
            ControlKind.EXEC,
            run.run_id,
            pack_strings(strings),
            descriptors,
            flags=flags | ControlFlag.WITH_CGROUP,
            arguments=len(spec.argv),
            environment=len(spec.env),
            mode=rows << 16 | columns,
            directory=directory,
        )
        self._commands[run.run_id] = run

    def signal(
        self, run_id: int, cgroup_fd: int, number: int, scope: SignalScope = SignalScope.TREE
    ) -> None:
        """Signal processes that a command started, as PID 1 sees them."""
        header = pack_control(
            ControlKind.SIGNAL, run_id, signal_number=number, flags=_SCOPE_FLAGS[scope]
        )
        self._send_packet(header, [cgroup_fd])

    def close_stdin(self, run_id: int) -> None:
        """Have PID 1 let go of a command's input."""
        if self.alive:
            self._send_packet(pack_control(ControlKind.CLOSE_STDIN, run_id), [])

    def finish(self, run_id: int) -> None:
        """Have PID 1 forget a command whose output is read, at the latest with what is sent next.

        PID 1 keeps the pipes until then; what comes later it reads into nothing.
        """
        self._commands.pop(run_id, None)
        if self.alive:
            self._finished.append(run_id)
            if self._finished_timer is None:
                self._finished_timer = self._loop.call_later(_FORGET_LATEST_S, self.flush)

    def flush(self) -> None:
        """Have PID 1 forget now what it may forget."""
        for run_id in self._take_finished():
            with contextlib.suppress(DsecError):  # it has ended
                self._put_packet(pack_control(ControlKind.DONE, run_id), [])

    async def list_commands(self) -> list[ListedCommand]:
        """Return every command that PID 1 knows; the descriptors are the caller's.

        Of use only before this client has asked for a command: it tells of those of an earlier one.
        """
        self._list_id = self._take_id()
        self._listing = self._loop.create_future()
        self._listed = []
        self._send_packet(pack_control(ControlKind.LIST, self._list_id), [])
        return await self._listing

    def expect(self, process: Process) -> None:
        """Have ``process``, which an earlier client started, told of its end."""
        self._commands[process.run_id] = process

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
            pack_strings([user, *paths]),
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
        directory: int = 0,
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
            directory=directory,
        )
        if len(self._outbox) >= _OUTBOX_MAX:
            raise DsecError(
                ErrorCode.EXHAUSTED, "the sandbox has too many requests waiting: retry later"
            )
        if inline:
            self._send_packet(header + payload, descriptors)
            return
        memory_fd = os.memfd_create("payload", os.MFD_CLOEXEC)
        try:
            os.write(memory_fd, payload)
            self._send_packet(header, [*descriptors[:1], memory_fd, *descriptors[1:]])
        finally:
            os.close(memory_fd)

    def _take_finished(self) -> list[int]:
        if self._finished_timer is not None:
            self._finished_timer.cancel()
            self._finished_timer = None
        finished, self._finished = self._finished, []
        return finished

    def _send_packet(self, packet: bytes, descriptors: list[int]) -> None:
        if self._finished:
            self.flush()
        self._put_packet(packet, descriptors)

    def _put_packet(self, packet: bytes, descriptors: list[int]) -> None:
        if not self.alive:
            raise ended_error()
        if not self._outbox:
            try:
                socket.send_fds(self._channel, [packet], descriptors)
            except BlockingIOError:
                self._loop.add_writer(self._channel.fileno(), self._send_waiting)
            except OSError as error:
                raise ended_error() from error
            else:
                return
        # PID 1 is behind. Whoever asked may close its descriptors meanwhile.
        self._outbox.append((packet, [os.dup(descriptor) for descriptor in descriptors]))

    def _send_waiting(self) -> None:
        while self._outbox:
            packet, descriptors = self._outbox[0]
            try:
                socket.send_fds(self._channel, [packet], descriptors)
            except BlockingIOError:
                return
            except OSError:
                break  # it has ended, which the reader is told
            self._outbox.popleft()
            close_all(descriptors)
        self._loop.remove_writer(self._channel.fileno())

    def _on_readable(self) -> None:
        """Take one packet: what follows makes the socket readable again, and others have a turn."""
        if not self.alive:
            return
        try:
            data, ancillary, _, _ = self._channel.recvmsg(
                CONTROL_REPLY_BYTES + INLINE_OUTPUT_MAX, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        descriptors = descriptors_in(ancillary) if ancillary else []
        if len(data) < CONTROL_REPLY_BYTES:
            close_all(descriptors)
            self._end(notify=True)
            return
        reply = ControlReply.unpack_from(data)
        if reply.kind == ReplyKind.EXITED:
            self._has_exited(reply, data)
        else:
            self._handle(reply, descriptors)

    def _handle(self, reply: ControlReply, descriptors: list[int]) -> None:
        if reply.kind == ReplyKind.STARTED and reply.request_id in self._commands:
            self._start(self._commands[reply.request_id], descriptors)
        elif reply.kind == ReplyKind.FAILED:
            self._has_failed(reply)
        elif reply.kind == ReplyKind.FILE_DONE and reply.request_id in self._files:
            future = self._files.pop(reply.request_id)
            if not future.done():
                future.set_result((reply, descriptors))
                return
            close_all(descriptors)
        elif reply.kind == ReplyKind.LISTED:
            self._listed.append(ListedCommand(reply, descriptors))
        elif reply.kind == ReplyKind.LIST_ENDED:
            if reply.request_id == self._list_id and not self._listing.done():
                listed, self._listed = self._listed, []
                self._listing.set_result(listed)
        elif reply.kind == ReplyKind.READY and not self.ready.done():
            self.ready.set_result(None)
        elif reply.kind == ReplyKind.BROKEN and not self.ready.done():
            self.ready.set_exception(creation_error(reply.step, reply.error))
        else:
            close_all(descriptors)

    def _start(self, run: CommandRun | Process, descriptors: list[int]) -> None:
        if run.take_streams(descriptors):
            run.is_started()
        else:
            run.has_failed(out_of_descriptors())

    def _has_exited(self, reply: ControlReply, packet: bytes) -> None:
        run = self._commands.pop(reply.request_id, None)
        if run is None:
            self.overheard.hear(reply, packet)
            return
        if isinstance(run, CommandRun):
            run.left_nothing = bool(reply.file_mode & ExitedFlag.ALONE)
            if reply.file_mode & ExitedFlag.WHOLE:
                error_at = CONTROL_REPLY_BYTES + reply.user_id
                run.has_printed(packet[CONTROL_REPLY_BYTES:error_at], packet[error_at:])
        run.is_over(reply.status)
        self._forget_at_init(run)

    def _has_failed(self, reply: ControlReply) -> None:
        run = self._commands.pop(reply.request_id, None)
        if run is not None:
            run.has_failed(command_error(run.spec, reply))
            self._forget_at_init(run)

    def _forget_at_init(self, run: CommandRun | Process) -> None:
        if run.was_started and not run.keeps_streams:
            self.finish(run.run_id)

    def _end(self, *, notify: bool) -> None:
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self._take_finished()
        if not self.ready.done():
            self.ready.set_exception(ended_error())
            self.ready.exception()  # nobody may be waiting any more
        for run in list(self._commands.values()):
            run.has_failed(ended_error())
        self._commands.clear()
        for _, descriptors in self._outbox:
            close_all(descriptors)
        self._outbox.clear()
        for listed in self._listed:
            close_all(listed.descriptors)
        self._listed.clear()
        if not self._listing.done():
            self._listing.set_exception(ended_error())
            self._listing.exception()
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
        details={"reason": _SANDBOX_OVER},
    )


def is_sandbox_over(error: DsecError) -> bool:
    """Return whether an error says that a sandbox's first process has gone meanwhile."""
    return error.details.get("reason") == _SANDBOX_OVER


_COMMAND_STEPS: Final = {
    "command_user": ("user", "the user {user!r} is not known in the sandbox"),
    "command_directory": ("directory", "cannot enter the working directory {cwd!r}"),
    "command_exec": ("command", "cannot run {argv0!r}"),
    "command_slot": ("commands", "the sandbox runs as many commands as it can"),
    "command_terminal": ("terminal", "the sandbox has no further terminal"),
    "command_fork": ("processes", "the sandbox can have no further process"),
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
        errno.ENOSPC: ErrorCode.EXHAUSTED,
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
