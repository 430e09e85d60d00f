"""The bucket of idempotency keys: claims, outcomes, and their compare-and-swap."""

from __future__ import annotations

from typing import Final

import structlog

from dsec_common.bus import KeyValue
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import ErrorReply
from dsec_common.wire.sandbox import SandboxCreated
from dsec_scheduler.cancelling import Gate
from dsec_scheduler.effects import Place
from dsec_scheduler.idempotency import Member, RequestRecord, RequestState

_log: Final = structlog.get_logger(__name__)

BUCKET: Final = "dsec-idempotency"


class ClaimLostError(Exception):
    """Another scheduler has written the record meanwhile: look again."""


class Claim:
    """This scheduler's hold on one key, from before the first attempt until its outcome.

    Args:
        records: the bucket.
        key: its key.
        digest: of the request's arguments.
        owner: this scheduler's name.
        revision: of the record found; 0 when there was none.
        grace_s: how long after its attempt's end the claim stands.
        gate: that a queued request has to pass.
    """

    def __init__(
        self,
        records: KeyValue[RequestRecord],
        key: str,
        digest: str,
        owner: str,
        *,
        revision: int,
        grace_s: float,
        gate: Gate | None,
    ) -> None:
        self._records = records
        self._key = key
        self._gate = gate
        self._digest = digest
        self._owner = owner
        self._revision = revision
        self._grace_s = grace_s
        self._begun = False

    async def begin_attempt(self, attempt: Place) -> None:
        """Write down which node is about to be asked; only then may it be.

        Raises:
            ClaimLostError: someone else has the key.
            DsecError: the bucket does not answer; ``conflict`` when the request was given up.
        """
        if self._gate is not None:
            await self._gate.begin(str(ScopedId(attempt.node, attempt.local)))
        await self._begin(
            RequestRecord(
                digest=self._digest,
                state=RequestState.PENDING,
                owner=self._owner,
                node=attempt.node,
                local=attempt.local,
                lease_id=attempt.lease_id,
                deadline=attempt.valid_until + self._grace_s,
            )
        )

    async def begin_gang(self, members: tuple[Member, ...], valid_until: float) -> None:
        """Write down which nodes are about to be asked for a gang; only then may they be.

        Args:
            members: all of them.
            valid_until: Unix time after which no node makes any of them.

        Raises:
            ClaimLostError: someone else has the key.
            DsecError: the bucket does not answer.
        """
        await self._begin(
            RequestRecord(
                digest=self._digest,
                state=RequestState.PENDING,
                owner=self._owner,
                members=members,
                deadline=valid_until + self._grace_s,
            )
        )

    async def _begin(self, record: RequestRecord) -> None:
        try:
            await self._write(record)
        except DsecError as error:
            if error.code is ErrorCode.CONFLICT:
                raise ClaimLostError from error
            raise
        self._begun = True

    async def is_lost(self) -> bool:
        """Return whether another scheduler has written the record, as far as can be found out."""
        try:
            found = await self._records.get(self._key)
        except DsecError:
            return False
        return found.revision != self._revision

    async def succeed(self, *created: SandboxCreated) -> None:
        """Write down the answer: one or a gang. Should this fail, the next request asks nodes."""
        await self._conclude(
            RequestRecord(
                digest=self._digest,
                state=RequestState.CREATED,
                owner=self._owner,
                created=created[0] if len(created) == 1 else None,
                gang=created if len(created) > 1 else (),
            )
        )

    async def fail(self, error: DsecError) -> None:
        """Write down that nothing is left of the request; needless before the first attempt."""
        if not self._begun:
            return
        await self._conclude(
            RequestRecord(
                digest=self._digest,
                state=RequestState.FAILED,
                owner=self._owner,
                error=ErrorReply.of(error),
            )
        )

    async def _write(self, record: RequestRecord) -> None:
        if self._revision:
            self._revision = await self._records.update(self._key, record, self._revision)
        else:
            self._revision = await self._records.create(self._key, record)

    async def _conclude(self, record: RequestRecord) -> None:
        try:
            await self._write(record)
        except DsecError as error:
            # The outcome stands either way; without its record the next request finds out.
            _log.warning("could not note a request's outcome", state=record.state, error=str(error))


class Ledger:
    """Finds and claims keys.

    Args:
        records: the bucket.
        owner: this scheduler's name.
        grace_s: how long after its attempt's end a claim stands.
    """

    def __init__(self, records: KeyValue[RequestRecord], owner: str, grace_s: float) -> None:
        self._records = records
        self._owner = owner
        self._grace_s = grace_s

    async def find(self, key: str) -> tuple[RequestRecord | None, int]:
        """Return the record and its revision; None and 0 when there is none.

        Raises:
            DsecError: the bucket does not answer.
        """
        try:
            entry = await self._records.get(key)
        except DsecError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return None, 0
            raise
        return entry.value, entry.revision

    def claim(self, key: str, digest: str, revision: int, gate: Gate | None = None) -> Claim:
        """Return a claim on the key that replaces ``revision``; nothing is written yet."""
        return Claim(
            self._records,
            key,
            digest,
            self._owner,
            revision=revision,
            grace_s=self._grace_s,
            gate=gate,
        )
