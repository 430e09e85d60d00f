"""Whatever the order of messages, appends and crashes: nothing is lost, nothing comes twice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chronus_world import World
from dsec_chronus.config import ChronusConfig
from dsec_chronus.records import FeedbackGiven, StageReported
from dsec_common.wire.rollout import (
    FeedbackAccepted,
    FeedbackState,
    StageAccepted,
    StageBatch,
)

LOCALS = ("a", "b")

locals_ = st.sampled_from(LOCALS)
payloads = st.sampled_from(("one", "two"))


class Mailbox(RuleBasedStateMachine):
    """Sandboxes and trainers around one shard that crashes."""

    @initialize()
    def begin(self) -> None:
        self.world = World(ChronusConfig(snapshot_after_frames=4, waiting_max=6))
        self.reports: dict[int, tuple[str, int, str]] = {}
        self.feedback: dict[int, tuple[str, int, str]] = {}
        self.polls: dict[int, tuple[str, int]] = {}
        self.awaits: dict[int, str] = {}
        self.accepted: dict[tuple[str, int], str] = {}
        self.answered: dict[tuple[str, int], str] = {}
        for local in LOCALS:
            self.world.open(local)
        self.world.settle()

    @rule(local=locals_, seq=st.integers(0, 5), payload=payloads)
    def report(self, local: str, seq: int, payload: str) -> None:
        request = self.world.report(seq, payload, local=local)
        self.reports[request] = (local, seq, payload)

    @rule(local=locals_, seq=st.integers(0, 5), payload=payloads)
    def give_feedback(self, local: str, seq: int, payload: str) -> None:
        request = self.world.feedback(seq, payload, local=local)
        self.feedback[request] = (local, seq, payload)

    @rule(local=locals_, after_seq=st.integers(0, 5), wait_s=st.sampled_from((0.0, 1.0, 9.0)))
    def look(self, local: str, after_seq: int, wait_s: float) -> None:
        self.polls[self.world.next(after_seq, wait_s=wait_s, local=local)] = (local, after_seq)

    @rule(local=locals_, seq=st.integers(1, 5))
    def wait_for_feedback(self, local: str, seq: int) -> None:
        self.awaits[self.world.await_feedback(seq, local=local)] = local

    @rule(local=locals_)
    def close(self, local: str) -> None:
        self.world.close(local)

    @rule()
    def append(self) -> None:
        if self.world.to_write:
            self.world.append()

    @rule()
    def refuse(self) -> None:
        if self.world.to_write:
            self.world.refuse_frame()

    @rule(lost=st.booleans())
    def crash(self, lost: bool) -> None:
        """A process dies; its outstanding frame may have become durable all the same."""
        if self.world.to_write and lost:
            self.world.append(acknowledged=False)
        self.world.take()

    @rule(seconds=st.sampled_from((0.5, 2.0)))
    def wait(self, seconds: float) -> None:
        self.world.tick(seconds)

    @invariant()
    def what_was_accepted_is_durable_and_never_changes(self) -> None:
        answers = self.world.answers
        for request, (local, seq, payload) in self.reports.items():
            if isinstance(answers.get(request), StageAccepted):
                assert self.accepted.setdefault((local, seq), payload) == payload
        for request, (local, seq, payload) in self.feedback.items():
            if isinstance(answers.get(request), FeedbackAccepted):
                assert self.answered.setdefault((local, seq), payload) == payload
        durable = self.world.durable_facts()
        kept = {
            (local, fact.seq, type(fact)): fact.payload.decode().strip('"')
            for local, facts in durable.items()
            for fact in facts
            if isinstance(fact, StageReported | FeedbackGiven)
        }
        for (local, seq), payload in self.accepted.items():
            assert kept[local, seq, StageReported] == payload
        for (local, seq), payload in self.answered.items():
            assert kept[local, seq, FeedbackGiven] == payload

    @invariant()
    def what_is_read_is_durable(self) -> None:
        durable = self.world.durable_facts()
        assert self.world.core.facts().keys() <= durable.keys()
        for local, facts in self.world.core.facts().items():
            assert [fact for fact in facts if fact in durable[local]] == facts

    @invariant()
    def readers_get_every_report_in_order(self) -> None:
        for request, (local, after_seq) in self.polls.items():
            batch = self.world.answers.get(request)
            if isinstance(batch, StageBatch):
                numbers = [report.seq for report in batch.reports]
                assert numbers == list(range(after_seq + 1, after_seq + 1 + len(numbers)))
                for report in batch.reports:
                    known = self.accepted.setdefault((local, report.seq), report.payload)
                    assert known == report.payload
        for request, local in self.awaits.items():
            state = self.world.answers.get(request)
            if isinstance(state, FeedbackState) and state.ready:
                assert self.answered.setdefault((local, state.seq), state.payload) == state.payload


TestMailbox = Mailbox.TestCase
TestMailbox.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
