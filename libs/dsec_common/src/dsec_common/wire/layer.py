"""Layers: importing content as EROFS images and looking them up."""

from __future__ import annotations

from enum import StrEnum

from dsec_common.wire.base import Message


class LayerKind(StrEnum):
    """Which of the three layers of a sandbox an image may be."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"


class ArchiveFormat(StrEnum):
    """What the uploaded bytes are."""

    TAR = "tar"
    OCI = "oci"


class UploadLayerChunk(Message, frozen=True, kw_only=True):
    """One piece of an archive on its way to a node; pieces may be sent eight at a time."""

    upload_id: str
    offset: int
    data: bytes


class LayerChunkStored(Message, frozen=True, kw_only=True):
    """The piece is on the node's disk."""

    received_bytes: int


class ImportLayer(Message, frozen=True, kw_only=True):
    """Turn an uploaded archive into a layer under ``name@version``.

    ``size_bytes`` and ``sha256`` are those of the whole upload and are verified first.
    """

    upload_id: str
    size_bytes: int
    sha256: str
    kind: LayerKind
    name: str
    version: str
    format: ArchiveFormat = ArchiveFormat.TAR
    replace: bool = False


class LayerInfo(Message, frozen=True, kw_only=True):
    """One layer: ``reference`` is ``name@version``, ``digest`` is ``sha256:…`` of the image."""

    reference: str
    digest: str
    kind: LayerKind
    size_bytes: int
    created_at: float
    entries: int = 0
    nodes: tuple[str, ...] = ()


class LayerImportProgress(Message, frozen=True, kw_only=True):
    """Event: how far an import is."""

    upload_id: str
    stage: str
    done_bytes: int
    total_bytes: int


class ListLayers(Message, frozen=True, kw_only=True):
    """Ask a node for the project's layers."""


class LayerList(Message, frozen=True, kw_only=True):
    """The project's layers in a node's store, sorted by reference."""

    layers: tuple[LayerInfo, ...] = ()
    store_id: str = ""


class InspectLayer(Message, frozen=True, kw_only=True):
    """Ask a node for one layer by ``name@version`` or ``sha256:…``."""

    reference: str


class RemoveLayer(Message, frozen=True, kw_only=True):
    """Remove a reference; the image goes when nothing refers to it."""

    reference: str


class LayerRemoved(Message, frozen=True, kw_only=True):
    """The reference is gone."""

    reference: str
