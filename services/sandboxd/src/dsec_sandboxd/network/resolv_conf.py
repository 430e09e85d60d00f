"""The one file of a sandbox that its network needs: who resolves names for it."""

from __future__ import annotations

import os
from typing import Final

import structlog

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.network_policy import Address
from dsec_sandboxd.kernel.interface import Kernel, OpenMode

_log: Final = structlog.get_logger(__name__)

_RESOLV_CONF: Final = "/etc/resolv.conf"


async def write_resolv_conf(kernel: Kernel, local: str, nameserver: Address) -> None:
    """Write ``/etc/resolv.conf``, in place of whatever a layer has there, and of no link's target.

    Where that cannot be, names do not resolve and addresses work: the log says so.
    """
    text = f"nameserver {nameserver}\noptions timeout:2 attempts:2\n"
    try:
        try:
            descriptor = await _create(kernel, local)
        except DsecError as error:
            if error.code is ErrorCode.NOT_FOUND:
                await kernel.make_directory(local, "/etc", parents=True)
            elif error.code is ErrorCode.CONFLICT:
                await kernel.unlink(local, _RESOLV_CONF)
            else:
                raise
            descriptor = await _create(kernel, local)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except (DsecError, OSError) as error:
        _log.warning("resolv_conf_not_written", local=local, error=str(error))


async def _create(kernel: Kernel, local: str) -> int:
    return await kernel.open_file(local, _RESOLV_CONF, OpenMode.CREATE)
