"""One sandbox for one key: the record of a request, and what to do on finding one. No I/O.

The record is written before a node is asked and again after it has answered. A scheduler may die
between any two lines; what the next request with the same key then finds:

1. nothing: no node was asked. It begins.
2. ``pending`` within its deadline: another scheduler is at work. It waits.
3. ``pending`` past its deadline: the scheduler died, before or after the node made the sandbox. The
   node that the record names is asked; a running sandbox is the answer. Otherwise the node will
   not make it any more, since each placement carries an end that lies before the deadline, and
   the request takes the record over. Two that try meet at the compare-and-swap.
4. ``created``: the same answer again.
5. ``failed``: nothing is left of it. It begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeAlias

import msgspec

from dsec_common.wire.base import ErrorReply, Message
from dsec_common.wire.sandbox import CreateSandbox, SandboxCreated
from dsec_scheduler.errors import key_conflict


class RequestState(StrEnum):
    """How far a request with a key is."""

    PENDING = "pending"
    CREATED = "created"
    FAILED = "failed"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox of a gang: the node that is asked for it, its id there, and its lease."""

    node: str
    local: str
    lease_id: str


class RequestRecord(Message, frozen=True, kw_only=True):
    """What is kept under an idempotency key.

    Attributes:
        digest: of the arguments.
        owner: the scheduler at work, for people who read the bucket.
        node: the node that was asked last.
        local: the sandbox's id there.
        lease_id: the lease taken for it, or empty.
        deadline: Unix time after which a pending record is nobody's.
        created: the answer, once there is one.
        error: why it failed.
        members: of a gang, in place of ``node``, ``local`` and ``lease_id``.
        gang: the answer to it, in place of ``created``.
    """

    digest: str
    state: RequestState
    owner: str
    node: str = ""
    local: str = ""
    lease_id: str = ""
    deadline: float = 0.0
    created: SandboxCreated | None = None
    error: ErrorReply | None = None
    members: tuple[Member, ...] = ()
    gang: tuple[SandboxCreated, ...] = ()

    @property
    def answer(self) -> tuple[SandboxCreated, ...]:
        """All that was made."""
        return self.gang or ((self.created,) if self.created is not None else ())


class Begin(msgspec.Struct, frozen=True):
    """Nothing is in the way."""


class Wait(msgspec.Struct, frozen=True):
    """Another scheduler is at work, until this Unix time at most."""

    until: float


class Replay(msgspec.Struct, frozen=True):
    """Answer the same again: one sandbox, or those of a gang."""

    created: tuple[SandboxCreated, ...]


class GiveUp(msgspec.Struct, frozen=True):
    """The request that was waited for has failed: this one, being the same, has too."""

    error: ErrorReply


class AskNode(msgspec.Struct, frozen=True):
    """A scheduler died at work: ask its nodes whether what it wanted is there, or else begin."""

    record: RequestRecord


Decision: TypeAlias = Begin | Wait | Replay | GiveUp | AskNode


def decide(record: RequestRecord | None, digest: str, now: float, *, waited: bool) -> Decision:
    """Return what to do on finding ``record`` under the key.

    Args:
        record: what is there.
        digest: of this request's arguments.
        now: Unix time.
        waited: this request has been waiting for that one.

    Raises:
        DsecError: ``conflict`` when the key was used with other arguments.
    """
    if record is None:
        return Begin()
    if record.digest != digest:
        raise key_conflict()
    if record.state is RequestState.CREATED and record.answer:
        return Replay(record.answer)
    if record.state is RequestState.FAILED:
        return GiveUp(record.error) if waited and record.error is not None else Begin()
    return Wait(record.deadline) if now < record.deadline else AskNode(record)


def arguments_digest(request: CreateSandbox) -> str:
    """Return what two requests for the same thing have in common.

    How long the caller waits and how the message is labelled do not matter.
    """
    command = request.command
    if command is not None:
        command = msgspec.structs.replace(command, message_id="", cause_id="", sent_at=0.0)
    plain = msgspec.structs.replace(
        request,
        message_id="",
        cause_id="",
        sent_at=0.0,
        idempotency_key="",
        timeout_s=0.0,
        command=command,
    )
    # The order in which a client happened to write its maps does not matter either.
    encoded = msgspec.msgpack.encode(plain, order="sorted")
    return hashlib.sha256(encoded).hexdigest()


def gang_digest(requests: Iterable[CreateSandbox]) -> str:
    """Return what two requests for the same gang have in common."""
    return hashlib.sha256(" ".join(map(arguments_digest, requests)).encode()).hexdigest()


def bucket_key(project: str, kind: str, key: str) -> str:
    """Return the bucket's key: of fixed form, whatever characters the caller's has.

    ``kind`` keeps keys that callers chose apart from those that the platform gives.
    """
    whole = f"{project}\0{kind}\0{key}"
    return hashlib.sha256(whole.encode(errors="surrogatepass")).hexdigest()
