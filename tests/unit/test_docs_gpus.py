"""What the page on GPUs shows is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from dsec_common.compute.units import DEFAULT_TABLE, TFLOPS
from dsec_common.nodes_file import NodesFile
from dsec_common.yaml_text import read_yaml

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")


def test_the_table_of_units_is_the_built_in_one() -> None:
    rows = re.findall(r"^\| ([A-Z][^|]+) \| (\d+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert {model: float(rate) for model, _, rate in rows} == dict(TFLOPS)
    assert all(DEFAULT_TABLE[model] == float(units) for model, units, _ in rows)


def test_the_file_that_is_shown_can_be_read() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    nodes = read_yaml(shown, NodesFile, "nodes.yaml")
    assert nodes.entry("gpu-1").model_of("GPU-8f6d", "told") == "A100"
