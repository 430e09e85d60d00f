from __future__ import annotations

import math

import pytest

from dsec_broker.config import BrokerConfig
from dsec_common.compute.cards import cards_of
from dsec_common.compute.model import COUNT_MAX, CardMode
from dsec_common.compute.units import A100_TFLOPS, DEFAULT_TABLE, TFLOPS, UnitTable, prices
from dsec_common.config import load_config
from dsec_common.errors import DsecError
from dsec_common.wire.node import Gpu, GpuInstance


@pytest.mark.parametrize(
    ("product", "units"),
    [
        ("NVIDIA A100-SXM4-40GB", 100.0),
        ("A100", 100.0),
        ("nvidia a100 80gb pcie", 100.0),
        ("Tesla V100-PCIE-16GB", 42.0),
        ("NVIDIA L40", 65.0),
        ("NVIDIA L40S", 116.0),
        ("NVIDIA H100 80GB HBM3", 317.0),
        ("NVIDIA H100 PCIe", 242.0),
        ("NVIDIA H100 NVL", 268.0),
        ("NVIDIA H200", 317.0),
        ("NVIDIA B200", 721.0),
        ("NVIDIA A10", 40.0),
        ("NVIDIA A10G", None),
        ("NVIDIA L4", 39.0),
        ("Tesla T4", 21.0),
        ("NVIDIA A40", 48.0),
        ("NVIDIA GeForce RTX 4090", 53.0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("GRID A100-20C", None),
        ("GRID A100-4-20C", None),
        ("", None),
    ],
)
def test_a_product_name_is_worth_what_the_table_says_of_its_model(
    product: str, units: float | None
) -> None:
    row = UnitTable({}).find(product)
    assert (None if row is None else row[1]) == units


def test_the_longest_configured_model_wins() -> None:
    table = UnitTable({"RTX 6000": 30.0, "RTX 6000 Ada": 50.0, "A100": 120.0})
    assert table.find("NVIDIA RTX 6000 Ada Generation") == ("RTX 6000 Ada", 50.0)
    assert table.find("NVIDIA RTX 6000") == ("RTX 6000", 30.0)
    assert table.find("NVIDIA A100-SXM4-40GB") == ("A100", 120.0)


def test_an_unknown_model_counts_for_nothing_and_says_so_once() -> None:
    gpus = [Gpu(uuid=f"GPU-{number}", model="NVIDIA H101") for number in range(2)]
    cards, notes = cards_of([*gpus, Gpu(uuid="GPU-2", model="NVIDIA L40")], UnitTable({}))
    assert [(card.model, card.cu) for card in cards] == [("", 0.0), ("", 0.0), ("L40", 65.0)]
    assert notes == ("gpu_model NVIDIA H101 unknown: CU 0, set it in nodes.yaml",)


def test_a_node_without_gpus_has_no_units_and_no_notes() -> None:
    assert cards_of([], UnitTable({})) == ((), ())


def test_a_gpu_that_is_listed_twice_counts_once_and_says_so() -> None:
    gpu = Gpu(uuid="GPU-0", model="NVIDIA L40")
    cards, notes = cards_of([gpu, gpu], UnitTable({}))
    assert [card.cu for card in cards] == [65.0]
    assert notes == ("GPU-0 is there twice: counted once",)


@pytest.mark.parametrize("memory_bytes", [-1, 1 << 62])
def test_memory_that_no_card_has_is_not_believed(memory_bytes: int) -> None:
    gpu = Gpu(uuid="GPU-0", model="NVIDIA L40", memory_bytes=memory_bytes)
    cards, notes = cards_of([gpu], UnitTable())
    assert cards[0].memory_bytes == 0
    assert notes == (f"GPU 0: {memory_bytes} bytes of memory are not believed",)


def test_instances_are_never_worth_more_than_their_card() -> None:
    lie = tuple(GpuInstance(uuid=f"MIG-{it}", compute_slices=4) for it in range(7))
    gpu = Gpu(uuid="GPU-0", model="A100", mode=CardMode.MIG, mig=lie, compute_slices=7)
    (card,), notes = cards_of([gpu], UnitTable())
    assert card.cu_total <= 100
    assert notes == ("GPU 0: MIG instances beyond the whole card count for nothing",)


def test_a_node_cannot_have_more_cards_than_any_machine() -> None:
    gpus = [Gpu(uuid=f"GPU-{number}", model="A100") for number in range(COUNT_MAX + 1)]
    cards, notes = cards_of(gpus, UnitTable())
    assert len(cards) == COUNT_MAX
    assert notes == (f"more than {COUNT_MAX} GPUs: the rest count for nothing",)


@pytest.mark.parametrize("units", [math.nan, -1.0, math.inf, 1e9])
def test_units_that_make_no_sense_are_refused(units: float) -> None:
    with pytest.raises(ValueError, match="B300 cannot be worth"):
        UnitTable({"B300": units})


def test_other_models_are_worth_their_rate_in_percent_of_an_a100_s() -> None:
    for model, rate in TFLOPS.items():
        assert DEFAULT_TABLE[model] == pytest.approx(100 * rate / A100_TFLOPS, abs=0.5)
    assert (DEFAULT_TABLE["A100"], DEFAULT_TABLE["L40"], DEFAULT_TABLE["V100"]) == (100, 65, 42)


def test_an_a100_s_unit_costs_what_the_operator_says_or_1_8_times_an_l40_s() -> None:
    assert prices()["A100"] / prices()["L40"] == pytest.approx(1.8)
    assert prices({"A100": 3.0})["A100"] == 3.0


def test_the_table_comes_from_the_environment() -> None:
    config = load_config(BrokerConfig, "broker", [], {"DSEC_CU_TABLE": "H100=220,L4=20"})
    assert config.cu_table == {"H100": 220.0, "L4": 20.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [("cu_table", "H100=-1"), ("node_timeout_s", "0"), ("lease_ttl_s", "inf")],
)
def test_a_setting_that_makes_no_sense_is_refused(name: str, value: str) -> None:
    with pytest.raises(DsecError, match=name):
        load_config(BrokerConfig, "broker", [], {f"DSEC_{name.upper()}": value})
