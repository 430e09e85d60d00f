"""A git repository cut to the commit that is checked out: no history, nothing unreachable.

The repository is not trusted. git never runs on it: a new one is made with a configuration of our
own, into which only object files go, by their names and as regular files, and what ``HEAD`` means
is read here. So neither hooks nor configuration nor alternates nor links of the old one have a say.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_common.errors import DsecError, ErrorCode

_OBJECT: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_LOOSE: Final = re.compile(r"[0-9a-f]{38}(?:[0-9a-f]{24})?")
_PACK: Final = re.compile(r"pack-[0-9a-f]{40,64}\.(?:pack|idx)")
_BRANCH: Final = re.compile(r"refs/heads/[A-Za-z0-9][A-Za-z0-9._/+-]{0,200}")
_TEXT_MAX_BYTES: Final = 16 << 20
_TIMEOUT_S: Final = 300.0
_MEMORY_BYTES: Final = 4 << 30
_NO_FOLLOW: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_SHA256_CHARACTERS: Final = 64


@dataclass(frozen=True, slots=True)
class Head:
    """What is checked out: a commit, and the branch that it is on, or an empty text."""

    commit: str
    branch: str


def read_head(repository: Path) -> Head | None:
    """Return what a repository has checked out; ``None`` when that cannot be told."""
    text = _read(repository, "HEAD")
    if text is None:
        return None
    if _OBJECT.fullmatch(text.strip()):
        return Head(text.strip(), "")
    branch = text.strip().removeprefix("ref: ")
    if not _BRANCH.fullmatch(branch) or ".." in branch or branch.endswith((".lock", "/", ".")):
        return None
    commit = (_read(repository, branch) or "").strip()
    if not commit:
        for line in (_read(repository, "packed-refs") or "").splitlines():
            value, _, name = line.partition(" ")
            if name == branch:
                commit = value
    return Head(commit, branch) if _OBJECT.fullmatch(commit) else None


def cut(repository: Path, target: Path) -> bool:
    """Make ``target`` a repository of the commit that ``repository`` has checked out, alone.

    Its index is that of the commit. The same commit gives the same files, whatever was there
    beside it. Blocking.

    Returns:
        False when the repository has no commit that can be read; then ``target`` is of no use.

    Raises:
        DsecError: ``unsupported`` when this host has no git; ``exhausted`` or ``layer_error`` when
            it fails.
    """
    program = shutil.which("git")
    if program is None:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            "this node has no git, which cuts a repository to one commit: install it, or leave "
            "repositories out (git=drop)",
            details={"what": "git"},
        )
    head = read_head(repository)
    if head is None:
        return False
    hashes = "sha256" if len(head.commit) == _SHA256_CHARACTERS else "sha1"
    git = _Git(program, target)
    git.run("init", "-q", "--template=", f"--object-format={hashes}")
    _take_objects(repository, target)
    # A commit that is named here has no parents, as far as git is concerned.
    (target / "shallow").write_text(f"{head.commit}\n")
    if not git.succeeds("cat-file", "-e", f"{head.commit}^{{tree}}"):
        return False
    if head.branch:
        reference = target / head.branch
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(f"{head.commit}\n")
        (target / "HEAD").write_text(f"ref: {head.branch}\n")
    else:
        (target / "HEAD").write_text(f"{head.commit}\n")
    git.run("read-tree", "HEAD")
    # Made anew, so that no pack tells what else there was.
    git.run("-c", "pack.threads=1", "repack", "-q", "-a", "-d", "-f")
    git.run("prune", "--expire=now")
    git.run("config", "core.bare", "false")
    shutil.rmtree(target / "logs", ignore_errors=True)
    return True


class _Git:
    def __init__(self, program: str, directory: Path) -> None:
        self._program = program
        self._environment = {
            "PATH": os.defpath,
            "LC_ALL": "C",
            "HOME": "/nonexistent",
            "GIT_DIR": str(directory),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
        }

    def succeeds(self, *arguments: str) -> bool:
        return self._run(*arguments).returncode == 0

    def run(self, *arguments: str) -> None:
        done = self._run(*arguments)
        if done.returncode == 0:
            return
        text = done.stderr.decode(errors="replace").strip()
        code = ErrorCode.EXHAUSTED if "No space left" in text else ErrorCode.LAYER_ERROR
        last = text.splitlines()[-1][:200] if text else "no output"
        raise DsecError(
            code, f"a git repository could not be cut to its commit: {last!r}; nothing was imported"
        )

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [self._program, *arguments]
        with subprocess.Popen(
            command,
            env=self._environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            # What it reads is not trusted, so it may not take the node's memory.
            with suppress(ProcessLookupError):
                limit = (_MEMORY_BYTES, _MEMORY_BYTES)
                resource.prlimit(process.pid, resource.RLIMIT_AS, limit)
            try:
                _, said = process.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            else:
                return subprocess.CompletedProcess(command, process.returncode, b"", said)
        raise DsecError(
            ErrorCode.LAYER_ERROR,
            f"cutting a git repository took longer than {_TIMEOUT_S:g} s; nothing was imported. "
            "Leave repositories out (git=drop)",
        )


def _read(repository: Path, name: str) -> str | None:
    """Return a text file of a repository, through no link."""
    directory = os.open(repository, _NO_FOLLOW | os.O_DIRECTORY)
    try:
        *parents, last = name.split("/")
        for parent in parents:
            inside = os.open(parent, _NO_FOLLOW | os.O_DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inside
        descriptor = os.open(last, _NO_FOLLOW | os.O_NONBLOCK, dir_fd=directory)
        with os.fdopen(descriptor, "rb") as file:
            if not file.seekable():
                return None
            return file.read(_TEXT_MAX_BYTES).decode(errors="replace")
    except OSError:
        return None
    finally:
        os.close(directory)


def _take_objects(repository: Path, target: Path) -> None:
    """Give ``target`` the object files of a repository: second names of the same files."""
    objects = repository / "objects"
    if objects.is_symlink() or not objects.is_dir():
        return
    for directory in sorted(objects.iterdir()):
        if directory.is_symlink() or not directory.is_dir():
            continue
        wanted = _PACK if directory.name == "pack" else _LOOSE
        if wanted is _LOOSE and not re.fullmatch(r"[0-9a-f]{2}", directory.name):
            continue
        for file in sorted(directory.iterdir()):
            if wanted.fullmatch(file.name) and not file.is_symlink() and file.is_file():
                into = target / "objects" / directory.name
                into.mkdir(exist_ok=True)
                os.link(file, into / file.name, follow_symlinks=False)
