"""The tracer's shell: Kafka's records and projects' requests become events, effects are done.

Every tracer reads the whole log, each at its own pace, and any of them answers: requests go to one
of their queue group. So one may know a step a moment before another, and a fresh one answers
``not_found`` until it has read that far.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from importlib.metadata import version
from typing import ClassVar, Final, assert_never

from dsec_common import subjects
from dsec_common.bus import Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, invalid
from dsec_common.log import KafkaConfig, LogConsumer, MeterConsumer
from dsec_common.service import Service
from dsec_common.subjects import ScopedId
from dsec_common.topics import METERING
from dsec_common.wire.base import Message
from dsec_common.wire.cost import Cost, GetCost
from dsec_common.wire.trace import GetTrace
from dsec_tracer import metrics
from dsec_tracer.bills import HOUR_MS, Bills
from dsec_tracer.config import TracerConfig
from dsec_tracer.effects import Answer, ForgetSandbox, ReadSteps, Refuse, WriteSandbox, WriteStep
from dsec_tracer.errors import no_kafka
from dsec_tracer.events import Event, RecordRead, SandboxLoaded, StepsRead, SweepDue, TraceAsked
from dsec_tracer.state import TracerState
from dsec_tracer.store import StepStore

QUEUE: Final = "tracer"
_KEEP_POSITION_S: Final = 1.0
_LATEST_S: Final = 1e11


class TracerService(Service[TracerConfig]):
    """Reads the behaviour log of every project and answers for what it has read."""

    name: ClassVar[str] = "tracer"

    def __init__(self, config: TracerConfig, clock: Clock | None = None) -> None:
        super().__init__(config, clock)
        self._core = TracerState(config)
        self._ids = itertools.count(1)
        self._store: StepStore | None = None
        self._consumer: LogConsumer | None = None
        self._meters: MeterConsumer | None = None
        self._bills = Bills()
        self._kept_at = 0.0

    async def open(self) -> None:
        """Open the store.

        Raises:
            DsecError: ``invalid`` without Kafka's address; ``unavailable`` when another tracer has
                the store.
        """
        if not self.config.kafka_bootstrap:
            raise no_kafka()
        self._store = StepStore(self.config.state_path)
        self._consumer = LogConsumer(
            KafkaConfig(bootstrap_servers=self.config.kafka_bootstrap),
            projects=None,
            position=_of_topics(self._store.position(), metering=False),
        )
        self._meters = MeterConsumer(
            KafkaConfig(bootstrap_servers=self.config.kafka_bootstrap),
            position=_of_topics(self._store.position(), metering=True),
        )
        self._bills = self._store.load_bills()
        await self.bus.register("dsec-tracer", version("dsec"), "Behaviour logs read back")

    async def recover(self) -> None:
        """Remember the sandboxes of an earlier life."""
        for key, sandbox in self._opened().load():
            self._handle(SandboxLoaded(key=key, sandbox=sandbox))

    async def subscribe(self) -> None:
        """Take requests, each tracer its share, and read the log."""
        await self.bus.serve(
            subjects.any_project("trace.get"), GetTrace, self._get_trace, queue=QUEUE
        )
        await self.bus.serve(
            subjects.any_project("trace.cost"), GetCost, self._get_cost, queue=QUEUE
        )
        self.spawn(self._read(), "read behaviour logs")
        self.spawn(self._read_meters(), "read metering records")
        self.spawn(self._sweep(), "sweep")

    async def close(self) -> None:
        """Let go of the store."""
        if self._store is not None:
            self._store.close()

    def readiness(self) -> str:
        """Return why what is asked here may be old, or the empty string."""
        if self._consumer is None or not self._consumer.connected:
            return "Kafka is not connected; reconnecting"
        return ""

    # --- What comes in ------------------------------------------------------------------------

    async def _read(self) -> None:
        consumer = self._consumer
        if consumer is None:
            return
        try:
            async for record in consumer:
                # All before this record went to the store, which keeps them with the position. What
                # is read twice after a crash is known there by its number.
                self._keep_position_now_and_then()
                self._handle(RecordRead(record=record, now=self.clock.now()))
                self._bills.step(record)
        finally:
            await consumer.stop()
            self._keep_position()

    async def _read_meters(self) -> None:
        consumer = self._meters
        if consumer is None:
            return
        try:
            async for record in consumer:
                self._keep_position_now_and_then()
                self._bills.segment(record)
        finally:
            await consumer.stop()
            self._keep_position()

    def _keep_position_now_and_then(self) -> None:
        now = self.clock.monotonic()
        if now - self._kept_at > _KEEP_POSITION_S:
            self._kept_at = now
            self._keep_position()

    def _keep_position(self) -> None:
        """Keep how far both readers have come, with the sums of just that."""
        position: dict[tuple[str, int], int] = {}
        for reader in (self._consumer, self._meters):
            if reader is not None:
                position |= reader.position
        self._opened().keep_position(position, self._bills)

    async def _sweep(self) -> None:
        while True:
            await self.clock.sleep(self.config.sweep_interval_s)
            self._handle(SweepDue(now=self.clock.now()))
            self._opened().write()
            oldest = self.clock.now() - self.config.sums_kept_s
            self._opened().forget_sums(self._bills.forget_before(_hour(oldest)))
            metrics.SANDBOXES.set(self._core.sandboxes)
            metrics.PASSED_OVER.set(self._core.passed_over)
            metrics.SHED.set(self._core.shed)

    async def _get_trace(self, request: Request[GetTrace]) -> Message:
        asked = request.message
        if self._consumer is not None:
            self._consumer.hurry()  # who asks for a trace mostly asks again for its next steps
        outcome = self._handle(
            TraceAsked(
                request_id=next(self._ids),
                project=subjects.project_of(request.subject),
                sandbox_id=str(ScopedId.parse(asked.sandbox_id)),
                after_seq=asked.after_seq,
                limit=asked.limit,
            )
        )
        if isinstance(outcome, DsecError):
            metrics.REQUESTS.labels(outcome.code).inc()
            raise outcome
        metrics.REQUESTS.labels("ok").inc()
        if outcome is None:
            raise AssertionError("the core left a request without an answer")
        return outcome

    async def _get_cost(self, request: Request[GetCost]) -> Cost:
        asked = request.message
        if self._meters is not None and self._consumer is not None:
            self._meters.hurry()
            self._consumer.hurry()
        if not 0 <= asked.since <= _LATEST_S or not 0 <= asked.until <= _LATEST_S:
            metrics.REQUESTS.labels("invalid").inc()
            raise invalid("since and until are Unix times in seconds", field="since")
        metrics.REQUESTS.labels("ok").inc()
        return Cost(
            cause_id=asked.message_id,
            rows=self._bills.rows(
                subjects.project_of(request.subject),
                _hour(asked.since),
                _hour(asked.until or _LATEST_S),
                by_agent=asked.by_agent,
            ),
            missing=self._bills.missing,
        )

    # --- Through the core ---------------------------------------------------------------------

    def _opened(self) -> StepStore:
        if self._store is None:
            raise AssertionError("the store is used before open()")
        return self._store

    def _handle(self, event: Event) -> Message | DsecError | None:
        """Do what the core wants; return its answer when the event was a request."""
        store = self._opened()
        answer: Message | DsecError | None = None
        for effect in self._core.handle(event):
            match effect:
                case WriteStep():
                    store.put(effect.key, effect.sandbox, effect.step)
                    metrics.STEPS.inc()
                case WriteSandbox():
                    store.put(effect.key, effect.sandbox)
                case ForgetSandbox():
                    store.forget(effect.key)
                case ReadSteps():
                    steps, more = store.steps(effect.key, effect.after_seq, effect.limit)
                    answer = self._handle(
                        StepsRead(
                            request_id=effect.request_id,
                            key=effect.key,
                            after_seq=effect.after_seq,
                            steps=steps,
                            more=more,
                        )
                    )
                case Answer():
                    answer = effect.reply
                case Refuse():
                    answer = effect.error
                case _:
                    assert_never(effect)
        return answer


def _hour(unix_s: float) -> int:
    return int(unix_s * 1000) // HOUR_MS


def _of_topics(
    position: Mapping[tuple[str, int], int], *, metering: bool
) -> dict[tuple[str, int], int]:
    """Return the part of a position that is, or is not, in the metering records."""
    return {
        (topic, partition): offset
        for (topic, partition), offset in position.items()
        if (topic == METERING) == metering
    }
