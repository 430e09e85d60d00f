"""How many Compute Units a GPU is worth, by its product name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from dsec_common.wire.node import Gpu

DEFAULT_TABLE: Final[Mapping[str, float]] = {"A100": 100.0, "L40": 65.0, "V100": 42.0}
"""Units of the models that need no configuration."""


def _words(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+", name.lower()))


class ComputeUnits:
    """The table of units by model.

    A model matches a product name that holds its words in a row, so that ``A100`` is found in
    ``NVIDIA A100-SXM4-40GB`` and ``L40`` is not found in ``NVIDIA L40S``. The longest match wins.
    """

    def __init__(self, table: Mapping[str, float]) -> None:
        merged = {_words(model): units for model, units in DEFAULT_TABLE.items()}
        merged.update({_words(model): units for model, units in table.items()})
        self._table = sorted(merged.items(), key=lambda row: (-len(row[0]), row[0]))

    def of_model(self, product_name: str) -> float | None:
        """Return the units of one GPU, or None when the table does not know its model."""
        words = _words(product_name)
        for model, units in self._table:
            starts = range(len(words) - len(model) + 1)
            if model and any(words[start : start + len(model)] == model for start in starts):
                return units
        return None

    def of_node(self, gpus: Iterable[Gpu]) -> tuple[float, tuple[str, ...]]:
        """Return a node's units, and a note for each model that counts for nothing."""
        total = 0.0
        notes = []
        for gpu in gpus:
            units = self.of_model(gpu.model)
            if units is None:
                note = f"{gpu.model} unknown: CU 0, set it in cu_table"
                if note not in notes:
                    notes.append(note)
            total += units or 0.0
        return total, tuple(notes)
