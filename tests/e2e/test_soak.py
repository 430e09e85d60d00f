"""The soak in small: what `make soak` does for ten minutes, done for twenty seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stack import environment

ROOT = Path(__file__).parents[2]
SECONDS = 20


@pytest.mark.timeout(400)
def test_a_short_soak_loses_no_sandbox_and_leaves_nothing() -> None:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    done = subprocess.run(
        [sys.executable, "-m", "soak", f"--seconds={SECONDS}", "--seed=7", "--json"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout)
    assert summary["violations"] == []
    assert summary["leaks"] == []
    assert summary["lost"] == 0
    assert sum(summary["kills"].values()) > 0
    assert sum(summary["operations"].values()) > 50
    assert done.returncode == 0


@pytest.mark.parametrize(
    "arguments", [["--seconds", "0"], ["--nodes", "0"], ["--users", "0"], ["--kill-every-s", "-1"]]
)
def test_a_soak_that_cannot_be_meant_is_refused_before_anything_starts(
    arguments: list[str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "soak", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "usage" in done.stderr
