"""Traces: a sandbox's behaviour log read back in order."""

from __future__ import annotations

import msgspec

from dsec_common.wire.base import Message


class GetTrace(Message, frozen=True, kw_only=True):
    """Ask the tracer for the steps of a sandbox, from ``after_seq`` on."""

    sandbox_id: str
    after_seq: int = 0
    limit: int = 500


class TraceStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step: what was done, when, how long it took and how it ended."""

    seq: int
    time: float
    agent: str
    action: str
    status: str
    latency_ms: float = 0.0
    tokens_in: int = 0
    tokens_out: int = 0
    attributes: dict[str, str] = msgspec.field(default_factory=dict)


class Trace(Message, frozen=True, kw_only=True):
    """Steps in order of ``seq``; ``gaps`` are numbers not seen (yet)."""

    sandbox_id: str
    steps: tuple[TraceStep, ...] = ()
    gaps: tuple[int, ...] = ()
    more: bool = False
