"""Which paths of a snapshot are left out of a layer."""

from __future__ import annotations

import time

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.snapshot_residue import PATTERN_MAX, PATTERNS_MAX, Exclusion, exclusion


def left_out(pattern: str, path: str) -> bool:
    return Exclusion([pattern]).matches(path.strip("/").split("/"))


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("/a", "/a", True),
        ("/a", "/a/b", False),
        ("/a/*", "/a/b", True),
        ("/a/*", "/a", False),
        ("/a/*", "/a/b/c", False),
        ("/a/x*y", "/a/x1y", True),
        ("/a/x*y", "/a/xy", True),
        ("/a/x*y", "/a/x1z", False),
        ("**/c", "/c", True),
        ("**/c", "/a/b/c", True),
        ("**/c", "/a/b/cd", False),
        ("/a/**/c", "/a/c", True),
        ("/a/**/c", "/a/b/b/c", True),
        ("/a/**/c", "/b/c", False),
        ("/a/[b]", "/a/b", False),
        ("/a/[b]", "/a/[b]", True),
        ("/a/**", "/a/b/c", True),
        ("/a.b", "/axb", False),
    ],
)
def test_a_pattern_matches_whole_names(pattern: str, path: str, expected: bool) -> None:
    assert left_out(pattern, path) is expected


@pytest.mark.parametrize("pattern", ["relative", "", "*", "/" + "x" * PATTERN_MAX])
def test_a_pattern_that_is_no_absolute_path_is_invalid(pattern: str) -> None:
    with pytest.raises(DsecError) as caught:
        Exclusion([pattern])
    assert caught.value.code is ErrorCode.INVALID


def test_too_many_patterns_are_invalid() -> None:
    with pytest.raises(DsecError):
        Exclusion(["/a"] * (PATTERNS_MAX + 1))


def test_mount_points_are_always_left_out_and_residue_only_when_asked() -> None:
    plain, clean = exclusion((), clean=False), exclusion((), clean=True)
    for path in ("proc", "dev", "sys", "run/dsec"):
        assert plain.matches(path.split("/"))
    for path in ("tmp/x", "root/.bash_history", "home/me/.cache", "a/b/__pycache__"):
        assert not plain.matches(path.split("/"))
        assert clean.matches(path.split("/"))
    assert not clean.matches(["tmp"])


def test_a_hostile_pattern_takes_no_time() -> None:
    pattern = Exclusion(["/" + "*a" * 200, "/" + "/".join(["**"] * 100) + "/x"])
    began = time.monotonic()
    assert not pattern.matches(["a" * 255] * 50)
    assert time.monotonic() - began < 60
