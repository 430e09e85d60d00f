"""The tracer's core: records in, steps to keep and pages of traces out. It does no I/O."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Final, assert_never

import msgspec

from dsec_common.behavior import BehaviorLog
from dsec_common.errors import DsecError
from dsec_common.subjects import DEFAULT_PROJECT, ScopedId, validate_project
from dsec_common.wire.trace import Trace, TraceStep
from dsec_tracer.config import TracerConfig
from dsec_tracer.effects import (
    Answer,
    Effect,
    ForgetSandbox,
    ReadSteps,
    Refuse,
    WriteSandbox,
    WriteStep,
)
from dsec_tracer.errors import sandbox_unknown
from dsec_tracer.events import (
    Event,
    RecordRead,
    SandboxKey,
    SandboxLoaded,
    StepsRead,
    SweepDue,
    TraceAsked,
)
from dsec_tracer.numbering import TracedSandbox

PAGE_STEPS_MAX: Final = 500
GAPS_MAX: Final = 1000
#: A trace tells what was done; whoever writes more into one step finds it in Kafka.
TEXT_CHARACTERS_MAX: Final = 2048
ATTRIBUTES_MAX: Final = 64

_step_decoder: Final = msgspec.msgpack.Decoder(TraceStep)


class TracerState:
    """What one tracer knows; bounded by its configuration.

    Attributes:
        passed_over: records that are no step of a trace: read before, without a number, or of no
            sandbox that could be.
        shed: steps beyond the limit of one sandbox.
    """

    def __init__(self, config: TracerConfig) -> None:
        """Begin with nothing."""
        self._config = config
        #: The one without a new step for longest comes first.
        self._sandboxes: OrderedDict[SandboxKey, TracedSandbox] = OrderedDict()
        self.passed_over = 0
        self.shed = 0

    @property
    def sandboxes(self) -> int:
        """How many sandboxes are remembered."""
        return len(self._sandboxes)

    def handle(self, event: Event) -> list[Effect]:
        """Take in what happened and return what is to be done, in order."""
        match event:
            case SandboxLoaded():
                return self._loaded(event)
            case RecordRead():
                return self._record(event)
            case TraceAsked():
                return [self._asked(event)]
            case StepsRead():
                return [self._page(event)]
            case SweepDue():
                return self._forget_before(event.now - self._config.kept_s)
            case _:
                assert_never(event)

    def validate_state(self) -> None:
        """Check what must always hold.

        Raises:
            AssertionError: naming what does not.
        """
        if len(self._sandboxes) > self._config.sandboxes_max:
            raise AssertionError(f"{len(self._sandboxes)} sandboxes are remembered")
        for key, sandbox in self._sandboxes.items():
            if sandbox.steps > self._config.steps_max:
                raise AssertionError(f"{sandbox.steps} steps are kept of {key}")
            for numbering in sandbox.numberings:
                below = 0
                for low, high in [*numbering.holes, (numbering.last + 1, numbering.last + 1)]:
                    if not below < low <= high:
                        raise AssertionError(f"{key} has holes out of order: {numbering}")
                    below = high

    def _loaded(self, event: SandboxLoaded) -> list[Effect]:
        self._sandboxes[event.key] = event.sandbox
        return self._forget_surplus()

    def _record(self, event: RecordRead) -> list[Effect]:
        record = event.record
        key = _key_of(record)
        if key is None:
            self.passed_over += 1
            return []
        known = self._sandboxes.get(key)
        sandbox = known or TracedSandbox()
        seq = sandbox.take(record.source, record.seq)
        if not seq:
            self.passed_over += 1
            return []
        sandbox.touched_at = event.now
        self._sandboxes[key] = sandbox
        self._sandboxes.move_to_end(key)
        if sandbox.steps >= self._config.steps_max:
            sandbox.shed += 1
            self.shed += 1
            return [WriteSandbox(key=key, sandbox=sandbox)]
        sandbox.steps += 1
        step = _step_of(record, seq)
        return [WriteStep(key=key, step=step, sandbox=sandbox), *self._forget_surplus()]

    def _asked(self, event: TraceAsked) -> Effect:
        key = SandboxKey(event.project, event.sandbox_id)
        if key not in self._sandboxes:
            return Refuse(request_id=event.request_id, error=sandbox_unknown(event.sandbox_id))
        return ReadSteps(
            request_id=event.request_id,
            key=key,
            after_seq=max(event.after_seq, 0),
            limit=max(1, min(event.limit, PAGE_STEPS_MAX)),
        )

    def _page(self, event: StepsRead) -> Effect:
        sandbox = self._sandboxes.get(event.key)
        if sandbox is None:
            error = sandbox_unknown(event.key.sandbox_id)
            return Refuse(request_id=event.request_id, error=error)
        steps = tuple(_step_decoder.decode(value) for _, value in event.steps)
        up_to_seq = steps[-1].seq if event.more else sandbox.last_seq
        gaps = tuple(islice(sandbox.missing(event.after_seq, up_to_seq), GAPS_MAX))
        trace = Trace(sandbox_id=event.key.sandbox_id, steps=steps, gaps=gaps, more=event.more)
        return Answer(request_id=event.request_id, reply=trace)

    def _forget_surplus(self) -> list[Effect]:
        forgotten: list[Effect] = []
        while len(self._sandboxes) > self._config.sandboxes_max:
            key, _ = self._sandboxes.popitem(last=False)
            forgotten.append(ForgetSandbox(key=key))
        return forgotten

    def _forget_before(self, touched_at: float) -> list[Effect]:
        forgotten: list[Effect] = []
        while self._sandboxes:
            key, sandbox = next(iter(self._sandboxes.items()))
            if sandbox.touched_at >= touched_at:
                break
            del self._sandboxes[key]
            forgotten.append(ForgetSandbox(key=key))
        return forgotten


def _key_of(record: BehaviorLog) -> SandboxKey | None:
    """Return whose step a record is; None when nobody could ask for it."""
    try:
        project = validate_project(record.project or DEFAULT_PROJECT)
        return SandboxKey(project, str(ScopedId.parse(record.sandbox_id)))
    except DsecError:
        return None


def _step_of(record: BehaviorLog, seq: int) -> TraceStep:
    attributes = {
        name[:TEXT_CHARACTERS_MAX]: value[:TEXT_CHARACTERS_MAX]
        for name, value in islice(record.attributes.items(), ATTRIBUTES_MAX)
    }
    for name, value in (
        ("stage", record.stage),
        ("rollout_id", record.rollout_id),
        ("error_code", record.error_code),
        ("detail_shed", "true" if record.detail_shed else ""),
        ("reward", "" if record.reward is None else f"{record.reward:g}"),
    ):
        if value:
            attributes.setdefault(name, value[:TEXT_CHARACTERS_MAX])
    return TraceStep(
        seq=seq,
        time=record.time_us / 1e6,
        agent=record.agent[:TEXT_CHARACTERS_MAX],
        action=record.action[:TEXT_CHARACTERS_MAX],
        status=record.status[:TEXT_CHARACTERS_MAX],
        latency_ms=record.latency_ms,
        tokens_in=record.tokens_in,
        tokens_out=record.tokens_out,
        attributes=attributes,
    )
