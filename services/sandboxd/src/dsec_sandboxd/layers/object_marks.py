"""How a garbage collection and an import of the same image, on other nodes, stay out of each other.

A bucket has no lock, so each image that is about to go gets a mark, a document that changes by
compare-and-swap:

- A collector *condemns* an image that no name means, **then** reads the names again, **then** turns
  its mark to *deleting* if it is still as it left it, deletes the image, and removes the mark.
- A publisher writes its name first, **then** looks at the mark. Without one, any collector that
  condemns the image later sees the name. A condemned one it *spares*: either its change comes
  first and the collector's fails, or the other way round, and then it waits for the deletion and
  puts the image there again.

A collector that died while deleting is replaced by another after an hour.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import new_id

if TYPE_CHECKING:
    from dsec_common.clock import Clock
    from dsec_sandboxd.layers.object_storage import ObjectStorage

_TAKEN_OVER_AFTER_S: Final = 3600.0
_POLL_S: Final = 0.05
_DELETION_TIMEOUT_S: Final = 10.0


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    state: Literal["condemned", "deleting", "spared"]
    #: Makes each mark another document, also where a revision is a hash of its content.
    owner: str
    at: float


class ImageMarks:
    """The marks of one storage."""

    def __init__(self, storage: ObjectStorage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock

    async def condemn(self, name: str) -> str | None:
        """Mark an image; return the mark's revision, or ``None`` when someone else deletes it."""
        mark, revision = await self._read(name)
        recently = self._clock.now() - _TAKEN_OVER_AFTER_S
        if mark is not None and mark.state == "deleting" and mark.at > recently:
            return None
        return await self._write(name, "condemned", revision)

    async def take(self, name: str, revision: str) -> bool:
        """Turn our mark to deleting; false when the image was spared or condemned by another."""
        return await self._write(name, "deleting", revision) is not None

    async def clear(self, name: str) -> None:
        """Remove the mark of an image that we have deleted."""
        await self._storage.delete_document(_key(name))

    async def spare(self, name: str) -> None:
        """Return when no collector can delete the image any more that has not seen our name.

        Raises:
            DsecError: ``unavailable`` when a deletion takes too long.
        """
        deadline = self._clock.monotonic() + _DELETION_TIMEOUT_S
        while True:
            mark, revision = await self._read(name)
            if mark is None or mark.state == "spared":
                return
            if mark.state == "condemned":
                if await self._write(name, "spared", revision) is not None:
                    return
            elif self._clock.monotonic() > deadline:
                raise DsecError(
                    ErrorCode.UNAVAILABLE,
                    f"another node is deleting the image {name}; import the layer again later",
                    retry_after_s=30.0,
                )
            await asyncio.sleep(_POLL_S)

    async def _read(self, name: str) -> tuple[_Mark | None, str | None]:
        document = await self._storage.read_document(_key(name))
        if document is None:
            return None, None
        try:
            return msgspec.json.decode(document.data, type=_Mark), document.revision
        except msgspec.DecodeError:
            return None, document.revision

    async def _write(
        self, name: str, state: Literal["condemned", "deleting", "spared"], revision: str | None
    ) -> str | None:
        mark = _Mark(state=state, owner=new_id(), at=self._clock.now())
        try:
            return await self._storage.write_document(
                _key(name), msgspec.json.encode(mark), revision=revision
            )
        except DsecError as error:
            if error.code is ErrorCode.CONFLICT:
                return None
            raise


def _key(name: str) -> str:
    return f"marks/{name}"
