"""Which sandboxes a project has: each node is asked, and those that are silent are named."""

from __future__ import annotations

import asyncio

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import DsecError
from dsec_common.wire.node import ListNodeSandboxes, NodeSandboxes
from dsec_common.wire.sandbox import ListSandboxes, SandboxInfo, SandboxList


async def list_sandboxes(
    bus: Bus, project: str, request: ListSandboxes, nodes: list[str], timeout_s: float
) -> SandboxList:
    """Return the sandboxes on ``nodes``, the oldest first, and the nodes without an answer."""
    question = ListNodeSandboxes(
        cause_id=request.message_id,
        project=project,
        include_ended=request.include_ended,
        labels=request.labels,
    )

    async def ask(node: str) -> tuple[SandboxInfo, ...] | None:
        try:
            answer = await bus.request(
                subjects.node_request(node, "list"), question, NodeSandboxes, timeout_s=timeout_s
            )
        except DsecError:
            return None
        return answer.sandboxes

    answers = await asyncio.gather(*(ask(node) for node in nodes))
    found = [info for answer in answers if answer is not None for info in answer]
    found.sort(key=lambda info: (info.created_at, info.sandbox_id))
    silent = sorted(node for node, answer in zip(nodes, answers, strict=True) if answer is None)
    return SandboxList(
        cause_id=request.message_id, sandboxes=tuple(found), silent_nodes=tuple(silent)
    )
