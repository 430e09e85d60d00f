"""What of imported content does not become part of a layer: residue, patterns, git's history.

Whoever trains on a task must not find its answer in what the task was built with. So an import can
leave out what builds leave behind, and cut a git repository to the commit that is checked out: its
history holds the fix, and so do objects that no branch names.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec_common.wire.layer import GitHistory
from dsec_sandboxd.layers.git_cut import cut
from dsec_sandboxd.layers.tree import Attributes, Parts, TreeWriter

if TYPE_CHECKING:
    from dsec_sandboxd.layers.limits import ImportWatch
    from dsec_sandboxd.snapshot_residue import Exclusion

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES: Final = 1 << 20
_GIT: Final = ".git"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOut:
    """What one import leaves out.

    Attributes:
        paths: patterns, residue among them; ``None`` leaves out none.
        git: what becomes of repositories.
    """

    paths: Exclusion | None = None
    git: GitHistory = GitHistory.KEEP

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return self.paths is not None or self.git is not GitHistory.KEEP


def leave_out(
    root: Path, tree: TreeWriter, wanted: LeaveOut, scratch: Path, watch: ImportWatch
) -> int:
    """Remove from a tree that is written but not finished; return how many entries went.

    Args:
        root: where the tree is; nobody else writes there.
        tree: its writer.
        wanted: what to leave out.
        scratch: a private directory on the same file system.
        watch: stops it.

    Raises:
        DsecError: as :func:`dsec_sandboxd.layers.git_cut.cut`.
    """
    return _LeavingOut(root, tree, wanted, scratch, watch).directory(())


@dataclass(slots=True)
class _LeavingOut:
    root: Path
    tree: TreeWriter
    wanted: LeaveOut
    scratch: Path
    watch: ImportWatch

    def directory(self, parts: Parts) -> int:
        with _opened(self.root, parts) as descriptor, os.scandir(descriptor) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        self.watch.advance("read", self.tree.written_bytes)
        gone = 0
        for name, is_directory in found:
            here = (*parts, name)
            if self.wanted.paths is not None and self.wanted.paths.matches(here):
                gone += self._remove(here)
            elif name == _GIT and self.wanted.git is not GitHistory.KEEP:
                gone += self._repository(here, is_directory=is_directory)
            elif is_directory:
                gone += self.directory(here)
        return gone

    def _remove(self, parts: Parts) -> int:
        count = 1
        try:
            with _opened(self.root, parts) as descriptor:
                for _, directories, files, _ in os.fwalk(".", dir_fd=descriptor):
                    count += len(directories) + len(files)
        except NotADirectoryError:
            pass
        except OSError as error:
            if not self.root.joinpath(*parts).is_symlink():
                raise error from None
        self.tree.remove(parts)
        return count

    def _repository(self, parts: Parts, *, is_directory: bool) -> int:
        """Cut or drop what is called .git. A file of that name leads to a repository elsewhere."""
        if self.wanted.git is GitHistory.DROP or not is_directory:
            return self._remove(parts)
        attributes = self.tree.attributes_of(parts)
        target = self.scratch / "git"
        try:
            usable = cut(self.root.joinpath(*parts), target)
            gone = self._remove(parts)
            return gone - self._add(target, parts, attributes) if usable else gone
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def _add(self, source: Path, parts: Parts, like: Attributes) -> int:
        """Bring in a repository of ours, with the owner and time that the old one had."""
        count = 0
        for directory, directories, files in os.walk(source):
            directories.sort()
            at = Path(directory)
            here = (*parts, *at.relative_to(source).parts)
            self.tree.add_directory(here, like)
            count += 1
            for name in sorted(files):
                self.tree.add_file((*here, name), _file_like(like, at / name), _chunks(at / name))
                count += 1
        return count


def _file_like(like: Attributes, path: Path) -> Attributes:
    mode = stat.S_IMODE(path.stat().st_mode) & 0o444 | (0o200 if path.parent.name != "pack" else 0)
    return Attributes(mode=mode | 0o400, uid=like.uid, gid=like.gid, mtime_ns=like.mtime_ns)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


@contextmanager
def _opened(root: Path, parts: Parts) -> Iterator[int]:
    descriptor = os.open(root.joinpath(*parts), _DIRECTORY_FLAGS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
