"""``inspect eval … --sandbox dsec`` as a user types it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("inspect_ai")

from stack import Stack

TASK = Path(__file__).parent.parent / "framework" / "inspect_task.py"


def _inspect(
    stack: Stack, directory: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    shutil.copy(TASK, directory)
    environment = os.environ | {
        "DSEC_NATS_SERVERS": ",".join(stack.context.nats_servers),
        "DSEC_NATS_CREDENTIALS": str(stack.directory / "auth" / "projects" / "default.creds"),
        "INSPECT_LOG_DIR": str(directory / "logs"),
        "XDG_DATA_HOME": str(directory / "data"),
        **variables,
    }
    return subprocess.run(
        [str(Path(sys.executable).parent / "inspect"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment,
        timeout=110,
    )


def _samples(directory: Path) -> list[dict[str, object]]:
    (log,) = (directory / "logs").glob("*.json")
    document = json.loads(log.read_text())
    assert document["status"] == "success", document.get("error")
    samples: list[dict[str, object]] = document["samples"]
    return samples


EVAL = ("--model", "mockllm/model", "--log-format", "json", "--display", "plain")


async def test_an_evaluation_runs_in_sandboxes_and_leaves_none(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    (tmp_path / "dsec.yaml").write_text(
        f"base: {base}\nuser: agent\nmemory_bytes: 134217728\ncpus: 0.5\ncpu_quota: true\n"
        "cpu_class: best_effort\ninodes: 1000\nnetwork: none\n"
    )
    said = _inspect(stack, tmp_path, "eval", TASK.name, "--sandbox", "dsec:dsec.yaml", *EVAL)
    assert said.returncode == 0, said.stderr + said.stdout
    samples = _samples(tmp_path)
    completions = [str(sample["output"]["completion"]) for sample in samples]  # type: ignore[index]
    assert [text.split() for text in completions] == [
        ["alphaagent", "/work"],
        ["betaagent", "/work"],
    ]
    async with stack.client() as client:
        assert not [
            found for found in await client.list_sandboxes() if "inspect-task" in found.labels
        ]


async def test_the_base_layer_may_come_from_the_environment(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    said = _inspect(
        *(stack, tmp_path, "eval", TASK.name, "--sandbox", "dsec", "--limit", "1", *EVAL),
        DSEC_INSPECT_BASE=base,
    )
    assert said.returncode == 0, said.stderr + said.stdout
    assert len(_samples(tmp_path)) == 1


async def test_a_wrong_configuration_says_what_is_wrong(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "dsec.yaml").write_text("bass: host@1\n")
    said = _inspect(stack, tmp_path, "eval", TASK.name, "--sandbox", "dsec:dsec.yaml", *EVAL)
    assert "bass" in said.stdout + said.stderr


async def test_sandboxes_that_were_left_are_cleaned_up(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    async with stack.client() as client:
        left = await client.create_sandbox(
            base, labels={"inspect-task": "t"}, memory_bytes=64 << 20
        )
        mine = await client.create_sandbox(base, memory_bytes=64 << 20)
        said = _inspect(stack, tmp_path, "sandbox", "cleanup", "dsec")
        assert said.returncode == 0, said.stderr + said.stdout
        living = {found.sandbox_id for found in await client.list_sandboxes()}
        assert left.id not in living
        assert mine.id in living
        await mine.delete()
