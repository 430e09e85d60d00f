"""What a layer store needs of a bucket: small documents with compare-and-swap, and large images.

The rest of a remote store (what names mean, when an image may go) is built on it once, in
:mod:`dsec_sandboxd.layers.object_backend`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from dsec_sandboxd.layers.limits import ImportWatch

#: Below what a NATS server takes as one message.
DOCUMENT_BYTES_MAX: Final = 768 * 1024


class Document(NamedTuple):
    """A document's bytes, and the revision that a change of it has to name."""

    data: bytes
    revision: str


class ObjectStorage(Protocol):
    """A bucket that nodes share.

    Keys are words joined by ``/``; a word holds letters, digits and ``._+-``. Images are named by
    64 hexadecimal digits. Every method raises ``DsecError``: ``unavailable`` or ``timeout`` when
    the bucket cannot be reached, ``denied`` when it refuses us, ``exhausted`` when it is full.
    """

    async def open(self) -> None:
        """Connect, and make the bucket where that is up to us."""
        ...

    async def close(self) -> None:
        """Let go of connections. Idempotent."""
        ...

    async def read_document(self, key: str) -> Document | None:
        """Return a document, or ``None`` when there is none."""
        ...

    async def write_document(self, key: str, data: bytes, *, revision: str | None) -> str:
        """Replace a document that is at ``revision``; ``None`` means that there is none yet.

        Returns:
            The new revision.

        Raises:
            DsecError: ``conflict`` when it is at another revision.
        """
        ...

    async def delete_document(self, key: str) -> None:
        """Delete a document, whatever its revision. A missing one is fine."""
        ...

    async def document_keys(self, prefix: str) -> list[str]:
        """Return the keys below ``prefix``, which ends with ``/``."""
        ...

    async def image_bytes(self, name: str) -> int | None:
        """Return an image's size, or ``None`` when there is none that is complete."""
        ...

    async def image_names(self) -> list[str]:
        """Return the names of all complete images."""
        ...

    async def write_image(self, name: str, path: Path, watch: ImportWatch) -> None:
        """Store a file as an image; others see it whole or not at all."""
        ...

    def read_image(self, name: str) -> AsyncGenerator[bytes]:
        """Yield an image's content in pieces of at most a few MiB.

        Raises:
            DsecError: ``not_found`` when there is none.
        """
        ...

    async def delete_image(self, name: str) -> None:
        """Delete an image. A missing one is fine."""
        ...

    async def remove_orphans(self, older_than_s: float) -> int:
        """Remove what died while it was written, so long ago; return how many there were."""
        ...
