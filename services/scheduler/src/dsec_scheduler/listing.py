"""Which sandboxes a project has: each node is asked, and those that are silent are named.

All sandboxes of all nodes do not fit one message, so a listing comes in pages. Every node is asked
for its own next page, small enough that all of them together are about one of ours.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import DsecError
from dsec_common.subjects import ScopedId
from dsec_common.wire.node import ListNodeSandboxes, NodeSandboxes
from dsec_common.wire.sandbox import (
    LISTING_PAGE_BYTES,
    ListSandboxes,
    SandboxInfo,
    SandboxList,
    listing_order,
)
from dsec_scheduler.errors import bad_field

_NODE_PAGE_BYTES_MIN: Final = 4096
_CURSOR_VERSION: Final = 1
_encoder: Final = msgspec.msgpack.Encoder()


async def list_sandboxes(
    bus: Bus, project: str, request: ListSandboxes, nodes: Sequence[str], timeout_s: float
) -> SandboxList:
    """Return a page of the sandboxes on ``nodes``, oldest first, and the nodes without an answer.

    Raises:
        DsecError: ``invalid`` when the question makes no sense.
    """
    _check(request)
    after = request.after
    if request.cursor:
        after = after_cursor(request)
    elif after:
        ScopedId.parse(after)
    question = ListNodeSandboxes(
        cause_id=request.message_id,
        project=project,
        include_ended=request.include_ended,
        labels=request.labels,
        after=after,
        states=request.states,
        agent=request.agent,
        rollout_id=request.rollout_id,
        created_after=request.created_after,
        created_before=request.created_before,
        limit=request.limit,
        usage=request.usage,
        page_bytes=max(LISTING_PAGE_BYTES // max(len(nodes), 1), _NODE_PAGE_BYTES_MIN),
    )

    async def ask(node: str) -> NodeSandboxes | None:
        try:
            return await bus.request(
                subjects.node_request(node, "list"), question, NodeSandboxes, timeout_s=timeout_s
            )
        except DsecError:
            return None

    answers = await asyncio.gather(*(ask(node) for node in nodes))
    page, more = merge([answer for answer in answers if answer is not None], request.limit)
    silent = sorted(node for node, answer in zip(nodes, answers, strict=True) if answer is None)
    return SandboxList(
        cause_id=request.message_id,
        sandboxes=page,
        silent_nodes=tuple(silent),
        more=more,
        next_cursor=cursor(request, page[-1].sandbox_id) if more and page else "",
    )


def _check(request: ListSandboxes) -> None:
    if request.limit < 0:
        raise bad_field("limit", request.limit, "use 1 or more, or 0 for as many as fit")
    if request.cursor and request.after:
        raise bad_field("after", request.after, "use it or a cursor, not both")
    for name in ("created_after", "created_before"):
        if not math.isfinite(getattr(request, name)):
            raise bad_field(name, getattr(request, name), "use Unix seconds, or 0 for any")


def cursor(request: ListSandboxes, last_id: str) -> str:
    """Return where the page after ``last_id`` begins, in words that mean nothing to callers."""
    raw = msgspec.msgpack.encode((_CURSOR_VERSION, _question_digest(request), last_id))
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def after_cursor(request: ListSandboxes) -> str:
    """Return the id after which the page begins that the request's cursor stands for.

    Raises:
        DsecError: ``invalid`` when it is no cursor, or one of another question.
    """
    text = request.cursor
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        version, digest, last_id = msgspec.msgpack.decode(raw, type=tuple[int, bytes, str])
        ScopedId.parse(last_id)
    except (ValueError, msgspec.MsgspecError, DsecError):
        version = 0
    if version != _CURSOR_VERSION:
        raise bad_field("cursor", text[:40], "use next_cursor of the page before, as it is")
    if digest != _question_digest(request):
        raise bad_field("cursor", text[:40], "it belongs to a listing with other filters")
    return last_id


def _question_digest(request: ListSandboxes) -> bytes:
    """Return what all pages of one listing have in common; a page's size may change."""
    plain = msgspec.structs.replace(
        request, message_id="", cause_id="", sent_at=0.0, after="", cursor="", limit=0
    )
    encoded = msgspec.msgpack.encode(plain, order="sorted")
    return hashlib.blake2b(encoded, digest_size=8).digest()


def merge(answers: Iterable[NodeSandboxes], limit: int = 0) -> tuple[tuple[SandboxInfo, ...], bool]:
    """Return one page made of the nodes' pages, and whether others follow.

    A node that has more may have it right after its last one, so the page ends with the earliest
    of these; what other nodes have told beyond it comes again with the next.
    """
    found: list[SandboxInfo] = []
    last_sure: tuple[str, str] | None = None
    for answer in answers:
        found += answer.sandboxes
        if answer.more and answer.sandboxes:
            last = listing_order(answer.sandboxes[-1].sandbox_id)
            last_sure = last if last_sure is None else min(last_sure, last)
    found.sort(key=lambda info: listing_order(info.sandbox_id))
    page: list[SandboxInfo] = []
    left_bytes = LISTING_PAGE_BYTES
    for info in found:
        left_bytes -= len(_encoder.encode(info))
        beyond = last_sure is not None and listing_order(info.sandbox_id) > last_sure
        if page and (left_bytes < 0 or beyond or (limit and len(page) >= limit)):
            break
        page.append(info)
    return tuple(page), len(page) < len(found) or last_sure is not None
