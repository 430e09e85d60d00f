"""Looking through a layer that is there, whoever made it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dsec.factory.credentials import FILES
from dsec.factory.evidence import Evidence
from dsec.factory.leaks import Finding, look_through
from dsec.factory.reading import read_layer

if TYPE_CHECKING:
    from dsec.client import DSecClient


def contents(paths: Iterable[Path]) -> list[bytes]:
    """Return what is in files, and in all files below directories; links are passed over."""
    found = []
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        found += [file.read_bytes() for file in files if file.is_file() and not file.is_symlink()]
    return found


async def check_layer(
    client: DSecClient,
    reference: str,
    evidence: Evidence,
    scratch: Path,
    *,
    allow: tuple[str, ...] = (),
) -> list[Finding]:
    """Return why a layer may be no environment; of a base or toolkit, too.

    What ``pack_diff`` leaves out is no finding here: a base has caches of its own.

    Args:
        client: connected.
        reference: of the layer.
        evidence: what must not be in it.
        scratch: an empty directory of this machine.
        allow: patterns of paths that are not looked into.

    Raises:
        DsecError: ``not_found``; as :func:`dsec.factory.reading.read_layer`.
    """
    tree = scratch / "layer"
    await read_layer(client, await client.layers.inspect(reference), tree)
    return await asyncio.to_thread(look_through, tree, evidence, residue=FILES, allow=allow)
