"""What the broker's core wants done."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_broker.record import NodeRecord
from dsec_common.errors import DsecError
from dsec_common.wire.base import Message


class WriteRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Write the record if ``revision`` is still the last (0: nothing is there).

    Exactly one of ``RecordWritten``, ``RecordRead`` (another broker was faster) and ``StoreFailed``
    must follow.
    """

    node: str
    record: NodeRecord
    revision: int


class ReadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Read the node's record; ``RecordRead`` or ``StoreFailed`` must follow."""

    node: str


class DeleteRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Forget the node if ``revision`` is still the last; another broker may have been faster."""

    node: str
    revision: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a request."""

    request_id: int
    reply: Message


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a request with an error."""

    request_id: int
    error: DsecError


Outcome: TypeAlias = Answer | Refuse
Effect: TypeAlias = WriteRecord | ReadRecord | DeleteRecord | Outcome
