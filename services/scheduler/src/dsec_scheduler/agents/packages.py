"""Packages of agents in the object store, in the pieces that they were uploaded in.

Any scheduler takes any piece; whether they are the package that was meant is known once it is
registered, by its hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from dsec_common.bus_objects import ObjectBucket
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.agent import (
    PACKAGE_CHUNK_BYTES,
    PACKAGE_MAX_BYTES,
    PackagePieceKept,
    UploadPackage,
)

BUCKET: Final = "dsec-agent-packages"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Packages:
    """The packages of all projects; a project finds its own only."""

    def __init__(self, bucket: ObjectBucket) -> None:
        self._bucket = bucket

    async def keep(self, project: str, piece: UploadPackage) -> PackagePieceKept:
        """Store one piece; the same again is fine.

        Raises:
            DsecError: ``invalid`` for what is no piece of a package.
        """
        _check_digest(piece.sha256)
        if not 0 <= piece.index < -(-PACKAGE_MAX_BYTES // PACKAGE_CHUNK_BYTES):
            raise invalid(
                f"no package has a piece {piece.index}: it has at most {PACKAGE_MAX_BYTES} bytes",
                field="index",
            )
        if not 0 < len(piece.data) <= PACKAGE_CHUNK_BYTES:
            raise invalid(
                f"a piece has 1 to {PACKAGE_CHUNK_BYTES} bytes, not {len(piece.data)}", field="data"
            )
        await self._bucket.put(_name(project, piece.sha256, piece.index), _only(piece.data))
        return PackagePieceKept(cause_id=piece.message_id, sha256=piece.sha256, index=piece.index)

    async def read(self, project: str, sha256: str, size: int) -> AsyncGenerator[bytes]:
        """Yield a package piece by piece.

        Raises:
            DsecError: ``not_found`` for a missing piece; ``invalid``, at the end, when the pieces
                are another package.
        """
        _check_digest(sha256)
        digest, read = hashlib.sha256(), 0
        for index in range(-(-size // PACKAGE_CHUNK_BYTES)):
            try:
                async for data in self._bucket.get(_name(project, sha256, index)):
                    digest.update(data)
                    read += len(data)
                    yield data
            except DsecError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                raise DsecError(
                    ErrorCode.NOT_FOUND,
                    f"piece {index} of the package {sha256[:12]}… was not uploaded",
                    details={"index": index},
                ) from None
        if digest.hexdigest() != sha256 or read != size:
            raise invalid(
                f"what was uploaded as {sha256[:12]}… has {read} bytes and another hash; upload "
                "it again",
                field="package_sha256",
            )

    async def check(self, project: str, sha256: str, size: int) -> None:
        """Return when the package is there, whole.

        Raises:
            DsecError: as :meth:`read`.
        """
        async for _ in self.read(project, sha256, size):
            pass

    async def remove(self, project: str, sha256: str, size: int) -> None:
        """Remove a package that no version has any more; pieces that are not there are fine."""
        for index in range(-(-size // PACKAGE_CHUNK_BYTES)):
            await self._bucket.delete(_name(project, sha256, index))


def _check_digest(sha256: str) -> None:
    if not _DIGEST.fullmatch(sha256):
        raise invalid("sha256 is 64 hexadecimal digits in lower case", field="sha256")


def _name(project: str, sha256: str, index: int) -> str:
    return f"{project}/{sha256}/{index}"


async def _only(data: bytes) -> AsyncIterator[bytes]:
    yield data
