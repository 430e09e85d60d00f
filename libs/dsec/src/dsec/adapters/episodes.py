"""Episodes of shell commands in a sandbox: what all adapters do, in no framework's words."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from dsec.client import DSecClient
from dsec.results import ExecResult
from dsec.sandbox import Sandbox
from dsec_common.errors import DsecError, ErrorCode, invalid

#: A sandbox of which nobody knows any more is ended by its node after so long.
_TTL_S: Final = 3600.0


@dataclass(frozen=True)
class Turn:
    """One action and what it did.

    Attributes:
        number: from 1.
        action: the command line, or the word that submits.
        result: how the command ended; None for the word that submits, and when it was refused.
        is_last: whether the episode ends with it, by that word or because no step is left.
        refused: why nothing ran: what is no command line, such as one with a NUL in it.
    """

    number: int
    action: str
    result: ExecResult | None
    is_last: bool
    refused: str = ""


@dataclass(frozen=True)
class Judgement:
    """What a turn is worth.

    Attributes:
        reward: the turn's own; an episode's is their sum.
        is_over: whether the task is done, or lost, and the episode ends with this turn.
    """

    reward: float = 0.0
    is_over: bool = False


class Judge(Protocol):
    """Says what a turn is worth. It is called after each one, while the sandbox is there."""

    async def __call__(self, sandbox: Sandbox, turn: Turn) -> Judgement:
        """Return it; an error it raises is the caller's of the step."""
        ...


@dataclass(frozen=True)
class Verifier:
    """A judge that runs a command where the agent cannot reach: in a sandbox of its own.

    At the end of an episode ``paths`` are copied from the agent's sandbox to a new one with the
    task's layers, ``files`` are written over them, and ``command`` runs there. Programs that the
    agent replaced, and processes that it left, are not in it. The reward is 1 when the command
    exits with 0, else 0. What the command itself executes of the agent's files may still lie: let
    it read them where it can.

    Attributes:
        command: as :meth:`Sandbox.exec` takes it.
        paths: what is judged; one that is missing is missing there, too.
        files: what the agent must not see or change, by path.
        timeout_s: of the command; one that takes longer says no.
        create: layers and limits instead of the task's, as ``create_sandbox`` takes them.
    """

    command: str | Sequence[str]
    paths: Sequence[str] = ("/work",)
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    timeout_s: float = 60.0
    create: Mapping[str, Any] | None = None

    async def judge(self, client: DSecClient, task: ShellTask, sandbox: Sandbox) -> Judgement:
        """Return what the sandbox's files are worth.

        Raises:
            DsecError: the platform's, when there is no verdict; it is never a reward.
        """
        create = dict(task.create if self.create is None else self.create)
        async with await client.create_sandbox(**{"ttl_s": _TTL_S} | create) as apart:
            for path in self.paths:
                await _copy(sandbox, apart, path)
            for path, content in self.files.items():
                await apart.write_file(path, content)
            result = await apart.exec(self.command, timeout_s=self.timeout_s)
            return Judgement(reward=float(result.ok), is_over=True)


@dataclass(frozen=True)
class ShellTask:
    """What an agent is put in front of.

    Attributes:
        create: the sandbox, as :meth:`DSecClient.create_sandbox` takes it: ``{"base": "host@1"}``.
        judge: a :class:`Verifier`, or a function of the sandbox and the turn.
        prompt: what is observed first.
        prepare: called with each new sandbox and the episode's seed: files, services.
        steps_max: after so many commands the episode is over.
        command_timeout_s: of each command, whose tree is ended then.
        cwd: where each command begins; made when it is missing.
        submit: the action that runs nothing and ends the episode.
    """

    create: Mapping[str, Any]
    judge: Verifier | Judge
    prompt: str = ""
    prepare: Callable[[Sandbox, int], Awaitable[None]] | None = None
    steps_max: int = 16
    command_timeout_s: float = 30.0
    cwd: str = "/work"
    submit: str = "submit"

    def __post_init__(self) -> None:
        """Refuse what no episode can be made of."""
        if self.steps_max < 1 or self.command_timeout_s <= 0:
            raise invalid("a task needs at least one step, and time for its commands")


