"""Which sandboxes a project has: each node is asked, and those that are silent are named.

All sandboxes of all nodes do not fit one message, so a listing comes in pages. Every node is asked
for its own next page, small enough that all of them together are about one of ours.
"""

from __future__ import annotations

import asyncio
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

_NODE_PAGE_BYTES_MIN: Final = 4096
_encoder: Final = msgspec.msgpack.Encoder()


async def list_sandboxes(
    bus: Bus, project: str, request: ListSandboxes, nodes: Sequence[str], timeout_s: float
) -> SandboxList:
    """Return a page of the sandboxes on ``nodes``, oldest first, and the nodes without an answer.

    Raises:
        DsecError: ``invalid`` when ``after`` is no sandbox id.
    """
    if request.after:
        ScopedId.parse(request.after)
    question = ListNodeSandboxes(
        cause_id=request.message_id,
        project=project,
        include_ended=request.include_ended,
        labels=request.labels,
        after=request.after,
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
    page, more = merge([answer for answer in answers if answer is not None])
    silent = sorted(node for node, answer in zip(nodes, answers, strict=True) if answer is None)
    return SandboxList(
        cause_id=request.message_id, sandboxes=page, silent_nodes=tuple(silent), more=more
    )


def merge(answers: Iterable[NodeSandboxes]) -> tuple[tuple[SandboxInfo, ...], bool]:
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
        if page and (left_bytes < 0 or beyond):
            break
        page.append(info)
    return tuple(page), len(page) < len(found) or last_sure is not None
