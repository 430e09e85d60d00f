"""`make chaos-rollout` in small: what it does for five minutes, done for some seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stack import environment

ROOT = Path(__file__).parents[2]
SECONDS = 5
SMALLER = ("--nodes=1", "--chronuses=2", "--agents=4", "--kill-every-s=1")


@pytest.mark.timeout(400)
def test_every_step_has_its_effect_once_whoever_is_killed() -> None:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "soak.rollout"),
            *(f"--seconds={SECONDS}", "--seed=5", "--json", *SMALLER),
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout)
    assert summary["violations"] == [], "\n".join(summary["history"])
    assert summary["rollouts"] == 4
    assert summary["steps"] >= 4
    assert summary["frames"] > 20
    assert sum(summary["kills"].values()) > 0
    assert done.returncode == 0
