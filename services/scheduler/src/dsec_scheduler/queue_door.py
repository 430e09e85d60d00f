"""The durable door: requests that wait in a stream until there is room.

A message is acknowledged only after its outcome has been published as an event that JetStream
has stored. A crash before that has it delivered again, and its idempotency key (the caller's, or
one made of its place in the stream) leads to the sandbox that was made, or to none.
"""

from __future__ import annotations

import random
from typing import Final

import msgspec
import structlog

from dsec_common import subjects
from dsec_common.bus import Bus, ReplyAddress, Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message
from dsec_common.wire.sandbox import CreateSandbox, SandboxRefused, SandboxRunning
from dsec_scheduler import admission, metrics
from dsec_scheduler.agents.resolving import Resolver
from dsec_scheduler.cancelling import Cancellations, Gate
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.creation import Creation, Queued
from dsec_scheduler.effects import Succeed
from dsec_scheduler.errors import bad_field, too_many_wait
from dsec_scheduler.idempotency import bucket_key

_log: Final = structlog.get_logger(__name__)

#: What a queued request waits out. A timeout is one try's, not the request's.
_WAITED_OUT: Final = frozenset({ErrorCode.EXHAUSTED, ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT})
_RETRY_GROWTH: Final = 1.5
_RETRY_MAX_S: Final = 10.0


class QueueDoor:
    """Handles the messages of the queue, for every project."""

    def __init__(
        self,
        bus: Bus,
        creation: Creation,
        clock: Clock,
        config: SchedulerConfig,
        randomness: random.Random,
        *,
        agents: Resolver,
        cancellations: Cancellations,
    ) -> None:
        self._bus = bus
        self._creation = creation
        self._agents = agents
        self._cancellations = cancellations
        self._clock = clock
        self._config = config
        self._random = randomness
        self._waiting = 0

    async def handle(self, queued: Request[CreateSandbox]) -> None:
        """Create the sandbox, or put the request back while it may wait.

        Raises:
            DsecError: retryable, to have the message delivered again later; ``invalid`` when its
                message id cannot stand in an event's subject.
        """
        request = queued.message
        subjects.validate_local(request.message_id)
        gate = Gate(self._cancellations, queued.project, request.message_id)
        try:
            running = await self._create(queued, gate)
        except DsecError as error:
            await gate.leave()
            # The first delivery carries the same time as the last: the stream keeps it.
            patience_s = max(request.timeout_s, self._config.queue_patience_s)
            left_s = queued.stored_at + patience_s - self._clock.now()
            if error.code in _WAITED_OUT and error.retryable and left_s > 0:
                metrics.CREATES.labels("queue", "waits").inc()
                raise self._again(error, queued.delivery, left_s) from error
            metrics.CREATES.labels("queue", str(error.code)).inc()
            _log.info("a queued request is refused", request=request.message_id, error=str(error))
            await self._tell(
                queued.project,
                request.message_id,
                "refused",
                SandboxRefused(
                    cause_id=request.message_id,
                    request_id=request.message_id,
                    code=str(error.code),
                    reason=error.message,
                ),
            )
            return
        metrics.CREATES.labels("queue", "ok").inc()
        await self._tell(queued.project, request.message_id, "created", running)

    async def _create(self, queued: Request[CreateSandbox], gate: Gate) -> SandboxRunning:
        request, project = queued.message, queued.project
        await gate.look()
        if request.command is not None:
            raise bad_field("command", request.command.argv, "a queued request carries no command")
        attempt_s = self._config.attempt_timeout_s * self._config.attempts_max
        # A queued request may wait for ever; the node and the checks see one try's time.
        tried = msgspec.structs.replace(request, timeout_s=attempt_s)
        meant = await self._agents.learn(project, tried) if tried.agent else tried
        admission.check(meant, max(attempt_s, self._config.request_timeout_max_s))
        if request.idempotency_key:
            key = bucket_key(project, "caller", request.idempotency_key)
        else:
            key = bucket_key(project, "queue", f"{queued.sequence} {queued.stored_at!r}")
        if meant.gpu_demand is None:
            succeeded = await self._creation.create(
                project, tried, attempt_s, ReplyAddress(), key, queued=Queued(gate)
            )
        else:
            succeeded = await self._wait_for_units(queued, tried, key, gate)
        if not succeeded.create_id:
            # It was made before, for this key: nothing has passed the gate in this life.
            await gate.begin(succeeded.created.sandbox_id)
        return SandboxRunning(
            cause_id=request.message_id,
            sandbox_id=succeeded.created.sandbox_id,
            request_id=request.message_id,
            created=succeeded.created,
        )

    async def _wait_for_units(
        self, queued: Request[CreateSandbox], tried: CreateSandbox, key: str, gate: Gate
    ) -> Succeed:
        """Have it wait here, in its turn since it was queued, for as long as it may.

        Raises:
            DsecError: as :meth:`Creation.create`; ``exhausted`` when as many of the queue wait here
                as may: others, and what wants no units, must not stand behind them.
        """
        if self._waiting >= self._config.queue_waiting_max:
            raise too_many_wait(self._waiting, self._config.retry_after_s)
        patience_s = max(queued.message.timeout_s, self._config.queue_patience_s)
        waited_s = max(self._clock.now() - queued.stored_at, 0.0)
        self._waiting += 1
        try:
            return await self._creation.create(
                queued.project,
                tried,
                max(patience_s - waited_s, tried.timeout_s),
                ReplyAddress(),
                key,
                queued=Queued(gate, waited_s),
            )
        finally:
            self._waiting -= 1

    def _again(self, error: DsecError, delivery: int, left_s: float) -> DsecError:
        """Return the error that delivers the message later: ever later, and never all at once."""
        base_s = error.retry_after_s or self._config.retry_after_s
        grown_s = min(base_s * _RETRY_GROWTH ** min(delivery - 1, 16), _RETRY_MAX_S)
        delay_s = grown_s * self._random.uniform(0.75, 1.25)
        return DsecError(
            error.code,
            error.message,
            retryable=True,
            retry_after_s=max(min(delay_s, left_s), 0.05),
            details=error.details,
        )

    async def _tell(self, project: str, request_id: str, what: str, event: Message) -> None:
        await self._bus.js_publish(
            subjects.request_event(project, request_id, what),
            event,
            message_id=f"{project}.{request_id}.{what}",
        )
