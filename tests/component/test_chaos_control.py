"""`make chaos-control` in small: what it does for five minutes, done for some seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 12


@pytest.mark.timeout(400)
def test_brokers_and_schedulers_that_are_killed_lose_and_double_nothing() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "soak.control"),
            *(f"--seconds={SECONDS}", "--seed=7", "--json"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout)
    assert summary["violations"] == [], "\n".join(summary["history"])
    assert summary["requests"] > 20
    assert sum(summary["granted"].values()) > 10
    assert sum(summary["kills"].values()) > 0
    assert summary["revisions"] > summary["leases"] > 0
    assert done.returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seconds", "0"],
        ["--brokers", "0"],
        ["--schedulers", "0"],
        ["--users", "0"],
        ["--kill-every-s", "-1"],
    ],
)
def test_chaos_that_cannot_be_meant_is_refused_before_anything_starts(
    arguments: list[str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "soak.control", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "usage" in done.stderr
