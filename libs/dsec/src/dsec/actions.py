"""Actions: steps of an agent's run that have resources of their own for just as long as they last.

::

    async with sandbox.action("train-step", cu=20, volumes={"scratch": 64 << 20}) as action:
        await action.exec("python3 train.py", check=True)

Compute Units, volumes and a network policy are taken when the block begins, all of them or none,
and are returned at its end, whatever that is. The node ends an action whose owner died, and keeps
what it was given, when, and how it ended: ``await sandbox.actions()``.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from dsec.channel import ANSWER_PATIENCE_S, AWAY_S
from dsec.handle import OfSandbox
from dsec.network import Policy, network_policy
from dsec_common.compute.model import GpuDemand
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.action import (
    ACTION_DETAIL_MAX,
    ActionInfo,
    ActionList,
    ActionOutcome,
    ActionVolume,
    BeginAction,
    EndAction,
    KeepAction,
    ListActions,
)
from dsec_common.wire.base import Message

if TYPE_CHECKING:
    from dsec.process import Process
    from dsec.results import ExecResult
    from dsec.sandbox import Sandbox
    from dsec.session import Session

Volumes = Mapping[str, int | str]
"""By name: the size in bytes of a new, empty one, or the reference of a layer."""

_Ask = Callable[[str, Message], Awaitable[ActionInfo]]

_BEGIN_TIMEOUT_S: Final = 30.0
_KEEPS_PER_HOLD: Final = 3
_GIVEN_UP: Final = frozenset({ErrorCode.EXPIRED, ErrorCode.NOT_FOUND})


class Action:
    """One action of a sandbox; it begins and ends as an async context manager, or when told to.

    Leaving the block ends it, as ``failed`` when an exception passes through.
    """

    def __init__(self, inside: Sandbox, asked: BeginAction, ask: _Ask, begin: _Ask) -> None:
        """Take the handle of its sandbox whose commands run in it, and how its node is asked."""
        self._begin = begin
        self._inside = inside
        self._asked = asked
        self._ask = ask
        self._keeping: asyncio.Task[None] | None = None
        self._info: ActionInfo | None = None

    def __repr__(self) -> str:
        return f"Action({self._asked.name!r}, {self.id!r})"

    @property
    def id(self) -> str:
        """Its id."""
        return self._asked.message_id

    @property
    def info(self) -> ActionInfo:
        """What its node said of it last.

        Raises:
            DsecError: ``invalid`` before it has begun.
        """
        if self._info is None:
            raise invalid("the action has not begun: use it in 'async with', or call begin()")
        return self._info

    @property
    def cu(self) -> float:
        """The Compute Units that it was given."""
        return self.info.cu

    @property
    def volumes(self) -> dict[str, str]:
        """Where its volumes are in the sandbox, by name."""
        return self.info.volumes

    async def begin(self) -> Self:
        """Take all that was asked for; again is fine.

        Raises:
            DsecError: ``exhausted`` when there are no such units free; ``denied`` by the contract
                of the sandbox's agent; ``conflict`` when another action has the network;
                ``invalid``; ``expired`` when it has ended already.
        """
        self._info = await self._begin("begin_action", self._asked)
        if self._keeping is None and self._asked.hold_s:
            self._keeping = asyncio.create_task(self._keep(), name=f"keep {self.id}")
        return self

    async def _keep(self) -> None:
        """Say again and again that it is wanted; without us its node ends it."""
        while True:
            await asyncio.sleep(self._asked.hold_s / _KEEPS_PER_HOLD)
            try:
                await self._ask("keep_action", KeepAction(action_id=self.id))
            except DsecError as error:
                if error.code in _GIVEN_UP:
                    return

    async def end(
        self, outcome: ActionOutcome | str = ActionOutcome.OK, detail: str = ""
    ) -> ActionInfo:
        """Return all that it had; its commands that still run are killed. Again is fine.

        Returns:
            What came of it: another outcome when the platform had ended it before.
        """
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
            self._keeping = None
        message = EndAction(
            action_id=self.id, outcome=ActionOutcome(outcome), detail=detail[:ACTION_DETAIL_MAX]
        )
        self._info = await self._ask("end_action", message)
        return self._info

    async def __aenter__(self) -> Self:
        return await self.begin()

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            info = await self.end()
            if info.outcome is not ActionOutcome.OK:
                raise DsecError(
                    ErrorCode.EXPIRED,
                    f"action {info.name!r} had ended before ({info.outcome}: {info.detail})",
                    details={"what": "action", "outcome": str(info.outcome)},
                )
            return
        try:
            await self.end(ActionOutcome.FAILED, f"{type(error).__name__}: {error}")
        except DsecError as failure:  # what went wrong inside says more
            error.add_note(f"the action was not ended: {failure}")

    # --- Inside -------------------------------------------------------------------------------

    async def exec(self, command: str | Sequence[str], **options: Any) -> ExecResult:
        """Run one command in it, as :meth:`Sandbox.exec` does."""
        return await self._inside.exec(command, **options)

    async def start(self, command: str | Sequence[str], **options: Any) -> Process:
        """Start a command in it, as :meth:`Sandbox.start` does; it ends with the action."""
        return await self._inside.start(command, **options)

    async def session(self, **options: Any) -> Session:
        """Return a shell in it, as :meth:`Sandbox.session` does; it ends with the action."""
        return await self._inside.session(**options)

    def action(self, name: str, **asked: Any) -> Action:
        """Return an action that is a part of this one, and ends with it at the latest."""
        return self._inside.action(name, parent=self.id, **asked)


class Acting(OfSandbox, ABC):
    """What a sandbox's handle does with actions; part of :class:`~dsec.sandbox.Sandbox`."""

    @abstractmethod
    def _within_action(self, action_id: str) -> Sandbox:
        """Return a handle whose commands run in an action."""

    def action(
        self,
        name: str,
        *,
        cu: float = 0.0,
        gpu: GpuDemand | None = None,
        volumes: Volumes | None = None,
        network: Policy | None = None,
        timeout_s: float = 3600.0,
        hold_s: float = 60.0,
        wait_s: float = 0.0,
        parent: str = "",
    ) -> Action:
        """Return an action that has not begun; ``async with`` begins and ends it.

        Args:
            name: what people call it.
            cu: just so many Compute Units: the short form of ``gpu``.
            gpu: what it needs of GPUs; its commands are told of these instead of the sandbox's.
            volumes: directories in ``DSEC_ACTION_VOLUMES`` of its commands: by name a size in
                bytes, for a new one in memory, or a layer's reference.
            network: what the whole sandbox may reach meanwhile; None leaves that as it is.
            timeout_s: it ends so long after it began, at most a day.
            hold_s: it ends when this program has not been heard of for so long; 0: never.
            wait_s: how long to go on asking while there are no such units free; each answer
                that there are none takes a second or so.
            parent: the id of the action that it is a part of; see :meth:`Action.action`.

        Raises:
            DsecError: ``invalid`` for both ``cu`` and ``gpu``, or what is no policy.
        """
        if cu and gpu is not None:
            raise invalid("cu is the short form of gpu: give one of them", field="cu")
        asked = BeginAction(
            name=name,
            parent=parent,
            gpu=GpuDemand(min_cu=cu, max_cu=cu) if cu else gpu,
            volumes=tuple(
                ActionVolume(name=volume, layer=what)
                if isinstance(what, str)
                else ActionVolume(name=volume, size_bytes=what)
                for volume, what in (volumes or {}).items()
            ),
            network=network_policy(network),
            timeout_s=timeout_s,
            hold_s=hold_s,
        )

        async def begin(verb: str, message: Message) -> ActionInfo:
            return await self._channel.ask(
                self._subject(verb),
                message,
                ActionInfo,
                timeout_s=_BEGIN_TIMEOUT_S + wait_s,
                repeatable=True,
                patience_s=ANSWER_PATIENCE_S,
                away_s=AWAY_S,
                room_within_s=wait_s,
            )

        return Action(self._within_action(asked.message_id), asked, self._ask_of_action, begin)

    async def actions(self) -> list[ActionInfo]:
        """Return the sandbox's actions, the first asked for first; kept as long as its record."""
        found: list[ActionInfo] = []
        while True:
            after = found[-1].action_id if found else ""
            page = await self._ask("list_actions", ListActions(after=after), ActionList)
            found += page.actions
            if not page.more:
                return found

    async def _ask_of_action(self, verb: str, message: Message) -> ActionInfo:
        return await self._ask(verb, message, ActionInfo)
