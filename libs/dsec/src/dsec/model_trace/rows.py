"""Sequences in the shapes that trainers take.

Every row is one sequence: what comes before the first sampled token is its prompt, all the rest
its completion, in which a mask marks the tokens that the model sampled. Sequences of which none
was sampled are left out: there is nothing to train on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypedDict

from dsec.model_trace.stitching import Sequence


class TrlRows(TypedDict):
    """What a ``rollout_func`` of TRL's ``GRPOTrainer`` returns: columns, an entry for each row.

    ``prompt_ids``, ``completion_ids`` and ``logprobs`` are required there; ``env_mask`` is 1 where
    the model sampled. Any other column is handed to the reward functions, so one may return
    ``rollout_reward`` as it is.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    env_mask: list[list[int]]
    rollout_reward: list[float | None]


class VerlRow(TypedDict):
    """The fields of verl's ``AgentLoopOutput``, which an ``AgentLoopBase.run`` returns.

    ``num_turns`` counts both sides: each call answers something that came from outside.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    reward_score: float | None
    num_turns: int
    metrics: dict[str, float]
    extra_fields: dict[str, list[str]]


class PrimeRlRow(TypedDict):
    """The fields of prime-rl's ``TrainingSample``, which its orchestrator sends to the trainer.

    Its orchestrator adds the advantage, and the name of the environment.
    """

    prompt_ids: list[int]
    prompt_mask: list[bool]
    completion_ids: list[int]
    completion_mask: list[bool]
    completion_logprobs: list[float]
    completion_temperatures: list[float]
    reward: float | None


def trl_rows(sequences: Iterable[Sequence]) -> TrlRows:
    """Return the columns for TRL, an entry for each sequence, in order.

    ``GRPOTrainer`` wants ``num_generations`` rows for each prompt; a rollout with several
    sequences may be told by :meth:`Trace.main` alone.
    """
    rows = TrlRows(prompt_ids=[], completion_ids=[], logprobs=[], env_mask=[], rollout_reward=[])
    for sequence in _trainable(sequences):
        split = sequence.prompt_length
        rows["prompt_ids"].append(list(sequence.token_ids[:split]))
        rows["completion_ids"].append(list(sequence.token_ids[split:]))
        rows["logprobs"].append(list(sequence.logprobs[split:]))
        rows["env_mask"].append(list(sequence.loss_mask[split:]))
        rows["rollout_reward"].append(sequence.reward)
    return rows


def verl_rows(sequences: Iterable[Sequence]) -> list[VerlRow]:
    """Return a row for verl for each sequence, in order; a rollout's calls share its reward."""
    return [
        VerlRow(
            prompt_ids=list(sequence.token_ids[: sequence.prompt_length]),
            response_ids=list(sequence.token_ids[sequence.prompt_length :]),
            response_mask=list(sequence.loss_mask[sequence.prompt_length :]),
            response_logprobs=list(sequence.logprobs[sequence.prompt_length :]),
            reward_score=sequence.reward,
            num_turns=2 * len(sequence.turns),
            metrics={},
            extra_fields={
                "model_versions": [turn.model_version for turn in sequence.turns],
                "finish_reasons": [turn.finish_reason for turn in sequence.turns],
            },
        )
        for sequence in _trainable(sequences)
    ]


def prime_rl_rows(sequences: Iterable[Sequence]) -> list[PrimeRlRow]:
    """Return a row for prime-rl for each sequence, in order.

    Tokens from outside have the temperature of the call that they were put to.
    """
    return [
        PrimeRlRow(
            prompt_ids=list(sequence.token_ids[: sequence.prompt_length]),
            prompt_mask=[False] * sequence.prompt_length,
            completion_ids=list(sequence.token_ids[sequence.prompt_length :]),
            completion_mask=[bool(it) for it in sequence.loss_mask[sequence.prompt_length :]],
            completion_logprobs=list(sequence.logprobs[sequence.prompt_length :]),
            completion_temperatures=_temperatures(sequence),
            reward=sequence.reward,
        )
        for sequence in _trainable(sequences)
    ]


def _trainable(sequences: Iterable[Sequence]) -> Iterator[Sequence]:
    return (sequence for sequence in sequences if sequence.sampled_tokens)


def _temperatures(sequence: Sequence) -> list[float]:
    temperatures: list[float] = []
    place = sequence.prompt_length
    for turn in sequence.turns:
        temperatures += [turn.temperature] * (turn.end - place)
        place = turn.end
    return temperatures
