"""Looking through an environment's files for what betrays its task, and for what a build leaves.

The files are looked at here, by who builds environments: no program of a sandbox has a say.
"""

from __future__ import annotations

import hashlib
import os
import stat as stat_bits
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from dsec.factory.credentials import credentials_in
from dsec.factory.evidence import BLOCK_BYTES_MIN, Evidence, Secret
from dsec.factory.patterns import matcher
from dsec.factory.views import Bounds, View, plain, views

FINDINGS_MAX: Final = 100
"""The most that are told of one environment."""

#: Of Linux: a longer path names nothing.
_PATH_BYTES_MAX: Final = 4095


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Why an environment is refused.

    Attributes:
        path: of the file in it, from the root; bytes that are no UTF-8 in hexadecimal.
        kind: ``canary``, ``solution``, ``tests``, ``credential``, ``residue`` or ``unreadable``.
        reason: what was found, in words.
        inside: the way into the file, outermost first: ``gzip``, ``tar:notes.txt``.
    """

    path: str
    kind: str
    reason: str
    inside: tuple[str, ...] = ()

    def __str__(self) -> str:
        way = f" ({', in '.join(reversed(self.inside))})" if self.inside else ""
        return f"{self.path}{way}: {self.reason}"


class _Search:
    """One look through a tree."""

    def __init__(self, evidence: Evidence, bounds: Bounds) -> None:
        self._evidence = evidence
        self._bounds = bounds
        self._seen: set[bytes] = set()
        self._whole: set[bytes] = set()
        self._scattered: dict[int, dict[bytes, str]] = {}

    def file(self, path: str, read: Callable[[], bytes], size: int) -> Iterator[Finding]:
        if size > self._bounds.file_bytes:
            yield Finding(
                path=path,
                kind="unreadable",
                reason=f"it has {size} bytes; {self._bounds.file_bytes} are the most looked at",
            )
            return
        data = read()
        whole = hashlib.sha256(data).digest()
        if whole in self._whole:
            return  # the same file under another name
        self._whole.add(whole)
        told: set[tuple[str, str]] = set()
        for view in views(data, self._bounds, wide=not self._evidence.ascii):
            for finding in self._new_view(path, view):
                if (finding.kind, finding.reason) not in told:
                    told.add((finding.kind, finding.reason))
                    yield finding

    def _new_view(self, path: str, view: View) -> Iterator[Finding]:
        digest = hashlib.sha256(view.data).digest()
        if view.problem:
            yield Finding(path=path, kind="unreadable", reason=view.problem, inside=view.how)
        elif digest not in self._seen:
            self._seen.add(digest)
            yield from self._view(path, view)

    def text(self, path: str, text: bytes, where: str) -> Iterator[Finding]:
        """Look through a name, or where a link leads."""
        for canary, given in self._evidence.canaries.items():
            if canary in plain(text):
                yield Finding(
                    path=path, kind="canary", reason=f"{where} holds the canary {given!r}"
                )

    def _view(self, path: str, view: View) -> Iterator[Finding]:
        text = plain(view.data)
        for canary, given in self._evidence.canaries.items():
            if canary in text:
                reason = f"it holds the canary {given!r}"
                yield Finding(path=path, kind="canary", reason=reason, inside=view.how)
        for number, secret in enumerate(self._evidence.secrets):
            if reason := self._betrays(text, path, number, secret):
                yield Finding(path=path, kind=secret.what, reason=reason, inside=view.how)
        for name in credentials_in(view.data):
            reason = f"it holds {name}"
            yield Finding(path=path, kind="credential", reason=reason, inside=view.how)

    def _betrays(self, text: bytes, path: str, number: int, secret: Secret) -> str:
        """Return why a text betrays a file; empty when it does not."""
        of = f"{secret.path} of the {secret.what}"
        if secret.whole in text and len(secret.whole) >= BLOCK_BYTES_MIN:
            return f"it holds all of {of}"
        for block, name in secret.blocks.items():
            if block in text:
                return f"it holds {name} of {of}"
        found = [line for line in secret.lines if line in text]
        if found and len(found) >= secret.lines_betray:
            return f"it holds {len(found)} lines of {of}, such as {_shown(found[0])}"
        for line in found:
            self._scattered.setdefault(number, {}).setdefault(line, path)
        return ""

    def scattered(self) -> Iterator[Finding]:
        """Tell of files whose lines are spread over many: no one holds enough to betray."""
        for number, lines in self._scattered.items():
            secret = self._evidence.secrets[number]
            if len(lines) * 2 > len(secret.lines) and len(lines) >= secret.lines_betray:
                paths = sorted(set(lines.values()))
                yield Finding(
                    path=paths[0],
                    kind=secret.what,
                    reason=f"{len(paths)} files together hold {len(lines)} of the "
                    f"{len(secret.lines)} lines of {secret.path} of the {secret.what}: "
                    + ", ".join(paths[:5]),
                )


def _shown(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace"))


def look_through(
    root: Path,
    evidence: Evidence,
    *,
    residue: tuple[str, ...] = (),
    allow: tuple[str, ...] = (),
    bounds: Bounds | None = None,
) -> list[Finding]:
    """Return why the tree below a directory may be no environment; an empty list when it may.

    Nothing in it is run, no link is followed, and of no file more than the bounds is unfolded.

    Args:
        root: a directory whose files are an environment's, from its root.
        evidence: what must not be there.
        residue: patterns of paths that must not be there either.
        allow: patterns of paths that are not looked into, because somebody has.
        bounds: how far files are followed into archives and encodings.

    Raises:
        DsecError: ``invalid`` for a pattern that is none.
        OSError: when a file cannot be read.
    """
    search = _Search(evidence, bounds or Bounds())
    left, passed = matcher(residue), matcher(allow)
    findings: list[Finding] = []
    for place, entry in _entries(root):
        if passed(place):
            continue
        name = os.fsencode(place)
        path = name.decode(errors="backslashreplace")
        if left(place):
            findings.append(
                Finding(path=path, kind="residue", reason="builds leave it, environments do not")
            )
        findings += search.text(path, name, "its name")
        if _is_too_long(entry.path):
            reason = f"its path is too long; {_PATH_BYTES_MAX - len(str(root))} bytes are the most"
            findings.append(Finding(path=path, kind="unreadable", reason=reason))
            continue
        status = entry.stat(follow_symlinks=False)
        if stat_bits.S_ISLNK(status.st_mode):
            target = os.fsencode(Path(entry.path).readlink())
            findings += search.text(path, target, "where it leads")
        elif stat_bits.S_ISREG(status.st_mode):
            findings += search.file(path, Path(entry.path).read_bytes, status.st_size)
        if len(findings) > FINDINGS_MAX:
            break
    findings += search.scattered()
    return findings[:FINDINGS_MAX]


def _entries(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield all that is below, in the order of names, as far as paths lead."""
    waiting = [("", str(root))]
    while waiting:
        above, directory = waiting.pop()
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            yield f"{above}/{entry.name}", entry
        waiting += [
            (f"{above}/{entry.name}", entry.path)
            for entry in reversed(found)
            if entry.is_dir(follow_symlinks=False) and not _is_too_long(entry.path)
        ]


def _is_too_long(path: str) -> bool:
    return len(os.fsencode(path)) > _PATH_BYTES_MAX
