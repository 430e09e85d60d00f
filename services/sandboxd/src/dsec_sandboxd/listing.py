"""One page of this node's sandboxes for the scheduler's listing. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from dsec_common.wire.node import ListNodeSandboxes, NodeSandboxes
from dsec_common.wire.sandbox import LISTING_PAGE_BYTES, SandboxInfo, listing_order
from dsec_sandboxd.records import SandboxRecord

#: What a sandbox uses is put into the page later: three numbers of at most nine bytes each.
_USAGE_BYTES: Final = 27
_encoder: Final = msgspec.msgpack.Encoder()


def page_of(node: str, records: Iterable[SandboxRecord], asked: ListNodeSandboxes) -> NodeSandboxes:
    """Return the page that ``asked`` wants of a project's ``records``, in listing order."""
    after = listing_order(asked.after)
    wanted = [
        record for record in records if (record.local, node) > after and _is_asked(record, asked)
    ]
    wanted.sort(key=lambda record: record.local)
    limit = asked.limit or len(wanted)
    page: list[SandboxInfo] = []
    left_bytes = min(asked.page_bytes, LISTING_PAGE_BYTES)
    for record in wanted:
        info = record.info(node)
        left_bytes -= len(_encoder.encode(info)) + (_USAGE_BYTES if asked.usage else 0)
        if page and (left_bytes < 0 or len(page) >= limit):
            break
        page.append(info)
    return NodeSandboxes(
        cause_id=asked.message_id, sandboxes=tuple(page), more=len(page) < len(wanted)
    )


def _is_asked(record: SandboxRecord, asked: ListNodeSandboxes) -> bool:
    return (
        (not asked.states or record.state in asked.states)
        and (not asked.agent or record.agent == asked.agent)
        and (not asked.rollout_id or record.rollout_id == asked.rollout_id)
        and (not asked.created_after or record.created_at >= asked.created_after)
        and (not asked.created_before or record.created_at < asked.created_before)
        and asked.labels.items() <= record.labels.items()
    )
