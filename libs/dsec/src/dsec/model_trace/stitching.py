"""Calls joined into sequences: a call whose prompt is another's tokens and more goes on with it.

Harnesses send the whole conversation with each call. Where its tokens are exactly those of an
earlier call, prompt and completion, and some more, both are one sequence, and the model is
trained on it once. Where they are not, as when the harness has shortened its context, started a
sub-agent, asked again, or the text was tokenised in another way, a new sequence begins, whose
prompt is never trained on: so every sampled token counts exactly once, under the tokens that the
engine really saw before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from dsec.model_trace.records import ModelCall, in_order
from dsec_common.errors import invalid


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One call within a sequence.

    Attributes:
        call_key: the call.
        number: its number in the rollout.
        start: place of its first sampled token in the sequence.
        end: one after its last.
        finish_reason: why the engine ended.
        model_version: of the weights that sampled.
        temperature: at which they did.
    """

    call_key: str
    number: int
    start: int
    end: int
    finish_reason: str
    model_version: str
    temperature: float


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens in the order in which the engine saw and sampled them.

    ``token_ids``, ``loss_mask`` and ``logprobs`` are of one length.

    Attributes:
        token_ids: all of them.
        loss_mask: 1 for a token that the model sampled, 0 for any other.
        logprobs: of the sampled tokens; 0.0 at the others.
        turns: the calls, in order; at least one.
        parent: index of the sequence that it has the most tokens in common with, from their
            beginning; None when there was none with any.
        shared_tokens: how many those are: what diverges there tells why it is no continuation.
        reward: what was attached to the rollout.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    turns: tuple[Turn, ...]
    parent: int | None = None
    shared_tokens: int = 0
    reward: float | None = None

    @property
    def prompt_length(self) -> int:
        """How many tokens there are before the first call's completion."""
        return self.turns[0].start

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the model sampled."""
        return sum(self.loss_mask)


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """All sequences of a rollout, in the order of their first calls."""

    sequences: tuple[Sequence, ...]

    def rewarded(self, reward: float) -> Trace:
        """Return the trace with the rollout's reward attached to each of its sequences."""
        return Trace(
            sequences=tuple(
                msgspec.structs.replace(sequence, reward=reward) for sequence in self.sequences
            )
        )

    def main(self) -> Sequence:
        """Return the sequence with the most sampled tokens, the first of several.

        Raises:
            DsecError: ``invalid`` when there is none at all.
        """
        if not self.sequences:
            raise invalid("this rollout called no model: there is nothing to train on")
        return max(self.sequences, key=lambda sequence: sequence.sampled_tokens)


def stitch(calls: Iterable[ModelCall]) -> Trace:
    """Join the calls of a rollout into sequences, whatever order they are given in.

    A call goes on with the longest sequence of which its prompt is an exact continuation, with
    the first of several that are equal. It takes time in proportion to the tokens of all prompts.

    Raises:
        DsecError: ``conflict`` when two calls claim the same key or number and differ.
    """
    drafts: list[_Draft] = []
    ends = _Ends()
    for call in in_order(calls):
        prompt = array("I", call.prompt_ids).tobytes()
        index = ends.longest_of(prompt)
        if index is None:
            index = len(drafts)
            drafts.append(_Draft(*_closest(prompt, drafts)))
        else:
            ends.remove(drafts[index].data, index)
        drafts[index].add(call)
        ends.add(drafts[index].data, index)
    return Trace(sequences=tuple(draft.sequence() for draft in drafts))


_WIDTH = array("I").itemsize


class _Draft:
    """A sequence that may grow."""

    def __init__(self, parent: int | None, shared_tokens: int) -> None:
        self.data = b""
        self._parent = parent
        self._shared_tokens = shared_tokens
        self._token_ids: list[int] = []
        self._loss_mask: list[int] = []
        self._logprobs: list[float] = []
        self._turns: list[Turn] = []

    def add(self, call: ModelCall) -> None:
        between = call.prompt_ids[len(self._token_ids) :]
        start = len(call.prompt_ids)
        self._token_ids += between + call.completion_ids
        self._loss_mask += [0] * len(between) + [1] * len(call.completion_ids)
        self._logprobs += [0.0] * len(between) + list(call.logprobs)
        self._turns.append(
            Turn(
                call_key=call.call_key,
                number=call.number,
                start=start,
                end=start + len(call.completion_ids),
                finish_reason=call.finish_reason,
                model_version=call.model_version,
                temperature=call.temperature,
            )
        )
        self.data += array("I", between + call.completion_ids).tobytes()

    def sequence(self) -> Sequence:
        return Sequence(
            token_ids=tuple(self._token_ids),
            loss_mask=tuple(self._loss_mask),
            logprobs=tuple(self._logprobs),
            turns=tuple(self._turns),
            parent=self._parent,
            shared_tokens=self._shared_tokens,
        )


class _Ends:
    """Where sequences end now, found from a prompt in one pass over its tokens."""

    def __init__(self) -> None:
        self._by_length: dict[int, dict[bytes, list[int]]] = {}

    def add(self, data: bytes, index: int) -> None:
        ends = self._by_length.setdefault(len(data), {})
        ends.setdefault(_digest(data), []).append(index)

    def remove(self, data: bytes, index: int) -> None:
        ends = self._by_length[len(data)]
        digest = _digest(data)
        ends[digest].remove(index)
        if not ends[digest]:
            del ends[digest]
        if not ends:
            del self._by_length[len(data)]

    def longest_of(self, prompt: bytes) -> int | None:
        """Return the longest sequence that ``prompt`` begins with."""
        found = None
        digest = blake2b(digest_size=16)
        done = 0
        view = memoryview(prompt)
        for length in sorted(it for it in self._by_length if it <= len(prompt)):
            digest.update(view[done:length])
            done = length
            there = self._by_length[length].get(digest.digest())
            if there:
                found = min(there)
        return found


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _closest(prompt: bytes, drafts: list[_Draft]) -> tuple[int | None, int]:
    """Return the sequence with the most tokens in common with ``prompt``, and how many."""
    parent, most = None, 0
    for index, draft in enumerate(drafts):
        shared = _shared_tokens(prompt, draft.data, at_least=most)
        if shared > most:
            parent, most = index, shared
    return parent, most


def _shared_tokens(one: bytes, other: bytes, *, at_least: int) -> int:
    """Return how many tokens two sequences begin with alike; 0 when they are not more."""
    low, high = at_least, min(len(one), len(other)) // _WIDTH
    if high <= low or one[: low * _WIDTH] != other[: low * _WIDTH]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * _WIDTH : middle * _WIDTH] == other[low * _WIDTH : middle * _WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low
