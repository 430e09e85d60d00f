"""What is asked of GPUs, what they are, and what a lease names of them.

Percent and bytes are integers, so that what is held and what is free add up exactly; Compute Units
follow from them (:attr:`Slice.cu`) and are never what is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from dsec_common.compute.units import UNITS_MAX

WHOLE_PERCENT: Final = 100
"""All of a card, or of a MIG instance."""

COUNT_MAX: Final = 1024
"""More cards than any one machine has."""

MODELS_MAX: Final = 16
"""Models that one demand may name: a demand stands in its node's record as long as it is held."""

MODEL_CHARACTERS_MAX: Final = 64
"""Of the name of a model in a demand."""

_CU_MAX: Final = COUNT_MAX * UNITS_MAX
_MEMORY_MAX_BYTES: Final = COUNT_MAX << 44
"""More than so many cards have: sums of what waits must stay numbers."""

_TOLERANCE: Final = 1e-9
"""Quotients such as 100 x 6.5 / 65 are not exact."""


class ServiceClass(StrEnum):
    """What is promised to a request for Compute Units."""

    REALTIME = "realtime"
    """Granted within 100 ms, from units kept for this class."""
    STANDARD = "standard"
    BATCH = "batch"
    """Whenever it is cheapest."""


class CardMode(StrEnum):
    """How a card is divided."""

    WHOLE = "whole"
    """Not at all."""
    MPS = "mps"
    """By percent of its threads, through CUDA MPS."""
    MIG = "mig"
    """Into the instances that its driver has made."""


class GpuDemand(msgspec.Struct, frozen=True, kw_only=True):
    """What someone asks of the GPUs of one node. All amounts are totals over all its slices.

    Attributes:
        min_cu: fewer Compute Units are of no use.
        max_cu: more are of no use, but for rounding up to whole percents of a card, or to all of a
            card or MIG instance that cannot be divided.
        memory_bytes: GPU memory; 0 for what goes with the units: the same part of the card's.
        count: on exactly so many distinct cards of one model, equally; 0 for as few as possible.
        same_island: those cards reach each other over NVLink.
        models: only cards of these models, named as in the table of units; empty for any.
    """

    min_cu: float
    max_cu: float
    memory_bytes: int = 0
    count: int = 0
    same_island: bool = False
    models: tuple[str, ...] = ()

    @property
    def flaw(self) -> str:
        """Why nothing can ever be given for it, whatever there is; empty when it makes sense."""
        if not 0 < self.min_cu <= _CU_MAX:
            most = f"and at most {_CU_MAX:g}"
            return f"cannot lease {self.min_cu!r} Compute Units: ask for more than 0 {most}"
        if not self.min_cu <= self.max_cu <= _CU_MAX:
            least = f"at least min_cu {self.min_cu:g} and at most {_CU_MAX:g}"
            return f"max_cu {self.max_cu!r} makes no sense: use {least}"
        if not 0 <= self.memory_bytes <= _MEMORY_MAX_BYTES:
            most = f"at most {_MEMORY_MAX_BYTES}"
            return f"memory_bytes {self.memory_bytes} makes no sense: use 0 or more and {most}"
        if not 0 <= self.count <= COUNT_MAX:
            return f"count {self.count} makes no sense: use 0 for any, or at most {COUNT_MAX}"
        if len(self.models) > MODELS_MAX or any(
            len(model) > MODEL_CHARACTERS_MAX for model in self.models
        ):
            return f"name at most {MODELS_MAX} models of at most {MODEL_CHARACTERS_MAX} characters"
        return ""


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A part of one card that a lease holds, and no other lease at the same time.

    Attributes:
        card: the card's uuid.
        kind: how the card is divided.
        percent: of the card's threads, or ``100`` of the MIG instance.
        mig_uuid: the instance, of a card in MIG mode.
        cu: what that is worth.
        memory_bytes: of the card's memory, or of the instance's.
    """

    card: str
    kind: CardMode = CardMode.MPS
    percent: int = WHOLE_PERCENT
    mig_uuid: str = ""
    cu: float = 0.0
    memory_bytes: int = 0

    @property
    def place(self) -> str:
        """What it is a part of: the card, or the MIG instance."""
        return self.mig_uuid or self.card


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that the driver has made of a card in MIG mode."""

    uuid: str
    cu: float
    memory_bytes: int = 0


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as something to be divided.

    Attributes:
        model: as in the table of units; empty for a card that the table does not know.
        cu: what the whole card is worth.
        memory_bytes: 0 when the driver does not tell: then memory cannot be asked of it.
        island: cards of one node with the same reach each other over NVLink; empty for none.
        pcie_bytes_per_s: between it and the host; 0 when unknown.
        healthy: false for a card that takes nothing new.
    """

    uuid: str
    model: str
    cu: float
    memory_bytes: int = 0
    island: str = ""
    pcie_bytes_per_s: float = 0.0
    mode: CardMode = CardMode.MPS
    mig: tuple[MigInstance, ...] = ()
    healthy: bool = True

    @property
    def cu_total(self) -> float:
        """What can be leased of it when nothing is."""
        if not self.healthy:
            return 0.0
        if self.mode is CardMode.MIG:
            return math.fsum(instance.cu for instance in self.mig)
        return self.cu


def percent_for(cu: float, of_cu: float) -> int:
    """Return the fewest whole percents of ``of_cu`` that are ``cu``; over 100 when it is too much.

    Args:
        cu: more than 0.
        of_cu: what all of it is worth, more than 0.
    """
    return max(1, math.ceil(min(WHOLE_PERCENT * cu / of_cu, WHOLE_PERCENT + 1) - _TOLERANCE))


def cu_of(percent: int, of_cu: float) -> float:
    """Return what so many percent are worth."""
    return of_cu * percent / WHOLE_PERCENT


def memory_of(percent: int, of_bytes: int) -> int:
    """Return the memory that goes with so many percent; the parts never exceed the whole."""
    return of_bytes * percent // WHOLE_PERCENT


def part_of_card(card: Card, percent: int, memory_bytes: int = 0) -> Slice:
    """Return a slice of a card that MPS divides, or that is given whole.

    Args:
        card: not in MIG mode.
        percent: of its threads.
        memory_bytes: 0 for what goes with the percent.
    """
    return Slice(
        card=card.uuid,
        kind=card.mode,
        percent=percent,
        cu=cu_of(percent, card.cu),
        memory_bytes=memory_bytes or memory_of(percent, card.memory_bytes),
    )


def all_of_instance(card: Card, instance: MigInstance) -> Slice:
    """Return the slice that is a whole MIG instance."""
    return Slice(
        card=card.uuid,
        kind=CardMode.MIG,
        mig_uuid=instance.uuid,
        cu=instance.cu,
        memory_bytes=instance.memory_bytes,
    )


def fit(
    cards: Iterable[Card], held: Iterable[Slice], demand: GpuDemand
) -> tuple[Slice, ...] | None:
    """Return the slices of one node's cards that serve the demand best, or None when none do.

    Pure and deterministic. In this order: as few cards as possible (or the number asked for),
    nothing given beyond ``max_cu``, as near to ``max_cu`` as there is room, on cards that are in
    use already, the fullest first. Whoever asks often keeps a
    :class:`~dsec_common.compute.slice_pool.SlicePool` instead, which this makes and throws away.

    Args:
        cards: all of the node's.
        held: slices that are taken.
        demand: one without a :attr:`~GpuDemand.flaw`; one with has no answer.
    """
    from dsec_common.compute.slice_pool import SlicePool  # noqa: PLC0415  it is made of this module

    return SlicePool(cards, held).find(demand)
