"""``shell``: commands, bounded in time and output, that leave no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

from dsec.tools.tool import Tool, tool_call
from dsec_common.errors import DsecError, ErrorCode, from_os_error

OUTPUT_MAX_BYTES: Final = 256 * 1024
"""Of each output, the beginning is kept."""

_PIECE_BYTES: Final = 64 * 1024


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

        When it is over, so are the processes that it left in its group.

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
        return self._over(process, stdin, timeout_s)

    def _over(self, process: subprocess.Popen[bytes], stdin: str, timeout_s: float) -> Output:
        deadline = time.monotonic() + timeout_s
        kept = [_Kept(process.stdout), _Kept(process.stderr)]
        writer = threading.Thread(target=_write, args=(process.stdin, stdin), daemon=True)
        writer.start()
        late = False
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            writer.join()
            for one in kept:
                one.finish()
        out, err = (bytes(one.data).decode("utf-8", "replace") for one in kept)
        if late:
            raise DsecError(
                ErrorCode.COMMAND_TIMEOUT,
                f"the command was ended after {timeout_s:g} s",
                details={"stdout": out, "stderr": err},
            )
        self.note(status="ok" if process.returncode == 0 else str(process.returncode))
        truncated = any(one.truncated for one in kept)
        return Output(exit_code=process.returncode, stdout=out, stderr=err, truncated=truncated)


class _Kept:
    """The beginning of a pipe, which is read to its end."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None  # noqa: S101  it was asked for
        self.data = bytearray()
        self.truncated = False
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while piece := os.read(self._pipe.fileno(), _PIECE_BYTES):
            room = OUTPUT_MAX_BYTES - len(self.data)
            self.data += piece[:room]
            self.truncated |= len(piece) > room

    def finish(self) -> None:
        self._thread.join()
        self._pipe.close()


def _write(pipe: IO[bytes] | None, text: str) -> None:
    assert pipe is not None  # noqa: S101  it was asked for
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(text.encode("utf-8"))
