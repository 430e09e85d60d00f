"""What a project held and used, added up."""

from __future__ import annotations

from typing import Any

import msgspec

from dsec_common.wire.base import Message


class GetCost(Message, frozen=True, kw_only=True):
    """Ask a tracer what was held and used.

    Attributes:
        since: Unix seconds; what ended before that hour does not count.
        until: Unix seconds, or 0 for all there is; what ended after that hour does not count.
        by_agent: a row for each kind of agent; else one for the project.
    """

    since: float = 0.0
    until: float = 0.0
    by_agent: bool = True


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of integers, exact in whatever order they were added.

    Attributes:
        sandboxes: that ended.
        sandbox_ms: how long sandboxes lived, together.
        cpu_us: processor time.
        memory_byte_ms: memory charged, over time.
        gpu_memory_byte_ms: memory of GPUs, over the time in which it is known; None: nothing is.
        gpu_memory_unknown_ms: for how long of their lives it is not known of sandboxes with units.
        lease_ms: how long leases were held, together.
        cu_micro_ms: millionths of Compute Units held, over time.
        cu_used_micro_ms: of Compute Units used, over the time in which it is known; None: nothing.
        cu_used_unknown_ms: as of memory.
        cost_nano: what those cost, in billionths of the price table's currency.
        unmeasured: sandboxes of whose last segment only the time is known.
        execs: commands that ended.
        tokens_in: of model calls.
        tokens_out: same.
        bytes_read: of files out of sandboxes.
        bytes_written: of files into sandboxes.
    """

    sandboxes: int = 0
    sandbox_ms: int = 0
    cpu_us: int = 0
    memory_byte_ms: int = 0
    gpu_memory_byte_ms: int | None = None
    gpu_memory_unknown_ms: int = 0
    lease_ms: int = 0
    cu_micro_ms: int = 0
    cu_used_micro_ms: int | None = None
    cu_used_unknown_ms: int = 0
    cost_nano: int = 0
    unmeasured: int = 0
    execs: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def plus(self, other: Amounts) -> Amounts:
        """Return the sum, amount by amount; what is not known adds nothing to what is."""
        sums: dict[str, Any] = {
            name: _sum(getattr(self, name), getattr(other, name))
            for name in Amounts.__struct_fields__
        }
        return Amounts(**sums)


def _sum(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one project, or of one kind of agent in it."""

    project: str
    agent: str = ""
    amounts: Amounts


class Cost(Message, frozen=True, kw_only=True):
    """The rows, by project and agent.

    Attributes:
        missing: segments that are known to exist and have not been read (yet): while it is 0 the
            sums are those of the nodes' and the brokers' own records.
    """

    rows: tuple[CostRow, ...] = ()
    missing: int = 0
