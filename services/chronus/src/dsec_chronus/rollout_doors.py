"""A shard's doors for single rollouts: what trainers ask, and what sandboxes' nodes do."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from dsec_chronus.errors import bad_reward, too_large
from dsec_chronus.events import (
    AwaitAsked,
    CloseAsked,
    FeedbackAsked,
    InspectAsked,
    NextAsked,
    ReportAsked,
    StepAsked,
)
from dsec_chronus.records import pack
from dsec_common import subjects
from dsec_common.bus import Request
from dsec_common.wire.rollout import (
    AwaitFeedback,
    CloseRollout,
    InspectRollout,
    NextStages,
    OpenRollout,
    SendFeedback,
    StageReport,
    StepRollout,
)

if TYPE_CHECKING:
    from dsec_chronus.shard import Shard

STAGE_CHARACTERS_MAX: Final = 256
SANDBOX_ID_CHARACTERS_MAX: Final = 128


class RolloutDoors:
    """Takes requests about rollouts to one shard's core."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    async def serve(self) -> None:
        """Answer from now on until the shard ends."""
        asked, told = subjects.any_project_rollout, subjects.any_system_rollout
        name, serve = self._shard.name, self._shard.serve
        await serve(asked(name, "next"), NextStages, self._next)
        await serve(asked(name, "feedback"), SendFeedback, self._feedback)
        await serve(asked(name, "inspect"), InspectRollout, self._inspect)
        await serve(asked(name, "close"), CloseRollout, self._close)
        await serve(told(name, "report"), StageReport, self._report)
        await serve(told(name, "step"), StepRollout, self._step)
        await serve(told(name, "await"), AwaitFeedback, self._await)
        await serve(told(name, "inspect"), InspectRollout, self._inspect_by_node)
        await serve(told(name, "open"), OpenRollout, self._open)

    async def _open(self, request: Request[OpenRollout]) -> None:
        project, rollout_id = subjects.system_rollout_of(request.subject)
        await self._shard.open(request, project, rollout_id)

    async def _report(self, request: Request[StageReport]) -> None:
        report = request.message
        payload = _packed(report)
        await self._shard.take(
            "report",
            request,
            _of_node(request),
            lambda origin: ReportAsked(
                **origin,
                seq=report.seq,
                stage=report.stage,
                payload=payload,
                sandbox_id=report.sandbox_id,
            ),
        )

    async def _step(self, request: Request[StepRollout]) -> None:
        step = request.message
        payload = _packed(step)
        await self._shard.take(
            "step",
            request,
            _of_node(request),
            lambda origin: StepAsked(
                **origin,
                seq=step.seq,
                stage=step.stage,
                payload=payload,
                sandbox_id=step.sandbox_id,
                wait_s=step.wait_s,
            ),
        )

    async def _await(self, request: Request[AwaitFeedback]) -> None:
        await self._shard.take(
            "await",
            request,
            _of_node(request),
            lambda origin: AwaitAsked(
                **origin, seq=request.message.seq, wait_s=request.message.wait_s
            ),
        )

    async def _next(self, request: Request[NextStages]) -> None:
        asked = request.message
        await self._shard.take(
            "next",
            request,
            _of_project(request),
            lambda origin: NextAsked(
                **origin, after_seq=asked.after_seq, wait_s=asked.wait_s, limit=asked.limit
            ),
        )

    async def _feedback(self, request: Request[SendFeedback]) -> None:
        given = request.message
        if given.reward is not None and not math.isfinite(given.reward):
            raise bad_reward(given.reward)
        payload = pack(given.payload)
        await self._shard.take(
            "feedback",
            request,
            _of_project(request),
            lambda origin: FeedbackAsked(
                **origin, seq=given.seq, payload=payload, reward=given.reward, done=given.done
            ),
        )

    async def _inspect(self, request: Request[InspectRollout]) -> None:
        await self._shard.take(
            "inspect",
            request,
            _of_project(request),
            lambda origin: InspectAsked(**origin),
        )

    async def _inspect_by_node(self, request: Request[InspectRollout]) -> None:
        await self._shard.take(
            "inspect",
            request,
            _of_node(request),
            lambda origin: InspectAsked(**origin),
        )

    async def _close(self, request: Request[CloseRollout]) -> None:
        await self._shard.take(
            "close",
            request,
            _of_project(request),
            lambda origin: CloseAsked(**origin, fence=request.message.fence),
        )


def _of_project(request: Request[Any]) -> tuple[str, str]:
    """Return the project and the rollout that a project's request is about."""
    return subjects.project_of(request.subject), subjects.scoped_id_of(request.subject).local


def _of_node(request: Request[Any]) -> tuple[str, str]:
    """Return the project and the rollout that a node's request is about."""
    return _project_and_local(request.subject)


@lru_cache(maxsize=16_384)
def _project_and_local(subject: str) -> tuple[str, str]:
    project, rollout_id = subjects.system_rollout_of(subject)
    return project, rollout_id.local


def _packed(report: StageReport | StepRollout) -> bytes:
    _limit("the stage's name", report.stage, STAGE_CHARACTERS_MAX)
    _limit("the sandbox id", report.sandbox_id, SANDBOX_ID_CHARACTERS_MAX)
    return pack(report.payload)


def _limit(what: str, text: str, characters: int) -> None:
    if len(text) > characters:
        raise too_large(what, len(text), characters, "characters")
