"""What running a command gives back."""

from __future__ import annotations

import shlex
from typing import Self

import msgspec

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire import sandbox as wire


class CommandFailed(DsecError):  # noqa: N818  the command failed, the platform did not
    """A command ran and did not succeed; raised only when the caller asked for ``check=True``.

    Its code is ``command_timeout`` or ``oom`` when that was the reason, otherwise ``invalid``.

    Args:
        result: how the command ended and what it printed.
    """

    def __init__(self, result: ExecResult) -> None:
        code, how = ErrorCode.INVALID, f"exited with {result.exit_code}"
        if result.timed_out:
            code, how = ErrorCode.COMMAND_TIMEOUT, f"was ended after {result.duration_s:.1f} s"
        elif result.oom and not result.ok:
            who = f" ({result.oom_process})" if result.oom_process else ""
            code, how = ErrorCode.OOM, f"ran out of memory{who}"
        elif result.signal is not None:
            how = f"was ended by signal {result.signal}"
        tail = result.stderr_text.strip() or result.stdout_text.strip()
        said = f": {tail[-500:]}" if tail else ""
        super().__init__(
            code,
            f"command {shlex.join(result.argv)[:200]} in sandbox {result.sandbox_id} {how}{said}",
            details={"exit_code": result.exit_code, "signal": result.signal},
        )
        self.result = result


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended and what it printed.

    Attributes:
        sandbox_id: where it ran.
        argv: what ran.
        exit_code: the command's own code, or None when a signal ended it.
        signal: the signal's number, or None.
        stdout: what it printed, at most the limit asked for; ``stdout_truncated`` says if more was.
        stderr: likewise.
        timed_out: the platform ended it at its timeout; the output so far is kept.
        oom: the out-of-memory killer ended a process of the sandbox meanwhile.
        duration_s: from start to end, measured by the node.
        oom_process: the name of that process; empty where the node's kernel does not tell.
        oom_pid: its process id inside; 0 when it was gone before it could be asked.
    """

    sandbox_id: str
    argv: tuple[str, ...]
    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    timed_out: bool
    oom: bool
    duration_s: float
    oom_process: str = ""
    oom_pid: int = 0

    @classmethod
    def of(cls, sandbox_id: str, argv: tuple[str, ...], reply: wire.ExecResult) -> Self:
        """Return the result that a node's reply tells of."""
        return cls(
            sandbox_id=sandbox_id,
            argv=argv,
            exit_code=reply.exit_code,
            signal=reply.signal,
            stdout=reply.stdout,
            stderr=reply.stderr,
            stdout_truncated=reply.stdout_truncated,
            stderr_truncated=reply.stderr_truncated,
            timed_out=reply.timed_out,
            oom=reply.oom,
            oom_process=reply.oom_process,
            oom_pid=reply.oom_pid,
            duration_s=reply.duration_s,
        )

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with code 0."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def stdout_text(self) -> str:
        """Standard output as UTF-8; what is not UTF-8 becomes U+FFFD."""
        return self.stdout.decode("utf-8", errors="replace")

    @property
    def stderr_text(self) -> str:
        """Standard error as UTF-8; what is not UTF-8 becomes U+FFFD."""
        return self.stderr.decode("utf-8", errors="replace")

    def check(self) -> Self:
        """Return the result itself.

        Raises:
            CommandFailed: unless the command ended by itself with code 0.
        """
        if not self.ok:
            raise CommandFailed(self)
        return self
