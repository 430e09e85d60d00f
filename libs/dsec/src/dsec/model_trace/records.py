"""One call of a model, as the engine that answered it tells it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from dsec_common.errors import DsecError, ErrorCode, invalid

_TOKEN_IDS: Final = range(1 << 32)


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that was answered, with the engine's own tokens.

    Attributes:
        call_key: known to the relay; the same key is the same call.
        number: in which order the rollout's calls were asked, from 1.
        prompt_ids: what the engine was given.
        completion_ids: what it sampled, with the token that ended it if it says so.
        logprobs: of each sampled token, natural logarithm, one to one.
        finish_reason: why it ended, in the engine's words (``stop``, ``length``, ``tool_calls``).
        model_version: of the weights that sampled.
        temperature: at which it sampled.

    Raises:
        DsecError: ``invalid`` when ids and log-probabilities do not line up or cannot be any.
    """

    call_key: str
    number: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    model_version: str = ""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.call_key or self.number < 1:
            raise invalid("a model call has a key, and a number from 1", call_key=self.call_key)
        if len(self.completion_ids) != len(self.logprobs):
            raise invalid(
                f"call {self.call_key} has {len(self.completion_ids)} sampled tokens and "
                f"{len(self.logprobs)} log-probabilities: the engine must return one for each",
                call_key=self.call_key,
            )
        if not self.prompt_ids:
            raise invalid(f"call {self.call_key} has no prompt tokens", call_key=self.call_key)
        for ids in (self.prompt_ids, self.completion_ids):
            if ids and not (min(ids) in _TOKEN_IDS and max(ids) in _TOKEN_IDS):
                raise invalid(
                    f"call {self.call_key} has token ids beyond 32 bits", call_key=self.call_key
                )
        if not all(map(math.isfinite, self.logprobs)):
            raise invalid(
                f"call {self.call_key} has log-probabilities that are no numbers",
                call_key=self.call_key,
            )


def in_order(calls: Iterable[ModelCall]) -> list[ModelCall]:
    """Return each call once, in the order in which they were asked.

    Raises:
        DsecError: ``conflict`` when a key or a number stands for two calls that differ.
    """
    by_key: dict[str, ModelCall] = {}
    by_number: dict[int, ModelCall] = {}
    for call in calls:
        for known in (by_key.get(call.call_key), by_number.get(call.number)):
            if known is not None and known != call:
                raise DsecError(
                    ErrorCode.CONFLICT,
                    f"calls {known.call_key} (number {known.number}) and {call.call_key} (number "
                    f"{call.number}) claim the same key or number and differ",
                    details={"call_key": call.call_key, "number": call.number},
                )
        by_key[call.call_key] = by_number[call.number] = call
    return [by_number[number] for number in sorted(by_number)]
