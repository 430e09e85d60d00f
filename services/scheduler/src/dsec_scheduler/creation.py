"""A creation as its caller means it: checked, once for each key, within its time."""

from __future__ import annotations

from typing import NamedTuple, assert_never

import msgspec

from dsec_common.bus import ReplyAddress
from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_common.subjects import ScopedId
from dsec_common.wire.sandbox import CreateSandbox
from dsec_scheduler.cancelling import Gate
from dsec_scheduler.effects import Succeed
from dsec_scheduler.idempotency import (
    AskNode,
    Begin,
    GiveUp,
    Replay,
    RequestRecord,
    Wait,
    arguments_digest,
    decide,
)
from dsec_scheduler.keyed import one_answer
from dsec_scheduler.ledger import Claim, ClaimLostError, Ledger
from dsec_scheduler.placer import Placer


class Queued(NamedTuple):
    """What is known of a request that comes from the queue.

    Attributes:
        gate: passed before a node is asked.
        waited_s: how long it has waited: so much of its turn it has where it waits for units.
    """

    gate: Gate
    waited_s: float = 0.0


class Creation:
    """Creates sandboxes, with and without an idempotency key."""

    def __init__(self, placer: Placer, ledger: Ledger, clock: Clock) -> None:
        self._placer = placer
        self._ledger = ledger
        self._clock = clock

    async def create(
        self,
        project: str,
        request: CreateSandbox,
        timeout_s: float,
        caller: ReplyAddress,
        key: str = "",
        *,
        queued: Queued | None = None,
    ) -> Succeed:
        """Return the sandbox; with a ``key`` of the bucket, the same one each time.

        What was ``queued`` has a key.

        When its node has told the caller, that is all; otherwise what came of the request's command
        is with it.

        Raises:
            DsecError: why there is none.
        """
        succeeded = await self._create(project, request, timeout_s, caller, key, queued=queued)
        if succeeded.told or request.command is None or succeeded.created.result is not None:
            return succeeded
        created = await self._placer.with_outcome(project, request, succeeded.created, timeout_s)
        return msgspec.structs.replace(succeeded, created=created)

    async def _create(
        self,
        project: str,
        request: CreateSandbox,
        timeout_s: float,
        caller: ReplyAddress,
        key: str,
        *,
        queued: Queued | None,
    ) -> Succeed:
        """Create or find it; without a key nothing is asked or written but the node."""
        if not key:
            return await self._placer.create(project, request, timeout_s, caller)

        async def try_once(left_s: float, waited: bool) -> Succeed | None:
            return await self._try_once(
                project, request, left_s, caller, key, waited=waited, queued=queued
            )

        return await one_answer(try_once, timeout_s, self._clock)

    async def _try_once(
        self,
        project: str,
        request: CreateSandbox,
        timeout_s: float,
        caller: ReplyAddress,
        key: str,
        *,
        waited: bool,
        queued: Queued | None,
    ) -> Succeed | None:
        """Return the sandbox, or None while another scheduler is at work on it."""
        digest = arguments_digest(request)
        record, revision = await self._ledger.find(key)
        claim = self._ledger.claim(key, digest, revision, queued.gate if queued else None)
        decision = decide(record, digest, self._clock.now(), waited=waited)
        match decision:
            case Replay():
                (created,) = decision.created
                return Succeed(create_id=0, created=created, told=False)
            case GiveUp():
                raise decision.error.to_error()
            case Wait():
                return None
            case AskNode():
                found = await self._after_a_crash(project, request, decision.record, claim)
                if found is not None:
                    return found
            case Begin():
                pass
            case _:
                assert_never(decision)
        waited_s = queued.waited_s if queued else 0.0
        return await self._create_claimed(
            project, request, timeout_s, caller, claim, waited_s=waited_s
        )

    async def _create_claimed(
        self,
        project: str,
        request: CreateSandbox,
        timeout_s: float,
        caller: ReplyAddress,
        claim: Claim,
        *,
        waited_s: float,
    ) -> Succeed:
        try:
            succeeded = await self._placer.create(
                project, request, timeout_s, caller, claim=claim, waited_s=waited_s
            )
        except DsecError as error:
            # While this one waited for units or its turn, another may have had them.
            if await claim.is_lost():
                raise ClaimLostError from error
            await claim.fail(error)
            raise
        # The caller has its answer by now; this is for those who ask again.
        await claim.succeed(succeeded.created)
        return succeeded

    async def _after_a_crash(
        self, project: str, request: CreateSandbox, record: RequestRecord, claim: Claim
    ) -> Succeed | None:
        """Return the sandbox that a dead scheduler's node did make, if it runs."""
        created = await self._placer.resolve(
            project,
            request,
            ScopedId(record.node, record.local),
            record.lease_id,
            valid_until=record.deadline,
        )
        if created is None:
            # Its lease, if any, is left to the node's heartbeats: without them it runs out soon.
            return None
        await claim.succeed(created)
        return Succeed(create_id=0, created=created, told=False)
