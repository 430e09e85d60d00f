"""``dsec up`` and ``dsec down``: what starts, what is said, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import sync
from dsec_common.processes import ProcessIdentity
from stack import Stack


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Stack]:
    """A second platform beside the session's, not yet started."""
    platform = Stack(tmp_path / "other", name="o")
    yield platform
    platform.stop()
    platform.dsec("down")
    assert platform.leftovers() == []


def _process(platform: Stack, name: str) -> ProcessIdentity:
    return ProcessIdentity(**platform.part(name)["process"])


def test_up_starts_every_part_in_order_and_ctrl_c_leaves_nothing_behind(other: Stack) -> None:
    other.start()
    node = other.node_names[0]
    assert [part["name"] for part in other.parts] == [
        *("nats", "kafka", "broker", "scheduler", "tracer", "chronus", f"sandboxd-{node}")
    ]
    status = other.dsec_json("status")
    assert status["state"] == "running"
    assert status["context"]["project"] == "default"
    assert "sandboxd" in other.dsec("status").stdout
    processes = [_process(other, part["name"]) for part in other.parts]
    base = other.import_host_base()
    other.dsec("sandbox", "create", base)
    assert other.stop(signal.SIGINT) == 0
    assert not any(process.alive for process in processes)
    assert other.leftovers() == []
    # And again: what was imported is still there.
    other.start()
    assert other.import_host_base() == base
    other.dsec("sandbox", "create", base)


def test_a_second_up_says_that_it_already_runs(other: Stack) -> None:
    other.start("--without-sandboxd")
    again = other.dsec("up", "--without-sandboxd", "--json", check=False)
    assert again.returncode == 1
    error = json.loads(again.stderr)["error"]
    assert error["code"] == "conflict"
    assert "dsec down" in error["message"]
    # The one that runs is unharmed.
    assert other.dsec_json("status")["state"] == "running"


def test_two_platforms_on_one_machine_cannot_share_a_node_name(other: Stack, stack: Stack) -> None:
    clash = other.dsec("up", f"--node-prefix={stack.prefix}", "--nats-port=0", check=False)
    assert clash.returncode == 1
    assert "--node-prefix" in clash.stderr
    assert stack.dsec_json("node", "list")["nodes"][0]["ready"]


def test_detached_it_runs_until_down_and_down_waits_for_its_end(other: Stack) -> None:
    up = other.dsec(*("--json", "up", "--detach", "--nats-port=0", f"--node-prefix={other.prefix}"))
    parts = json.loads(up.stdout)["parts"]
    processes = [ProcessIdentity(**part["process"]) for part in parts]
    assert all(process.alive for process in processes)
    assert other.dsec_json("node", "list")["nodes"][0]["ready"]
    assert other.dsec_json("down") == {"was": "running", "cleaned": []}
    assert not any(process.alive for process in processes)
    assert other.leftovers() == []
    assert other.dsec("status", check=False).returncode == 1


def test_several_nodes_share_one_layer_store(tmp_path: Path) -> None:
    platform = Stack(tmp_path / "two", name="w", nodes=2)
    try:
        platform.start()
        base = platform.import_host_base()
        layers = platform.dsec_json("layer", "list")
        assert layers[0]["nodes"] == list(platform.node_names)
        used = {
            platform.dsec_json("sandbox", "create", base)["sandbox_id"].partition(".")[0]
            for _ in range(12)
        }
        assert used == set(platform.node_names)
    finally:
        assert platform.stop() == 0
    assert platform.leftovers() == []


