"""GPUs from the driver's library to what ``dsec-cli node list`` says of the cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvml import Card, Inventory, environment, l40
from stack import Stack

NODES = 3
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cards() -> list[Card]:
    return [l40(index, uuid=f"GPU-{os.getpid()}-{index}") for index in range(NODES)]


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory, cards: list[Card]) -> Inventory:
    found = Inventory(Path(tmp_path_factory.mktemp("nvml")) / "gpus")
    found.write(cards)
    return found


@pytest.fixture(scope="module")
def platform(
    tmp_path_factory: pytest.TempPathFactory, inventory: Inventory, cards: list[Card]
) -> Iterator[Stack]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    platform = Stack(Path(tmp_path_factory.mktemp("gpus")), name="g", nodes=NODES)
    nodes_file = inventory.path.with_name("nodes.yaml")
    own = zip(platform.node_names, cards, strict=True)
    nodes_file.write_text(
        json.dumps({"nodes": {name: {"only": [card["uuid"]]} for name, card in own}})
    )
    platform.more_environment = {
        **environment(inventory.path),
        "DSEC_NODES_FILE": str(nodes_file),
    }
    try:
        platform.start()
        yield platform
    finally:
        code = platform.stop()
    assert code == 0, platform.said()
    assert platform.leftovers() == []


def listed(platform: Stack, wanted: str) -> str:
    """Return the list of nodes once it holds ``wanted``; heartbeats carry the news."""
    deadline = time.monotonic() + PATIENCE_S
    while wanted not in (told := platform.dsec("node", "list").stdout):
        assert time.monotonic() < deadline, told
        time.sleep(0.2)
    return told


def test_three_nodes_with_an_l40_each_are_195_units(platform: Stack) -> None:
    told = listed(platform, "195 CU")
    assert told.splitlines()[-1] == "3 Ready, 195 CU"
    node = platform.dsec_json("node", "inspect", platform.node_names[0])
    (gpu,) = node["heartbeat"]["gpus"]
    assert (gpu["model"], gpu["healthy"], node["cu_total"]) == ("NVIDIA L40", True, 65.0)
    assert node["heartbeat"]["machine"]["driver"] == "550.54.15"


def test_a_card_that_falls_off_takes_its_units_with_it_and_the_list_says_why(
    platform: Stack, inventory: Inventory, cards: list[Card]
) -> None:
    listed(platform, "3 Ready, 195 CU")
    inventory.write([cards[0], cards[1], l40(2, uuid=cards[2]["uuid"], lost=1)])
    told = listed(platform, "3 Ready, 130 CU")
    lost = f"{platform.node_names[2]}: GPU 2 ({cards[2]['uuid']}): CU 0, it fell off the bus"
    assert lost in told
    inventory.write(cards)
    listed(platform, "3 Ready, 195 CU")


def test_a_machine_is_looked_at_before_it_becomes_a_node(tmp_path: Path) -> None:
    inventory = Inventory(tmp_path / "gpus")
    inventory.write([l40(0), Card(1, "NVIDIA Z9", 1 << 30)])
    nodes_file = tmp_path / "etc" / "nodes.yaml"

    def init(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dsec.cli.init", f"--nodes-file={nodes_file}", *arguments],
            env={**os.environ, **environment(inventory.path)},
            check=False,
            capture_output=True,
            text=True,
        )

    looked = init("--dry-run", "--node=gpu-1")
    assert looked.returncode == 0, looked.stderr
    assert "gpu_model NVIDIA Z9 unknown: CU 0, set it in nodes.yaml" in looked.stdout
    assert looked.stdout.splitlines()[-1] == "65 CU"
    assert not nodes_file.exists()
    assert init("--auto-discover", "--node=gpu-1").returncode == 0
    nodes_file.write_text(nodes_file.read_text().replace("# gpu_model:", "gpu_model:"))
    again = init("--auto-discover", "--node=gpu-1")
    assert "it was not changed" in again.stderr
    assert "unknown" not in again.stdout
    nodes_file.write_text("nodes:\n  gpu-1:\n    gpu_modl: L40\n")
    refused = init("--dry-run")
    assert refused.returncode == 1
    assert "nodes.yaml:3:5: 'gpu_modl' is not known here; did you mean" in refused.stderr
    assert init().returncode == 2
