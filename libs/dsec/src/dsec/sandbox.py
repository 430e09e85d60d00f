"""The handle of one sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from dsec.channel import ANSWER_PATIENCE_S, Channel
from dsec.files import Files
from dsec.results import ExecResult
from dsec_common import subjects
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode, invalid
from dsec_common.subjects import ScopedId
from dsec_common.wire import sandbox as wire
from dsec_common.wire.sandbox import (
    MAX_OUTPUT_BYTES,
    DeleteSandbox,
    EndCause,
    ExecCommand,
    FileInfo,
    InspectSandbox,
    SandboxCreated,
    SandboxDeleted,
    SandboxInfo,
    SandboxState,
)

#: The node ends a command at its timeout (TERM, then KILL) and answers; this much later we give up.
_EXEC_BACKSTOP_S: Final = 15.0
#: How often a command without an answer is looked after, and how long its answer may take when its
#: sandbox has just ended.
_LOOK_EVERY_S: Final = 5.0
_LAST_WORD_S: Final = 1.0
_INSPECT_TIMEOUT_S: Final = 10.0
_FILE_TIMEOUT_S: Final = 30.0
_DELETE_TIMEOUT_S: Final = 60.0


class Sandbox:
    """A sandbox that runs, or did.

    As an async context manager it deletes the sandbox at the end. One that is not used so lives
    until :meth:`delete`, its ``ttl_s`` or the end of its node.

    Attributes:
        id: ``<node>.<local>``.
        created: what the node said at creation; None for a handle made from an id.
    """

    def __init__(self, channel: Channel, sandbox_id: str, created: SandboxCreated | None) -> None:
        self._channel = channel
        self._scoped = ScopedId.parse(sandbox_id)
        self.id = sandbox_id
        self.created = created

    def __repr__(self) -> str:
        return f"Sandbox({self.id!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, error, traceback
        await self.delete()

    @property
    def node(self) -> str:
        """The node it runs on."""
        return self._scoped.owner

    def _subject(self, verb: str) -> str:
        return subjects.sandbox(self._channel.project, self._scoped, verb)

    def _files(self, user: str, timeout_s: float = _FILE_TIMEOUT_S) -> Files:
        return Files(self._channel, self._scoped, user=user, timeout_s=timeout_s)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        user: str = "root",
        stdin: str | bytes = b"",
        timeout_s: float = 60.0,
        output_limit_bytes: int = MAX_OUTPUT_BYTES,
        check: bool = False,
    ) -> ExecResult:
        """Run one command and return when it has ended. It is never run twice.

        Args:
            command: a line for the sandbox's ``/bin/sh``, or program and arguments.
            env: variables on top of the sandbox's own.
            cwd: working directory.
            user: name or ``uid[:gid]`` in the sandbox.
            stdin: given to the command, then end of file.
            timeout_s: after it the whole process tree is ended; the output so far is kept.
            output_limit_bytes: kept of each stream, at most 256 KiB.
            check: raise when the command does not succeed.

        Raises:
            CommandFailed: with ``check``, unless it ended by itself with code 0.
            DsecError: ``not_found`` for a program that does not exist, ``expired`` when the
                sandbox has ended or ends meanwhile, ``invalid``, ``timeout`` when its node does
                not answer.
        """
        if not isinstance(command, str | Sequence):
            raise invalid(f"a command is text or a list of texts, not {command!r}")
        argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
        if not all(isinstance(word, str) for word in argv):
            raise invalid(f"a command is text or a list of texts, not {command!r}")
        reply = await self._run(
            ExecCommand(
                argv=argv,
                env=dict(env or {}),
                cwd=cwd,
                user=user,
                stdin=stdin.encode() if isinstance(stdin, str) else stdin,
                timeout_s=timeout_s,
                output_limit_bytes=output_limit_bytes,
            )
        )
        result = ExecResult.of(self.id, argv, reply)
        return result.check() if check else result

    async def _run(self, command: ExecCommand) -> wire.ExecResult:
        """Return the answer to a command, or stop waiting when nobody can give it any more.

        A node whose daemon was killed does not answer for what ran there; started again, it knows
        that the sandbox is over.
        """
        answer = asyncio.create_task(
            self._channel.bus.request(
                self._subject("exec"),
                command,
                wire.ExecResult,
                # The node refuses a time that makes no sense; its answer is waited for.
                timeout_s=max(command.timeout_s, 0.0) + _EXEC_BACKSTOP_S,
            )
        )
        try:
            wait_s = _LOOK_EVERY_S
            over: DsecError | None = None
            while True:
                done, _ = await asyncio.wait({answer}, timeout=wait_s)
                if done:
                    return answer.result()
                if over is not None:
                    raise over
                over = await self._why_over()
                # Its node may be about to answer, and says more than we can.
                wait_s = _LOOK_EVERY_S if over is None else _LAST_WORD_S
        finally:
            answer.cancel()
            await asyncio.wait({answer})

    async def _why_over(self) -> DsecError | None:
        """Return the error for a command whose sandbox has ended; None when it has not."""
        try:
            info = await self.inspect()
        except DsecError as error:
            return error if error.code in {ErrorCode.NOT_FOUND, ErrorCode.EXPIRED} else None
        if info.state is not SandboxState.ENDED:
            return None
        return DsecError(
            ErrorCode.EXPIRED,
            f"sandbox {self.id} ended ({info.end_cause}) while the command ran; what it printed is "
            "lost",
            details={MAY_HAVE_HAPPENED: True, "end_cause": info.end_cause},
        )

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
        self, path: str, data: bytes | str, *, mode: int = 0o644, user: str = "root"
    ) -> None:
        """Put ``data`` (text as UTF-8) at ``path``; missing parent directories are made.

        Readers see the old file or all of the new one.

        Raises:
            DsecError: ``invalid`` for an impossible path, ``denied``, ``exhausted`` when the
                sandbox's disk is full.
        """
        body = data.encode() if isinstance(data, str) else data
        await self._files(user).write(path, body, mode=mode)

    async def upload(self, local: str | os.PathLike[str], path: str, *, user: str = "root") -> int:
        """Copy a local file, or a directory's regular files, to ``path``; see :meth:`write_file`.

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
        """Copy a file, or a directory's regular files, from the sandbox to ``local``.

        A local file is replaced only when all of the new one is there.

        Returns:
            The size in bytes of a file; the number of files of a directory.
        """
        files = self._files(user)
        if (await files.stat(path)).kind is wire.FileKind.DIRECTORY:
            return await files.download_tree(path, Path(local))
        return await files.download(path, Path(local))

    async def stat(self, path: str, *, user: str = "root") -> FileInfo:
        """Return what ``path`` is; a symbolic link is not followed."""
        return await self._files(user).stat(path)

    async def list_directory(self, path: str, *, user: str = "root") -> list[FileInfo]:
        """Return a directory's entries, sorted by name."""
        return await self._files(user).list(path)

    async def make_directory(self, path: str, *, mode: int = 0o755, user: str = "root") -> None:
        """Create a directory and its parents; an existing one is fine."""
        await self._files(user).make_directory(path, mode=mode)

    # --- Life ---------------------------------------------------------------------------------

    async def inspect(self) -> SandboxInfo:
        """Return the sandbox as its node knows it; the cause of its end is kept for a while."""
        return await self._channel.ask(
            self._subject("inspect"),
            InspectSandbox(),
            SandboxInfo,
            timeout_s=_INSPECT_TIMEOUT_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def delete(self) -> EndCause:
        """End it and return why it ended; any number of times, from every state.

        When it returns, the sandbox holds nothing any more. One that is gone so long that its node
        does not remember it counts as deleted.
        """
        try:
            reply = await self._channel.ask(
                self._subject("delete"),
                DeleteSandbox(),
                SandboxDeleted,
                timeout_s=_DELETE_TIMEOUT_S,
                repeatable=True,
                patience_s=ANSWER_PATIENCE_S,
            )
        except DsecError as error:
            if error.code in {ErrorCode.NOT_FOUND, ErrorCode.EXPIRED}:
                return EndCause.DELETED
            raise
        return reply.end_cause
