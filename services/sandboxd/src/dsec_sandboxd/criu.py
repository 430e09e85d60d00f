"""Why process memory is no part of a snapshot here, as ``criu check`` itself tells.

CRIU is asked and never driven: a snapshot with memory would have to put back every process of a
sandbox with its sockets, terminals, timers and its filter, or none. Until this version can, the
answer is ``unsupported`` on every host; which of the reasons holds is what an operator can act on.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.programs import run_program

_TIMEOUT_S: Final = 10.0
_SAID_MAX: Final = 200


class Criu:
    """Asks the host's CRIU, once for each program that is installed."""

    def __init__(self) -> None:
        self._known: tuple[str, int, int] | None = None
        self._why = ""
        self._lock = asyncio.Lock()

    async def refusal(self) -> DsecError:
        """Return why process memory is not part of a snapshot; nothing has been done."""
        return DsecError(
            ErrorCode.UNSUPPORTED,
            f"a snapshot with process memory needs CRIU: {await self._reason()}; take one without "
            "memory",
            details={"reason": "criu"},
        )

    async def _reason(self) -> str:
        program = shutil.which("criu")
        if program is None:
            return "it is not installed on the node"
        status = os.stat(program)  # noqa: PTH116  of a file that is in the cache
        installed = (program, status.st_ino, status.st_mtime_ns)
        async with self._lock:
            if self._known != installed:
                self._why, self._known = await _check(program), installed
            return self._why


async def _check(program: str) -> str:
    try:
        status, output = await run_program([program, "check"], listen=True, deadline_s=_TIMEOUT_S)
    except TimeoutError:
        return f"`criu check` did not end within {_TIMEOUT_S:g} s"
    except OSError as error:
        return f"`criu check` does not run here ({error.strerror})"
    if status:
        lines = output.decode(errors="replace").strip().splitlines()
        said = lines[-1][:_SAID_MAX] if lines else "no word why"
        return f"`criu check` fails on this kernel (status {status}: {said})"
    return "`criu check` passes, but this version of dsec does not drive it"
