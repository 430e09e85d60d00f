"""A shard's doors for groups of rollouts: what trainers ask, and what the service hands on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from dsec_chronus.errors import bad_group, bad_reward, too_large
from dsec_chronus.events import (
    AnswerGiven,
    AnswersAsked,
    GroupOpenAsked,
    GroupTakeAsked,
    StepsAsked,
    TaskGiven,
)
from dsec_chronus.keys import group_local, task_local
from dsec_chronus.records import pack
from dsec_common import subjects
from dsec_common.bus import Request
from dsec_common.errors import DsecError
from dsec_common.wire.rollout_group import (
    AnswerSteps,
    GroupTask,
    NextSteps,
    OpenGroup,
    StepAnswer,
    TakeGroup,
)

if TYPE_CHECKING:
    from dsec_chronus.shard import Shard

GROUP_CHARACTERS_MAX: Final = 128
BATCH_MAX: Final = 512
"""Tasks or answers in one request."""

BATCH_BYTES_MAX: Final = 512 * 1024
"""Of the tasks or answers in one request, as JSON: with it a frame of the journal is not too large
for a NATS message."""


class GroupDoors:
    """Takes requests about groups to one shard's core."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    async def serve(self) -> None:
        """Answer from now on until the shard ends."""
        name, serve = self._shard.name, self._shard.serve
        await serve(subjects.any_project_group(name, "next"), NextSteps, self._next)
        await serve(subjects.any_project_group(name, "answer"), AnswerSteps, self._answer)
        await serve(subjects.any_system_group(name, "take"), TakeGroup, self._take_over)
        await serve(subjects.any_system_group(name, "open"), OpenGroup, self._open)

    async def _next(self, request: Request[NextSteps]) -> None:
        asked, project = request.message, subjects.project_of(request.subject)
        check_name(asked.group)
        await self._shard.take(
            "next_steps",
            request,
            (project, group_local(project, asked.group)),
            lambda origin: StepsAsked(
                **origin,
                group=asked.group,
                fence=asked.fence,
                epoch=asked.epoch,
                after=asked.after,
                wait_s=asked.wait_s,
                limit=asked.limit,
            ),
        )

    async def _answer(self, request: Request[AnswerSteps]) -> None:
        asked, project = request.message, subjects.project_of(request.subject)
        check_name(asked.group)
        check_count(len(asked.answers), "answers")
        answers = tuple(map(_given, asked.answers))
        _check_bytes(sum(len(answer.payload) for answer in answers), "the answers")
        await self._shard.take(
            "answer_steps",
            request,
            (project, group_local(project, asked.group)),
            lambda origin: AnswersAsked(
                **origin, group=asked.group, fence=asked.fence, answers=answers
            ),
        )

    async def _take_over(self, request: Request[TakeGroup]) -> None:
        asked, project = request.message, _project_of(request)
        await self._shard.take(
            "take_group",
            request,
            (project, group_local(project, asked.group)),
            lambda origin: GroupTakeAsked(**origin, group=asked.group),
        )

    async def _open(self, request: Request[OpenGroup]) -> None:
        asked, project = request.message, _project_of(request)
        tasks = tuple(_task(project, asked.group, task) for task in asked.tasks)
        _check_bytes(sum(len(task.task) for task in tasks), "the tasks")
        await self._shard.take(
            "open_group",
            request,
            (project, group_local(project, asked.group)),
            lambda origin: GroupOpenAsked(
                **origin,
                group=asked.group,
                fence=asked.fence,
                labels=asked.labels,
                tasks=tasks,
                checkpoint_every=asked.checkpoint_every,
                durable=asked.durable_checkpoints,
            ),
        )


def check_name(group: str) -> None:
    """Return if this can be a group's name.

    Raises:
        DsecError: ``invalid``.
    """
    if not 1 <= len(group) <= GROUP_CHARACTERS_MAX or not group.isprintable():
        raise bad_group(f"{group[:40]!r} is not the name of a group")


def check_count(count: int, what: str) -> None:
    """Return if so many may come in one request.

    Raises:
        DsecError: ``invalid``.
    """
    if count > BATCH_MAX:
        raise too_large("the request", count, BATCH_MAX, what)


def _check_bytes(size: int, what: str) -> None:
    if size > BATCH_BYTES_MAX:
        raise too_large(f"{what} of one request together", size, BATCH_BYTES_MAX)


def _given(answer: StepAnswer) -> AnswerGiven:
    payload, refusal = b"", None
    try:
        if answer.reward is not None and not math.isfinite(answer.reward):
            raise bad_reward(answer.reward)
        payload = pack(answer.payload)
    except DsecError as error:
        refusal = error
    return AnswerGiven(
        local=answer.local,
        seq=answer.seq,
        payload=payload,
        reward=answer.reward,
        done=answer.done,
        refusal=refusal,
    )


def _task(project: str, group: str, task: GroupTask) -> TaskGiven:
    return TaskGiven(
        local=task_local(project, group, task.index), index=task.index, task=pack(task.task)
    )


def _project_of(request: Request[Any]) -> str:
    return subjects.system_group_of(request.subject)
