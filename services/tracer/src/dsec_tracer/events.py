"""What can happen to the tracer."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_common.behavior import BehaviorLog
from dsec_tracer.numbering import TracedSandbox


class SandboxKey(msgspec.Struct, frozen=True, order=True):
    """A sandbox and the project that owns it: nobody else's request finds it."""

    project: str
    sandbox_id: str


class SandboxLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier life of this tracer knew this sandbox."""

    key: SandboxKey
    sandbox: TracedSandbox


class RecordRead(msgspec.Struct, frozen=True, kw_only=True):
    """Kafka gave the next record."""

    record: BehaviorLog
    now: float


class TraceAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A project asks for a sandbox's steps."""

    request_id: int
    project: str
    sandbox_id: str
    after_seq: int
    limit: int


class StepsRead(msgspec.Struct, frozen=True, kw_only=True):
    """The store gave the steps of a page, in order; ``more`` says that others follow."""

    request_id: int
    key: SandboxKey
    after_seq: int
    steps: tuple[tuple[int, bytes], ...]
    more: bool


class SweepDue(msgspec.Struct, frozen=True, kw_only=True):
    """Time to look for sandboxes to forget."""

    now: float


Event: TypeAlias = SandboxLoaded | RecordRead | TraceAsked | StepsRead | SweepDue
