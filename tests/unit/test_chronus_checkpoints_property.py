"""Whatever the order of requests, answers of nodes, appends and crashes: actions are done once."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chronus_world import ROLLOUT, World
from dsec_chronus.config import ChronusConfig
from dsec_chronus.effects import Perform
from dsec_chronus.records import ActionKind
from dsec_common.errors import unavailable
from dsec_common.wire.checkpoint import CheckpointInfo, RolloutRolledBack

KEYS = ("one", "two", "three")


class Kept(RuleBasedStateMachine):
    """A trainer, its agent and a node around one rollout whose owner crashes."""

    @initialize()
    def begin(self) -> None:
        self.world = World(ChronusConfig(snapshot_after_frames=3))
        self.world.open()
        self.world.report(1)
        self.world.settle()
        self.actions: dict[int, str] = {}
        self.told: dict[str, tuple[Any, ...]] = {}
        self.asked: list[Perform] = []
        self.reports: dict[int, tuple[int, int]] = {}
        self.written = 0

    @rule()
    def report(self) -> None:
        """Report what is next, as the agent knows it."""
        info = self.world.answers[self.world.inspect()]
        seq = info.last_seq + 1  # type: ignore[attr-defined]
        self.written += 1
        self.reports[self.world.report(seq, self.written)] = (seq, self.written)

    @rule(seq=st.integers(1, 4))
    def answer(self, seq: int) -> None:
        self.world.feedback(seq, seq, reward=1.0)

    @rule()
    def put(self) -> None:
        self.written += 1
        self.world.put({"written": self.written})

    @rule(
        key=st.sampled_from(KEYS),
        kind=st.sampled_from([ActionKind.CHECKPOINT, ActionKind.ROLLBACK]),
    )
    def act(self, key: str, kind: ActionKind) -> None:
        key = f"{kind} {key}"
        self.actions[self.world.act(kind, key)] = key

    @rule(fails=st.booleans())
    def node_answers(self, *, fails: bool) -> None:
        """Let a node carry out, or refuse, what it was asked last."""
        self.asked += self.world.performing()
        if self.asked:
            it = self.asked.pop()
            self.world.done(it, unavailable("no") if fails else None)

    @rule()
    def append(self) -> None:
        if self.world.to_write:
            self.world.append()

    @rule()
    def refuse(self) -> None:
        if self.world.to_write:
            self.world.refuse_frame()

    @rule()
    def sweep(self) -> None:
        self.world.sweep()

    @rule(durable=st.booleans())
    def crash(self, *, durable: bool) -> None:
        if self.world.to_write and durable:
            self.world.append(acknowledged=False)
        self.world.take()
        self.asked = []

    @invariant()
    def a_key_has_one_result(self) -> None:
        for request, key in self.actions.items():
            reply = self.world.answers.get(request)
            if isinstance(reply, CheckpointInfo):
                facts: tuple[Any, ...] = (reply.checkpoint, reply.step, reply.version)
            elif isinstance(reply, RolloutRolledBack):
                facts = (reply.checkpoint, reply.step, reply.last_seq)
            else:
                continue
            assert self.told.setdefault(key, facts) == facts

    @invariant()
    def a_number_never_has_another_report(self) -> None:
        seen: dict[int, int] = {}
        for request, (seq, payload) in self.reports.items():
            if request in self.world.answers:
                assert seen.setdefault(seq, payload) == payload

    @invariant()
    def an_intent_is_asked_of_nodes_by_every_owner(self) -> None:
        pending = self.world.core.actions.contents.rollouts[ROLLOUT].kept.action
        asked = [
            it.begun.number for it in [*self.asked, *self.world.deeds] if isinstance(it, Perform)
        ]
        if pending is not None and not self.world.to_write:
            assert pending.number in asked or self.world.core._untold

    @invariant()
    def what_is_read_is_what_a_new_owner_reads(self) -> None:
        if not self.world.to_write:
            assert self.world.core.facts() == self.world.durable_facts()


TestKept = Kept.TestCase
TestKept.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
