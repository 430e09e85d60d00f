"""Commands as Inspect wants them: input and output of any size, and how they ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsec.process import Process
from dsec.sandbox import Sandbox
from dsec_common.errors import DsecError, ErrorCode


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended. ``truncated`` says that a stream was longer than what is kept of it."""

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    timed_out: bool


async def run(
    sandbox: Sandbox,
    command: Sequence[str],
    *,
    stdin: bytes | None,
    cwd: str,
    env: Mapping[str, str],
    user: str,
    timeout_s: float,
    output_limit_bytes: int,
) -> Outcome:
    """Run a command once; when the caller gives up, its whole process tree is ended.

    Raises:
        DsecError: as :meth:`Sandbox.start`; why it never ran.
    """
    async with await sandbox.start(
        list(command),
        env=env,
        cwd=cwd,
        user=user,
        stdin=stdin is not None,
        timeout_s=timeout_s,
    ) as process:
        feeding = asyncio.ensure_future(_feed(process, stdin)) if stdin is not None else None
        try:
            result = await process.output(output_limit_bytes=output_limit_bytes)
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.wait({feeding})
    return Outcome(
        exit_code=result.exit_code,
        signal=result.signal,
        stdout=result.stdout,
        stderr=result.stderr,
        truncated=result.stdout_truncated or result.stderr_truncated,
        timed_out=result.timed_out,
    )


async def _feed(process: Process, data: bytes) -> None:
    """Give a command its input; one that stops reading is none the worse for it."""
    with contextlib.suppress(DsecError):
        try:
            await process.write(data)
        except DsecError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
        await process.close_stdin()
