"""The behaviour log's record: what an agent did, as protobuf on Kafka and as a line of text.

A plain Kafka consumer reads the records with ``value_deserializer=BehaviorLog.parse``. The protobuf
schema is ``wire/behavior.proto``; the text form lives in :mod:`dsec_common.behavior_text`.
"""

from __future__ import annotations

from typing import Final, Self

import msgspec
from google.protobuf.message import DecodeError

from dsec_common.behavior_text import from_text, to_text
from dsec_common.errors import invalid
from dsec_common.wire import behavior_pb2


class BehaviorLog(msgspec.Struct, frozen=True, kw_only=True):
    """One thing an agent did, or that was done for it. Immutable; every field has a default.

    Attributes:
        sandbox_id: the sandbox it happened in; also the Kafka key, so its records keep their order.
        project: the project that owns the sandbox.
        seq: 1, 2, 3, … per sandbox and source; 0: the writer does not number its records.
        source: who numbered it.
        time_us: when, in microseconds of Unix time; the producer fills in a 0.
        agent: the agent's kind, such as ``web_crawler``.
        agent_id: the agent's own id (``id`` in the text form).
        action: what was done, such as ``fetch_url``.
        status: how it ended, such as ``200`` or ``ok``. Text: not every action has a number.
        latency_ms: how long it took, in milliseconds.
        tokens_in: tokens the model read.
        tokens_out: tokens the model wrote.
        attributes: the action's own particulars (url, command, exit_code).
        rollout_id: the rollout that the sandbox serves; empty without one.
        stage: the rollout's stage.
        message_id: the bus message that the record tells of.
        cause_id: the message that caused it.
        traceparent: the W3C trace parent.
        input_prompt: what the model was given.
        output_text: what the model answered.
        reward: the trainer's reward for the step; None while unknown.
        error_code: a failure's code from the closed set; empty when nothing failed.
        detail_shed: attributes, input_prompt and output_text were left out for want of room.
    """

    sandbox_id: str = ""
    project: str = ""
    seq: int = 0
    source: str = ""
    time_us: int = 0
    agent: str = ""
    agent_id: str = ""
    action: str = ""
    status: str = ""
    latency_ms: float = 0.0
    tokens_in: int = 0
    tokens_out: int = 0
    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    rollout_id: str = ""
    stage: str = ""
    message_id: str = ""
    cause_id: str = ""
    traceparent: str = ""
    input_prompt: str = ""
    output_text: str = ""
    reward: float | None = None
    error_code: str = ""
    detail_shed: bool = False

    @classmethod
    def parse(cls, value: bytes) -> Self:
        """Return the record that a Kafka message's value holds. Unknown fields are ignored.

        Raises:
            DsecError: ``invalid`` when the bytes are no behaviour log.
        """
        try:
            message = behavior_pb2.BehaviorLog.FromString(value)
        except DecodeError as error:
            raise invalid(
                f"a value of {len(value)} bytes is not a BehaviorLog: {error}. "
                "Read only behaviour-log topics with this parser.",
            ) from error
        return cls(
            sandbox_id=message.sandbox_id,
            project=message.project,
            seq=message.seq,
            source=message.source,
            time_us=message.time_us,
            agent=message.agent,
            agent_id=message.agent_id,
            action=message.action,
            status=message.status,
            latency_ms=message.latency_ms,
            tokens_in=message.tokens_in,
            tokens_out=message.tokens_out,
            attributes=dict(message.attributes),
            rollout_id=message.rollout_id,
            stage=message.stage,
            message_id=message.message_id,
            cause_id=message.cause_id,
            traceparent=message.traceparent,
            input_prompt=message.input_prompt,
            output_text=message.output_text,
            reward=message.reward if message.HasField("reward") else None,
            error_code=message.error_code,
            detail_shed=message.detail_shed,
        )

    def serialize(self) -> bytes:
        """Return the record as protobuf, the value of a Kafka message.

        Raises:
            DsecError: ``invalid`` when a field does not fit its type (a negative count, text that
                is not Unicode).
        """
        try:
            return self._message().SerializeToString()
        except (TypeError, ValueError) as error:
            raise invalid(
                f"behaviour log {self.action!r} of sandbox {self.sandbox_id!r} "
                f"cannot be written: {error}",
            ) from error

    def _message(self) -> behavior_pb2.BehaviorLog:
        message = behavior_pb2.BehaviorLog()
        # Most fields are empty in most records; the constructor would convert each of them.
        for name in _PLAIN_FIELDS:
            if value := getattr(self, name):
                setattr(message, name, value)
        message.attributes.update(self.attributes)
        if self.reward is not None:
            message.reward = self.reward
        return message

    def without_detail(self) -> Self:
        """Return the record without attributes, input_prompt and output_text, and saying so."""
        return msgspec.structs.replace(
            self, attributes={}, input_prompt="", output_text="", detail_shed=True
        )

    def to_text(self, *, full: bool = False) -> str:
        """Return one line of text, without a line break at its end.

        ``[2024-06-15T14:22:03.127Z] agent=web_crawler id=abc123 action=fetch_url
        url=https://example.com status=200 latency=142ms tokens_in=512 tokens_out=89``

        Values that hold spaces, quotes, ``=`` or anything unprintable are written as JSON strings.

        Args:
            full: append every other field that is set, so that :meth:`from_text` returns an equal
                record; without it the line holds time (in milliseconds), agent, action and counts.
        """
        return to_text(msgspec.structs.asdict(self), full=full)

    @classmethod
    def from_text(cls, line: str) -> Self:
        """Return the record that a line of :meth:`to_text` tells of.

        Raises:
            DsecError: ``invalid``, naming the column where the line stops making sense.
        """
        return msgspec.convert(from_text(line), cls)


#: Those whose empty value is the same as none at all.
_PLAIN_FIELDS: Final = tuple(
    name for name in BehaviorLog.__struct_fields__ if name not in {"attributes", "reward"}
)
