"""Many rollouts, one trainer: their steps in one stream, its answers by the batch."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from dsec.channel import Channel
from dsec.group_answers import Answers, is_fenced
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.subjects import ScopedId
from dsec_common.wire.rollout_group import (
    GroupLease,
    GroupOpened,
    GroupStep,
    GroupTask,
    NextSteps,
    OpenGroup,
    StepAnswer,
    StepBatch,
    TakeGroup,
)

if TYPE_CHECKING:
    from dsec.rollouts import Rollout

_TIMEOUT_S: Final = 60.0
_ATTEMPTS: Final = 60
#: One request waits so long for a step, and is asked again so much later when no answer came: the
#: owner of the shard may have died.
_WAIT_S: Final = 1.0
_MARGIN_S: Final = 0.5
_PAUSE_S: Final = 0.1
_TASKS_AT_ONCE: Final = 256
_TASK_BYTES_AT_ONCE: Final = 256 * 1024
_STEPS_AT_ONCE: Final = 1024


class Step:
    """One report of an agent, waiting for its answer.

    Attributes:
        rollout: where it belongs.
        index: of the rollout's task in the group's list.
        task: that task.
        seq: its number in the rollout, from 1.
        stage: what the agent says it has reached.
        observation: what it reported, any JSON value.
        sandbox_id: the sandbox that reported.
        reported_at: Unix time at which Chronus took it.
    """

    __slots__ = (
        "_group",
        "index",
        "observation",
        "reported_at",
        "rollout",
        "sandbox_id",
        "seq",
        "stage",
        "task",
    )

    def __init__(self, group: RolloutGroup, rollout: Rollout, task: Any, sent: GroupStep) -> None:
        self._group = group
        self.rollout = rollout
        self.index = sent.index
        self.task = task
        self.seq = sent.seq
        self.stage = sent.stage
        self.observation = sent.payload
        self.sandbox_id = sent.sandbox_id
        self.reported_at = sent.reported_at

    def __repr__(self) -> str:
        return f"Step({self.rollout.id!r}, seq={self.seq}, stage={self.stage!r})"

    async def reply(
        self, payload: Any = None, *, reward: float | None = None, done: bool = False
    ) -> None:
        """Answer this step; return when the answer is durable.

        Answers that are given at the same time travel together: see :meth:`RolloutGroup.reply` for
        a whole batch.

        Args:
            payload: any JSON value, at most 256 KiB: an action, feedback, what a model said.
            reward: this step's reward.
            done: tells the agent to stop and closes the rollout.

        Raises:
            DsecError: ``conflict`` when another trainer has taken the group over (``reason`` is
                ``fenced``), or when this step has another answer; ``expired`` when the rollout is
                closed; ``invalid`` for a payload that is too large or no JSON.
        """
        (error,) = await self._group.reply([Reply(self, payload, reward=reward, done=done)])
        if error is not None:
            raise error


class Reply:
    """The answer to one step, for :meth:`RolloutGroup.reply`: what :meth:`Step.reply` takes."""

    __slots__ = ("done", "payload", "reward", "step")

    def __init__(
        self, step: Step, payload: Any = None, *, reward: float | None = None, done: bool = False
    ) -> None:
        self.step = step
        self.payload = payload
        self.reward = reward
        self.done = done


class _Window:
    """How many steps of one shard are held without an answer, and until there may be more."""

    def __init__(self, limit: int) -> None:
        self._held: set[tuple[str, int]] = set()
        self._limit = limit
        self._room = asyncio.Event()

    async def until_room(self) -> int:
        """Return for how many there is room, once there is any."""
        while len(self._held) >= self._limit:
            self._room.clear()
            await self._room.wait()
        return self._limit - len(self._held)

    def hold(self, local: str, seq: int) -> None:
        """Take room for a step."""
        self._held.add((local, seq))

    def answered(self, local: str, seq: int, outcome: asyncio.Future[DsecError | None]) -> None:
        """Make room for another one, unless the step still waits for an answer that is valid."""
        error = None if outcome.cancelled() else outcome.result()
        if error is None or error.code is not ErrorCode.INVALID:
            self._held.discard((local, seq))
            self._room.set()


class RolloutGroup:
    """The rollouts of a list of tasks, and the only trainer that answers them.

    An async context manager: entering it opens the rollouts, or finds them, and takes the group
    over from whoever had it before, whose answers are refused from then on. What was answered
    never comes again; what was not does, so that a trainer that was killed goes on at the very
    step. One loop reads the steps.

    Attributes:
        name: unique in the project.
        rollouts: in the order of the tasks; empty before it is entered.
        fence: the number under which this trainer took the group over.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        tasks: Iterable[Any],
        rollout_of: Callable[[str, int], Rollout],
        *,
        labels: Mapping[str, str],
        window: int,
        patience_s: float,
        checkpoint_every: int = 0,
        durable_checkpoints: bool = False,
    ) -> None:
        if window < 1:
            raise invalid(f"a window of {window} steps holds none")
        self.name = name
        self.rollouts: tuple[Rollout, ...] = ()
        self.fence = 0
        self._channel = channel
        self._tasks = list(tasks)
        self._rollout_of = rollout_of
        self._labels = dict(labels)
        self._window = window
        self._patience_s = patience_s
        self._checkpoint_every = checkpoint_every
        self._durable_checkpoints = durable_checkpoints
        self._by_local: dict[str, tuple[Rollout, Any]] = {}
        self._seen: dict[str, int] = {}
        self._windows: dict[str, _Window] = {}
        self._ready: deque[Step] = deque()
        self._came = asyncio.Event()
        self._reading = 0
        self._failed: DsecError | None = None
        self._answers: dict[str, Answers] = {}
        self._running: list[asyncio.Task[None]] = []

    # --- The life of a group ------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._open()
        self._by_local = {
            ScopedId.parse(rollout.id, "rollout id").local: (rollout, task)
            for rollout, task in zip(self.rollouts, self._tasks, strict=True)
        }
        shards = sorted({rollout.id.partition(".")[0] for rollout in self.rollouts})
        self._reading = len(shards)
        for shard in shards:
            self._windows[shard] = _Window(max(1, self._window // len(shards)))
            answers = Answers(self._channel, self.name, self.fence, shard, self._patience_s)
            self._answers[shard] = answers
            self._start(self._read(shard), f"steps of {self.name} in {shard}")
            self._start(answers.run(), f"answers to {self.name} in {shard}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running, self._running = self._running, []
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for answers in self._answers.values():
            answers.fail(invalid(f"the group {self.name!r} is not entered any more"))

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._running.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, DsecError):
            self._fail(error)
        elif error is not None:
            why = f"the trainer of the group {self.name!r} failed: {error!r}"
            self._fail(DsecError(ErrorCode.INTERNAL, why))

    def _fail(self, error: DsecError) -> None:
        self._failed = self._failed or error
        for answers in self._answers.values():
            answers.fail(self._failed)
        self._came.set()

    async def _open(self) -> None:
        # Without a number first: a list of tasks that is refused takes nobody's group away.
        await self._open_tasks(0)
        lease = await self._channel.ask(
            subjects.rollout_group(self._channel.project, "take_group"),
            TakeGroup(group=self.name),
            GroupLease,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            attempts_max=_ATTEMPTS,
        )
        self.fence = lease.fence
        ids = await self._open_tasks(self.fence)
        self.rollouts = tuple(self._rollout_of(rollout_id, self.fence) for rollout_id in ids)

    async def _open_tasks(self, fence: int) -> list[str]:
        ids: list[str] = []
        for tasks in _parts(self._tasks):
            opened = await self._channel.ask(
                subjects.rollout_group(self._channel.project, "open_group"),
                OpenGroup(
                    group=self.name,
                    fence=fence,
                    tasks=tasks,
                    labels=self._labels,
                    checkpoint_every=self._checkpoint_every,
                    durable_checkpoints=self._durable_checkpoints,
                ),
                GroupOpened,
                timeout_s=_TIMEOUT_S,
                repeatable=True,
                attempts_max=_ATTEMPTS,
            )
            ids += opened.rollouts
        return ids

    # --- Steps --------------------------------------------------------------------------------

    async def steps(self) -> AsyncIterator[Step]:
        """Yield the steps of all rollouts, those of one in order, until all are closed.

        No more than ``window`` are held here without an answer, an equal part of it from each
        shard; beyond it agents wait.

        Raises:
            DsecError: ``conflict`` (``reason`` is ``fenced``) when another trainer has taken the
                group over; what Chronus refuses; ``unavailable`` when it was away for longer than
                ``patience_s``.
        """
        async with aclosing(self.batches(1)) as batches:
            async for batch in batches:
                yield batch[0]

    async def batches(self, limit: int = 256) -> AsyncGenerator[list[Step], None]:
        """Yield what :meth:`steps` does, by as many as there are: one at least, ``limit`` at most.

        For whoever answers many at once, as a model does.
        """
        while True:
            if self._failed is not None:
                raise self._failed
            if self._ready:
                yield [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]
            elif not self._reading:
                return
            else:
                self._came.clear()
                await self._came.wait()

    async def _read(self, shard: str) -> None:
        subject = subjects.group(self._channel.project, shard, "next")
        window, epoch, after, failing_since = self._windows[shard], "", 0, 0.0
        while True:
            room = await window.until_room()
            asked = NextSteps(
                group=self.name,
                fence=self.fence,
                epoch=epoch,
                after=after,
                wait_s=_WAIT_S,
                limit=min(room, _STEPS_AT_ONCE),
            )
            try:
                batch = await self._channel.bus.request(
                    subject, asked, StepBatch, timeout_s=_WAIT_S + _MARGIN_S
                )
            except DsecError as error:
                now = time.monotonic()
                failing_since = failing_since or now
                if not error.retryable or now - failing_since > self._patience_s:
                    raise
                await asyncio.sleep(_PAUSE_S)
                continue
            epoch, after, failing_since = batch.epoch, batch.after, 0.0
            self._take(batch.steps, window)
            if not batch.open_rollouts:
                self._reading -= 1
                self._came.set()
                return

    def _take(self, steps: Sequence[GroupStep], window: _Window) -> None:
        for sent in steps:
            known = self._by_local.get(sent.local)
            # A new owner of the shard sends again what is not answered yet, some of it held here.
            if known is None or sent.seq <= self._seen.get(sent.local, 0):
                continue
            self._seen[sent.local] = sent.seq
            window.hold(sent.local, sent.seq)
            self._ready.append(Step(self, known[0], known[1], sent))
        if self._ready:
            self._came.set()

    # --- Answers ------------------------------------------------------------------------------

    async def reply(self, replies: Iterable[Reply]) -> list[DsecError | None]:
        """Answer several steps; return for each what went wrong, None when it is durable.

        Raises:
            DsecError: ``conflict`` (``reason`` is ``fenced``) when another trainer has taken the
                group over: none of what is not durable yet will be.
        """
        if self._failed is not None:
            raise self._failed
        futures: list[asyncio.Future[DsecError | None]] = []
        for reply in replies:
            shard, _, local = reply.step.rollout.id.partition(".")
            answer = StepAnswer(
                local=local,
                seq=reply.step.seq,
                payload=reply.payload,
                reward=reply.reward,
                done=reply.done,
            )
            future = self._answers[shard].give(answer)
            window = self._windows[shard]
            future.add_done_callback(partial(window.answered, local, reply.step.seq))
            futures.append(future)
        outcomes = [await future for future in futures]
        for error in outcomes:
            if error is not None and is_fenced(error):
                raise error
        return outcomes


def _parts(tasks: Sequence[Any]) -> Iterator[tuple[GroupTask, ...]]:
    """Yield the tasks by as many as fit one request."""
    part: list[GroupTask] = []
    size = 0
    for index, task in enumerate(tasks):
        try:
            weight = len(msgspec.json.encode(task))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise invalid(f"task {index} is not a JSON value: {error}") from error
        if part and (len(part) >= _TASKS_AT_ONCE or size + weight > _TASK_BYTES_AT_ONCE):
            yield tuple(part)
            part, size = [], 0
        part.append(GroupTask(index=index, task=task))
        size += weight
    if part:
        yield tuple(part)
