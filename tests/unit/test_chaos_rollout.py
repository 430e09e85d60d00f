"""What judges a run of `make chaos-rollout` sees each thing that must not be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dsec_chronus.records import (
    FeedbackGiven,
    Frame,
    GroupTaken,
    HistoryForgotten,
    Record,
    RolloutBegun,
    RolloutEnded,
    StageReported,
)
from dsec_common.wire.rollout import RolloutInfo, RolloutState
from soak.chaos_run import RunModel
from soak.rollout.__main__ import main
from soak.rollout.checker import check_ledgers, check_rollout
from soak.rollout.effects import NOTHING, append, chained, line_of, read_lines
from soak.rollout.journal import JournalAuditor
from soak.rollout.ledger import Answer, Began, Came, Confirmed, Decided, Entry, Ledger, read_all
from soak.rollout.ledger import Refused as AnswerRefused

SHARD, LOCAL = "s1", "r1"
ROLLOUT = f"{SHARD}.{LOCAL}"
STEPS = 3


def answer(seq: int, action: str = "") -> Answer:
    return Answer(payload={"action": action or f"1-{seq}"}, reward=seq / 4, done=seq == STEPS)


def given(seq: int, of: Answer | None = None) -> FeedbackGiven:
    told = of or answer(seq)
    return FeedbackGiven(
        local=LOCAL,
        at=0.0,
        seq=seq,
        payload=msgspec.json.encode(told.payload),
        reward=told.reward,
        done=told.done,
    )


def line(seq: int) -> str:
    return line_of({"seq": seq, **msgspec.to_builtins(answer(seq))})


def digest(seq: int) -> str:
    """Return what report ``seq`` tells: the answers before it."""
    value = NOTHING
    for before in range(1, seq):
        value = chained(value, line(before))
    return value


def reported(seq: int, told: str = "") -> StageReported:
    return StageReported(
        local=LOCAL,
        at=0.0,
        seq=seq,
        stage="step",
        payload=msgspec.json.encode({"digest": told or digest(seq)}),
        sandbox_id="n.1",
    )


def taken(fence: int) -> GroupTaken:
    return GroupTaken(local="g", at=0.0, project="default", group="chaos", fence=fence)


BEGUN = RolloutBegun(local=LOCAL, at=0.0, project="default", labels={})
ENDED = RolloutEnded(local=LOCAL, at=0.0)


class Run:
    """A run of one rollout in which all went well, until a test changes one of the accounts."""

    def __init__(self) -> None:
        self.model = RunModel()
        self.auditor = JournalAuditor(self.model)
        self.records: list[Record] = [taken(1), BEGUN]
        for seq in range(1, STEPS + 1):
            self.records += [reported(seq), given(seq)]
        self.records.append(ENDED)
        self.applied = [line(seq) for seq in range(1, STEPS + 1)]
        self.info = RolloutInfo(
            rollout_id=ROLLOUT,
            state=RolloutState.CLOSED,
            last_seq=STEPS,
            answered_seq=STEPS,
            total_reward=sum(answer(seq).reward for seq in range(1, STEPS + 1)),
        )
        # The first trainer is killed before it hears that its second answer is durable.
        first: list[Entry] = [Began(fence=1), *self.saw(1), *self.saw(2)[:2]]
        second: list[Entry] = [Began(fence=2), self.saw(2)[0], self.saw(2)[2], *self.saw(3)]
        self.ledgers = [first, second]
        self.rivals = 0

    @staticmethod
    def saw(seq: int, of: Answer | None = None) -> list[Entry]:
        told = of or answer(seq)
        return [
            Came(rollout=ROLLOUT, seq=seq, digest=digest(seq)),
            Decided(rollout=ROLLOUT, seq=seq, answer=told),
            Confirmed(rollout=ROLLOUT, seq=seq, answer=told),
        ]

    def read(self, number: int, *records: Record, epoch: str = "e1", snapshot: int = 0) -> None:
        """Have the auditor read the next frame."""
        frame = Frame(epoch=epoch, number=number, records=records, snapshot_part=snapshot)
        self.auditor.see(self.auditor.frames + 1, SHARD, frame)

    def judge(self) -> str:
        """Return what is found, a line each."""
        for number, record in enumerate(self.records):
            self.read(number, record)
        written = self.auditor.rollouts
        check_rollout(
            ROLLOUT,
            written[ROLLOUT],
            applied=self.applied,
            info=self.info,
            wrong=self.model.violate,
        )
        self.seen_again = check_ledgers(
            written, self.ledgers, rivals=self.rivals, wrong=self.model.violate
        )
        return self.found

    @property
    def found(self) -> str:
        return "\n".join(it.what for it in self.model.violations)


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_run_in_which_all_went_well_is_clean(run: Run) -> None:
    assert run.judge() == ""
    assert run.seen_again == 1


def info_of(run: Run, **changes: object) -> None:
    run.info = msgspec.structs.replace(run.info, **changes)


MUTATIONS: dict[str, Callable[[Run], object]] = {
    # The journal.
    "report 2 is there twice": lambda run: run.records.insert(5, reported(2)),
    "report 2 is answered twice": lambda run: run.records.insert(6, given(2)),
    "report 3 came after 1": lambda run: run.records.remove(reported(2)),
    "no report 2": lambda run: run.records.remove(reported(2)),
    "the answer to 2 came before the report": lambda run: run.records.remove(reported(2)),
    "no answer 2": lambda run: run.records.remove(given(2)),
    "report 4 came after the end": lambda run: run.records.append(reported(4)),
    "the answer to 3 came after the end": lambda run: run.records.append(given(3)),
    "began again": lambda run: run.records.append(BEGUN),
    "chaos was taken as 1 after 1": lambda run: run.records.append(taken(1)),
    "forgotten without an answer: [4]": lambda run: run.records.append(
        HistoryForgotten(local=LOCAL, at=0.0, seq=4, reward=0.0)
    ),
    "ended at [3] of 3, journal False, told closed": lambda run: run.records.remove(ENDED),
    # What agents did.
    "2 answers had an effect, and 3 were given": lambda run: run.applied.pop(),
    "effect 2 is": lambda run: run.applied.pop(1),
    "effect 3 is": lambda run: run.applied.insert(1, line(2)),
    "effect 1 is": lambda run: run.applied.reverse(),
    "report 3 does not follow": lambda run: run.records.__setitem__(6, reported(3, digest(2))),
    # What the platform says.
    "told of reward 1, and its answers sum to 1.5": lambda run: info_of(run, total_reward=1.0),
    "told of 2 reports and 3 answers of 3": lambda run: info_of(run, last_seq=2),
    "told of 3 reports and 2 answers of 3": lambda run: info_of(run, answered_seq=2),
    "journal True, told open": lambda run: info_of(run, state=RolloutState.OPEN),
    # What trainers saw.
    "1 came again after its answer was durable": lambda run: run.ledgers[1].insert(
        1, run.saw(1)[0]
    ),
    "3 came to one trainer after 1": lambda run: run.ledgers.append(
        [Began(fence=3), run.saw(1)[0], run.saw(3)[0]]
    ),
    "2 came to one trainer after 2": lambda run: run.ledgers[1].insert(1, run.saw(2)[0]),
    "2 came otherwise than it was reported": lambda run: run.ledgers[1].__setitem__(
        1, Came(rollout=ROLLOUT, seq=2, digest=digest(3))
    ),
    "2 was decided 2 times": lambda run: run.ledgers[1].insert(2, run.saw(2, answer(2, "x"))[1]),
    "the answer to 2 is none that a trainer decided": lambda run: run.ledgers[0].pop(),
    "4 was decided and is not answered": lambda run: run.ledgers[1].append(run.saw(4)[1]),
    "the answer to 3 is not the one that was confirmed": lambda run: run.ledgers[1].append(
        run.saw(3, answer(3, "x"))[2]
    ),
    "the answer to 3 was refused: why": lambda run: run.ledgers[1].append(
        AnswerRefused(rollout=ROLLOUT, seq=3, why="why")
    ),
}


@pytest.mark.parametrize("said", MUTATIONS)
def test_what_must_not_be_is_found(run: Run, said: str) -> None:
    MUTATIONS[said](run)
    assert said in run.judge()


def test_only_trainers_that_live_at_once_may_both_decide_a_step(run: Run) -> None:
    run.ledgers[1].insert(2, run.saw(2, answer(2, "other"))[1])
    run.rivals = 1
    assert run.judge() == ""


def test_a_step_is_not_open_to_a_trainer_that_is_newer_than_its_answer_even_with_rivals(
    run: Run,
) -> None:
    run.rivals = 1
    run.ledgers[1].insert(1, run.saw(1)[0])
    run.ledgers.reverse()
    assert "1 came again after its answer was durable" in run.judge()


def test_an_owner_that_was_followed_writes_nothing_more(run: Run) -> None:
    run.read(0)
    run.read(0, epoch="e2")
    run.read(1, taken(1))
    assert "frame 1 of an owner that another had followed" in run.found


def test_an_owner_counts_its_frames_from_nothing(run: Run) -> None:
    run.read(1)
    run.read(1)
    assert "an owner began with frame 1" in run.found
    assert "frame 1 came after 1" in run.found


def test_a_shard_may_know_a_group_before_it_has_a_trainer(run: Run) -> None:
    run.read(0, taken(0), taken(1))
    assert run.found == ""
    run.read(1, taken(0))
    assert "chaos was taken as 0 after 1" in run.found


def test_a_snapshot_that_says_otherwise_is_found(run: Run) -> None:
    run.read(0, BEGUN, reported(1), given(1))
    run.read(1, BEGUN, reported(1, "x"), given(1, answer(1, "x")), ENDED, snapshot=1)
    assert "a snapshot has another report 1" in run.found
    assert "a snapshot has another answer to 1" in run.found
    assert "a snapshot says that it ended" in run.found


def test_what_a_snapshot_replaced_before_it_was_read_is_learnt_from_it(run: Run) -> None:
    run.auditor.see(
        10, SHARD, Frame(epoch="e", number=9, records=(reported(1), given(1)), snapshot_part=1)
    )
    assert run.found == ""
    assert run.auditor.unseen == 9
    assert [*run.auditor.rollouts[ROLLOUT].answers] == [1]


def test_a_trainer_goes_on_with_what_those_before_it_decided(tmp_path: Path) -> None:
    first = Ledger.open(tmp_path, 1)
    first.add(Began(fence=1), *Run.saw(1)[:2])
    first.sync()
    path = tmp_path / "ledger-000001"
    # Killed while it wrote: a line without its end was never synced, and no answer was given.
    path.write_bytes(path.read_bytes() + msgspec.json.encode(Run.saw(2)[1])[:-1])
    second = Ledger.open(tmp_path, 2)
    assert second.decisions == {(ROLLOUT, 1): answer(1)}
    assert [len(entries) for entries in read_all(tmp_path)] == [3, 0]
    with pytest.raises(FileExistsError):
        Ledger.open(tmp_path, 2)
    first.close()
    second.close()


def test_an_agents_file_tells_what_it_applied(tmp_path: Path) -> None:
    path = str(tmp_path / "applied")
    assert read_lines(path) == []
    for seq in (1, 2):
        append(path, line(seq))
    assert read_lines(path) == [line(1), line(2)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seconds", "0"],
        ["--nodes", "0"],
        ["--chronuses", "0"],
        ["--agents", "0"],
        ["--kill-every-s", "-1"],
    ],
)
def test_chaos_that_cannot_be_meant_is_refused_before_anything_starts(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err
