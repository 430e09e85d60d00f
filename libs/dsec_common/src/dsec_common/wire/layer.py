"""Layers: importing content as EROFS images and looking them up."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from dsec_common.wire.base import Message


class LayerKind(StrEnum):
    """Which of a sandbox's layers an image may be.

    A ``data`` layer holds what sandboxes only read, such as a model's weights: it is mounted like
    a toolkit, and its pages are in memory once for all sandboxes of a node.
    """

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"
    DATA = "data"


#: Layers in one reply to :class:`ListLayers`.
LAYERS_PAGE_MAX: Final = 1000


class ArchiveFormat(StrEnum):
    """What the uploaded bytes are; ``auto``: what they look like."""

    AUTO = "auto"
    TAR = "tar"
    OCI = "oci"


class GitHistory(StrEnum):
    """What an import does with git repositories.

    ``cut`` leaves the commit that is checked out, its branch and an index of it: no other commit,
    no object that it does not reach, no remote, no hook, no reflog. ``drop`` leaves nothing.
    """

    KEEP = "keep"
    CUT = "cut"
    DROP = "drop"


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

    ``size_bytes`` and ``sha256`` are those of the whole upload and are verified first. ``image``
    chooses one image of an archive of several, by its tag; ``tags`` mean the layer afterwards.
    ``exclude`` and ``clean`` leave out what they do when a snapshot is packed; ``git`` says what
    becomes of repositories: ``None`` means ``cut`` with ``clean``, else ``keep``.
    """

    upload_id: str
    size_bytes: int
    sha256: str
    kind: LayerKind
    name: str
    version: str
    format: ArchiveFormat = ArchiveFormat.TAR
    replace: bool = False
    image: str = ""
    tags: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    clean: bool = False
    git: GitHistory | None = None


class LayerMeaning(msgspec.Struct, frozen=True, kw_only=True):
    """A digest that a reference meant, from ``at`` (Unix time in seconds) until the next."""

    at: float
    digest: str


class CommandDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What commands have where nothing else is said: as a base's container image says it.

    Attributes:
        env: variables.
        cwd: working directory, absolute; empty for none.
        user: name or ``uid[:gid]``; empty for none.
    """

    env: dict[str, str] = msgspec.field(default_factory=dict)
    cwd: str = ""
    user: str = ""


class LayerInfo(Message, frozen=True, kw_only=True):
    """One layer.

    Attributes:
        reference: ``name@version``.
        digest: ``sha256:…`` of its image.
        kind: which layer of a sandbox it is.
        size_bytes: size of the image.
        created_at: when the reference got its meaning, Unix time in seconds.
        entries: files, directories and links in it.
        nodes: whose stores have it.
        tags: the tags that mean it now.
        source_digest: of the archive or image manifest that it was made of; empty for a directory.
        history: what the reference meant before it was replaced, the oldest first.
        left_out: in the answer to an import: entries of the source that are no part of it.
        defaults: what the image that it was made of says of commands, for sandboxes on this base.
    """

    reference: str
    digest: str
    kind: LayerKind
    size_bytes: int
    created_at: float
    entries: int = 0
    nodes: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    source_digest: str = ""
    history: tuple[LayerMeaning, ...] = ()
    left_out: int = 0
    defaults: CommandDefaults | None = None


class LayerImportProgress(Message, frozen=True, kw_only=True):
    """Event: how far an import is."""

    upload_id: str
    stage: str
    done_bytes: int
    total_bytes: int


class ListLayers(Message, frozen=True, kw_only=True):
    """Ask a node for the project's layers, a page at a time.

    Attributes:
        name: only layers of this name; with ``*`` at its end, of names that begin so.
        kind: only layers of this kind.
        tag: only layers that this tag means.
        limit: at most so many, and :data:`LAYERS_PAGE_MAX`.
        after: only references after this one: ``next_after`` of the page before.
    """

    name: str = ""
    kind: LayerKind | None = None
    tag: str = ""
    limit: int = LAYERS_PAGE_MAX
    after: str = ""


class LayerList(Message, frozen=True, kw_only=True):
    """Layers of the project in a node's store, sorted by reference.

    ``next_after`` is empty on the last page. ``history`` is left out: inspect a layer for it.
    """

    layers: tuple[LayerInfo, ...] = ()
    store_id: str = ""
    next_after: str = ""


class InspectLayer(Message, frozen=True, kw_only=True):
    """Ask a node for one layer by ``name@version``, ``name:tag`` or ``sha256:…``."""

    reference: str


class TagLayer(Message, frozen=True, kw_only=True):
    """Let ``name:tag`` mean ``name@version`` from now on; sandboxes keep what they have."""

    name: str
    tag: str
    version: str


class RemoveLayer(Message, frozen=True, kw_only=True):
    """Remove a ``name@version`` or a ``name:tag``; the image goes when nothing refers to it."""

    reference: str


class LayerRemoved(Message, frozen=True, kw_only=True):
    """The reference is gone."""

    reference: str


class LayerDocument(Message, frozen=True, kw_only=True):
    """A document of a layer store that is kept in NATS; the store writes and reads ``data``."""

    data: bytes