@dataclass(frozen=True)
class Outcome:
    """What a step gave back.

    Attributes:
        turn: what was done.
        reward: the judge's.
        terminated: the task is done or lost: nothing that comes later would matter.
        truncated: no step is left.
        cause: the code of the error that the agent's own doing ended the sandbox with (``oom``).
    """

    turn: Turn
    reward: float
    terminated: bool
    truncated: bool
    cause: str = ""


class Episode:
    """One sandbox from its creation to its end. Not for several tasks at once."""

    def __init__(self, client: DSecClient, task: ShellTask) -> None:
        self._client = client
        self._task = task
        self._steps = 0
        self.sandbox: Sandbox | None = None
        self.is_over = True

    async def begin(self, seed: int) -> None:
        """End what was before, and make and prepare a new sandbox; a failure leaves none."""
        await self.end()
        task = self._task
        sandbox = await self._client.create_sandbox(**{"ttl_s": _TTL_S} | dict(task.create))
        try:
            await sandbox.make_directory(task.cwd)
            if task.prepare is not None:
                await task.prepare(sandbox, seed)
        except BaseException:
            await sandbox.delete()
            raise
        self.sandbox, self._steps, self.is_over = sandbox, 0, False

    async def step(self, action: str, *, timeout_s: float | None = None) -> Outcome:
        """Run one command, or submit.

        Args:
            action: a command line, or the word that submits.
            timeout_s: of the command, where that is less than the task allows.

        Raises:
            DsecError: ``conflict`` when no episode is under way; else the platform's. The episode
                cannot go on then: begin another.
        """
        if self.sandbox is None or self.is_over:
            raise DsecError(ErrorCode.CONFLICT, "no episode is under way; reset first")
        self._steps += 1
        # Until the judge has spoken: an error leaves nothing that could be stepped on.
        self.is_over = True
        submitted = action.strip() == self._task.submit
        is_last = submitted or self._steps >= self._task.steps_max
        turn = Turn(self._steps, action, None, is_last)
        try:
            if not submitted:
                turn = await self._run(turn, timeout_s)
            judgement = await self._judged(turn)
        except DsecError as error:
            if error.code is not ErrorCode.OOM:
                raise
            # The sandbox ended for what the agent did in it.
            return Outcome(turn, 0.0, terminated=True, truncated=False, cause=error.code.value)
        terminated = judgement.is_over or submitted
        self.is_over = terminated or is_last
        return Outcome(turn, judgement.reward, terminated, is_last and not terminated)

    async def end(self) -> None:
        """Delete the sandbox, if there is one."""
        sandbox, self.sandbox, self.is_over = self.sandbox, None, True
        if sandbox is not None:
            await sandbox.delete()

    async def _run(self, turn: Turn, timeout_s: float | None) -> Turn:
        assert self.sandbox is not None  # noqa: S101  looked at by step
        allowed_s = self._task.command_timeout_s
        try:
            turn.action.encode()
            result = await self.sandbox.exec(
                turn.action,
                cwd=self._task.cwd,
                timeout_s=allowed_s if timeout_s is None else min(timeout_s, allowed_s),
            )
        except UnicodeEncodeError as error:
            return replace(turn, refused=str(error))
        except DsecError as error:
            # A model may write anything: what cannot be run is a step that did nothing.
            if error.code is not ErrorCode.INVALID:
                raise
            return replace(turn, refused=error.message)
        return replace(turn, result=result)

    async def _judged(self, turn: Turn) -> Judgement:
        assert self.sandbox is not None  # noqa: S101  looked at by step
        judge = self._task.judge
        if not isinstance(judge, Verifier):
            return await judge(self.sandbox, turn)
        if not turn.is_last:
            return Judgement()
        return await judge.judge(self._client, self._task, self.sandbox)


async def _copy(source: Sandbox, target: Sandbox, path: str) -> None:
    with tempfile.TemporaryDirectory(prefix="dsec-verifier-") as scratch:
        # The agent chose what is at the path, so it gets a name of ours.
        copy = Path(scratch) / "copy"
        try:
            await source.download(path, copy)
        except DsecError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return
            raise
        await target.upload(copy, path)
