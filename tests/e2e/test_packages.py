"""Packages on a whole platform: built, made layers of, registered, run in sandboxes, replaced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from documents import ROOT
from dsec import DsecError, ErrorCode, sync
from dsec.pack.building import Wanted, build_package, write_package
from dsec.pack.signing import write_new_key
from packages import cache_in, package_of, write_project
from stack import Stack

ASKED = b'{"place":"Oslo","celsius":[1,9]}'
ANSWER = {"place": "Oslo", "text": "9 °C and getting warmer"}
EXAMPLE = ROOT / "examples" / "forecast"
RUN = "/opt/dsec/agents/forecaster/run"
SDK_AGENT = """\
from dsec import Agent


class Doubler(Agent):
    def execute(self, number: int) -> int:
        return self.get_tool("shell").run(["expr", str(number), "*", "2"]).stdout.strip()


if __name__ == "__main__":
    Doubler().serve()
"""
SDK_CONTRACT = """\
name: doubler
version: "1"
capabilities:
  - {tool: shell, permissions: [run_command]}
"""


@pytest.fixture
def client(stack: Stack) -> Iterator[Any]:
    context = stack.context
    with sync.DSecClient(context.nats_servers, context.credentials) as connected:
        yield connected


def test_an_agent_runs_from_its_package_with_any_base(
    stack: Stack, base: str, client: Any, tmp_path: Path
) -> None:
    key = write_new_key(tmp_path / "key")
    wanted, cache = Wanted(sign_key=key), cache_in(tmp_path)
    write_package(build_package(EXAMPLE, wanted, cache), tmp_path / "f.dsec")
    package = str(tmp_path / "f.dsec")
    layer = stack.dsec_json("layer", "import", package, "--public-key", key.public_key)
    assert (layer["reference"], layer["kind"]) == ("forecaster@1.0", "toolkit")
    again = client.layers.import_package(tmp_path / "f.dsec", version="again")
    assert again.digest == layer["digest"]
    project = write_project(tmp_path / "p", {"agent.py": SDK_AGENT, "agent.yaml": SDK_CONTRACT})
    client.layers.import_package(build_package(project, cache=cache).package)
    toolkits = ["forecaster@1.0", "doubler@1"]
    with client.create_sandbox(base, toolkits=toolkits) as sandbox:
        answered = sandbox.exec([RUN], stdin=ASKED, check=True)
        assert json.loads(answered.stdout) == ANSWER
        doubled = sandbox.exec(["/opt/dsec/agents/doubler/run", "--number", "21"], check=True)
        assert "42" in doubled.stdout_text


def test_what_is_no_package_or_not_signed_as_demanded_changes_nothing(
    stack: Stack, client: Any, tmp_path: Path
) -> None:
    key = write_new_key(tmp_path / "key").public_key
    whole, cut = tmp_path / "x.dsec", tmp_path / "y.dsec"
    whole.write_bytes(package_of())
    cut.write_bytes(package_of()[:-1])
    done = stack.dsec("layer", "import", str(whole), "--public-key", key, check=False)
    assert (done.returncode, "signature is demanded" in done.stderr) == (1, True)
    with pytest.raises(DsecError, match="signature is demanded"):
        sync.register_package(client, whole, public_key=key)
    with pytest.raises(DsecError, match="bytes were lost"):
        sync.register_package(client, cut)
    assert client.layers.list(name="tester") == []
    assert client.agents.list(prefix="tester") == []


def test_weights_are_replaced_while_those_before_are_in_use(
    stack: Stack, base: str, client: Any, tmp_path: Path
) -> None:
    built = build_package(EXAMPLE, cache=cache_in(tmp_path))
    write_package(built, tmp_path / "f.dsec")
    stack.dsec("agent", "register", "--package", str(tmp_path / "f.dsec"), "--base", base)
    # An answer that was lost: the same again is fine.
    (version,) = sync.register_package(client, tmp_path / "f.dsec", base=base).versions
    assert version.toolkits == ("forecaster@1.0",)
    assert version.package_sha256 == built.package.sha256
    weights = tmp_path / "weights.bin"
    read = "cat /opt/dsec/models/forecaster/weights.bin"
    weights.write_bytes(b"first")
    model = ("--name", "forecaster", "--version", "1.1", "--model-path", str(weights))
    stack.dsec("agent", "update", *model)
    with client.create_sandbox(agent="forecaster") as before:
        weights.write_bytes(b"second")
        for _ in range(2):
            sync.update_model(client, "forecaster", "1.2", weights)
        assert before.exec(read, check=True).stdout == b"first"
        with client.create_sandbox(agent="forecaster") as after:
            assert after.inspect().agent_version == "1.2"
            assert after.exec(read, check=True).stdout == b"second"
            answered = after.exec([RUN], stdin=ASKED, check=True)
            assert json.loads(answered.stdout) == ANSWER
        weights.write_bytes(b"third")
        with pytest.raises(DsecError) as changed:
            sync.update_model(client, "forecaster", "1.2", weights)
        assert changed.value.code is ErrorCode.CONFLICT
        client.agents.rollback("forecaster")
        with client.create_sandbox(agent="forecaster") as back:
            assert back.exec(read, check=True).stdout == b"first"
    with pytest.raises(DsecError) as active:
        client.agents.remove("forecaster", "1.1")
    assert active.value.code is ErrorCode.CONFLICT
    removed = stack.dsec_json("agent", "remove", "forecaster", "--version", "1.0")
    assert removed == {"name": "forecaster", "versions": ["1.0"]}
