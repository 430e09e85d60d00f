"""A node's GPUs as cards to be divided."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dsec_common.compute.model import COUNT_MAX, Card, CardMode, MigInstance
from dsec_common.compute.units import UnitTable
from dsec_common.wire.node import Gpu

MEMORY_MAX_BYTES: Final = 1 << 44
"""16 TiB: more memory than any card has; whoever tells more is not believed."""


def cards_of(gpus: Iterable[Gpu], units: UnitTable) -> tuple[tuple[Card, ...], tuple[str, ...]]:
    """Return the cards, and a note for each reason for which something counts for nothing.

    What a node tells is not believed blindly: what a card is worth comes from the table here, one
    whose uuid is there twice is counted once, and its instances are never worth more than it is.
    """
    cards: dict[str, Card] = {}
    notes: dict[str, None] = {}
    for gpu in gpus:
        if len(cards) == COUNT_MAX:
            notes[f"more than {COUNT_MAX} GPUs: the rest count for nothing"] = None
            break
        if not gpu.uuid:
            notes[f"{gpu.model} without a uuid: CU 0"] = None
        elif gpu.uuid in cards:
            notes[f"{gpu.uuid} is there twice: counted once"] = None
        else:
            cards[gpu.uuid] = card = _card(gpu, units)
            notes |= dict.fromkeys(_notes(gpu, card))
    return tuple(cards.values()), tuple(notes)


def _card(gpu: Gpu, units: UnitTable) -> Card:
    model, cu = units.find(gpu.model) or ("", 0.0)
    return Card(
        uuid=gpu.uuid,
        model=model,
        cu=cu,
        memory_bytes=_believable(gpu.memory_bytes),
        island=gpu.island,
        pcie_bytes_per_s=float(max(0, gpu.pcie_bytes_per_s)),
        mode=gpu.mode,
        mig=_instances(gpu, cu),
        healthy=gpu.healthy,
    )


def _believable(memory_bytes: int) -> int:
    """Return the memory, or 0 (unknown) for an amount that no card has."""
    return memory_bytes if 0 < memory_bytes <= MEMORY_MAX_BYTES else 0


def _instances(gpu: Gpu, cu: float) -> tuple[MigInstance, ...]:
    """Return the instances, each worth its part of the card; those beyond the whole are left out.

    A driver that does not say how many parts there are leaves them to be those that are taken.
    """
    if gpu.mode is not CardMode.MIG:
        return ()
    parts = gpu.compute_slices or sum(max(0, it.compute_slices) for it in gpu.mig)
    left = parts
    kept: dict[str, MigInstance] = {}
    for instance in gpu.mig:
        taken = instance.compute_slices
        if instance.uuid and instance.uuid not in kept and 0 < taken <= left:
            left -= taken
            kept[instance.uuid] = MigInstance(
                uuid=instance.uuid,
                cu=cu * taken / parts,
                memory_bytes=_believable(instance.memory_bytes),
            )
    return tuple(kept.values())


def _notes(gpu: Gpu, card: Card) -> Iterable[str]:
    if not gpu.healthy:
        yield f"GPU {gpu.index} ({gpu.uuid}): CU 0, {gpu.reason or 'it is not healthy'}"
    elif not card.model:
        yield f"gpu_model {gpu.model or 'empty'} unknown: CU 0, set it in nodes.yaml"
    elif not card.cu:
        yield f"gpu_model {card.model} is worth CU 0 by the table"
    if gpu.memory_bytes != card.memory_bytes:
        yield f"GPU {gpu.index}: {gpu.memory_bytes} bytes of memory are not believed"
    if gpu.mode is CardMode.MIG and not gpu.mig:
        yield f"GPU {gpu.index}: CU 0, MIG is on and has no instances; make some: nvidia-smi mig"
    elif len(card.mig) < len(gpu.mig) and gpu.mode is CardMode.MIG:
        yield f"GPU {gpu.index}: MIG instances beyond the whole card count for nothing"
