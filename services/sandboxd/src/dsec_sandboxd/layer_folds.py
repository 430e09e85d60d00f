"""Folds: neighbouring layers as one image, made once on this node and mounted in their place.

What becomes a fold is decided in :mod:`dsec_sandboxd.layers.folding`. A fold is made in the
background, so the first sandbox of many small layers starts on all of them and later ones on the
fold; only one that names more layers than can be mounted waits for it. Nobody sees a difference:
whiteouts, opaque directories, hard links, attributes and times come out as they were.

On disk, below one directory of this node::

    images/<hex>.erofs   what is mounted, by its content's digest; bounded, the oldest go
    index/<key>.json     which image stands for which layers in which order

An image is there before the index names it. Whatever a crash leaves is not named, or is found out
by its digest before its first use, and is then made again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from dsec_common.errors import DsecError, ErrorCode, from_os_error, not_found
from dsec_sandboxd.kernel.interface import LAYERS_MAX
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layers.erofs import image_digest, read_superblock
from dsec_sandboxd.layers.folding import (
    FOLDED_TO_MAX,
    FoldRules,
    fold_key,
    needed_runs,
    small_runs,
)
from dsec_sandboxd.layers.image_cache import ImageCache
from dsec_sandboxd.layers.limits import ImportWatch
from dsec_sandboxd.layers.names import DIGEST_PREFIX
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.snapshot_image import pack_image

if TYPE_CHECKING:
    from dsec_common.clock import Clock
    from dsec_sandboxd.kernel.layer_copies import LayerCopy, SnapshotKernel

_log: Final = structlog.get_logger(__name__)

#: A fold that could not be made is not tried again in the background for so long.
_RETRY_S: Final = 600.0
_INODES_SLACK: Final = 1024
#: In memory every file takes whole pages, and a directory some for its names.
_BYTES_PER_ENTRY: Final = 8192
_ROOM_SLACK_BYTES: Final = 4 << 20

Mount = tuple[str, Path]
"""What is mounted: the image's digest, and where it is or will be."""


class _Fold(msgspec.Struct, frozen=True, kw_only=True):
    """Which image stands for which layers, lowest first."""

    image: str
    layers: tuple[str, ...]


