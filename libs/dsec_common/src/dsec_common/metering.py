"""What was held and used, for the bill: the records on the topic ``dsec-metering``.

Whatever is metered (a sandbox by its node, a lease by a broker) is told in segments that follow
each other without a gap: segment 1 begins where the thing began, each later one where the one
before ended, and the last one says that it is. A reader that adds up a thing's segments has what it
held and used from its beginning, to the millisecond; the number drops what comes twice and shows
what is missing. Amounts are integers, so that sums are exact in any order:

- Compute Units, held and used, in millionths of a unit times milliseconds (:data:`MICRO`);
- memory in bytes times milliseconds, the mean of a segment's two ends, of GPUs by their readings;
- processor time in microseconds.

What a GPU's driver does not tell is never 0: the amount is of the time in which it is known, the
rest is counted in milliseconds as unknown, and an amount of which nothing is known is None.

Values are JSON, one object a record, with its kind under ``type``.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.topics import METERING

MICRO: Final = 1_000_000
"""Millionths in a Compute Unit."""


class Segment(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A piece of time in which something was held; each kind says by ``thing`` what.

    Attributes:
        project: whose it is.
        agent: the kind of agent it is held for; empty: none was named.
        node: where it is.
        number: 1, 2, 3, …
        from_ms, to_ms: Unix time in milliseconds; the first is in it, the second is not.
        last: whether it has ended with this segment.
    """

    project: str
    agent: str = ""
    node: str
    number: int
    from_ms: int
    to_ms: int
    last: bool = False

    @property
    def lasted_ms(self) -> int:
        """How long the segment is."""
        return self.to_ms - self.from_ms


class SandboxSegment(Segment, frozen=True, kw_only=True, tag="sandbox"):
    """What one sandbox used in a piece of its life.

    Attributes:
        sandbox_id: ``<node>.<local>``.
        lease_id: the Compute Units that it runs on, if any.
        rollout_id: that it serves, if any.
        cpu_us: processor time of all its processes.
        memory_byte_ms: memory charged to it, over time.
        gpu_memory_byte_ms: memory of the GPUs that it has slices of, over the time in which it is
            known; None: of none of it, or it has no slices.
        gpu_memory_unknown_ms: how long of the segment it is not known.
        cu_used_micro_ms: Compute Units used, in millionths, over time: how busy its processes kept
            their cards' multiprocessors times what those cards are worth; None: as above.
        cu_used_unknown_ms: how long of the segment they are not known.
        measured: false when its node could not ask the kernel any more (it was killed together
            with the sandbox): then processor time and memory are 0 and the time alone is known.
    """

    sandbox_id: str
    lease_id: str = ""
    rollout_id: str = ""
    cpu_us: int = 0
    memory_byte_ms: int = 0
    gpu_memory_byte_ms: int | None = None
    gpu_memory_unknown_ms: int = 0
    cu_used_micro_ms: int | None = None
    cu_used_unknown_ms: int = 0
    measured: bool = True

    @property
    def thing(self) -> str:
        """The sandbox."""
        return self.sandbox_id


class LeaseSegment(Segment, frozen=True, kw_only=True, tag="lease"):
    """What one lease held in a piece of its life, in which that did not change.

    Attributes:
        lease_id: ``<node>.<local>`` of its sandbox; of an action ``<node>.<action_id>``.
        cu_micro: Compute Units held, in millionths.
        cost_micro_per_hour: what that costs, in millionths of the price table's currency.
    """

    lease_id: str
    cu_micro: int
    cost_micro_per_hour: int = 0

    @property
    def thing(self) -> str:
        """The lease."""
        return self.lease_id

    @property
    def cu_micro_ms(self) -> int:
        """Held units over time."""
        return self.cu_micro * self.lasted_ms


MeterRecord: TypeAlias = SandboxSegment | LeaseSegment
"""Everything on the topic."""

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(SandboxSegment | LeaseSegment)


def encode_segment(segment: MeterRecord) -> tuple[str, bytes, bytes]:
    """Return a segment as a Kafka message: topic, key and value.

    The key is the thing itself, so that its segments keep their order.
    """
    return METERING, segment.thing.encode(), _encoder.encode(segment)


def decode_segment(value: bytes) -> MeterRecord:
    """Return the segment in a message's value.

    Raises:
        DsecError: ``invalid``, saying what does not fit.
    """
    try:
        segment = _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise invalid(f"this is no metering record: {error}") from error
    if segment.to_ms < segment.from_ms or segment.number < 1 or not segment.thing:
        raise DsecError(
            ErrorCode.INVALID,
            f"segment {segment.number} of {segment.thing!r} from {segment.from_ms} to "
            f"{segment.to_ms} cannot be",
        )
    return segment
