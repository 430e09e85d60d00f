"""The host's limits are raised where they are too low, and only there."""

from __future__ import annotations

from pathlib import Path

from dsec_sandboxd.kernel.host_limits import LEAST, raise_host_limits


def _limits(root: Path, value: int) -> None:
    for name in LEAST:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{value}\n")


def test_a_limit_that_is_too_low_is_raised(tmp_path: Path) -> None:
    _limits(tmp_path, 5)
    assert raise_host_limits(tmp_path) == ()
    assert {name: int((tmp_path / name).read_text()) for name in LEAST} == LEAST


def test_a_limit_that_is_high_enough_is_left_alone(tmp_path: Path) -> None:
    _limits(tmp_path, 1 << 63)
    assert raise_host_limits(tmp_path) == ()
    assert {(tmp_path / name).read_text() for name in LEAST} == {f"{1 << 63}\n"}


def test_a_limit_that_cannot_be_raised_is_named(tmp_path: Path) -> None:
    assert set(raise_host_limits(tmp_path)) == set(LEAST)
