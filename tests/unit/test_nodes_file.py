from __future__ import annotations

from pathlib import Path

import pytest

from dsec_broker.config import BrokerConfig
from dsec_common.config import load_config
from dsec_common.errors import DsecError
from dsec_common.nodes_file import NODES_FILE, NodesFile, read_nodes_file
from dsec_common.yaml_text import read_yaml
from dsec_sandboxd.config import SandboxdConfig

WHOLE = """
cu_table: {"RTX 6000 Ada": 110, B300: 750.5}
prices: {A100: 1.8}
labels: {site: north, tier: a}
nodes:
  gpu-1:
    gpu_model: L40
    gpus: {GPU-1: A100}
    only: [GPU-0, GPU-1]
    labels: {tier: b}
"""


def test_the_file_says_what_nodes_and_gpus_are(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(WHOLE)
    nodes = read_nodes_file(str(path))
    entry = nodes.entry("gpu-1")
    assert nodes.cu_table == {"RTX 6000 Ada": 110.0, "B300": 750.5}
    assert [entry.model_of(uuid, "told") for uuid in ("GPU-0", "GPU-1")] == ["L40", "A100"]
    assert entry.labels == {"site": "north", "tier": "b"}
    assert nodes.entry("other").labels == {"site": "north", "tier": "a"}
    assert nodes.entry("other").model_of("GPU-0", "told") == "told"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "nodes:\n  gpu-1:\n    gpu_modl: L40\n",
            "n.yaml:3:5: 'gpu_modl' is not known here; did you mean 'gpu_model'?",
        ),
        ("nodez: {}\n", "n.yaml:1:1: 'nodez' is not known here; did you mean 'nodes'?"),
        ("nodes:\n  a b: {}\n", "n.yaml:2:3: "),
        ("nodes:\n  a: {}\n  a: {}\n", "n.yaml:3:3: 'a' is there twice: remove one"),
        ("cu_table:\n  A100: .nan\n", "n.yaml:2:3: nan is no amount"),
        ("cu_table:\n  A100: .inf\n", "n.yaml:2:3: inf is no amount"),
        ("cu_table:\n  A100: -1\n", "n.yaml:2:3: Expected `float` >= 0"),
        ("cu_table:\n  A100: 1000000\n", "n.yaml:2:3: Expected `float` <= 100000"),
        ("cu_table:\n  A100: many\n", "n.yaml:2:3: Expected `float`, got `str`"),
        ("prices: {A100: -1}\n", "n.yaml:1:10: Expected `float` >= 0"),
        ("prices: {A100: 1.0e+300}\n", "n.yaml:1:10: Expected `float` <= 1000000000"),
        ("labels:\n  gpu: no\n", "n.yaml:2:3: Expected `str`, got `bool`: put it in quotes"),
        ("nodes:\n  - a\n", "n.yaml:1:1: Expected `object`, got `array`"),
        ("nodes: {a: [}\n", "n.yaml:1:13: "),
        ("? [a, b]\n: c\n", "n.yaml:1:3: a name must be plain text"),
        ("a: &x [*x]\n", "n.yaml"),
        ("a: !!python/object:os.system {}\n", "n.yaml:1"),
        ("a: 2026-13-40\n", "n.yaml"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, told: str) -> None:
    with pytest.raises(DsecError) as refused:
        read_yaml(text, NodesFile, "n.yaml")
    assert refused.value.message.startswith(told)


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n", "nodes: {}\n"])
def test_an_empty_file_says_nothing(text: str) -> None:
    assert read_yaml(text, NodesFile, "n.yaml") == NodesFile()


def test_only_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    if not Path(NODES_FILE).exists():
        assert read_nodes_file(NODES_FILE) == NodesFile()
    with pytest.raises(DsecError, match="there is no file"):
        read_nodes_file(str(tmp_path / "none.yaml"))


def test_settings_go_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(WHOLE)
    environment = {"DSEC_NODES_FILE": str(path), "DSEC_CU_TABLE": "B300=700"}
    broker = load_config(BrokerConfig, "broker", [], environment)
    assert broker.cu_table == {"RTX 6000 Ada": 110.0, "B300": 700.0}
    environment = {"DSEC_NODES_FILE": str(path), "DSEC_NODE": "gpu-1", "DSEC_LABELS": "rack=7"}
    node = load_config(SandboxdConfig, "sandboxd", [], environment)
    assert node.labels == {"site": "north", "tier": "b", "rack": "7"}


def test_a_file_that_makes_no_sense_stops_a_service_before_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text("nodes: {gpu-1: {label: {}}}\n")
    with pytest.raises(DsecError, match=r"nodes.yaml:1:17: 'label' is not known here"):
        load_config(BrokerConfig, "broker", [], {"DSEC_NODES_FILE": str(path)})
