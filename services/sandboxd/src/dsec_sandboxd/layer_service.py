"""Layers of a node, put together: their store, who holds which, folds, upkeep, and the door."""

from __future__ import annotations

import contextlib

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import Clock
from dsec_common.wire.layer import (
    ImportLayer,
    InspectLayer,
    ListLayers,
    RemoveLayer,
    TagLayer,
    UploadLayerChunk,
)
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.event_publisher import EventPublisher
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.layer_folds import LayerFolds
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layer_upkeep import LayerUpkeep
from dsec_sandboxd.layers.folding import FoldRules
from dsec_sandboxd.layers.opening import backend_of
from dsec_sandboxd.layers.store import LayerStore
from dsec_sandboxd.layers.urls import store_url
from dsec_sandboxd.layers_door import LayersDoor


class LayerService:
    """Everything about layers that the daemon's shell has to hold.

    Attributes:
        store: where they are.
        holds: which of them this node uses.
        folds: small neighbours that are mounted as one.
        upkeep: collects garbage and renews holds.
        door: answers requests about layers.
    """

    def __init__(
        self,
        config: SandboxdConfig,
        kernel: Kernel,
        bus: Bus,
        events: EventPublisher,
        *,
        clock: Clock,
    ) -> None:
        self._node = config.node_name
        backend = backend_of(
            store_url(config.layers_backend, config.layers_path),
            directory=config.layers_cache_path,
            cache_bytes=config.layers_cache_bytes,
            node=self._node,
            bus=bus,
            in_use=lambda: self.holds.in_use,
            clock=clock,
        )
        self.store = LayerStore(backend, clock=clock)
        self.holds = LayerHolds(kernel, config.layers_idle_max, self.store)
        self.folds = LayerFolds(
            kernel,
            self.holds,
            config.state_path / "folds",
            bytes_max=config.layer_folds_bytes,
            rules=FoldRules(above=config.layers_fold_above),
            clock=clock,
        )
        self.upkeep = LayerUpkeep(
            self.store, self.holds, clock, config.layers_garbage_interval_s, self.folds
        )
        self.door = LayersDoor(
            self._node,
            self.store,
            self.holds,
            events=events,
            clock=clock,
            directory=config.state_path / "uploads",
            upload_max_bytes=config.layer_upload_max_bytes,
            disk_reserve_bytes=config.disk_reserve_bytes,
            uploads_max=config.layer_uploads_max,
            imports_max=config.layer_imports_max,
            idle_s=config.upload_idle_s,
        )
        self._opened = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Open the store; remove what an earlier daemon left half-done.

        Raises:
            DsecError: as the store's; when a directory cannot be made.
        """
        await self.store.open()
        self._opened.push_async_callback(self.store.close)
        self._opened.push_async_callback(self.holds.close)
        self.folds.open()
        self._opened.push_async_callback(self.folds.close)
        self.door.open()
        self._opened.callback(self.door.close)

    async def serve(self, bus: Bus) -> None:
        """Take requests about layers, of every project."""

        def layer(name: str) -> str:
            return subjects.any_project_layer(self._node, name)

        door = self.door
        await bus.serve(layer("upload"), UploadLayerChunk, door.upload)
        await bus.serve(layer("import"), ImportLayer, door.import_layer)
        await bus.serve(layer("list"), ListLayers, door.list)
        await bus.serve(layer("inspect"), InspectLayer, door.inspect)
        await bus.serve(layer("tag"), TagLayer, door.tag)
        await bus.serve(layer("remove"), RemoveLayer, door.remove)

    async def close(self) -> None:
        """Let go of what was opened."""
        await self._opened.aclose()
