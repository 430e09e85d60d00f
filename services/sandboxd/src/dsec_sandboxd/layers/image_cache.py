"""Images of a remote store on this node's disk: fetched once, checked, bounded, the oldest go.

A file under its digest's name is complete. Whatever happens in between, a half-fetched file has
another name, and a file is hashed before its first use by a process, so that a wrong one is never
mounted.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from dsec_common.errors import DsecError, ErrorCode, from_os_error
from dsec_sandboxd.layers.erofs import image_digest, read_superblock
from dsec_sandboxd.layers.images import Identity, identity_of
from dsec_sandboxd.layers.limits import ImportWatch
from dsec_sandboxd.layers.names import DIGEST_PREFIX, is_digest
from dsec_sandboxd.metrics import LAYER_CACHE_BYTES, LAYER_EVICTIONS, LAYER_FETCHES

if TYPE_CHECKING:
    from prometheus_client import Gauge

    from dsec_sandboxd.layers.backend import InUse

_log: Final = structlog.get_logger(__name__)

_SUFFIX: Final = ".erofs"
_PART: Final = ".part"

Source = Callable[[], Awaitable[tuple[int, AsyncGenerator[bytes]]]]
"""Returns an image's size in bytes and its content; raises ``not_found`` when there is none."""


class ImageCache:
    """The images in one directory, at most ``bytes_max`` in all. One process owns it.

    Attributes:
        directory: where they are.
        bytes_max: their room; what is in use may never be evicted, so a fetch can find none.
        in_use: says which digests must not be evicted.
        gauge: is told how much room they take.
    """

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        in_use: InUse,
        gauge: Gauge | None = LAYER_CACHE_BYTES,
    ) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._in_use = in_use
        self._gauge = gauge
        #: Sizes by digest, the least recently used first; what is being fetched is counted too.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._verified: dict[str, Identity] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self.fetches = 0
        self.evictions = 0

    @property
    def used_bytes(self) -> int:
        """What all images take, those being fetched included."""
        return sum(self._sizes.values())

    def open(self) -> None:
        """Make the directory, forget half-fetched files, and learn what is there.

        Blocking. Files are ordered by their last use, which their access times tell. Nothing is
        evicted yet, even beyond a bound that is smaller now: what living sandboxes use is not
        known before the node has taken them over.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found: list[tuple[int, str, int]] = []
        for path in self._directory.iterdir():
            digest = DIGEST_PREFIX + path.name.removesuffix(_SUFFIX)
            if path.name.endswith(_SUFFIX) and is_digest(digest):
                status = path.stat()
                found.append((status.st_atime_ns, digest, status.st_size))
            elif path.name.endswith(_PART):
                path.unlink()
        self._sizes = OrderedDict((digest, size) for _, digest, size in sorted(found))

    def path(self, digest: str) -> Path:
        """Return where an image is, or would be."""
        return self._directory / f"{digest.removeprefix(DIGEST_PREFIX)}{_SUFFIX}"

    def is_ready(self, digest: str) -> bool:
        """Tell whether an image is here and is the file that was checked; counts as a use."""
        known = self._verified.get(digest)
        if known is None or known != identity_of(self.path(digest)):
            return False
        self._use(digest)
        return True

    async def ensure(self, digest: str, source: Source) -> Path:
        """Return an image's file, fetched unless it is here; concurrent calls fetch it once.

        A caller that is cancelled leaves the fetch to the others.

        Raises:
            DsecError: ``layer_error`` when the source has none or a wrong one, ``exhausted``
                when there is no room.
        """
        while not self.is_ready(digest):
            task = self._fetching.get(digest)
            if task is None:
                task = asyncio.create_task(self._bring(digest, source), name=f"fetch {digest}")
                self._fetching[digest] = task
                task.add_done_callback(self._fetched(digest))
            await asyncio.shield(task)
        return self.path(digest)

    def adopt(self, digest: str, image: Path) -> bool:
        """Take over an image that was just built and hashed; tell whether there was room."""
        size = image.stat().st_size
        try:
            self._reserve(digest, size)
        except DsecError:
            return False
        image.chmod(0o444)
        image.replace(self.path(digest))
        self._settle(digest)
        return True

    def drop(self, digest: str) -> None:
        """Forget an image."""
        self._sizes.pop(digest, None)
        self._verified.pop(digest, None)
        self.path(digest).unlink(missing_ok=True)

    async def close(self) -> None:
        """End the fetches."""
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- Fetching -----------------------------------------------------------------------------

    def _fetched(self, digest: str) -> Callable[[asyncio.Task[None]], None]:
        def done(task: asyncio.Task[None]) -> None:
            self._fetching.pop(digest, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.info("layer_not_fetched", digest=digest, error=str(error))

        return done

    async def _bring(self, digest: str, source: Source) -> None:
        path = self.path(digest)
        if path.exists() and digest not in self._verified:
            # From an earlier run: a crash may have come between its name and its bytes.
            if await asyncio.to_thread(_holds, path, digest):
                self._settle(digest)
                return
            _log.warning("cached_image_damaged", digest=digest)
            self.drop(digest)
        size, pieces = await source()
        part = self._directory / f"{uuid.uuid4().hex}{_PART}"
        async with aclosing(pieces):
            self._reserve(digest, size)
            try:
                await self._write(digest, size, pieces, part)
                await asyncio.to_thread(part.chmod, 0o444)
                part.replace(path)
            except BaseException as error:
                self._sizes.pop(digest, None)
                part.unlink(missing_ok=True)
                if isinstance(error, OSError):
                    raise from_os_error("fetch", error, "the node's cache of layers") from error
                raise
        self.fetches += 1
        LAYER_FETCHES.inc()
        self._settle(digest)

    async def _write(
        self, digest: str, size: int, pieces: AsyncGenerator[bytes], part: Path
    ) -> None:
        hashed, written = hashlib.sha256(), 0
        with part.open("xb", buffering=0) as file:

            def keep(piece: bytes) -> None:
                hashed.update(piece)
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]

            async for piece in pieces:
                written += len(piece)
                if written > size:
                    break
                await asyncio.to_thread(keep, piece)
        if written != size or DIGEST_PREFIX + hashed.hexdigest() != digest:
            raise DsecError(
                ErrorCode.LAYER_ERROR,
                f"the layer store gave something else for the image {digest}; import the layer "
                "again",
                details={"digest": digest, "reason": "damaged"},
            )
        read_superblock(part)

    # --- Room ---------------------------------------------------------------------------------

    def _use(self, digest: str) -> None:
        if digest in self._sizes:
            self._sizes.move_to_end(digest)

    def _settle(self, digest: str) -> None:
        path = self.path(digest)
        identity = identity_of(path)
        if identity is None:
            return
        status = path.stat()
        # What the next process orders by; nothing else needs the access time.
        os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
        self._verified[digest] = identity_of(path) or identity
        self._sizes[digest] = status.st_size
        self._use(digest)
        if self._gauge is not None:
            self._gauge.set(self.used_bytes)

    def _reserve(self, digest: str, size: int) -> None:
        self._sizes.pop(digest, None)
        self._evict(size)
        free = shutil.disk_usage(self._directory).free
        if self.used_bytes + size > self._bytes_max or size > free:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"the node's cache of layers has no room for {size} bytes: "
                f"{self.used_bytes} of {self._bytes_max} are in use, and {free} are free on the "
                "disk; end sandboxes, or give the node a larger layers_cache_bytes",
                details={"reason": "layer_cache_full"},
                retry_after_s=5.0,
            )
        self._sizes[digest] = size

    def _evict(self, size: int) -> None:
        """Remove the least recently used images until ``size`` more bytes fit, if they can."""
        if self.used_bytes + size <= self._bytes_max:
            return
        kept = {*self._in_use(), *self._fetching}
        kept_bytes = sum(self._sizes[digest] for digest in kept & self._sizes.keys())
        if size and kept_bytes + size > self._bytes_max:
            return  # nothing is thrown away in vain
        for digest in kept & self._sizes.keys():
            self._sizes.move_to_end(digest)
        for digest in [digest for digest in self._sizes if digest not in kept]:
            self.drop(digest)
            self.evictions += 1
            LAYER_EVICTIONS.inc()
            _log.info("layer_evicted", digest=digest)
            if self.used_bytes + size <= self._bytes_max:
                return


def _holds(path: Path, digest: str) -> bool:
    try:
        return image_digest(path, ImportWatch()) == digest
    except FileNotFoundError:
        return False
