"""Trainers that take a group from one another, agents that repeat steps, a shard that crashes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chronus_world import World
from dsec_chronus.config import ChronusConfig
from dsec_chronus.records import FeedbackGiven
from dsec_common.wire.rollout import FeedbackState
from dsec_common.wire.rollout_group import GroupLease, StepBatch, StepsAnswered

TASKS = {"a": 1, "b": 2}
Step = tuple[str, int]


@dataclass
class TrainerOfTest:
    """One trainer: what it holds, and how far it has read."""

    take: int
    fence: int = 0
    epoch: str = ""
    after: int = 0
    poll: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    holds: list[Step] = field(default_factory=list)


class Training(RuleBasedStateMachine):
    """One group of two rollouts; two trainers that believe to be the only one."""

    @initialize()
    def begin(self) -> None:
        self.world = World(ChronusConfig(snapshot_after_frames=5))
        self.trainers: list[TrainerOfTest] = []
        self.next_seq = dict.fromkeys(TASKS, 1)
        self.steps: dict[int, Step] = {}
        # Requests to answer: who asked, what, and the newest number that was out by then.
        self.sent: dict[int, tuple[int, int, list[Step]]] = {}
        self.answered: dict[Step, int] = {}
        self.asked_before: dict[int, set[Step]] = {}
        self.newest = 0
        self.start_trainer_in_peace()

    @rule()
    @precondition(lambda self: len(self.trainers) < 5)
    def start_trainer(self) -> None:
        self.trainers.append(TrainerOfTest(self.world.take_group()))

    @rule()
    @precondition(lambda self: len(self.trainers) < 5)
    def start_trainer_in_peace(self) -> None:
        self.start_trainer()
        self.world.settle()
        self.go_on(len(self.trainers) - 1)
        self.world.settle()

    @rule(which=st.integers(0, 4))
    def go_on(self, which: int) -> None:
        """Let a trainer do what comes next: hear its number, open, take what came, ask for more."""
        trainer = self.trainers[which % len(self.trainers)]
        lease = self.world.answers.get(trainer.take)
        if lease is None and trainer.take in self.world.refusals:
            trainer.take = self.world.take_group()
        elif isinstance(lease, GroupLease) and not trainer.fence:
            trainer.fence = lease.fence
            self.world.open_group(trainer.fence, TASKS)
        elif trainer.fence:
            self.read(trainer)
            self.ask(trainer)
            self.read(trainer)

    def read(self, trainer: TrainerOfTest) -> None:
        batch = self.world.answers.get(trainer.poll)
        if isinstance(batch, StepBatch):
            before = self.asked_before.pop(trainer.poll)
            trainer.epoch, trainer.after, trainer.poll = batch.epoch, batch.after, 0
            for step in batch.steps:
                assert (step.local, step.seq) not in before, "an answered step came again"
                if step.seq > trainer.seen.get(step.local, 0):
                    assert step.seq == self.expected(trainer, step.local), "a step was left out"
                    trainer.seen[step.local] = step.seq
                    trainer.holds.append((step.local, step.seq))

    def ask(self, trainer: TrainerOfTest) -> None:
        if trainer.poll == 0 or trainer.poll in self.world.refusals:
            trainer.poll = self.world.steps(
                trainer.fence, epoch=trainer.epoch, after=trainer.after, limit=2
            )
            self.asked_before[trainer.poll] = set(self.answered)

    def expected(self, trainer: TrainerOfTest, local: str) -> int:
        """Return the oldest step that the trainer has not seen and nobody has answered."""
        seq = trainer.seen.get(local, 0) + 1
        while self.is_durable((local, seq)):
            seq += 1
        return seq

    def is_durable(self, step: Step) -> bool:
        facts = self.world.durable_facts().get(step[0], [])
        return any(isinstance(fact, FeedbackGiven) and fact.seq == step[1] for fact in facts)

    @rule(which=st.integers(0, 4))
    def step_and_read(self, which: int) -> None:
        self.step("ab")
        self.world.settle()
        self.go_on(which)

    @rule(which=st.integers(0, 4), count=st.integers(1, 3))
    def answer(self, which: int, count: int) -> None:
        index = which % len(self.trainers)
        trainer = self.trainers[index]
        steps, trainer.holds = trainer.holds[:count], trainer.holds[count:]
        if steps:
            answers = [(local, seq, f"trainer {index}") for local, seq in steps]
            request = self.world.answer_steps(trainer.fence, *answers)
            self.sent[request] = (trainer.fence, self.newest, steps)

    @rule(locals_=st.sampled_from(("a", "b", "ab")))
    def step(self, locals_: str) -> None:
        """Step, or repeat the step whose answer has not come."""
        for local in locals_:
            self.step_once(local)

    def step_once(self, local: str) -> None:
        seq = self.next_seq[local]
        self.steps[self.world.step(seq, f"{local} {seq}", wait_s=2, local=local)] = (local, seq)

    @rule()
    def append(self) -> None:
        if self.world.to_write:
            self.world.append()

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule()
    def refuse(self) -> None:
        if self.world.to_write:
            self.world.refuse_frame()

    @rule(lost=st.booleans())
    def crash(self, lost: bool) -> None:
        if self.world.to_write and lost:
            self.world.append(acknowledged=False)
        self.world.take()
        for trainer in self.trainers:  # a request that is not answered any more is asked again
            trainer.poll = 0
            if not trainer.fence and trainer.take not in self.world.answers:
                trainer.take = self.world.take_group()

    @rule()
    def wait(self) -> None:
        self.world.tick(2)

    @invariant()
    def numbers_only_grow(self) -> None:
        for trainer in self.trainers:
            lease = self.world.answers.get(trainer.take)
            if isinstance(lease, GroupLease):
                self.newest = max(self.newest, lease.fence)

    @invariant()
    def answers_of_a_trainer_that_was_taken_over_change_nothing(self) -> None:
        for request, (fence, newest, steps) in list(self.sent.items()):
            reply = self.world.answers.get(request)
            if not isinstance(reply, StepsAnswered):
                continue
            del self.sent[request]
            assert fence >= newest, "a number that was out already did not fence"
            for step, outcome in zip(steps, reply.outcomes, strict=True):
                if outcome.error is None:
                    assert self.is_durable(step)
                    self.answered.setdefault(step, request)

    @invariant()
    def an_agent_hears_one_answer_to_each_step_and_it_is_durable(self) -> None:
        for request, step in list(self.steps.items()):
            state = self.world.answers.get(request)
            if isinstance(state, FeedbackState) and state.ready:
                del self.steps[request]
                facts = self.world.durable_facts()[step[0]]
                given = [f for f in facts if isinstance(f, FeedbackGiven) and f.seq == step[1]]
                assert [fact.payload.decode() for fact in given] == [f'"{state.payload}"']
                local, seq = step
                self.next_seq[local] = max(self.next_seq[local], seq + 1)

    @invariant()
    def a_new_owner_knows_the_same(self) -> None:
        durable = self.world.durable_facts()
        for local, facts in self.world.core.facts().items():
            if local in TASKS:
                assert [fact for fact in facts if fact in durable[local]] == facts


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
