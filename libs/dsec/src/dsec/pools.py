"""Warm pools, and functions called in sandboxes that wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from dsec.channel import ANSWER_PATIENCE_S, AWAY_S, Channel
from dsec.creating import command_of, limits_of, warm_use_of
from dsec.results import CommandFailed, ExecResult
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire import pool as wire
from dsec_common.wire.pool import (
    CallFunction,
    CallStatus,
    ListPools,
    PoolInfo,
    PoolList,
    PoolRemoved,
    RemovePool,
    SetPool,
    pool_key,
)
from dsec_common.wire.sandbox import ExecCommand, Limits
from dsec_common.wire.task import WarmUse

if TYPE_CHECKING:
    from dsec_common.wire.base import ErrorReply

_TIMEOUT_S: Final = 10.0
#: The platform answers within the caller's time; its answer says more than our giving up.
_ANSWER_MARGIN_S: Final = 2.0
#: A node ends a command at its time (TERM, then KILL), and then answers.
_COMMAND_MARGIN_S: Final = 15.0


class Pools:
    """The project's warm pools: sandboxes that are made ahead of need, by the layers they have.

    A sandbox that is created with the same layers is one of them if one waits, with the limits,
    variables, labels, agent, network and name that its own request gives it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def set(
        self,
        base: str,
        *,
        size: int,
        workspace: str = "",
        toolkits: Iterable[str] = (),
        limits: Limits | None = None,
    ) -> PoolInfo:
        """Have ``size`` sandboxes of these layers wait, spread over the nodes.

        Said again with the same layers it changes the size. They are made in the background:
        :meth:`list` says how many wait, and why fewer than wanted.

        Args:
            base: the base layer.
            size: how many, on all nodes together.
            workspace: the layer over it.
            toolkits: the layers on top.
            limits: of those that wait. Hand-out is quickest when requests ask for the same. CPU
                class, core scheduling, ``oom_group`` and ``cpu_quota`` are part of which pool it
                is.

        Raises:
            DsecError: ``invalid``; ``exhausted`` for too many pools.
        """
        if isinstance(toolkits, str):
            raise invalid(f"toolkits is a list of layers, not the text {toolkits!r}")
        return await self._channel.ask(
            subjects.pool(self._channel.project, "set"),
            SetPool(
                base=base,
                workspace=workspace,
                toolkits=tuple(toolkits),
                size=size,
                limits=limits or Limits(),
            ),
            PoolInfo,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def list(self) -> list[PoolInfo]:
        """Return the project's pools, and what there is of each on every node."""
        answer = await self._channel.ask(
            subjects.pool(self._channel.project, "list"),
            ListPools(),
            PoolList,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )
        return list(answer.pools)

    async def remove(
        self,
        base: str = "",
        *,
        workspace: str = "",
        toolkits: Iterable[str] = (),
        limits: Limits | None = None,
        key: str = "",
    ) -> None:
        """Drop a pool and what waits in it; sandboxes that were handed out live on.

        Args:
            base: the layers, as they were set; or ``key``.
            workspace: likewise.
            toolkits: likewise.
            limits: those that are part of which pool it is.
            key: its name, as :meth:`list` tells it.

        Raises:
            DsecError: ``not_found``.
        """
        if bool(base) == bool(key):
            raise invalid("name the pool by its base layer and others, or by its key")
        key = key or pool_key(
            self._channel.project, base, workspace, tuple(toolkits), limits or Limits()
        )
        await self._channel.ask(
            subjects.pool(self._channel.project, "remove"),
            RemovePool(key=key),
            PoolRemoved,
            timeout_s=_TIMEOUT_S,
        )


class FunctionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a call.

    Attributes:
        status: ``success``; ``failed``, which is the command's doing; or ``sandbox_error``, which
            is the platform's: ``retryable`` says whether the same call may do better.
        result: how the command ended and what it printed; None when it never ran.
        files: the contents of those files asked for that there are.
        error: why it is no success, unless the command's own end says so.
        warm: its sandbox had been made ahead of need.
    """

    status: CallStatus
    result: ExecResult | None = None
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    error: DsecError | None = None
    warm: bool = False

    @classmethod
    def of(cls, argv: tuple[str, ...], reply: wire.FunctionResult) -> Self:
        """Return the result that the platform's reply tells of."""
        ended = reply.result
        error: ErrorReply | None = reply.error
        return cls(
            status=reply.status,
            result=None if ended is None else ExecResult.of(reply.sandbox_id, argv, ended),
            files=reply.files,
            error=None if error is None else error.to_error(),
            warm=reply.warm,
        )

    @property
    def ok(self) -> bool:
        """Whether it is a success."""
        return self.status is CallStatus.SUCCESS

    @property
    def retryable(self) -> bool:
        """Whether it failed for a reason of the platform's that may be over next time."""
        is_ours = self.status is CallStatus.SANDBOX_ERROR
        return is_ours and self.error is not None and self.error.retryable

    def check(self) -> Self:
        """Return the result itself.

        Raises:
            CommandFailed: when the command failed.
            DsecError: when a file asked for is not there, or the platform failed.
        """
        if self.ok:
            return self
        if self.result is not None and not self.result.ok:
            raise CommandFailed(self.result)
        raise self.error or DsecError(ErrorCode.INTERNAL, "the call failed without a reason")


class Functions(ABC):
    """What the client has of pools and calls."""

    @abstractmethod
    def _connected(self) -> Channel:
        """Return the connection, or raise ``invalid`` before there is one."""

    @property
    def pools(self) -> Pools:
        """The project's warm pools."""
        return Pools(self._connected())

    async def call(
        self,
        base: str,
        command: str | Sequence[str] | ExecCommand,
        *,
        files: Mapping[str, bytes | str] | None = None,
        collect: Iterable[str] = (),
        workspace: str = "",
        toolkits: Iterable[str] = (),
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        agent: str = "",
        agent_version: str = "",
        stdin: str | bytes = b"",
        cwd: str = "",
        user: str = "",
        timeout_s: float = 60.0,
        warm: WarmUse | str = WarmUse.PREFER,
        request_id: str = "",
        create_timeout_s: float = 30.0,
    ) -> FunctionResult:
        """Run one task in a sandbox of its own, which is gone afterwards and never used again.

        Calls with the same layers have sandboxes made ahead of the next ones, as many as their rate
        asks for.

        Args:
            base: the base layer.
            command: a line for ``/bin/sh``, or program and arguments.
            files: written before, by absolute path; at most 192 KiB in all. For more, import a
                layer, or use a sandbox that stays.
            collect: paths of files to return afterwards; at most 192 KiB in all.
            workspace: the layer over the base.
            toolkits: the layers on top.
            limits: what it may use.
            env: variables of the command.
            labels: for listings and logs.
            agent: the agent type written into behaviour logs; see ``create_sandbox``.
            agent_version: likewise.
            stdin: given to the command, then end of file.
            cwd: working directory; empty for the sandbox's own.
            user: name or ``uid[:gid]`` in the sandbox, empty for the sandbox's own; files are
                written and read as this user.
            timeout_s: the command's time.
            warm: ``prefer``, ``require`` or ``bypass``.
            request_id: the same id again is the same call: it runs once, and what came of it is
                told again.
            create_timeout_s: how long a sandbox may take to be there.

        Raises:
            DsecError: for a request that cannot be meant: ``invalid``, ``not_found`` for a layer,
                ``conflict`` for a ``request_id`` used with something else. All else is told in the
                result.
        """
        if isinstance(toolkits, str) or isinstance(collect, str):
            raise invalid("toolkits and collect are lists, not one text")
        meant = command_of(command, env=None, cwd=cwd, user=user, stdin=stdin, timeout_s=timeout_s)
        given = {
            path: data.encode() if isinstance(data, str) else bytes(data)
            for path, data in (files or {}).items()
        }
        request = CallFunction(
            base=base,
            workspace=workspace,
            toolkits=tuple(toolkits),
            command=meant,
            files=given,
            collect=tuple(collect),
            limits=limits_of(limits),
            env=dict(env or {}),
            labels=dict(labels or {}),
            agent=agent,
            agent_version=agent_version,
            warm=warm_use_of(warm),
            idempotency_key=request_id,
            timeout_s=create_timeout_s,
        )
        channel = self._connected()
        command_s = max(meant.timeout_s, 0.0) + _COMMAND_MARGIN_S
        extra: dict[str, Any] = {}
        if request_id:
            extra = {"repeatable": True, "patience_s": ANSWER_PATIENCE_S + command_s}
        reply = await channel.ask(
            subjects.function_call(channel.project),
            request,
            wire.FunctionResult,
            timeout_s=create_timeout_s + command_s + _ANSWER_MARGIN_S,
            room_within_s=create_timeout_s,
            away_s=min(AWAY_S, create_timeout_s),
            **extra,
        )
        return FunctionResult.of(meant.argv, reply)
