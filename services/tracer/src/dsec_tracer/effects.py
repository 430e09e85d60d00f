"""What the tracer's core wants done."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_common.errors import DsecError
from dsec_common.wire.base import Message
from dsec_common.wire.trace import TraceStep
from dsec_tracer.events import SandboxKey
from dsec_tracer.numbering import TracedSandbox


class WriteStep(msgspec.Struct, frozen=True, kw_only=True):
    """Keep a step, and what is known of its sandbox now, together."""

    key: SandboxKey
    step: TraceStep
    sandbox: TracedSandbox


class WriteSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """Keep what is known of a sandbox now."""

    key: SandboxKey
    sandbox: TracedSandbox


class ForgetSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """Drop a sandbox with its steps."""

    key: SandboxKey


class ReadSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Read a page of a sandbox's steps; ``StepsRead`` must follow."""

    request_id: int
    key: SandboxKey
    after_seq: int
    limit: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a request."""

    request_id: int
    reply: Message


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a request with an error."""

    request_id: int
    error: DsecError


Effect: TypeAlias = WriteStep | WriteSandbox | ForgetSandbox | ReadSteps | Answer | Refuse
