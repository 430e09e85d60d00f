"""What a layer store's back end does, whatever keeps its bytes.

The life of a layer, in the calls of :class:`LayerBackend`:

1. An image is built in a private directory below ``staging``, on this node.
2. ``publish`` makes it durable, then gives it its name: a crash leaves the old state or the new
   one, and at worst an image without a name.
3. ``find`` says what a reference means now: a digest, for good. Tags move, digests do not, so a
   sandbox keeps what its references meant when it was made.
4. ``ensure`` brings the image behind a digest to this node, checked, as a file to be mounted. While
   the digest is held (``declare``), no node's garbage collection takes that file away.
5. ``remove`` takes a name away; ``collect_garbage`` deletes the images that no name means and that
   nobody holds.

Back ends are interchangeable: one contract suite runs against each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dsec_common.wire.layer import LayerKind
    from dsec_sandboxd.layers.importer import BuiltImage
    from dsec_sandboxd.layers.limits import ImportWatch
    from dsec_sandboxd.layers.names import NamedReference
    from dsec_sandboxd.layers.records import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A built image, and the name that it is to have.

    Attributes:
        image: lies in ``staging``.
        project: whose layer it will be.
        reference: its ``name@version``.
        kind: the role of the layer.
        created_at: Unix time in seconds.
        staging: the import's private directory.
        watch: is told how far it is, and raises when the import was cancelled.
        replace: let the reference mean something else than before.
    """

    image: BuiltImage
    project: str
    reference: NamedReference
    kind: LayerKind
    created_at: float
    staging: Path
    watch: ImportWatch
    replace: bool


class LayerBackend(Protocol):
    """Keeps layers. Safe for any number of tasks, processes and hosts at once."""

    @property
    def staging(self) -> Path:
        """The local directory in which images are built."""
        ...

    @property
    def store_id(self) -> str:
        """The store's identity, equal on all nodes that share it; empty before :meth:`open`."""
        ...

    @property
    def references_version(self) -> str:
        """A token that is another one after a change of any reference.

        This node's own changes show at once, those of others within ``refresh_s`` seconds (none
        for a directory).
        """
        ...

    async def open(self) -> int:
        """Make the store if there is none, and clean up after crashed imports of this node.

        Returns:
            How many crashed imports were cleaned up.
        """
        ...

    async def close(self) -> None:
        """Let go of connections and tasks. Idempotent."""
        ...

    async def publish(self, publication: Publication) -> Layer:
        """Make a reference mean a built image; nothing changes when it means that already.

        Raises:
            DsecError: ``conflict`` when it means something else and ``replace`` is false.
        """
        ...

    async def find(self, project: str, reference: str) -> Layer:
        """Return what ``name@version``, ``name:tag`` or ``sha256:…`` means in a project, now.

        Raises:
            DsecError: ``invalid`` for a malformed reference or one without a version,
                ``not_found`` for an unknown one, ``layer_error`` when a record or image is gone.
        """
        ...

    async def list(self, project: str) -> tuple[Layer, ...]:
        """Return the project's layers, sorted by reference."""
        ...

    async def tag(self, project: str, name: str, tag: str, version: str, *, at: float) -> Layer:
        """Let ``name:tag`` mean ``name@version`` from now on; return that layer.

        Raises:
            DsecError: ``not_found`` for an unknown version.
        """
        ...

    async def remove(self, project: str, reference: str) -> None:
        """Remove a ``name@version``, or a ``name:tag`` and nothing else.

        Raises:
            DsecError: ``not_found``; ``invalid`` for a digest; ``conflict`` for a version that a
                tag means.
        """
        ...

    async def ensure(self, digest: str) -> Path:
        """Return the image as a file of this node, its content checked.

        Concurrent calls for one digest do the work once.

        Raises:
            DsecError: ``layer_error`` when it is missing or damaged; ``exhausted`` when there is
                no room for it; ``unavailable`` when it cannot be reached.
        """
        ...

    def path(self, digest: str) -> Path:
        """Return where on this node the image is, or will be after :meth:`ensure`."""
        ...

    def is_ready(self, digest: str) -> bool:
        """Tell whether :meth:`ensure` would have nothing to do; costs one ``stat``."""
        ...

    async def declare(self, held: Collection[str]) -> None:
        """Tell all nodes which digests this one uses, until told otherwise or for an hour.

        Raises:
            DsecError: when that cannot be told; then nothing may be mounted.
        """
        ...

    async def collect_garbage(self, in_use: frozenset[str]) -> tuple[str, ...]:
        """Delete the images that no reference means and nobody holds; return their digests.

        Raises:
            DsecError: ``layer_error`` when a reference is damaged: then nothing is deleted.
        """
        ...


InUse = Callable[[], Collection[str]]
"""Says which digests this node uses at the moment: they are never evicted."""
