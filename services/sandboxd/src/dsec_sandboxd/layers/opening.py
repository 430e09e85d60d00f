"""From a node's settings to the back end of its layer store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dsec_sandboxd.layers.directory_backend import DirectoryBackend
from dsec_sandboxd.layers.nats_storage import NatsStorage
from dsec_sandboxd.layers.object_backend import ObjectBackend
from dsec_sandboxd.layers.s3_storage import S3Storage
from dsec_sandboxd.layers.urls import check_url

if TYPE_CHECKING:
    from dsec_common.bus import Bus
    from dsec_common.clock import Clock
    from dsec_sandboxd.layers.backend import InUse, LayerBackend
    from dsec_sandboxd.layers.object_storage import ObjectStorage


def backend_of(
    url: str,
    *,
    directory: Path,
    cache_bytes: int,
    node: str,
    bus: Bus,
    in_use: InUse,
    clock: Clock,
) -> LayerBackend:
    """Return the back end that ``url`` names; it is not open yet.

    Args:
        url: ``dir:/path``, ``nats:bucket`` or ``s3://bucket/prefix?endpoint=…``.
        directory: this node's own, for the cache of a remote store.
        cache_bytes: room of that cache.
        node: this node's name.
        bus: connected.
        in_use: says which digests this node uses.
        clock: dates things.

    Raises:
        DsecError: ``invalid`` for another URL.
    """
    check_url(url)
    scheme, _, rest = url.partition(":")
    if scheme == "dir":
        return DirectoryBackend(Path(rest), holder=node, clock=clock)
    storage: ObjectStorage = NatsStorage(bus, rest) if scheme == "nats" else S3Storage(url)
    return ObjectBackend(storage, directory, cache_bytes=cache_bytes, in_use=in_use, clock=clock)
