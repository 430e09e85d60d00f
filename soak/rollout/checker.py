"""Holds four accounts of the same steps against one another.

The journal says what was reported and answered, the agents' files say what had an effect, the
trainers' ledgers say what was decided and confirmed, and the platform says what it counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

import msgspec

from dsec_chronus.records import FeedbackGiven
from dsec_common.wire.rollout import RolloutInfo, RolloutState
from soak.rollout.effects import NOTHING, chained, line_of
from soak.rollout.journal import Written
from soak.rollout.ledger import Answer, Began, Came, Confirmed, Decided, Entry, Key, Refused

#: Of one rollout that went wrong so many lines say enough.
_SAID_MAX: Final = 5

Wrong = Callable[[str, str], None]
"""Told ``(what, rollout)`` of each thing that must not be."""


def check_rollout(
    rollout: str,
    written: Written,
    *,
    applied: Sequence[str],
    info: RolloutInfo,
    wrong: Wrong,
) -> None:
    """Check that each step of a rollout was reported, answered and applied exactly once."""
    said: list[str] = []
    last = max((*written.reports, *written.answers), default=0)
    for name, there in (("report", written.reports), ("answer", written.answers)):
        said += [f"no {name} {seq}" for seq in range(1, last + 1) if seq not in there]
    expected = [_line(written.answers[seq]) for seq in sorted(written.answers)]
    if [*applied] != expected:
        said.append(_difference(applied, expected))
    digest = NOTHING
    for seq in range(1, last + 1):
        report, answer = written.reports.get(seq), written.answers.get(seq)
        if report is None or answer is None:
            break
        if msgspec.json.decode(report.payload) != {"digest": digest}:
            said.append(f"report {seq} does not follow from the answers before it")
            break
        digest = chained(digest, _line(answer))
    ends = [seq for seq, answer in written.answers.items() if answer.done]
    if ends != [last] or not written.ended or info.state is not RolloutState.CLOSED:
        said.append(f"ended at {ends} of {last}, journal {written.ended}, told {info.state}")
    if (info.last_seq, info.answered_seq) != (last, last):
        said.append(f"told of {info.last_seq} reports and {info.answered_seq} answers of {last}")
    reward = sum(answer.reward or 0.0 for answer in written.answers.values())
    if info.total_reward != reward:
        said.append(f"told of reward {info.total_reward:g}, and its answers sum to {reward:g}")
    for what in said[:_SAID_MAX]:
        wrong(what, rollout)


@dataclass(slots=True, eq=False)
class _Known:
    """What trainers saw, decided and were told, of each step."""

    came: Counter[Key] = field(default_factory=Counter)
    decided: defaultdict[Key, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    confirmed: defaultdict[Key, list[Answer]] = field(default_factory=lambda: defaultdict(list))


def check_ledgers(
    rollouts: Mapping[str, Written],
    ledgers: Iterable[Sequence[Entry]],
    *,
    rivals: int,
    wrong: Wrong,
) -> int:
    """Check what trainers saw and decided; return how many steps came more than once.

    Args:
        rollouts: what the journal says.
        ledgers: what each trainer wrote.
        rivals: how often one was started while another lived: only then may a step be decided
            twice, and the journal has one of the two.
        wrong: told of what must not be.
    """
    known = _Known()
    for entries in sorted(ledgers, key=_fence):
        _read(entries, known, rollouts, wrong)
    for (rollout, seq), answers in known.decided.items():
        if len(answers) > 1 and not rivals:
            wrong(f"{seq} was decided {len(answers)} times", rollout)
    _agree(rollouts, known, wrong)
    return sum(times > 1 for times in known.came.values())


def _read(
    entries: Sequence[Entry], known: _Known, rollouts: Mapping[str, Written], wrong: Wrong
) -> None:
    """Take in one trainer's ledger; it took the group after all those that were read before."""
    newest: dict[str, int] = {}
    # What a trainer was told to be durable is not open to any that comes after it.
    before = set(known.confirmed)
    for entry in entries:
        match entry:
            case Began():
                pass
            case Came():
                known.came[key := (entry.rollout, entry.seq)] += 1
                _came(entry, newest, rollouts, wrong)
                if key in before:
                    wrong(f"{entry.seq} came again after its answer was durable", entry.rollout)
            case Decided():
                known.decided[entry.rollout, entry.seq].append(entry.answer)
            case Confirmed():
                known.confirmed[entry.rollout, entry.seq].append(entry.answer)
            case Refused():
                wrong(f"the answer to {entry.seq} was refused: {entry.why}", entry.rollout)
            case _:
                assert_never(entry)


def _fence(entries: Sequence[Entry]) -> int:
    """Return the number under which a trainer took the group; 0 for one that never did."""
    return entries[0].fence if entries and isinstance(entries[0], Began) else 0


def _agree(rollouts: Mapping[str, Written], known: _Known, wrong: Wrong) -> None:
    """Check that what was decided, and no other, is what the journal has."""
    answered = {
        (rollout, seq): answer_of(given)
        for rollout, written in rollouts.items()
        for seq, given in written.answers.items()
    }
    for (rollout, seq), answer in answered.items():
        if answer not in known.decided.get((rollout, seq), ()):
            wrong(f"the answer to {seq} is none that a trainer decided", rollout)
    for rollout, seq in known.decided.keys() - answered.keys():
        wrong(f"{seq} was decided and is not answered", rollout)
    for (rollout, seq), answers in known.confirmed.items():
        if any(answer != answered.get((rollout, seq)) for answer in answers):
            wrong(f"the answer to {seq} is not the one that was confirmed", rollout)


def _came(
    entry: Came, newest: dict[str, int], rollouts: Mapping[str, Written], wrong: Wrong
) -> None:
    """Check that a trainer has the steps of a rollout in order, each once, as reported."""
    last = newest.get(entry.rollout)
    if last is not None and entry.seq != last + 1:
        wrong(f"{entry.seq} came to one trainer after {last}", entry.rollout)
    newest[entry.rollout] = entry.seq
    report = rollouts.get(entry.rollout, Written()).reports.get(entry.seq)
    if report is None or msgspec.json.decode(report.payload) != {"digest": entry.digest}:
        wrong(f"{entry.seq} came otherwise than it was reported", entry.rollout)


def answer_of(given: FeedbackGiven) -> Answer:
    """Return an answer of the journal as trainers decide it."""
    return Answer(
        payload=msgspec.json.decode(given.payload), reward=given.reward or 0.0, done=given.done
    )


def _line(given: FeedbackGiven) -> str:
    answer = {
        "seq": given.seq,
        "payload": msgspec.json.decode(given.payload),
        "reward": given.reward,
        "done": given.done,
    }
    return line_of(answer)


def _difference(applied: Sequence[str], expected: Sequence[str]) -> str:
    both = zip(applied, expected, strict=False)
    place = next((index for index, (one, other) in enumerate(both) if one != other), None)
    if place is None:
        return f"{len(applied)} answers had an effect, and {len(expected)} were given"
    return f"effect {place + 1} is {applied[place]}, and the answer was {expected[place]}"
