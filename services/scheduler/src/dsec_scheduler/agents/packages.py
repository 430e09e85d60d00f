"""Packages of agents in the object store, in the pieces that they were uploaded in.

Any scheduler takes any piece; whether they are the package that was meant is known once it is
registered, by its hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Final

from dsec_common.bus_objects import ObjectBucket
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.agent import (
    PACKAGE_CHUNK_BYTES,
    PACKAGE_MAX_BYTES,
    PackagePieceKept,
    UploadPackage,
)

BUCKET: Final = "dsec-agent-packages"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
#: A piece that no version has after this long is of an upload that was given up.
_UPLOAD_S: Final = 3600.0


class Packages:
    """The packages of all projects; a project finds its own only.

    Args:
        bucket: where they are.
        clock: for the age of what nobody has registered.
        project_max_bytes: what those of one project may take, counted in whole pieces.
    """

    def __init__(self, bucket: ObjectBucket, clock: Clock, project_max_bytes: int) -> None:
        self._bucket = bucket
        self._clock = clock
        self._pieces_max = max(1, project_max_bytes // PACKAGE_CHUNK_BYTES)

    async def keep(
        self, project: str, piece: UploadPackage, registered: Callable[[], Awaitable[set[str]]]
    ) -> PackagePieceKept:
        """Store one piece; the same again is fine.

        Args:
            project: whose it is.
            piece: of which package, and which one.
            registered: asked for the hashes of the packages that the project's versions have, when
                the project has no room left: what was uploaded and never registered goes first.

        Raises:
            DsecError: ``invalid`` for what is no piece of a package; ``exhausted`` when the
                project's packages take all that they may.
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
        name = _name(project, piece.sha256, piece.index)
        await self._make_room(project, name, registered)
        await self._bucket.put(name, _only(piece.data))
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

    async def _make_room(
        self, project: str, name: str, registered: Callable[[], Awaitable[set[str]]]
    ) -> None:
        kept = {one for one in await self._bucket.names() if one.startswith(f"{project}/")}
        if name in kept or len(kept) < self._pieces_max:
            return
        used = await registered()
        oldest, removed = self._clock.now() - _UPLOAD_S, 0
        for one in kept:
            if one.split("/")[1] not in used and await self._put_at(one) < oldest:
                await self._bucket.delete(one)
                removed += 1
        if len(kept) - removed >= self._pieces_max:
            limit = self._pieces_max * PACKAGE_CHUNK_BYTES
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"the packages of project {project} take all of their {limit} bytes "
                "(agent_packages_project_max_bytes); remove versions that nothing uses",
                details={"limit_bytes": limit},
            )

    async def _put_at(self, name: str) -> float:
        try:
            return (await self._bucket.info(name)).put_at
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return 0.0


def _check_digest(sha256: str) -> None:
    if not _DIGEST.fullmatch(sha256):
        raise invalid("sha256 is 64 hexadecimal digits in lower case", field="sha256")


def _name(project: str, sha256: str, index: int) -> str:
    return f"{project}/{sha256}/{index}"


async def _only(data: bytes) -> AsyncIterator[bytes]:
    yield data
