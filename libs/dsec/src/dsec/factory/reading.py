"""A layer's files on this machine, where they are looked through."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec.archive import PlainFile
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.files import FileKind
from dsec_common.wire.layer import LayerInfo, LayerKind

if TYPE_CHECKING:
    from dsec.client import DSecClient
    from dsec.sandbox import Sandbox

#: What every sandbox has of its own: never of a layer.
_OWN: Final = frozenset({"proc", "dev", "sys"})
_TIMEOUT_S: Final = 600.0
_MARK: Final = ".dsec-factory"
_EMPTY: Final = ("dsec-factory-nothing", "1")


async def read_layer(client: DSecClient, layer: LayerInfo, target: Path) -> None:
    """Copy a layer's files to a new directory.

    They come out of a sandbox that has this layer and no program that would be run: its files are
    read by the node's own, which follows no link. Devices, pipes and sockets stay behind, and what
    lies at ``/proc``, ``/dev`` and ``/sys``, where no sandbox shows it.

    Args:
        client: connected.
        layer: of any kind.
        target: is made.

    Raises:
        DsecError: as ``create_sandbox`` and ``download``; ``timeout``.
    """
    await asyncio.to_thread(target.mkdir)
    if layer.kind is LayerKind.BASE:
        making = client.create_sandbox(layer.reference)
    elif layer.kind is LayerKind.WORKSPACE:
        making = client.create_sandbox(await _nothing(client), workspace=layer.reference)
    else:
        making = client.create_sandbox(await _nothing(client), toolkits=[layer.reference])
    async with await making as sandbox:
        for entry in await sandbox.list_directory("/"):
            name = entry.path.rpartition("/")[2]
            # By its content, too: whoever makes layers may call anything so.
            is_mark = name == _MARK and entry.kind is FileKind.FILE and not entry.size_bytes
            if name in _OWN or is_mark:
                continue
            here = target / name
            if entry.kind is FileKind.SYMLINK:
                here.symlink_to(entry.link_target)
            elif entry.kind is not FileKind.OTHER:
                await download_within(sandbox, f"/{name}", here)


async def download_within(sandbox: Sandbox, path: str, here: Path) -> None:
    """Copy a file or directory of whoever made it: a hole of a terabyte ends at a time.

    Raises:
        DsecError: as ``download``; ``timeout``.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await sandbox.download(path, here)
    except TimeoutError:
        raise DsecError(
            ErrorCode.TIMEOUT, f"{path} could not be read within {_TIMEOUT_S:g} s", retryable=False
        ) from None


async def _nothing(client: DSecClient) -> str:
    """Return a base with nothing in it that a sandbox could run."""
    name, version = _EMPTY
    try:
        found = await client.layers.inspect(f"{name}@{version}")
    except DsecError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        found = await client.layers.import_files(
            [PlainFile(_MARK, b"")], kind=LayerKind.BASE, name=name, version=version
        )
    return found.reference


async def content_at(sandbox: Sandbox, path: str, size_max: int) -> bytes | None:
    """Return a file's content; None where no file of at most ``size_max`` bytes is."""
    try:
        found = await sandbox.stat(path)
        if found.kind is not FileKind.FILE or found.size_bytes > size_max:
            return None
        return await sandbox.read_file(path)
    except DsecError as error:
        if error.code in {ErrorCode.NOT_FOUND, ErrorCode.INVALID}:
            return None
        raise
