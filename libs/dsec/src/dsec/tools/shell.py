"""``shell``: commands, bounded in time and output, that leave no process behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final, Self, cast

from dsec.tools.tool import Tool, tool_call
from dsec_common.errors import DsecError, ErrorCode, from_os_error

OUTPUT_MAX_BYTES: Final = 256 * 1024
"""Of each output, the beginning is kept."""

_PIECE_BYTES: Final = 64 * 1024
#: A pipe holds as much as one of them takes.
_LAST_READS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Output:
    """What came of a command.

    Attributes:
        exit_code: negative for the number of a signal that ended it.
        stdout: the beginning of it, as text.
        stderr: the same.
        truncated: whether there was more than is kept.
    """

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool

    @property
    def ok(self) -> bool:
        """Whether the command exited with 0."""
        return self.exit_code == 0


class Shell(Tool):
    """``shell``. It needs ``run_command``."""

    @tool_call("run_command")
    def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: str = "",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Output:
        """Run a line of the shell, or a program with its arguments.

        When it has exited, the processes that it left in its group are killed.

        Raises:
            DsecError: ``command_timeout`` when it had to be ended, with the output's beginning in
                ``details``; ``not_found`` when there is no such program or directory.
        """
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=cwd,
                env=None if env is None else {**os.environ, **env},
                start_new_session=True,
            )
        except OSError as error:
            raise from_os_error("run", error, error.filename or words[0]) from error
        with _Run(process, stdin.encode("utf-8")) as running:
            late = not running.wait(timeout_s)
        out, err = (bytes(it).decode("utf-8", "replace") for it in running.kept)
        if late:
            raise DsecError(
                ErrorCode.COMMAND_TIMEOUT,
                f"the command was ended after {timeout_s:g} s",
                details={"stdout": out, "stderr": err},
            )
        code = process.returncode
        self.note(status="ok" if code == 0 else str(code))
        return Output(exit_code=code, stdout=out, stderr=err, truncated=running.truncated)


class _Run:
    """A process with its pipes, served until it is over; then its group is killed.

    It is over when it has exited, though somebody else may still hold its outputs open.
    """

    def __init__(self, process: subprocess.Popen[bytes], text: bytes) -> None:
        assert process.stdin is not None  # noqa: S101  all three were asked for
        assert process.stdout is not None  # noqa: S101  same
        assert process.stderr is not None  # noqa: S101  same
        self.kept = (bytearray(), bytearray())
        self.truncated = False
        self._process = process
        self._unsent = memoryview(text)
        self._stdin = process.stdin
        self._outputs = {process.stdout: self.kept[0], process.stderr: self.kept[1]}
        self._exit = os.pidfd_open(process.pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._exit, selectors.EVENT_READ)
        self._selector.register(self._stdin, selectors.EVENT_WRITE)
        for pipe in self._outputs:
            self._selector.register(pipe, selectors.EVENT_READ)
        for pipe in (self._stdin, *self._outputs):
            os.set_blocking(pipe.fileno(), False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in self._outputs:
            # What it wrote last is in the pipe; whoever else holds it may write for ever.
            for _read in range(_LAST_READS):
                if pipe.closed or not self._read(pipe):
                    break
        self._selector.close()
        os.close(self._exit)
        for pipe in (self._stdin, *self._outputs):
            pipe.close()

    def wait(self, timeout_s: float) -> bool:
        """Serve the pipes; return whether the process exited in time."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                if key.fileobj == self._exit:
                    return True
                if key.fileobj is self._stdin:
                    self._write()
                else:
                    self._read(cast("IO[bytes]", key.fileobj))
        return False

    def _write(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
            if self._unsent:
                return
        self._close(self._stdin)

    def _read(self, pipe: IO[bytes]) -> bool:
        """Take some output, and return whether there may be more now."""
        try:
            piece = os.read(pipe.fileno(), _PIECE_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self._close(pipe)
            return False
        kept = self._outputs[pipe]
        room = OUTPUT_MAX_BYTES - len(kept)
        kept += piece[:room]
        self.truncated |= len(piece) > room
        return True

    def _close(self, pipe: IO[bytes]) -> None:
        self._selector.unregister(pipe)
        pipe.close()
