"""What sandboxes use, put into what is told of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from dsec_common.errors import DsecError
from dsec_sandboxd.states import AWAKE_OR_ASLEEP

if TYPE_CHECKING:
    from dsec_common.wire.node import NodeSandboxes
    from dsec_common.wire.sandbox import SandboxInfo
    from dsec_sandboxd.kernel.interface import Kernel

#: After so many others have a turn: each costs a few reads from the kernel.
_AT_ONCE: Final = 32


async def with_usage(kernel: Kernel, info: SandboxInfo) -> SandboxInfo:
    """Return what is told of a sandbox with what it uses, if it runs or stands still.

    Raises:
        DsecError: it is gone meanwhile, or what the kernel did not tell.
    """
    if info.state not in AWAKE_OR_ASLEEP:
        return info
    usage = await kernel.usage(info.sandbox_id.partition(".")[2])
    return msgspec.structs.replace(
        info,
        memory_bytes_used=usage.memory_bytes,
        cpu_seconds_used=usage.cpu_s,
        pids_used=usage.pids,
    )


async def page_with_usage(kernel: Kernel, page: NodeSandboxes) -> NodeSandboxes:
    """Return a page of sandboxes with what each uses; of one that is going just now, without."""
    told = []
    for number, info in enumerate(page.sandboxes, 1):
        try:
            told.append(await with_usage(kernel, info))
        except DsecError:
            told.append(info)
        if not number % _AT_ONCE:
            await asyncio.sleep(0)
    return msgspec.structs.replace(page, sandboxes=tuple(told))
