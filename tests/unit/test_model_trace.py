"""Calls of a model become sequences in which every sampled token counts exactly once."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.model_trace import ModelCall, Trace, prime_rl_rows, stitch, trl_rows, verl_rows
from dsec_common.errors import DsecError


def _call(number: int, prompt: list[int], completion: list[int], /, **changes: object) -> ModelCall:
    facts: dict[str, object] = {
        "call_key": f"call-{number}",
        "number": number,
        "prompt_ids": tuple(prompt),
        "completion_ids": tuple(completion),
        # Known by number and place, so that one in the wrong place shows.
        "logprobs": tuple(-number - place / 100 for place in range(len(completion))),
        "finish_reason": "stop",
        "model_version": f"step-{number}",
    }
    return ModelCall(**(facts | changes))  # type: ignore[arg-type]


def test_turns_whose_prompts_go_on_exactly_are_one_sequence() -> None:
    trace = stitch([_call(1, [1, 2], [3, 4]), _call(2, [1, 2, 3, 4, 5, 6], [7])])
    (sequence,) = trace.sequences
    assert sequence.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert sequence.loss_mask == (0, 0, 1, 1, 0, 0, 1)
    assert sequence.logprobs == (0.0, 0.0, -1.0, -1.01, 0.0, 0.0, -2.0)
    assert [(turn.start, turn.end, turn.model_version) for turn in sequence.turns] == [
        (2, 4, "step-1"),
        (6, 7, "step-2"),
    ]


def test_a_second_continuation_of_one_call_begins_a_sequence_of_its_own() -> None:
    trace = stitch(
        [
            _call(1, [1], [2]),
            _call(2, [1, 2, 3], [4]),
            _call(3, [1, 2, 5], [6]),
            _call(4, [1, 2, 5, 6, 7], [8]),
        ]
    )
    first, second = trace.sequences
    assert first.token_ids == (1, 2, 3, 4)
    assert second.token_ids == (1, 2, 5, 6, 7, 8)
    assert second.loss_mask == (0, 0, 0, 1, 0, 1), "2 is trained on in the first one"
    assert (second.parent, second.shared_tokens) == (0, 2)


def test_a_call_that_was_sampled_again_goes_on_where_the_harness_went_on() -> None:
    trace = stitch([_call(1, [1], [2]), _call(2, [1], [3]), _call(3, [1, 3, 4], [5])])
    assert [it.token_ids for it in trace.sequences] == [(1, 2), (1, 3, 4, 5)]


def test_a_shortened_context_begins_a_sequence_and_says_where_it_left() -> None:
    trace = stitch(
        [_call(1, [1, 2, 3], [4]), _call(2, [1, 2, 3, 4, 5], [6]), _call(3, [1, 9], [7])]
    )
    assert [it.token_ids for it in trace.sequences] == [(1, 2, 3, 4, 5, 6), (1, 9, 7)]
    assert (trace.sequences[1].parent, trace.sequences[1].shared_tokens) == (0, 1)


def test_text_that_was_tokenised_another_way_is_no_continuation() -> None:
    trace = stitch([_call(1, [1], [2, 3]), _call(2, [1, 23, 4], [5])])
    assert [it.loss_mask for it in trace.sequences] == [(0, 1, 1), (0, 0, 0, 1)]


def test_a_call_told_twice_counts_once_and_one_told_differently_is_refused() -> None:
    call = _call(1, [1], [2])
    assert stitch([call, call]) == stitch([call])
    with pytest.raises(DsecError, match="claim the same key or number"):
        stitch([call, _call(1, [1], [3])])
    with pytest.raises(DsecError, match="claim the same key or number"):
        stitch([call, _call(1, [1], [2], call_key="another")])


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": ()},
        {"logprobs": (float("nan"), -1.0)},
        {"logprobs": (float("-inf"), -1.0)},
        {"prompt_ids": ()},
        {"prompt_ids": (-1,)},
        {"completion_ids": (1, 1 << 32)},
        {"number": 0},
        {"call_key": ""},
    ],
)
def test_a_call_that_does_not_line_up_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(DsecError):
        _call(1, [1], [2, 3], **changes)


def test_a_reward_is_attached_to_every_sequence() -> None:
    trace = stitch([_call(1, [1], [2]), _call(2, [5], [6, 7])]).rewarded(0.5)
    assert [it.reward for it in trace.sequences] == [0.5, 0.5]
    assert trace.main().token_ids == (5, 6, 7)
    with pytest.raises(DsecError, match="nothing to train on"):
        stitch([]).main()


def test_rows_have_the_fields_that_trainers_read() -> None:
    trace = stitch(
        [
            _call(1, [1, 2], [3, 4], temperature=0.7),
            _call(2, [1, 2, 3, 4, 5], [6], temperature=1.0, finish_reason="length"),
            _call(3, [9], []),  # cancelled before its first token: nothing to train on
        ]
    ).rewarded(1.0)
    assert trl_rows(trace.sequences) == {
        "prompt_ids": [[1, 2]],
        "completion_ids": [[3, 4, 5, 6]],
        "logprobs": [[-1.0, -1.01, 0.0, -2.0]],
        "env_mask": [[1, 1, 0, 1]],
        "rollout_reward": [1.0],
    }
    assert verl_rows(trace.sequences) == [
        {
            "prompt_ids": [1, 2],
            "response_ids": [3, 4, 5, 6],
            "response_mask": [1, 1, 0, 1],
            "response_logprobs": [-1.0, -1.01, 0.0, -2.0],
            "reward_score": 1.0,
            "num_turns": 4,
            "metrics": {},
            "extra_fields": {
                "model_versions": ["step-1", "step-2"],
                "finish_reasons": ["stop", "length"],
            },
        }
    ]
    assert prime_rl_rows(trace.sequences) == [
        {
            "prompt_ids": [1, 2],
            "prompt_mask": [False, False],
            "completion_ids": [3, 4, 5, 6],
            "completion_mask": [True, True, False, True],
            "completion_logprobs": [-1.0, -1.01, 0.0, -2.0],
            "completion_temperatures": [0.7, 0.7, 1.0, 1.0],
            "reward": 1.0,
        }
    ]


# --- Any rollout ------------------------------------------------------------------------------

#: Few ids, so that prompts coincide by chance as well.
TOKENS = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def rollouts(draw: st.DrawFn) -> list[ModelCall]:
    """Return calls that go on with one another, or with a part of one another, or with none."""
    calls: list[ModelCall] = []
    for number in range(1, draw(st.integers(1, 8)) + 1):
        before: list[int] = []
        goes_on = draw(st.booleans())
        if calls and goes_on:
            earlier = draw(st.sampled_from(calls))
            whole = [*earlier.prompt_ids, *earlier.completion_ids]
            before = whole[: draw(st.integers(0, len(whole)) | st.just(len(whole)))]
        prompt = before + draw(TOKENS) or [0]
        calls.append(_call(number, prompt, draw(TOKENS)))
    return calls


def _sampled(trace: Trace) -> list[tuple[int, float]]:
    return sorted(
        (token, logprob)
        for sequence in trace.sequences
        for token, mask, logprob in zip(
            sequence.token_ids, sequence.loss_mask, sequence.logprobs, strict=True
        )
        if mask
    )


@settings(deadline=None)
@given(rollouts())
def test_every_sampled_token_counts_once_with_its_own_log_probability(
    calls: list[ModelCall],
) -> None:
    given_ids = sorted(
        pair for call in calls for pair in zip(call.completion_ids, call.logprobs, strict=True)
    )
    assert _sampled(stitch(calls)) == given_ids


@settings(deadline=None)
@given(rollouts())
def test_each_call_has_before_it_exactly_the_prompt_that_the_engine_saw(
    calls: list[ModelCall],
) -> None:
    by_key = {call.call_key: call for call in calls}
    turns = 0
    for sequence in stitch(calls).sequences:
        assert len(sequence.token_ids) == len(sequence.loss_mask) == len(sequence.logprobs)
        for turn in sequence.turns:
            call = by_key[turn.call_key]
            assert sequence.token_ids[: turn.start] == call.prompt_ids
            assert sequence.token_ids[turn.start : turn.end] == call.completion_ids
            assert sequence.logprobs[turn.start : turn.end] == call.logprobs
            turns += 1
    assert turns == len(calls)


@settings(deadline=None)
@given(rollouts(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(
    calls: list[ModelCall], chance: random.Random
) -> None:
    shuffled = list(calls)
    chance.shuffle(shuffled)
    assert stitch(shuffled) == stitch(calls)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1), st.data())
def test_a_prompt_that_differs_in_one_token_begins_a_sequence(
    first: list[int], data: st.DataObject
) -> None:
    completion = [10, 11]
    prompt = [*first, *completion, 12]
    place = data.draw(st.integers(0, len(first) + len(completion) - 1))
    other = [*prompt]
    other[place] = 99
    once = _call(1, first, completion)
    assert len(stitch([once, _call(2, prompt, [13])]).sequences) == 1
    trace = stitch([once, _call(2, other, [13])])
    assert len(trace.sequences) == 2
    assert trace.sequences[1].shared_tokens == place


@settings(deadline=None)
@given(rollouts())
def test_a_new_sequence_begins_only_where_no_open_one_is_gone_on_with(
    calls: list[ModelCall],
) -> None:
    """By the definition, the slow way: ends of sequences, the longest that fits, the first."""
    ends: list[tuple[int, ...]] = []
    for call in calls:
        whole = call.prompt_ids + call.completion_ids
        fits = [end for end in ends if call.prompt_ids[: len(end)] == end]
        if fits:
            ends[ends.index(max(fits, key=len))] = whole
        else:
            ends.append(whole)
    assert [it.token_ids for it in stitch(calls).sequences] == ends


def test_a_trace_is_read_back_as_it_was_written() -> None:
    trace = stitch([_call(1, [1], [2]), _call(2, [1, 2, 3], [4])]).rewarded(0.25)
    assert msgspec.json.decode(msgspec.json.encode(trace), type=Trace) == trace
