"""The tracer's core: every step once and in its place, gaps told, memory bounded."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_world import LOCAL, NODE, sandbox_record
from dsec_common.behavior import BehaviorLog
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.trace import Trace
from dsec_sandboxd.step_log import StepLog
from dsec_tracer.config import TracerConfig
from dsec_tracer.effects import Answer, ForgetSandbox, ReadSteps, Refuse, WriteSandbox, WriteStep
from dsec_tracer.events import (
    Event,
    RecordRead,
    SandboxKey,
    SandboxLoaded,
    StepsRead,
    SweepDue,
    TraceAsked,
)
from dsec_tracer.numbering import BLOCK, HOLES_MAX, SOURCES_MAX, Numbering, TracedSandbox
from dsec_tracer.state import GAPS_MAX, TracerState

SANDBOX = "node-1.01aaa"


@dataclass
class World:
    """A core with a store that is a dictionary."""

    config: TracerConfig = field(default_factory=TracerConfig)
    steps: dict[SandboxKey, dict[int, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = TracerState(self.config)

    def handle(self, event: Event) -> Trace | DsecError | None:
        answer: Trace | DsecError | None = None
        for effect in self.core.handle(event):
            match effect:
                case WriteStep():
                    kept = self.steps.setdefault(effect.key, {})
                    assert effect.step.seq not in kept
                    kept[effect.step.seq] = msgspec.msgpack.encode(effect.step)
                case WriteSandbox():
                    pass
                case ForgetSandbox():
                    self.steps.pop(effect.key, None)
                case ReadSteps():
                    answer = self.handle(self.page(effect))
                case Answer():
                    assert isinstance(effect.reply, Trace)
                    answer = effect.reply
                case Refuse():
                    answer = effect.error
        self.core.validate_state()
        return answer

    def page(self, asked: ReadSteps) -> StepsRead:
        rows = sorted(self.steps[asked.key].items())
        after = [row for row in rows if row[0] > asked.after_seq]
        return StepsRead(
            request_id=asked.request_id,
            key=asked.key,
            after_seq=asked.after_seq,
            steps=tuple(after[: asked.limit]),
            more=len(after) > asked.limit,
        )

    def read(self, seq: int, now: float = 1.0, **fields: object) -> None:
        record = BehaviorLog(
            **{"sandbox_id": SANDBOX, "source": "sandboxd", "action": f"a{seq}", **fields},  # type: ignore[arg-type]
            seq=seq,
        )
        assert self.handle(RecordRead(record=record, now=now)) is None

    def ask(
        self,
        project: str = "default",
        sandbox_id: str = SANDBOX,
        after_seq: int = 0,
        limit: int = 500,
    ) -> Trace:
        answer = self.handle(
            TraceAsked(
                request_id=1,
                project=project,
                sandbox_id=sandbox_id,
                after_seq=after_seq,
                limit=limit,
            )
        )
        if isinstance(answer, DsecError):
            raise answer
        assert answer is not None
        return answer

    def numbers(self, **asked: object) -> list[int]:
        return [step.seq for step in self.ask(**asked).steps]  # type: ignore[arg-type]


@given(st.lists(st.integers(min_value=1, max_value=60), max_size=120))
def test_whatever_the_order_of_arrival_each_step_is_kept_once_and_what_lacks_is_told(
    numbers: list[int],
) -> None:
    world = World()
    for seq in numbers:
        world.read(seq)
    seen = sorted(set(numbers))
    if not seen:
        return
    trace = world.ask()
    assert [step.seq for step in trace.steps] == seen
    assert list(trace.gaps) == sorted(set(range(1, seen[-1])) - set(seen))
    assert world.core.passed_over == len(numbers) - len(seen)


@given(st.sets(st.integers(min_value=1, max_value=80), min_size=1), st.integers(1, 20))
def test_pages_put_together_are_the_whole_trace(numbers: set[int], limit: int) -> None:
    world = World()
    for seq in numbers:
        world.read(seq)
    steps: list[int] = []
    gaps: list[int] = []
    while True:
        page = world.ask(after_seq=steps[-1] if steps else 0, limit=limit)
        steps += [step.seq for step in page.steps]
        gaps += page.gaps
        if not page.more:
            break
    assert steps == sorted(numbers)
    assert gaps == sorted(set(range(1, max(numbers))) - numbers)


def test_another_projects_sandbox_is_not_found_like_one_that_never_was() -> None:
    world = World()
    world.read(1, project="acme")
    assert world.numbers(project="acme") == [1]
    with pytest.raises(DsecError, match="nothing was read") as other:
        world.ask(project="default")
    with pytest.raises(DsecError, match="nothing was read") as never:
        world.ask(sandbox_id="node-1.never")
    assert other.value.code == never.value.code == ErrorCode.NOT_FOUND


def test_the_same_sandbox_id_in_two_projects_is_two_sandboxes() -> None:
    world = World()
    world.read(1, project="acme", action="theirs")
    world.read(1, action="ours")
    assert [step.action for step in world.ask().steps] == ["ours"]
    assert [step.action for step in world.ask("acme").steps] == ["theirs"]


def test_a_daemon_that_counts_anew_adds_a_block_after_the_first() -> None:
    world = World()
    world.read(1)
    world.read(1, source="sandboxd-2")
    world.read(2)
    world.read(3, source="sandboxd-2")
    trace = world.ask()
    assert [step.seq for step in trace.steps] == [1, 2, BLOCK + 1, BLOCK + 3]
    assert trace.gaps == (BLOCK + 2,)


def test_the_end_of_a_sandbox_told_by_a_restarted_daemon_is_a_step_of_its_own() -> None:
    world = World()
    record = sandbox_record()

    class Reader:
        def append(self, record: BehaviorLog) -> None:
            world.handle(RecordRead(record=record, now=1.0))

    first = StepLog(NODE, Reader(), "sandboxd-1")
    first.step(record, "create")
    first.step(record, "exec")
    StepLog(NODE, Reader(), "sandboxd-2").step(record, "end", status="lost")
    steps = world.ask(sandbox_id=f"{NODE}.{LOCAL}").steps
    assert [step.action for step in steps] == ["create", "exec", "end"]


def test_records_that_are_no_step_of_a_trace_are_counted_and_change_nothing() -> None:
    world = World()
    world.read(0)
    world.read(BLOCK)
    world.read(1, sandbox_id="no sandbox")
    world.read(1, sandbox_id="")
    world.read(1, project="../etc")
    assert world.core.passed_over == 5
    assert world.core.sandboxes == 0


def test_a_sandbox_has_no_more_sources_than_it_can_have_had_daemons() -> None:
    world = World()
    for number in range(SOURCES_MAX + 5):
        world.read(1, source=f"s{number}")
    assert len(world.numbers()) == SOURCES_MAX
    assert world.core.passed_over == 5


def test_beyond_its_limit_steps_of_a_sandbox_are_shed_and_counted() -> None:
    world = World(TracerConfig(steps_max=3))
    for seq in range(1, 6):
        world.read(seq)
    assert world.numbers() == [1, 2, 3]
    assert world.core.shed == 2


def test_the_sandbox_without_a_new_step_for_longest_makes_room() -> None:
    world = World(TracerConfig(sandboxes_max=2))
    world.read(1, sandbox_id="n.a")
    world.read(1, sandbox_id="n.b")
    world.read(2, sandbox_id="n.a")
    world.read(1, sandbox_id="n.c")
    assert world.numbers(sandbox_id="n.a") == [1, 2]
    assert world.numbers(sandbox_id="n.c") == [1]
    with pytest.raises(DsecError, match=r"n\.b"):
        world.ask(sandbox_id="n.b")
    assert {key.sandbox_id for key in world.steps} == {"n.a", "n.c"}


def test_a_sandbox_is_forgotten_some_time_after_its_last_step() -> None:
    world = World(TracerConfig(kept_s=10))
    world.read(1, now=100.0)
    world.handle(SweepDue(now=110.0))
    assert world.core.sandboxes == 1
    world.handle(SweepDue(now=110.1))
    assert world.core.sandboxes == 0
    assert not world.steps


def test_a_restarted_tracer_drops_what_it_had_read_before() -> None:
    world = World()
    for seq in (1, 2, 5):
        world.read(seq)
    (key, kept), *_ = world.core._sandboxes.items()
    loaded = msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=TracedSandbox)
    after = World(steps=world.steps)
    after.handle(SandboxLoaded(key=key, sandbox=loaded))
    for seq in (2, 3, 5, 6):
        after.read(seq)
    assert after.numbers() == [1, 2, 3, 5, 6]
    assert after.ask().gaps == (4,)


def test_holes_are_bounded_the_newest_are_kept() -> None:
    numbering = Numbering(source="s")
    for seq in range(2, 4 * HOLES_MAX, 2):
        assert numbering.take(seq)
    assert len(numbering.holes) == HOLES_MAX
    assert not numbering.take(1)
    assert numbering.take(4 * HOLES_MAX - 3)


def test_a_gap_of_a_million_is_told_in_part_and_takes_no_time() -> None:
    world = World()
    world.read(1)
    world.read(1_000_000)
    assert world.ask().gaps == tuple(range(2, 2 + GAPS_MAX))


def test_texts_are_shortened_so_that_a_page_fits_one_message() -> None:
    world = World()
    world.read(1, action="x" * 10_000, attributes={f"k{n}": "v" * 100_000 for n in range(100)})
    (value,) = world.steps[SandboxKey("default", SANDBOX)].values()
    assert len(value) < 256 * 1024


def test_what_a_step_belongs_to_is_told_with_it() -> None:
    world = World()
    world.read(1, stage="tests_run", rollout_id="s0.a", error_code="oom", reward=0.5)
    (step,) = world.ask().steps
    assert step.attributes == {
        "stage": "tests_run",
        "rollout_id": "s0.a",
        "error_code": "oom",
        "reward": "0.5",
    }
