from __future__ import annotations

import pytest

from dsec_broker.compute_units import ComputeUnits
from dsec_broker.config import BrokerConfig
from dsec_common.config import load_config
from dsec_common.errors import DsecError
from dsec_common.wire.node import Gpu


@pytest.mark.parametrize(
    ("product", "units"),
    [
        ("NVIDIA A100-SXM4-40GB", 100.0),
        ("A100", 100.0),
        ("nvidia a100 80gb pcie", 100.0),
        ("Tesla V100-PCIE-16GB", 42.0),
        ("NVIDIA L40", 65.0),
        ("NVIDIA L40S", None),
        ("NVIDIA H100 80GB HBM3", None),
        ("", None),
    ],
)
def test_a_product_name_is_worth_what_the_table_says_of_its_model(
    product: str, units: float | None
) -> None:
    assert ComputeUnits({}).of_model(product) == units


def test_the_longest_configured_model_wins() -> None:
    table = ComputeUnits({"RTX 6000": 30.0, "RTX 6000 Ada": 50.0, "A100": 120.0})
    assert table.of_model("NVIDIA RTX 6000 Ada Generation") == 50.0
    assert table.of_model("NVIDIA RTX 6000") == 30.0
    assert table.of_model("NVIDIA A100-SXM4-40GB") == 120.0


def test_an_unknown_model_counts_for_nothing_and_says_so_once() -> None:
    gpus = [Gpu(uuid=f"GPU-{number}", model="NVIDIA H100") for number in range(2)]
    total, notes = ComputeUnits({}).of_node([*gpus, Gpu(uuid="GPU-2", model="NVIDIA L40")])
    assert total == 65.0
    assert notes == ("NVIDIA H100 unknown: CU 0, set it in cu_table",)


def test_a_node_without_gpus_has_no_units_and_no_notes() -> None:
    assert ComputeUnits({}).of_node([]) == (0.0, ())


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
