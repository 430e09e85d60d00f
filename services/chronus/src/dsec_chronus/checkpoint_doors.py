"""A shard's doors for a rollout's state, its checkpoints, and what is done with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dsec_chronus.errors import bad_count, bad_key, bad_names, too_large
from dsec_chronus.events import ActionAsked, CheckpointsAsked, GetAsked, PutAsked
from dsec_chronus.records import PAYLOAD_BYTES_MAX, ActionKind, pack
from dsec_common import subjects
from dsec_common.bus import Request
from dsec_common.subjects import ScopedId
from dsec_common.wire.checkpoint import (
    BranchRollout,
    GetState,
    ListCheckpoints,
    MakeCheckpoint,
    PutState,
    RollBackRollout,
)

if TYPE_CHECKING:
    from dsec_chronus.shard import Shard

BRANCHES_MAX: Final = 64
KEY_CHARACTERS_MAX: Final = 128
NAME_CHARACTERS_MAX: Final = 256
NAMES_MAX: Final = 1024


class CheckpointDoors:
    """Takes requests about what is kept with rollouts to one shard's core."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    async def serve(self) -> None:
        """Answer from now on until the shard ends."""
        name, serve = self._shard.name, self._shard.serve
        asked = subjects.any_project_rollout
        await serve(asked(name, "put_state"), PutState, self._put)
        await serve(asked(name, "get_state"), GetState, self._get)
        await serve(asked(name, "checkpoint"), MakeCheckpoint, self._checkpoint)
        await serve(asked(name, "checkpoints"), ListCheckpoints, self._checkpoints)
        await serve(asked(name, "rollback"), RollBackRollout, self._roll_back)
        await serve(asked(name, "branch"), BranchRollout, self._branch)

    async def _put(self, request: Request[PutState]) -> None:
        asked = request.message
        for names in (asked.values, asked.deletes):
            if len(names) > NAMES_MAX or not all(map(_is_name, names)):
                raise bad_names(NAMES_MAX, NAME_CHARACTERS_MAX)
        values = {name: pack(value) for name, value in asked.values.items()}
        size = sum(len(name.encode()) + len(value) for name, value in values.items())
        if size > PAYLOAD_BYTES_MAX:
            raise too_large("what is to be kept", size, PAYLOAD_BYTES_MAX)
        await self._shard.take(
            "put_state",
            request,
            _of_project(request),
            lambda origin: PutAsked(
                **origin, values=values, deletes=asked.deletes, fence=asked.fence
            ),
        )

    async def _get(self, request: Request[GetState]) -> None:
        asked = request.message
        await self._shard.take(
            "get_state",
            request,
            _of_project(request),
            lambda origin: GetAsked(**origin, names=asked.names, checkpoint=asked.checkpoint),
        )

    async def _checkpoints(self, request: Request[ListCheckpoints]) -> None:
        await self._shard.take(
            "checkpoints",
            request,
            _of_project(request),
            lambda origin: CheckpointsAsked(**origin),
        )

    async def _checkpoint(self, request: Request[MakeCheckpoint]) -> None:
        asked = request.message
        _check_key(asked.key)
        if asked.sandbox_id:
            ScopedId.parse(asked.sandbox_id)
        await self._shard.take(
            "checkpoint",
            request,
            _of_project(request),
            lambda origin: ActionAsked(
                **origin,
                kind=ActionKind.CHECKPOINT,
                key=asked.key,
                sandbox_id=asked.sandbox_id,
                durable=asked.durable,
                fence=asked.fence,
            ),
        )

    async def _roll_back(self, request: Request[RollBackRollout]) -> None:
        asked = request.message
        _check_key(asked.key)
        await self._shard.take(
            "rollback",
            request,
            _of_project(request),
            lambda origin: ActionAsked(
                **origin,
                kind=ActionKind.ROLLBACK,
                key=asked.key,
                step=asked.step,
                fence=asked.fence,
            ),
        )

    async def _branch(self, request: Request[BranchRollout]) -> None:
        asked = request.message
        _check_key(asked.key)
        if not 1 <= asked.count <= BRANCHES_MAX:
            raise bad_count(asked.count, BRANCHES_MAX)
        await self._shard.take(
            "branch",
            request,
            _of_project(request),
            lambda origin: ActionAsked(
                **origin,
                kind=ActionKind.BRANCH,
                key=asked.key,
                step=asked.step,
                count=asked.count,
                fence=asked.fence,
            ),
        )


def _of_project(request: Request[Any]) -> tuple[str, str]:
    return subjects.project_of(request.subject), subjects.scoped_id_of(request.subject).local


def _is_name(name: str) -> bool:
    return 1 <= len(name) <= NAME_CHARACTERS_MAX


def _check_key(key: str) -> None:
    # Those that begin otherwise are made here.
    if not 1 <= len(key) <= KEY_CHARACTERS_MAX or not key.isprintable():
        raise bad_key(key, KEY_CHARACTERS_MAX)
