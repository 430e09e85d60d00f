"""A shard's core around a journal, with every append in the test's hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chronus_journal import JournalOfTest, taken
from dsec_chronus.config import ChronusConfig
from dsec_chronus.effects import (
    Answer,
    Collect,
    Deed,
    DropCheckpoint,
    Effect,
    Perform,
    PurgeJournal,
    Refuse,
    WriteFrame,
)
from dsec_chronus.events import (
    ActionAsked,
    ActionDone,
    AnswerGiven,
    AnswersAsked,
    AwaitAsked,
    ClockTicked,
    CloseAsked,
    Event,
    FeedbackAsked,
    FrameFailed,
    FrameRead,
    FrameWritten,
    GetAsked,
    GroupOpenAsked,
    GroupTakeAsked,
    InspectAsked,
    JournalRead,
    Moment,
    NextAsked,
    OpenAsked,
    PutAsked,
    ReportAsked,
    ShardLost,
    StepAsked,
    StepsAsked,
    SweepDue,
    TaskGiven,
)
from dsec_chronus.records import ActionKind, Child, Frame, Record, pack
from dsec_chronus.state import ShardState
from dsec_common.errors import DsecError, unavailable
from dsec_common.wire.base import Message

START_S = 1_000_000.0
PROJECT = "default"
ROLLOUT = "r1"
GROUP = "g1"


class World:
    """One shard, its journal, and a clock."""

    def __init__(self, config: ChronusConfig | None = None) -> None:
        self.config = config or ChronusConfig()
        self.journal = JournalOfTest()
        self.now = START_S
        self.answers: dict[int, Message] = {}
        self.refusals: dict[int, DsecError] = {}
        self._ids = 0
        self._epoch = 0
        self.take()

    @property
    def at(self) -> Moment:
        """Now, on both clocks."""
        return Moment(self.now, self.now - START_S)

    def take(self) -> None:
        """Have a fresh core read the journal, as after a crash; what was outstanding is gone."""
        self._epoch += 1
        self.core = ShardState("s0", self.config, str(self._epoch))
        self.to_write: list[WriteFrame] = []
        self.deeds: list[Deed] = []
        for sequence, frame in sorted(self.journal.frames.items()):
            self.handle(FrameRead(frame=frame, sequence=sequence))
        self.journal.append(Frame(epoch=str(self._epoch), number=0))
        self.handle(JournalRead(at=self.at))

    def handle(self, event: Event) -> None:
        """Feed one event and check the core's invariants."""
        effects = self.core.handle(event)
        self.core.validate_state()
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case WriteFrame():
                assert not self.to_write, "two frames are outstanding"
                self.to_write.append(effect)
            case PurgeJournal():
                self.journal.purge(effect.sequence)
            case Perform() | DropCheckpoint() | Collect():
                self.deeds.append(effect)
            case Answer():
                assert effect.request_id not in self.answers | self.refusals
                self.answers[effect.request_id] = effect.reply
            case Refuse():
                assert effect.request_id not in self.answers | self.refusals
                self.refusals[effect.request_id] = effect.error

    def append(self, *, acknowledged: bool = True) -> None:
        """Let the outstanding frame become durable; without the acknowledgement only that."""
        frame = self.to_write.pop(0)
        sequence = self.journal.append(
            Frame(
                epoch=str(self._epoch),
                number=self.journal.last + 1,
                records=frame.records,
                snapshot_part=frame.snapshot_part,
                snapshot_complete=frame.snapshot_complete,
            )
        )
        if acknowledged:
            self.handle(FrameWritten(sequence=sequence, at=self.at))

    def refuse_frame(self) -> None:
        """Let JetStream refuse the outstanding frame."""
        self.to_write.pop(0)
        self.handle(FrameFailed(error=unavailable("the stream is full"), at=self.at))

    def lose(self) -> None:
        """Let the shard become another's."""
        self.to_write.clear()
        self.handle(ShardLost(error=unavailable("moved")))

    def settle(self) -> None:
        """Let frames become durable until none is outstanding."""
        while self.to_write:
            self.append()

    def tick(self, seconds: float) -> None:
        """Let time pass and deadlines fall due."""
        self.now += seconds
        self.handle(ClockTicked(at=self.at))

    def sweep(self) -> None:
        """Let rollouts that are over be forgotten."""
        self.handle(SweepDue(at=self.at))

    def durable_facts(self) -> dict[str, list[Record]]:
        """Return what a process would know that took the shard over now."""
        core = ShardState("s0", self.config, "looking")
        for sequence, frame in sorted(self.journal.frames.items()):
            core.handle(FrameRead(frame=frame, sequence=sequence))
        return core.facts()

    # --- Requests; each returns its id ----------------------------------------------------------

    def _ask(self, kind: Callable[..., Event], **fields: Any) -> int:
        """Have the core asked now; return the request's number."""
        request_id = self._next_id()
        self.handle(kind(request_id=request_id, at=self.at, **fields))
        return request_id

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def open(
        self,
        local: str = ROLLOUT,
        *,
        project: str = PROJECT,
        labels: dict[str, str] | None = None,
        checkpoint_every: int = 0,
    ) -> int:
        """Open a rollout."""
        return self._ask(
            OpenAsked,
            project=project,
            local=local,
            labels=labels or {},
            checkpoint_every=checkpoint_every,
        )

    def report(
        self,
        seq: int,
        payload: Any = None,
        *,
        stage: str = "stage",
        local: str = ROLLOUT,
        project: str = PROJECT,
        sandbox_id: str = "node-1.a",
    ) -> int:
        """Report as the sandbox."""
        return self._ask(
            ReportAsked,
            project=project,
            local=local,
            seq=seq,
            stage=stage,
            payload=pack(payload),
            sandbox_id=sandbox_id,
        )

    def feedback(
        self,
        seq: int,
        payload: Any = None,
        *,
        reward: float | None = None,
        local: str = ROLLOUT,
        project: str = PROJECT,
    ) -> int:
        """Answer as the trainer."""
        return self._ask(
            FeedbackAsked,
            project=project,
            local=local,
            seq=seq,
            payload=pack(payload),
            reward=reward,
            done=False,
        )

    def close(self, local: str = ROLLOUT, *, project: str = PROJECT) -> int:
        """Close as the trainer."""
        return self._ask(CloseAsked, project=project, local=local)

    def inspect(self, local: str = ROLLOUT, *, project: str = PROJECT) -> int:
        """Look as the trainer."""
        return self._ask(InspectAsked, project=project, local=local)

    def next(
        self,
        after_seq: int = 0,
        *,
        wait_s: float = 30.0,
        limit: int = 64,
        local: str = ROLLOUT,
        project: str = PROJECT,
    ) -> int:
        """Wait for reports as the trainer."""
        return self._ask(
            NextAsked, project=project, local=local, after_seq=after_seq, wait_s=wait_s, limit=limit
        )

    def await_feedback(
        self, seq: int, *, wait_s: float = 30.0, local: str = ROLLOUT, project: str = PROJECT
    ) -> int:
        """Wait for feedback as the sandbox."""
        return self._ask(AwaitAsked, project=project, local=local, seq=seq, wait_s=wait_s)

    def step(
        self,
        seq: int,
        payload: Any = None,
        *,
        wait_s: float = 30.0,
        local: str = ROLLOUT,
        project: str = PROJECT,
    ) -> int:
        """Report as the sandbox and wait for the feedback."""
        return self._ask(
            StepAsked,
            project=project,
            local=local,
            seq=seq,
            stage="stage",
            payload=pack(payload),
            sandbox_id="node-1.a",
            wait_s=wait_s,
        )

    # --- State and actions ----------------------------------------------------------------------

    def put(
        self, values: dict[str, Any], *deletes: str, local: str = ROLLOUT, fence: int = 0
    ) -> int:
        """Keep values as the trainer."""
        request_id = self._next_id()
        packed = {name: pack(value) for name, value in values.items()}
        self.handle(
            PutAsked(
                request_id=request_id,
                project=PROJECT,
                local=local,
                values=packed,
                deletes=deletes,
                fence=fence,
                at=self.at,
            )
        )
        return request_id

    def state(self, local: str = ROLLOUT, *, checkpoint: int = 0) -> dict[str, Any]:
        """Return what is kept."""
        request_id = self._next_id()
        self.handle(
            GetAsked(
                request_id=request_id,
                project=PROJECT,
                local=local,
                names=(),
                checkpoint=checkpoint,
                at=self.at,
            )
        )
        values: dict[str, Any] = self.answers[request_id].values  # type: ignore[attr-defined]
        return values

    def act(self, kind: ActionKind, key: str, *, local: str = ROLLOUT, **what: Any) -> int:
        """Ask for an action as the trainer."""
        request_id = self._next_id()
        self.handle(
            ActionAsked(
                request_id=request_id,
                project=PROJECT,
                local=local,
                kind=kind,
                key=key,
                at=self.at,
                **what,
            )
        )
        return request_id

    def performing(self) -> list[Perform]:
        """Return what nodes were asked for since this was called last."""
        asked = [deed for deed in self.deeds if isinstance(deed, Perform)]
        self.deeds = [deed for deed in self.deeds if not isinstance(deed, Perform)]
        return asked

    def dropped(self) -> list[str]:
        """Return the snapshots that were to be dropped since this was called last."""
        dropped = [it.taken.snapshot_id for it in self.deeds if isinstance(it, DropCheckpoint)]
        self.deeds = [deed for deed in self.deeds if not isinstance(deed, DropCheckpoint)]
        return dropped

    def done(self, it: Perform, error: DsecError | None = None, **what: Any) -> None:
        """Let an action come to something, by default to what its kind does."""
        begun = it.begun
        if error is None and not what:
            if begun.kind is ActionKind.CHECKPOINT:
                what = {"taken": taken(f"node-1.snap{begun.number}", durable=begun.durable)}
            elif begun.kind is ActionKind.ROLLBACK:
                what = {"sandbox_id": begun.sandbox_id}
            else:
                locals_ = [f"{begun.local}child{index}" for index in range(begun.count)]
                children = tuple(Child(local=one, sandbox_id=f"node-1.{one}") for one in locals_)
                what = {"children": children}
        self.handle(
            ActionDone(
                request_id=0,
                project=it.project,
                local=begun.local,
                at=self.at,
                number=begun.number,
                error=error,
                **what,
            )
        )

    def acted(self, kind: ActionKind, key: str, *, local: str = ROLLOUT, **what: Any) -> Message:
        """Carry an action through and return its answer."""
        request = self.act(kind, key, local=local, **what)
        self.settle()
        for it in self.performing():
            self.done(it)
        self.settle()
        return self.answers[request]

    # --- Groups; a task's rollout is named by its index, a group by its name --------------------

    def take_group(self, group: str = GROUP, *, project: str = PROJECT) -> int:
        """Become a group's trainer."""
        return self._ask(GroupTakeAsked, project=project, local=group, group=group)

    def open_group(
        self,
        fence: int,
        tasks: dict[str, Any],
        *,
        labels: dict[str, str] | None = None,
        group: str = GROUP,
        project: str = PROJECT,
    ) -> int:
        """Open the rollouts of tasks: names of rollouts, and what each is to do."""
        request_id = self._next_id()
        given = tuple(
            TaskGiven(local=local, index=index, task=pack(task))
            for index, (local, task) in enumerate(tasks.items())
        )
        self.handle(
            GroupOpenAsked(
                request_id=request_id,
                project=project,
                local=group,
                group=group,
                fence=fence,
                labels=labels or {},
                tasks=given,
                at=self.at,
            )
        )
        return request_id

    def steps(
        self,
        fence: int,
        *,
        epoch: str = "",
        after: int = 0,
        wait_s: float = 30.0,
        limit: int = 256,
        group: str = GROUP,
        project: str = PROJECT,
    ) -> int:
        """Wait for steps as a group's trainer."""
        return self._ask(
            StepsAsked,
            project=project,
            local=group,
            group=group,
            fence=fence,
            epoch=epoch,
            after=after,
            wait_s=wait_s,
            limit=limit,
        )

    def answer_steps(
        self,
        fence: int,
        *answers: tuple[str, int, Any],
        done: bool = False,
        group: str = GROUP,
        project: str = PROJECT,
    ) -> int:
        """Answer steps as a group's trainer: rollouts, numbers and payloads."""
        return self._ask(
            AnswersAsked,
            project=project,
            local=group,
            group=group,
            fence=fence,
            answers=tuple(
                AnswerGiven(local=local, seq=seq, payload=pack(payload), reward=1.0, done=done)
                for local, seq, payload in answers
            ),
        )
