"""The door for groups: numbers their trainers, and hands their tasks to the shards' owners."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Final

from dsec_chronus.errors import bad_group, shard_moving, too_large
from dsec_chronus.group_doors import check_count, check_name
from dsec_chronus.keys import group_id_of, task_id_of
from dsec_chronus.shard import LABELS_BYTES_MAX
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.bus_types import ReplyT
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message
from dsec_common.wire.rollout_group import (
    GroupLease,
    GroupOpened,
    GroupTask,
    OpenGroup,
    TakeGroup,
)

_TIMEOUT_S: Final = 5.0


class GroupOpening:
    """Any Chronus does this; the owners of the shards, itself among them, do the rest."""

    def __init__(self, bus: Bus, shards: int) -> None:
        self._bus = bus
        self._shards = shards

    async def take(self, request: Request[TakeGroup]) -> GroupLease:
        """Number a new trainer of a group: one shard numbers all trainers of one group.

        Raises:
            DsecError: ``invalid`` for a bad name; ``unavailable`` when the shard is moving.
        """
        project, asked = subjects.project_of(request.subject), request.message
        check_name(asked.group)
        shard = group_id_of(project, asked.group, self._shards).owner
        return await self._ask(project, shard, "take", asked, GroupLease)

    async def open(self, request: Request[OpenGroup]) -> GroupOpened:
        """Open the rollouts of some tasks, each in its shard; again, they are there.

        Raises:
            DsecError: ``invalid``, ``conflict`` for another task or a newer trainer, or
                ``unavailable``: some may be open then, and the same request opens the rest.
        """
        project, asked = subjects.project_of(request.subject), request.message
        self._check(asked)
        by_shard: dict[str, list[GroupTask]] = defaultdict(list)
        ids = [task_id_of(project, asked.group, task.index, self._shards) for task in asked.tasks]
        for rollout_id, task in zip(ids, asked.tasks, strict=True):
            by_shard[rollout_id.owner].append(task)
        parts = [
            self._ask(
                project,
                shard,
                "open",
                OpenGroup(
                    cause_id=asked.message_id,
                    group=asked.group,
                    fence=asked.fence,
                    labels=asked.labels,
                    tasks=tuple(tasks),
                    checkpoint_every=asked.checkpoint_every,
                    durable_checkpoints=asked.durable_checkpoints,
                ),
                GroupOpened,
            )
            for shard, tasks in by_shard.items()
        ]
        for outcome in await asyncio.gather(*parts, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        return GroupOpened(cause_id=asked.message_id, rollouts=tuple(map(str, ids)))

    @staticmethod
    def _check(asked: OpenGroup) -> None:
        check_name(asked.group)
        check_count(len(asked.tasks), "tasks")
        indices = [task.index for task in asked.tasks]
        if len(set(indices)) != len(indices) or min(indices, default=0) < 0:
            raise bad_group("each task needs an index of its own, from 0")
        size = sum(len(name.encode()) + len(text.encode()) for name, text in asked.labels.items())
        if size > LABELS_BYTES_MAX:
            raise too_large("the group's labels", size, LABELS_BYTES_MAX)

    async def _ask(
        self, project: str, shard: str, verb: str, message: Message, reply: type[ReplyT]
    ) -> ReplyT:
        try:
            return await self._bus.request(
                subjects.group_system(project, shard, verb), message, reply, timeout_s=_TIMEOUT_S
            )
        except DsecError as error:
            if error.code in {ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT}:
                raise shard_moving(shard) from error
            raise
