"""The handle of one sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dsec.actions import Acting
from dsec.channel import Channel
from dsec.creating import argv_of, command_of
from dsec.file_watch import FileWatch
from dsec.files import Files
from dsec.handle import Closing, OfSandbox
from dsec.long_arguments import send_ahead
from dsec.long_input import is_long, run_started
from dsec.network import Network, PortStream, Tunnel, open_port
from dsec.one_shot import look_at, run_once
from dsec.process import Process, list_processes
from dsec.results import ExecResult
from dsec.session import Session
from dsec.snapshots import Snapshotted
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.wire import sandbox as wire
from dsec_common.wire.base import Message
from dsec_common.wire.exec import (
    ArgumentsAdded,
    CancelExec,
    ExecInfo,
    ExecList,
    StartExec,
    TerminalSize,
)
from dsec_common.wire.files import FileInfo
from dsec_common.wire.life import PatchSandbox, PauseSandbox, ResumeSandbox, TouchSandbox
from dsec_common.wire.sandbox import (
    MAX_OUTPUT_BYTES,
    DeleteSandbox,
    EndCause,
    ExecCommand,
    InspectSandbox,
    SandboxCreated,
    SandboxDeleted,
    SandboxInfo,
)

_START_TIMEOUT_S: Final = 30.0
_CANCEL_TIMEOUT_S: Final = 5.0
_INSPECT_TIMEOUT_S: Final = 10.0
_FILE_TIMEOUT_S: Final = 30.0
_DELETE_TIMEOUT_S: Final = 60.0


class Sandbox(Closing, Acting, Snapshotted):
    """A sandbox that runs, or did.

    As an async context manager it deletes the sandbox at the end. One that is not used so lives
    until :meth:`delete`, its ``ttl_s`` or the end of its node.

    Attributes:
        id: ``<node>.<local>``.
        created: what the node said at creation; None for a handle made from an id.
    """

    def __init__(
        self,
        channel: Channel,
        sandbox_id: str,
        created: SandboxCreated | None,
        first_argv: tuple[str, ...] = (),
    ) -> None:
        OfSandbox.__init__(self, channel, ScopedId.parse(sandbox_id))
        self.id = sandbox_id
        self.created = created
        self._first_argv = first_argv
        self._action = ""

    def __repr__(self) -> str:
        return f"Sandbox({self.id!r})"

    async def _leave(self) -> None:
        await self.delete()

    def _within_action(self, action_id: str) -> Sandbox:
        inside = Sandbox(self._channel, self.id, self.created, self._first_argv)
        inside._action = action_id
        return inside

    @property
    def node(self) -> str:
        """The node it runs on."""
        return self._scoped.owner

    @property
    def first_result(self) -> ExecResult | None:
        """How the command of its create request ended; None when it had none.

        Raises:
            DsecError: why the command was not run, or why what came of it is not known.
        """
        if self.created is None or not self._first_argv:
            return None
        if self.created.error is not None:
            raise self.created.error.to_error()
        if self.created.result is None:
            return None
        return ExecResult.of(self.id, self._first_argv, self.created.result)

    def _files(self, user: str, timeout_s: float = _FILE_TIMEOUT_S) -> Files:
        return Files(self._channel, self._scoped, user=user, timeout_s=timeout_s)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: str | bytes = b"",
        timeout_s: float = 60.0,
        output_limit_bytes: int = MAX_OUTPUT_BYTES,
        merge_stderr: bool = False,
        check: bool = False,
    ) -> ExecResult:
        """Run one command and return when it has ended. It is never run twice.

        When the connection or the node's daemon is lost meanwhile, the node is asked again for the
        same command: it runs on, and its result is kept for a while. A caller that is cancelled
        has its whole process tree killed.

        Args:
            command: a line for the sandbox's ``/bin/sh``, or program and arguments.
            env: variables on top of the sandbox's own.
            cwd: working directory; empty for the sandbox's own.
            user: name or ``uid[:gid]`` in the sandbox; empty for the sandbox's own.
            stdin: given to the command, then end of file; of any length.
            timeout_s: after it the whole process tree is ended; the output so far is kept.
            output_limit_bytes: kept of each stream, at most 256 KiB.
            merge_stderr: standard error goes where standard output goes.
            check: raise when the command does not succeed.

        Raises:
            CommandFailed: with ``check``, unless it ended by itself with code 0.
            DsecError: ``not_found`` for a program that does not exist, ``expired`` when the
                sandbox has ended or ends meanwhile, ``invalid``, ``timeout`` when its node does
                not answer.
        """
        message = command_of(
            command,
            env=env,
            cwd=cwd,
            user=user,
            stdin=stdin,
            timeout_s=timeout_s,
            output_limit_bytes=output_limit_bytes,
            merge_stderr=merge_stderr,
            action=self._action,
        )

        if is_long(message):
            result = await run_started(message, self._start)
            return result.check() if check else result

        async def ask(command: ExecCommand, wait_s: float) -> wire.ExecResult:
            return await self._channel.bus.request(
                self._subject("exec"), command, wire.ExecResult, timeout_s=wait_s
            )

        try:
            reply = await run_once(message, ask, lambda: look_at(self.inspect))
        except asyncio.CancelledError:
            await self._end_command(message.message_id)
            raise
        result = ExecResult.of(self.id, message.argv, reply)
        return result.check() if check else result

    async def _end_command(self, message_id: str) -> None:
        """Have a command ended that nobody waits for any more; one that is over is fine, too."""
        with contextlib.suppress(DsecError):
            await self._channel.bus.request(
                self._subject("cancel_exec"),
                CancelExec(exec_id=message_id, grace_s=0.0),
                ExecInfo,
                timeout_s=_CANCEL_TIMEOUT_S,
            )

    async def start(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: bool = False,
        merge_stderr: bool = False,
        terminal: tuple[int, int] | None = None,
        timeout_s: float = 0.0,
        labels: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a command and return at once; it runs until it ends or is ended.

        Args:
            command: a line for the sandbox's ``/bin/sh``, or program and arguments.
            env: variables on top of the sandbox's own.
            cwd: working directory; empty for the sandbox's own.
            user: name or ``uid[:gid]`` in the sandbox; empty for the sandbox's own.
            stdin: it is given input by ``Process.write``; else its input is empty.
            merge_stderr: standard error goes where standard output goes.
            terminal: rows and columns of a terminal to run it on; it carries input, too.
            timeout_s: after it the whole process tree is ended; 0 means never.
            labels: the caller's own, for listings.

        Raises:
            DsecError: ``invalid``; ``exhausted`` when the sandbox has no further terminal or
                process to give; ``expired`` when it has ended.
        """
        size = TerminalSize(rows=terminal[0], columns=terminal[1]) if terminal else None
        message = StartExec(
            argv=argv_of(command),
            env=dict(env or {}),
            cwd=cwd,
            user=user,
            stdin=stdin,
            merge_stderr=merge_stderr,
            terminal=size,
            timeout_s=timeout_s,
            labels=dict(labels or {}),
            action=self._action,
        )
        return await self._start(message)

    async def _start(self, message: StartExec) -> Process:
        message = await send_ahead(
            message, lambda piece: self._ask("add_arguments", piece, ArgumentsAdded)
        )
        info = await self._ask("start_exec", message, ExecInfo)
        return self.process(info.exec_id)

    def process(self, exec_id: str) -> Process:
        """Return the handle of a started command by its id; nothing is asked."""
        return Process(self._channel, self._scoped, exec_id)

    async def processes(
        self, *, labels: Mapping[str, str] | None = None, include_ended: bool = True
    ) -> list[ExecInfo]:
        """Return the started commands, oldest first; those that ended are kept for a while."""
        return await list_processes(
            lambda message: self._ask("list_execs", message, ExecList), labels, include_ended
        )

    async def session(
        self,
        *,
        shell: str | Sequence[str] = ("/bin/sh",),
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
    ) -> Session:
        """Return a shell that keeps its directory, variables and functions between commands."""
        argv = (shell,) if isinstance(shell, str) else tuple(shell)
        process = await self.start(argv, env=env, cwd=cwd, user=user, stdin=True)
        return await Session(process).open()

    # --- Files --------------------------------------------------------------------------------

    async def read_file(self, path: str, *, user: str = "root") -> bytes:
        """Return a regular file's content.

        Raises:
            DsecError: ``not_found``, ``invalid`` for what is no regular file, ``denied``;
                ``conflict`` when it kept changing while it was read.
        """
        return await self._files(user).read(path)

    async def read_text(self, path: str, *, user: str = "root") -> str:
        """Return a file's content as UTF-8; what is not UTF-8 becomes U+FFFD."""
        return (await self.read_file(path, user=user)).decode("utf-8", errors="replace")

    async def write_file(
        self, path: str, data: bytes | str, *, mode: int | None = None, user: str = "root"
    ) -> None:
        """Put ``data`` (text as UTF-8) at ``path``; missing parent directories are made.

        Readers see the old file or all of the new one: it takes the place of the old one, whose
        other names (hard links) keep the old content. It has the old one's owner, and without
        ``mode`` its mode; a new file is 0644. A link at ``path`` is followed.

        Raises:
            DsecError: ``invalid`` for an impossible path, ``denied``, ``exhausted`` when the
                sandbox's disk is full.
        """
        body = data.encode() if isinstance(data, str) else data
        await self._files(user).write(path, body, mode=mode)

    async def upload(self, local: str | os.PathLike[str], path: str, *, user: str = "root") -> int:
        """Copy a local file or directory to ``path``; see :meth:`write_file`.

        A new file has the permission bits of the local one. A directory keeps modes, times, links
        and empty directories; what is at ``path`` already and not in it stays. Each of its files
        appears whole; the directory does not in one step.

        Returns:
            The size in bytes of a file; the number of files of a directory.
        """
        source = Path(local)
        if source.is_dir():  # noqa: ASYNC240  one stat before it is all read
            return await self._files(user).upload_tree(source, path)
        return await self._files(user).upload(source, path)

    async def download(
        self, path: str, local: str | os.PathLike[str], *, user: str = "root"
    ) -> int:
        """Copy a file or a directory from the sandbox to ``local``.

        Nothing changes at ``local`` before all of it is here and its hash verified. A directory
        keeps modes, times, links (a file with several names becomes several files) and empty
        directories; what is at ``local`` already and not in it stays.

        Returns:
            The size in bytes of a file; the number of files of a directory.
        """
        return await self._files(user).download_whole(path, Path(local))

    async def stat(self, path: str, *, user: str = "root") -> FileInfo:
        """Return what ``path`` is; a symbolic link is not followed."""
        return await self._files(user).stat(path)

    async def list_directory(self, path: str, *, user: str = "root") -> list[FileInfo]:
        """Return a directory's entries, sorted by name."""
        return await self._files(user).list(path)

    async def make_directory(
        self, path: str, *, mode: int = 0o755, parents: bool = True, user: str = "root"
    ) -> None:
        """Create a directory; with ``parents`` those above it, and an existing one is fine."""
        await self._files(user).make_directory(path, mode=mode, parents=parents)

    async def move(
        self, path: str, target: str, *, replace: bool = True, user: str = "root"
    ) -> None:
        """Move a file or a directory inside the sandbox; one of a layer is copied, then removed.

        A ``target`` that ends in a slash is the directory that it goes into, else its new path.

        Raises:
            DsecError: ``not_found``, ``denied``, ``invalid``, ``exhausted``; ``conflict`` for a
                directory that is not empty at ``target``, and without ``replace`` for anything.
        """
        await self._files(user).move(path, target, replace=replace)

    async def copy(
        self, path: str, target: str, *, replace: bool = True, user: str = "root"
    ) -> int:
        """Copy a file or a whole directory as it is; return how many entries that were.

        It appears whole, and no link is followed. Raises as :meth:`move`.
        """
        return await self._files(user).copy(path, target, replace=replace)

    async def remove(self, path: str, *, recursive: bool = False, user: str = "root") -> int:
        """Delete a file, a link or an empty directory; with ``recursive`` a whole one.

        No link is followed.

        Returns:
            How many names are gone.

        Raises:
            DsecError: ``not_found``, ``denied``; ``conflict`` for a directory that is not empty.
        """
        return await self._files(user).remove(path, recursive=recursive)

    def watch(self, path: str, *, recursive: bool = False, user: str = "root") -> FileWatch:
        """Watch a directory, and with ``recursive`` all below it; see :class:`FileWatch`."""
        return self._files(user).watch(path, recursive=recursive)

    # --- Network ------------------------------------------------------------------------------

    @property
    def network(self) -> Network:
        """What it may reach."""
        return Network(self._channel, self._scoped)

    async def open_port(
        self, port: int, *, host: str = "127.0.0.1", timeout_s: float = 10.0
    ) -> PortStream:
        """Return a connection to what listens on a TCP port inside, with any network or none.

        Raises:
            DsecError: ``unavailable`` when nothing listens there; ``timeout``; ``exhausted`` when
                too many connections are open.
        """
        return await open_port(self._channel, self._scoped, port, host=host, timeout_s=timeout_s)

    async def forward(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        local_host: str = "127.0.0.1",
        local_port: int = 0,
    ) -> Tunnel:
        """Listen on a local TCP port, each connection to which ends at a port inside.

        Use it as an async context manager, or close it; it needs this client.

        Args:
            port: the port inside.
            host: the address inside that it listens on.
            local_host: where to listen here.
            local_port: 0 takes any free one; see :attr:`Tunnel.local_port`.

        Raises:
            DsecError: ``invalid`` when the local port cannot be had.
        """

        async def open_stream() -> PortStream:
            return await self.open_port(port, host=host)

        return await Tunnel(open_stream, port, local_host, local_port).start()

    # --- Life ---------------------------------------------------------------------------------

    async def inspect(self) -> SandboxInfo:
        """Return the sandbox as its node knows it; the cause of its end is kept for a while."""
        return await self._change("inspect", InspectSandbox())

    async def pause(self) -> SandboxInfo:
        """Stop every process in it; on return all stand still, and so do commands' time limits.

        The next request has it go on. Its time to live counts on. Any number of times.

        Raises:
            DsecError: ``expired`` when it is over; ``timeout`` when a process cannot be stopped.
        """
        return await self._change("pause", PauseSandbox())

    async def resume(self) -> SandboxInfo:
        """Have it go on, as the next request would; any number of times.

        Raises:
            DsecError: ``expired`` when it is over.
        """
        return await self._change("resume", ResumeSandbox())

    async def touch(
        self, ttl_s: float | None = None, *, idle_ttl_s: float | None = None
    ) -> SandboxInfo:
        """Keep it for longer: its time to live and its idle time begin anew. Wakes nothing.

        Args:
            ttl_s: a new time to live, from now; 0 means no end. None keeps its own.
            idle_ttl_s: likewise.

        Raises:
            DsecError: ``expired`` when it is over; ``invalid``.
        """
        return await self._change("touch", TouchSandbox(ttl_s=ttl_s, idle_ttl_s=idle_ttl_s))

    async def set_labels(self, labels: Mapping[str, str | None]) -> SandboxInfo:
        """Change its labels; None removes one, and what is not named stays. Wakes nothing.

        Raises:
            DsecError: ``expired`` when it is over; ``invalid``, and then none is changed.
        """
        return await self._change("patch", PatchSandbox(labels=dict(labels)))

    async def _change(self, verb: str, message: Message) -> SandboxInfo:
        return await self._ask(verb, message, SandboxInfo, timeout_s=_INSPECT_TIMEOUT_S)

    async def delete(self) -> EndCause:
        """End it and return why it ended; any number of times, from every state.

        When it returns, the sandbox holds nothing any more. One that is gone so long that its node
        does not remember it counts as deleted.
        """
        try:
            reply = await self._ask(
                "delete", DeleteSandbox(), SandboxDeleted, timeout_s=_DELETE_TIMEOUT_S
            )
        except DsecError as error:
            if error.code in {ErrorCode.NOT_FOUND, ErrorCode.EXPIRED}:
                return EndCause.DELETED
            raise
        return reply.end_cause
