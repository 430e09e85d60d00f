"""Commands with more input or arguments than fit into one message: started, fed in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.exec import StartExec

if TYPE_CHECKING:
    from dsec.process import Process
    from dsec.results import ExecResult
    from dsec_common.wire.sandbox import ExecCommand

#: What goes along with a command in its own message, which holds 1 MiB at most.
INLINE_BYTES_MAX: Final = 512 * 1024


def is_long(command: ExecCommand) -> bool:
    """Return whether a command is too long for one message."""
    # Four bytes are the most for one character.
    size = len(command.stdin) + 4 * sum(map(len, command.argv))
    return size > INLINE_BYTES_MAX


async def run_started(
    command: ExecCommand, start: Callable[[StartExec], Awaitable[Process]]
) -> ExecResult:
    """Run a command as a started one that is given its input while it runs; return its result.

    A caller that is cancelled ends it. What the command does not read of its input is dropped.

    Raises:
        DsecError: as ``Sandbox.exec``.
    """
    process = await start(
        StartExec(
            argv=command.argv,
            env=command.env,
            cwd=command.cwd,
            user=command.user,
            stdin=bool(command.stdin),
            merge_stderr=command.merge_stderr,
            timeout_s=command.timeout_s,
            action=command.action,
        )
    )
    async with process:
        reading = asyncio.ensure_future(
            process.output(output_limit_bytes=command.output_limit_bytes)
        )
        feeding = asyncio.ensure_future(_feed(process, command.stdin))
        either: set[asyncio.Future[Any]] = {reading, feeding}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await feeding  # whose failure nobody would wait for otherwise
            return await reading
        finally:
            reading.cancel()
            feeding.cancel()
            await asyncio.gather(reading, feeding, return_exceptions=True)


async def _feed(process: Process, data: bytes) -> None:
    if not data:
        return
    try:
        await process.write(data)
        await process.close_stdin()
    except DsecError as error:
        if error.code is not ErrorCode.CONFLICT:  # else it has read all it wants
            raise
