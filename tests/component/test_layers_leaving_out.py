"""What an import leaves out: residue, patterns, and a repository's history."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import GitHistory, LayerKind
from dsec_sandboxd.layers.leaving_out import LeaveOut
from dsec_sandboxd.layers.records import ImportedLayer
from dsec_sandboxd.layers.store import LayerStore
from dsec_sandboxd.snapshot_residue import import_exclusion
from layer_builders import mounted

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers need root")

CUT = LeaveOut(git=GitHistory.CUT)
CLEAN = LeaveOut(paths=import_exclusion((), clean=True), git=GitHistory.CUT)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LayerStore]:
    async with LayerStore(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout one commit behind the fix, with all that a build leaves."""
    root = tmp_path / "tree"
    work = root / "work"
    work.mkdir(parents=True)
    git(work, "init", "-q", "-b", "main")
    (work / "code.py").write_text("broken\n")
    commit(work, "the task")
    (work / "code.py").write_text("FIXED-ON-MAIN\n")
    commit(work, "the fix")
    git(work, "tag", "solved")
    git(work, "repack", "-q", "-a", "-d")
    (work / "code.py").write_text("FIXED-LOOSE\n")
    commit(work, "another fix")
    git(work, "branch", "saved")
    git(work, "reset", "-q", "--hard", "HEAD~2")
    git(work, "config", "remote.origin.url", "https://example.com/where-the-answer-is")
    return root