def test_a_part_that_crashes_is_said_and_started_again(other: Stack) -> None:
    other.start("--without-sandboxd")
    _process(other, "scheduler").signal(signal.SIGKILL)
    ended = other.next_event("service_ended")
    assert (ended["name"], ended["how"]) == ("scheduler", "signal 9")
    assert other.next_event("service_restarted")["name"] == "scheduler"
    with sync.DSecClient(other.context.nats_servers, other.context.credentials) as client:
        _process(other, "nats").signal(signal.SIGKILL)
        assert other.next_event("service_ended")["name"] == "nats"
        assert other.next_event("service_restarted")["name"] == "nats"
        # The same client goes on: it reconnects and asks again.
        assert client.nodes().nodes == ()
    _process(other, "kafka").signal(signal.SIGKILL)
    assert other.next_event("service_ended")["name"] == "kafka"
    assert other.next_event("service_restarted")["name"] == "kafka"
    assert other.dsec_json("node", "list")["nodes"] == []


def test_after_kill_9_of_the_supervisor_down_finds_and_ends_what_is_left(other: Stack) -> None:
    other.start()
    processes = [_process(other, part["name"]) for part in other.parts]
    base = other.import_host_base()
    other.dsec("sandbox", "create", base)
    assert other.stop(signal.SIGKILL) == -signal.SIGKILL
    assert other.dsec_json("down")["was"] == "killed"
    assert not any(process.alive for process in processes)
    assert other.leftovers() == []


def test_after_kill_9_of_supervisor_and_node_down_ends_the_sandboxes_too(other: Stack) -> None:
    other.start()
    base = other.import_host_base()
    other.dsec("sandbox", "create", base)
    _process(other, f"sandboxd-{other.node_names[0]}").signal(signal.SIGKILL)
    assert other.stop(signal.SIGKILL) == -signal.SIGKILL
    cleaned = other.dsec_json("down")["cleaned"]
    assert f"sandboxes of {other.node_names[0]}" in cleaned
    assert other.leftovers() == []


def test_cleaning_up_after_a_killed_platform_leaves_its_successor_of_the_same_name_alone(
    other: Stack, tmp_path: Path
) -> None:
    other.start()
    assert other.stop(signal.SIGKILL) == -signal.SIGKILL
    successor = Stack(tmp_path / "successor", name="o")
    try:
        successor.start()
        sandbox = successor.dsec("sandbox", "create", successor.import_host_base()).stdout.strip()
        assert other.dsec_json("down")["was"] == "killed"
        assert successor.dsec("sandbox", "exec", sandbox, "echo", "alive").stdout == "alive\n"
    finally:
        successor.stop()
    assert successor.leftovers() == []


def test_after_kill_9_of_the_supervisor_up_starts_afresh(other: Stack) -> None:
    other.start()
    assert other.stop(signal.SIGKILL) == -signal.SIGKILL
    other.start()
    assert other.dsec_json("sandbox", "list") == []


def test_a_child_that_cannot_start_stops_the_rest_and_says_why(other: Stack) -> None:
    # A file where a directory must be: the layer store cannot open.
    other.directory.mkdir()
    (other.directory / "store").write_text("")
    done = other.dsec(
        *("up", "--nats-port=0", f"--node-prefix={other.prefix}"),
        *("--layers-directory", str(other.directory / "store")),
        check=False,
    )
    assert done.returncode == 1
    assert "sandboxd" in done.stderr
    assert "store" in done.stderr
    assert "Traceback" not in done.stderr
    assert other.leftovers() == []


def test_without_root_it_says_plainly_what_needs_root_and_exits_with_2(tmp_path: Path) -> None:
    platform = Stack(tmp_path / "nobody", name="n")
    done = subprocess.run(
        [
            *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
            # Only so that the interpreter and this checkout can be read wherever they lie.
            *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
            *platform.command("up"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
    )
    assert done.returncode == 2, done.stderr
    assert "root" in done.stderr
    assert "--without-sandboxd" in done.stderr


def test_a_taken_port_is_said(other: Stack, stack: Stack) -> None:
    port = stack.context.nats_servers[0].rpartition(":")[2]
    done = other.dsec("up", "--without-sandboxd", f"--nats-port={port}", check=False)
    assert done.returncode == 1
    assert port in done.stderr
    assert "another program listens" in done.stderr