class LayerFolds:
    """Says what is mounted for a sandbox's layers, and makes the folds among it."""

    def __init__(
        self,
        kernel: SnapshotKernel,
        holds: LayerHolds,
        directory: Path,
        *,
        bytes_max: int,
        rules: FoldRules,
        clock: Clock,
    ) -> None:
        """Take the parts; ``bytes_max`` bounds the images of all folds together."""
        self._kernel = kernel
        self._holds = holds
        self._directory = directory
        self._index_directory = directory / "index"
        self._rules = rules
        self._clock = clock
        self._images = ImageCache(directory / "images", bytes_max, lambda: holds.in_use, gauge=None)
        self._folds: dict[str, _Fold] = {}
        self._making: dict[str, asyncio.Task[None]] = {}
        self._failed_at: dict[str, float] = {}
        self._one_at_a_time = asyncio.Lock()

    def open(self) -> None:
        """Learn what an earlier process made, and remove what it left half made. Blocking."""
        self._index_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._images.open()
        for leftover in self._directory.iterdir():
            if leftover.suffix == ".tree":
                leftover.rmdir()
            elif leftover.is_file():
                leftover.unlink()
        for path in self._index_directory.iterdir():
            try:
                fold = msgspec.json.decode(path.read_bytes(), type=_Fold)
                whole = path.suffix == ".json" and self._images.path(fold.image).exists()
            except (OSError, msgspec.DecodeError):
                whole = False
            if whole:
                self._folds[path.stem] = fold
            else:
                path.unlink()
        named = {fold.image for fold in self._folds.values()}
        for path in (self._directory / "images").iterdir():
            if DIGEST_PREFIX + path.stem not in named:
                self._images.drop(DIGEST_PREFIX + path.stem)

    async def close(self) -> None:
        """End what is being made; nothing of it stays."""
        tasks = list(self._making.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._images.close()

    async def mounts(self, layers: Sequence[Layer], snapshots: int) -> list[Mount]:
        """Return what to mount for ``layers``, lowest first.

        Hold it before anything else is awaited: until then the node may evict a fold.

        Args:
            layers: as the sandbox names them, lowest first.
            snapshots: how many snapshot layers are mounted above.

        Raises:
            DsecError: ``invalid`` for more layers than can be folded; what folding raises when
                they cannot be mounted without it.
        """
        at_most = LAYERS_MAX - snapshots
        if len(layers) <= min(at_most, self._rules.above):
            return [_mount(layer) for layer in layers]
        if all(layer.entries for layer in layers):
            runs = small_runs(layers, self._rules)
        else:
            runs = self._standing_runs([layer.digest for layer in layers])
        if len(layers) > at_most:
            layers = await self._measured(layers)
            target = at_most if len(layers) <= LAYERS_MAX else min(at_most, FOLDED_TO_MAX)
            runs = needed_runs(layers, target, self._rules, runs)
            await self._made([layers[run.start : run.stop] for run in runs])
        else:
            runs = [run for run in runs if self._ready(layers[run.start : run.stop])]
        return self._stacked(layers, runs)

    def _standing_runs(self, digests: Sequence[str]) -> list[range]:
        """Return the runs that there are folds of: all that can be said where only digests are."""
        folds: dict[str, list[tuple[str, ...]]] = {}
        for fold in self._folds.values():
            folds.setdefault(fold.layers[0], []).append(fold.layers)
        runs: list[range] = []
        place = 0
        while place < len(digests):
            fitting = [
                len(layers)
                for layers in folds.get(digests[place], [])
                if tuple(digests[place : place + len(layers)]) == layers
            ]
            length = max(fitting, default=1)
            if length > 1:
                runs.append(range(place, place + length))
            place += length
        return runs

    async def _measured(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """Return the layers with their figures, read from the images where they are not known."""
        unknown = [layer for layer in layers if not layer.entries]
        if not unknown:
            return layers
        absent = [_mount(layer) for layer in unknown if not layer.image_path.exists()]
        await self._holds.hold(absent)  # which fetches them
        try:
            return [layer if layer.entries else _read(layer) for layer in layers]
        finally:
            self._holds.release([digest for digest, _ in absent])

    def _stacked(self, layers: Sequence[Layer], runs: Sequence[range]) -> list[Mount]:
        starts = {run.start: run for run in runs}
        mounts: list[Mount] = []
        place = 0
        while place < len(layers):
            run = starts.get(place)
            if run is None:
                mounts.append(_mount(layers[place]))
                place += 1
            else:
                image = self._folds[fold_key(layers[run.start : run.stop])].image
                mounts.append((image, self._images.path(image)))
                place = run.stop
        # Two folds of the same content are one image, which overlayfs takes only once: the upper
        # one hides the lower one whole.
        return list(reversed(dict(reversed(mounts)).items()))

    def forget(self, layers: Collection[str]) -> None:
        """Drop the folds made of any of these layers; what is mounted of them stays mounted."""
        gone = frozenset(layers)
        for key, fold in list(self._folds.items()):
            if not gone.isdisjoint(fold.layers):
                self._drop(key)

    def forget_absent(self, image_path: Callable[[str], Path]) -> None:
        """Drop the folds made of a layer whose image is not on this node any more. Blocking.

        A sandbox on a fold holds its layers, too, so those of living sandboxes stay.
        """
        layers = {layer for fold in self._folds.values() for layer in fold.layers}
        self.forget([layer for layer in layers if not image_path(layer).exists()])

    def forget_images(self, images: Collection[str]) -> None:
        """Drop the folds whose image is among these; they are made again when next wanted."""
        for key, fold in list(self._folds.items()):
            if fold.image in images:
                self._drop(key)

    async def settled(self) -> None:
        """Return when no fold is being made any more."""
        while self._making:
            await asyncio.wait(set(self._making.values()))

    # --- Making -------------------------------------------------------------------------------

    def _ready(self, run: Sequence[Layer]) -> bool:
        """Return whether a fold can be mounted now; if not, it will have been made in a while."""
        key = fold_key(run)
        fold = self._folds.get(key)
        if fold is not None and self._images.is_ready(fold.image):
            return True
        failed_at = self._failed_at.get(key)
        if failed_at is None or self._clock.monotonic() - failed_at >= _RETRY_S:
            self._begin(key, run)
        return False

    async def _made(self, runs: Sequence[Sequence[Layer]]) -> None:
        """Return when the folds of all runs can be mounted."""
        while True:
            # All are looked at without a pause: making one may have evicted another.
            missing = [run for run in runs if not self._is_ready(run)]
            if not missing:
                return
            for run in missing:
                key = fold_key(run)
                await asyncio.shield(self._begin(key, run))

    def _is_ready(self, run: Sequence[Layer]) -> bool:
        fold = self._folds.get(fold_key(run))
        return fold is not None and self._images.is_ready(fold.image)

    def _begin(self, key: str, run: Sequence[Layer]) -> asyncio.Task[None]:
        task = self._making.get(key)
        if task is None:
            task = asyncio.create_task(self._make(key, tuple(run)), name=f"fold {key}")
            self._making[key] = task
            task.add_done_callback(self._done(key))
        return task

    def _done(self, key: str) -> Callable[[asyncio.Task[None]], None]:
        def done(task: asyncio.Task[None]) -> None:
            self._making.pop(key, None)
            if task.cancelled():
                return
            error = task.exception()
            if error is None:
                self._failed_at.pop(key, None)
            else:
                self._failed_at[key] = self._clock.monotonic()
                _log.warning("layers_not_folded", fold=key, error=str(error))

        return done

    async def _make(self, key: str, run: tuple[Layer, ...]) -> None:
        fold = self._folds.get(key)
        if fold is not None:
            try:
                await self._images.ensure(fold.image, _nowhere)  # hashed, after a restart
            except DsecError:
                self._drop(key)
            else:
                return
        await self._holds.hold([_mount(layer) for layer in run])
        try:
            async with self._one_at_a_time:
                await self._fold(key, run)
        finally:
            self._holds.release([layer.digest for layer in run])

    async def _fold(self, key: str, run: tuple[Layer, ...]) -> None:
        entries = sum(layer.entries for layer in run)
        copy = await self._kernel.fold(
            [layer.digest for layer in reversed(run)],
            size_bytes=sum(layer.size_bytes for layer in run)
            + entries * _BYTES_PER_ENTRY
            + _ROOM_SLACK_BYTES,
            inodes=entries + _INODES_SLACK,
        )
        try:
            draft = self._directory / f"{key}.draft"
            try:
                await self._pack(copy, draft)
                digest = await asyncio.to_thread(image_digest, draft, ImportWatch())
                if not self._images.adopt(digest, draft):
                    raise DsecError(
                        ErrorCode.EXHAUSTED,
                        "there is no room for another fold of layers: give the node a larger "
                        "layer_folds_bytes, or end sandboxes",
                        details={"reason": "layer_folds_full"},
                    )
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            raise from_os_error("fold", error, "layers") from error
        finally:
            await asyncio.to_thread(os.close, copy.mount_fd)
        fold = _Fold(image=digest, layers=tuple(layer.digest for layer in run))
        self._write(key, fold)
        self._folds[key] = fold
        _log.info("layers_folded", fold=key, layers=len(run), image=digest)

    async def _pack(self, copy: LayerCopy, draft: Path) -> None:
        await pack_image(
            copy.mount_fd,
            draft,
            size_bytes=copy.size_bytes,
            inodes=copy.inodes,
            hole_bytes=copy.hole_bytes,
        )

    def _write(self, key: str, fold: _Fold) -> None:
        draft = self._directory / f"{key}.json"
        draft.write_bytes(msgspec.json.encode(fold))
        draft.replace(self._index_directory / f"{key}.json")
        # Folds whose image was evicted are forgotten here, so that the index stays as small.
        for other, standing in list(self._folds.items()):
            if not self._images.path(standing.image).exists():
                self._drop(other)

    def _drop(self, key: str) -> None:
        fold = self._folds.pop(key, None)
        (self._index_directory / f"{key}.json").unlink(missing_ok=True)
        if fold is not None and all(fold.image != other.image for other in self._folds.values()):
            self._images.drop(fold.image)


def _mount(layer: Layer) -> Mount:
    return layer.digest, layer.image_path


def _read(layer: Layer) -> Layer:
    superblock = read_superblock(layer.image_path)
    return dataclasses.replace(layer, size_bytes=superblock.size_bytes, entries=superblock.inodes)


async def _nowhere() -> tuple[int, AsyncGenerator[bytes]]:
    """Have no source: a fold is made here or not at all."""
    raise not_found("the fold is not on this node", what="fold")
