"""What GPUs are worth and cost: Compute Units by model, and the price of one for an hour.

An A100 is 100, an L40 65 and a V100 42: the figures that the measure was introduced with. Every
other model is worth its dense FP16/BF16 tensor rate (accumulated in FP32, without sparsity) in
percent of an A100's 312 TFLOPS, rounded, as its maker's datasheet states that rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

A100_TFLOPS: Final = 312.0
"""NVIDIA A100 Tensor Core GPU datasheet: FP16 and BF16 tensor, dense."""

FIRST_TABLE: Final[Mapping[str, float]] = {"A100": 100.0, "L40": 65.0, "V100": 42.0}
"""The models that the measure was introduced with."""

TFLOPS: Final[Mapping[str, float]] = {
    "GB200": 2500.0,  # GB200 NVL72 datasheet: 360 PFLOPS sparse for 72 GPUs
    "B200": 2250.0,  # DGX B200 datasheet: 36 PFLOPS sparse for 8 GPUs
    "GH200": 989.4,  # NVIDIA H100 architecture white paper: the same GPU as the H100 SXM5
    "H200": 989.4,  # H200 datasheet, SXM
    "H200 NVL": 835.5,  # H200 datasheet, NVL: 1,671 sparse
    "H100": 989.4,  # H100 architecture white paper, SXM5
    "H100 NVL": 835.5,  # H100 NVL product brief: 1,671 sparse
    "H100 PCIe": 756.0,  # H100 architecture white paper, PCIe
    "L40S": 362.05,  # L40S datasheet
    "L4": 121.0,  # L4 datasheet: 242 sparse
    "A40": 149.7,  # A40 datasheet
    "A30": 165.0,  # A30 datasheet
    "A10": 125.0,  # A10 datasheet
    "T4": 65.0,  # T4 datasheet: its only rate, accumulated in FP16
    "RTX 5090": 209.5,  # RTX Blackwell architecture white paper
    "RTX 4090": 165.2,  # Ada GPU architecture white paper
    "RTX 3090": 71.0,  # GA102 architecture white paper
    "RTX 6000 Ada": 364.2,  # Ada professional architecture white paper
    "RTX A6000": 154.8,  # RTX A6000 datasheet: 309.7 sparse
}
"""Datasheet rates of other models."""

DEFAULT_TABLE: Final[Mapping[str, float]] = {
    **{model: float(round(100 * rate / A100_TFLOPS)) for model, rate in TFLOPS.items()},
    **FIRST_TABLE,
}
"""Units of the models that need no configuration."""

DEFAULT_PRICES: Final[Mapping[str, float]] = {"A100": 1.8, "L40": 1.0}
"""Cost of one unit for an hour: an A100's is 1.8 times an L40's."""

DEFAULT_PRICE: Final = 1.0
"""Cost of one unit for an hour of every model without a price of its own."""

UNITS_MAX: Final = 100_000.0
"""More than one card can be worth by a hundred times: a mistake, or a lie."""

_OTHER_CARD: Final = re.compile(r"laptop|max|d|\d+[abcq]")
"""What follows a model's name when it is another, smaller card, or a virtual part of one."""


def _words(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+", name.lower()))


def flaw_of_units(model: str, units: float) -> str:
    """Return why a row of the table makes no sense; empty when it does."""
    if not _words(model):
        return f"{model!r} is no name of a model"
    if math.isnan(units) or not 0 <= units <= UNITS_MAX:
        return f"{model} cannot be worth {units:g} CU: use 0 to {UNITS_MAX:g}"
    return ""


def prices(given: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the cost of one unit for an hour by model, with ``given`` before the defaults."""
    return {**DEFAULT_PRICES, **(given or {})}


class UnitTable:
    """Compute Units by model.

    A model matches a product name that holds its words in a row, so that ``A100`` is found in
    ``NVIDIA A100-SXM4-40GB`` and ``L40`` is not found in ``NVIDIA L40S``. The longest match wins.
    The mobile, cut-down and virtual cards that bear a larger one's name match no built-in model.
    """

    def __init__(self, table: Mapping[str, float] | None = None) -> None:
        """Take models to add or to override.

        Raises:
            ValueError: one of them makes no sense.
        """
        given = table or {}
        for model, units in given.items():
            if flaw := flaw_of_units(model, units):
                raise ValueError(flaw)
        merged = {_words(model): (model, units) for model, units in DEFAULT_TABLE.items()}
        merged.update({_words(model): (model, units) for model, units in given.items()})
        self._given = {_words(model) for model in given}
        self._table = sorted(merged.items(), key=lambda row: (-len(row[0]), row[0]))

    def find(self, product_name: str) -> tuple[str, float] | None:
        """Return the model as the table names it and its units; None for one it does not know."""
        words = _words(product_name)
        for model, row in self._table:
            for start in range(len(words) - len(model) + 1):
                end = start + len(model)
                if words[start:end] == model and (
                    model in self._given or not any(map(_OTHER_CARD.fullmatch, words[end:]))
                ):
                    return row
        return None
