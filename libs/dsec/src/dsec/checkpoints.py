"""What a trainer keeps with a rollout, and what it does to the rollout and its sandbox together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from dsec.channel import ANSWER_PATIENCE_S, Channel
from dsec.sandbox import Sandbox
from dsec_common import subjects
from dsec_common.bus_types import ReplyT
from dsec_common.errors import DsecError
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import Message, new_id
from dsec_common.wire.checkpoint import (
    BranchRollout,
    CheckpointInfo,
    CheckpointList,
    GetState,
    ListCheckpoints,
    MakeCheckpoint,
    PutState,
    RollBackRollout,
    RolloutBranched,
    RolloutRolledBack,
    RolloutStateValues,
    StateVersion,
)

if TYPE_CHECKING:
    from dsec.rollouts import Rollout

_TIMEOUT_S: Final = 30.0
_ACTION_TIMEOUT_S: Final = 120.0
_ATTEMPTS: Final = 60


class RolloutBranch:
    """A rollout that begins where another was, and its sandbox.

    Attributes:
        rollout: the new rollout; its reports count from 1.
        sandbox: its sandbox, with the files of the checkpoint. No process runs in it yet.
        model_rollout: a new rollout for its model calls; None where the sandbox that was kept had
            none beside the rollout that was branched.
    """

    def __init__(
        self, rollout: Rollout, sandbox: Sandbox, model_rollout: Rollout | None = None
    ) -> None:
        self.rollout = rollout
        self.sandbox = sandbox
        self.model_rollout = model_rollout

    def __repr__(self) -> str:
        return f"RolloutBranch({self.rollout.id!r}, {self.sandbox.id!r})"


class Checkpointed(ABC):
    """What a rollout's handle does with checkpoints; part of :class:`~dsec.rollouts.Rollout`.

    Each action is recorded before it begins and carried to its end, whoever dies meanwhile. It is
    known by its ``key``: asked again with the same key, also by another process, it is not done
    again, and its result is told. The same key for anything else is a ``conflict``. So is, in a
    group, what its trainer does not ask: ``reason`` is ``fenced`` when another has taken over.
    """

    id: str
    fence: int
    _channel: Channel
    _scoped: ScopedId

    @abstractmethod
    def __init__(self, channel: Channel, rollout_id: str, fence: int = 0) -> None:
        """Be the handle of the rollout with this id, of a group's trainer with that number."""

    # --- State --------------------------------------------------------------------------------

    async def put_state(
        self, values: Mapping[str, Any] | None = None, *, deletes: Iterable[str] = ()
    ) -> int:
        """Keep values with the rollout, all of them or none; return the state's new version.

        Args:
            values: by name; any JSON value each, 256 KiB at once and 512 KiB in all.
            deletes: names that are to be gone.

        Raises:
            DsecError: ``invalid``; ``exhausted`` when it would be too much; ``expired`` when the
                rollout is closed.
        """
        message = PutState(values=dict(values or {}), deletes=tuple(deletes), fence=self.fence)
        return (await self._about("put_state", message, StateVersion)).version

    async def get_state(self, *names: str, checkpoint: int = 0) -> dict[str, Any]:
        """Return what is kept with the rollout.

        Args:
            names: only these; none for all. One that is not there is left out.
            checkpoint: as it was at this checkpoint; 0 for now.
        """
        message = GetState(names=names, checkpoint=checkpoint)
        return (await self._about("get_state", message, RolloutStateValues)).values

    # --- Checkpoints --------------------------------------------------------------------------

    async def checkpoint(
        self, *, sandbox: Sandbox | str = "", durable: bool = False, key: str = ""
    ) -> CheckpointInfo:
        """Keep the state and a snapshot of the sandbox, recorded together or not at all.

        Feedback is held back until it is made, so an agent that waits for it stands still.

        Args:
            sandbox: which; by default the one that last reported.
            durable: also make a layer of it, from which another node can go on.
            key: see the class.

        Raises:
            DsecError: why the sandbox could not be kept; ``invalid`` when none is known.
        """
        sandbox_id = sandbox if isinstance(sandbox, str) else sandbox.id
        message = MakeCheckpoint(
            key=key or new_id(), sandbox_id=sandbox_id, durable=durable, fence=self.fence
        )
        return await self._act("checkpoint", message, CheckpointInfo)

    async def checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints that are kept, the oldest first; 16 at most."""
        return [*(await self._about("checkpoints", ListCheckpoints(), CheckpointList)).checkpoints]

    async def roll_back(self, step: int = -1, *, key: str = "") -> RolloutRolledBack:
        """Put state and sandbox back to the newest checkpoint at or before a step.

        The sandbox's processes end. Reports after the checkpoint, and those without an answer, are
        void: whoever still answers them is refused (``conflict``, ``reason`` is ``rolled_back``).
        If the sandbox is gone, another takes its place; start the agent in ``sandbox_id``.

        Args:
            step: a report's number; -1 for the newest checkpoint.
            key: see the class.

        Raises:
            DsecError: ``not_found`` without such a checkpoint; why the sandbox could not be put
                back: the rollout is as before then.
        """
        message = RollBackRollout(key=key or new_id(), step=step, fence=self.fence)
        return await self._act("rollback", message, RolloutRolledBack)

    async def branch(
        self, count: int, *, step: int = -1, key: str = ""
    ) -> list[RolloutBranch | DsecError]:
        """Make rollouts of the newest checkpoint at or before a step, each with its own sandbox.

        Args:
            count: how many, at most 64.
            step: a report's number; -1 for the newest checkpoint.
            key: see the class.

        Returns:
            For each the new rollout and its sandbox, or why there is none.

        Raises:
            DsecError: ``not_found`` without such a checkpoint; ``invalid``.
        """
        message = BranchRollout(key=key or new_id(), count=count, step=step, fence=self.fence)
        reply = await self._act("branch", message, RolloutBranched)
        made: list[RolloutBranch | DsecError] = []
        for branch in reply.branches:
            if branch.error is not None:
                made.append(branch.error.to_error())
                continue
            sandbox = Sandbox(self._channel, branch.sandbox_id, None)
            model_id = branch.model_rollout_id
            model_rollout = self._handle(model_id) if model_id else None
            made.append(RolloutBranch(self._handle(branch.rollout_id), sandbox, model_rollout))
        return made

    @abstractmethod
    def _handle(self, rollout_id: str) -> Rollout:
        """Return the handle of another rollout."""

    async def _act(self, verb: str, message: Message, reply: type[ReplyT]) -> ReplyT:
        return await self._about(verb, message, reply, timeout_s=_ACTION_TIMEOUT_S)

    async def _about(
        self, verb: str, message: Message, reply: type[ReplyT], *, timeout_s: float = _TIMEOUT_S
    ) -> ReplyT:
        return await self._channel.ask(
            subjects.rollout(self._channel.project, self._scoped, verb),
            message,
            reply,
            timeout_s=timeout_s,
            repeatable=True,
            attempts_max=_ATTEMPTS,
            patience_s=ANSWER_PATIENCE_S,
        )