def git(work: Path, *arguments: str) -> str:
    environment = {
        "PATH": os.defpath,
        "HOME": "/nonexistent",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        **{f"GIT_{who}_{what}": "someone" for who in ("AUTHOR", "COMMITTER") for what in ("NAME",)},
        **{f"GIT_{who}_EMAIL": "a@example.com" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_DATE": "1700000000 +0000" for who in ("AUTHOR", "COMMITTER")},
    }
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def commit(work: Path, text: str) -> None:
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", text)


async def imported(
    store: LayerStore, tree: Path, leaving_out: LeaveOut, version: str = "1"
) -> ImportedLayer:
    return await store.import_layer(
        "default", "w", version, tree, kind=LayerKind.WORKSPACE, leaving_out=leaving_out
    )


async def test_a_cut_repository_has_the_commit_that_is_checked_out_and_nothing_else(
    store: LayerStore, tree: Path, tmp_path: Path
) -> None:
    commit_id = git(tree / "work", "rev-parse", "HEAD")
    outcome = await imported(store, tree, CUT)
    assert outcome.left_out > 0
    with mounted(outcome.layer.image_path, tmp_path / "seen") as seen:
        work = seen / "work"
        assert git(work, "rev-parse", "HEAD") == commit_id
        assert git(work, "branch", "--format=%(refname)") == "refs/heads/main\n"
        assert git(work, "log", "--format=%s", "--all") == "the task\n"
        assert git(work, "show", "HEAD:code.py") == "broken\n"
        assert git(work, "diff", "--stat", "HEAD") == ""
        assert git(work, "remote") == git(work, "tag") == ""
        objects = git(work, "cat-file", "--batch-all-objects", "--batch-check")
        assert len(objects.splitlines()) == 3  # a commit, a tree and a file
        assert git(work, "fsck", "--full") == ""
        assert not (work / ".git/logs").exists()
        assert not (work / ".git/ORIG_HEAD").exists()
        for path in work.rglob("*"):
            assert not path.is_file() or b"FIXED" not in path.read_bytes()


async def test_what_is_cut_does_not_depend_on_what_goes(
    store: LayerStore, tree: Path, tmp_path: Path
) -> None:
    first = await imported(store, tree, CUT)
    work = tree / "work"
    times = [(path, path.stat().st_mtime_ns) for path in (work, work / ".git", work / "code.py")]
    git(work, "update-ref", "-d", "refs/heads/saved")
    git(work, "reflog", "expire", "--expire=now", "--all")
    git(work, "gc", "-q", "--prune=now")
    for path, time in times:
        os.utime(path, ns=(time, time))
    second = await imported(store, tree, CUT, "2")
    assert first.left_out != second.left_out
    assert first.layer.digest == second.layer.digest


async def test_a_dropped_repository_leaves_nothing(
    store: LayerStore, tree: Path, tmp_path: Path
) -> None:
    outcome = await imported(store, tree, LeaveOut(git=GitHistory.DROP))
    with mounted(outcome.layer.image_path, tmp_path / "seen") as seen:
        assert sorted(path.name for path in (seen / "work").iterdir()) == ["code.py"]


async def test_a_hostile_repository_runs_nothing_and_reads_nothing_of_the_node(
    store: LayerStore, tree: Path, tmp_path: Path
) -> None:
    """Hooks, filters, alternates and links in it mean something to git, but not to an import."""
    ran, work = tmp_path / "ran", tree / "work"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    outside = tmp_path / "outside"
    outside.mkdir()
    git(outside, "init", "-q")
    (outside / "secret").write_text("SECRET of the node\n")
    commit(outside, "secret")
    for key in ("core.fsmonitor", "core.sshCommand", "uploadpack.packObjectsHook", "core.pager"):
        git(work, "config", key, str(program))
    git(work, "config", "extensions.partialClone", "origin")
    for hook in ("post-index-change", "reference-transaction", "post-checkout"):
        (work / ".git/hooks").mkdir(exist_ok=True)
        (work / ".git/hooks" / hook).symlink_to(program)
    (work / ".git/objects/info").mkdir(exist_ok=True)
    (work / ".git/objects/info/alternates").write_text(f"{outside}/.git/objects\n")
    (work / ".git/objects/ff").unlink(missing_ok=True)
    secret = git(outside, "rev-parse", "HEAD").strip()
    (work / ".git/refs/heads/main").write_text(f"{secret}\n")
    outcome = await imported(store, tree, CUT)
    assert not ran.exists()
    with mounted(outcome.layer.image_path, tmp_path / "seen") as seen:
        # Its commit is not among its own objects, so it is no repository.
        assert not (seen / "work/.git").exists()


@pytest.mark.parametrize("head", ["ref: refs/heads/../../../x", "ref: /etc/passwd", "", "x" * 99])
async def test_a_repository_that_is_none_is_left_out(
    store: LayerStore, tree: Path, tmp_path: Path, head: str
) -> None:
    (tree / "work/.git/HEAD").write_text(head)
    outcome = await imported(store, tree, CUT)
    with mounted(outcome.layer.image_path, tmp_path / "seen") as seen:
        assert not (seen / "work/.git").exists()
        assert (seen / "work/code.py").exists()


async def test_links_in_place_of_a_repositorys_parts_lead_nowhere(
    store: LayerStore, tree: Path, tmp_path: Path
) -> None:
    work = tree / "work"
    (work / ".git/objects").rename(tmp_path / "objects")
    (work / ".git/objects").symlink_to(tmp_path / "objects")
    outcome = await imported(store, tree, CUT)
    with mounted(outcome.layer.image_path, tmp_path / "seen") as seen:
        assert not (seen / "work/.git").exists()


async def test_clean_leaves_out_what_builds_leave_behind(
    store: LayerStore, tree: Path, tmp_path: Path
) -> None:
    residue = (
        "root/.bash_history",
        "home/dev/.python_history",
        "root/.cache/pip/http/x",
        "home/dev/.npm/_cacache/x",
        "work/pkg/__pycache__/m.pyc",
        "work/.pytest_cache/v/lastfailed",
        "work/code.py~",
        "work/.code.py.swp",
        "work/code.py.orig",
        "work/.coverage",
        "tmp/answer",
    )
    for name in (*residue, "work/pkg/m.py", "root/.profile"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("x")
    outcome = await imported(store, tree, CLEAN)
    assert outcome.left_out > len(residue)
    with mounted(outcome.layer.image_path, tmp_path / "seen") as seen:
        assert [name for name in residue if (seen / name).exists()] == []
        assert (seen / "work/pkg/m.py").exists()
        assert (seen / "root/.profile").exists()
        assert (seen / "work/.git/HEAD").exists()


async def test_patterns_leave_out_more(store: LayerStore, tree: Path, tmp_path: Path) -> None:
    (tree / "work/deep/er").mkdir(parents=True)
    for name in ("a.log", "deep/er/b.log", "deep/keep"):
        (tree / "work" / name).write_text("x")
    (tree / "work/deep/link").symlink_to("/")
    wanted = LeaveOut(paths=import_exclusion(("**/*.log", "/work/deep/link"), clean=False))
    outcome = await imported(store, tree, wanted)
    assert outcome.left_out == 3
    with mounted(outcome.layer.image_path, tmp_path / "seen") as seen:
        names = sorted(path.name for path in (seen / "work").rglob("*") if ".git" not in str(path))
        assert names == ["code.py", "deep", "er", "keep"]


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(DsecError) as caught:
        import_exclusion(("relative",), clean=False)
    assert caught.value.code is ErrorCode.INVALID
