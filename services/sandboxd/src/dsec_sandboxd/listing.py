"""One page of this node's sandboxes for the scheduler's listing. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from dsec_common.wire.node import ListNodeSandboxes, NodeSandboxes
from dsec_common.wire.sandbox import LISTING_PAGE_BYTES, SandboxInfo, listing_order
from dsec_sandboxd.records import SandboxRecord

_encoder: Final = msgspec.msgpack.Encoder()


def page_of(node: str, records: Iterable[SandboxRecord], asked: ListNodeSandboxes) -> NodeSandboxes:
    """Return the page that ``asked`` wants of a project's ``records``, in listing order."""
    labels = asked.labels.items()
    after = listing_order(asked.after)
    wanted = [
        record
        for record in records
        if labels <= record.labels.items() and (record.local, node) > after
    ]
    wanted.sort(key=lambda record: record.local)
    page: list[SandboxInfo] = []
    left_bytes = min(asked.page_bytes, LISTING_PAGE_BYTES)
    for record in wanted:
        info = record.info(node)
        left_bytes -= len(_encoder.encode(info))
        if page and left_bytes < 0:
            break
        page.append(info)
    return NodeSandboxes(
        cause_id=asked.message_id, sandboxes=tuple(page), more=len(page) < len(wanted)
    )
