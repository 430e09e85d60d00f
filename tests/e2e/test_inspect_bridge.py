"""Inspect's agent bridge: a program in a sandbox without a network calls the evaluation's model."""

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

TASK = Path(__file__).parent.parent / "framework" / "inspect_bridge_task.py"
RUN = """
import sys

import tiktoken
from inspect_ai import eval
from inspect_ai.model import ModelOutput, get_model
from inspect_bridge_task import bridged

# Inspect counts tokens by a table that it would fetch; nothing here depends on how many there are.
letters = {bytes([letter]): letter for letter in range(256)}
counting = tiktoken.Encoding("letters", pat_str=".", mergeable_ranks=letters, special_tokens={})
tiktoken.get_encoding = tiktoken.encoding_for_model = lambda name: counting

outputs = [ModelOutput.from_content("mockllm/model", text) for text in ("wait", "it is gamma")]
log, = eval(
    bridged(), model=get_model("mockllm/model", custom_outputs=outputs),
    sandbox=("dsec", "dsec.yaml"), display="plain", log_format="json", log_dir="logs",
)
sys.exit(0 if log.status == "success" else log.error.message)
"""


def test_a_program_in_a_sandbox_is_bridged_to_the_model_of_an_evaluation(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    shutil.copy(TASK, tmp_path)
    # Inspect wants to know what system it is; the base is of programs alone.
    (tmp_path / "layer" / "etc").mkdir(parents=True)
    (tmp_path / "layer" / "etc" / "os-release").write_text("ID=debian\nVERSION_ID=12\n")
    stack.dsec(
        *("layer", "import", str(tmp_path / "layer"), "--kind", "toolkit"),
        *("--name", "debian-release", "--version", "12"),
    )
    (tmp_path / "dsec.yaml").write_text(
        f"base: {base}\ntoolkits: [debian-release@12]\nnetwork: none\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", RUN],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ
        | {
            "DSEC_NATS_SERVERS": ",".join(stack.context.nats_servers),
            "DSEC_NATS_CREDENTIALS": stack.context.credentials,
            "XDG_DATA_HOME": str(tmp_path / "data"),
        },
        timeout=110,
    )
    assert said.returncode == 0, said.stderr + said.stdout
    (path,) = (tmp_path / "logs").glob("*.json")
    (sample,) = json.loads(path.read_text())["samples"]
    assert sample["scores"]["includes"]["value"] == "C"
    told = [(message["role"], message["content"]) for message in sample["messages"]]
    assert [role for role, _ in told] == ["user", "assistant", "user", "assistant"]
    assert "gamma" in str(told[-1][1])
