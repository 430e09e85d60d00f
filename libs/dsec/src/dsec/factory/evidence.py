"""What betrays a solution or a hidden test: its text, its functions, its lines, and canaries.

All is compared as :func:`dsec.factory.views.plain` leaves it, so that neither case nor space nor
quotes hide anything.
"""

from __future__ import annotations

import ast
import os
import re
import stat as stat_bits
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from dsec.factory.views import plain
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found

#: Bytes, as :func:`plain` leaves them. Shorter ones stand in other files, too.
BLOCK_BYTES_MIN: Final = 16
LINE_BYTES_MIN: Final = 16
CANARY_BYTES_MIN: Final = 8
#: So many lines of one file in one file of the environment betray it, or all if it has fewer.
LINES_BETRAY: Final = 3
#: The most pieces of each kind that are looked for; the longest are taken.
PIECES_MAX: Final = 400
SECRET_BYTES_MAX: Final = 16 << 20
_BLOCK_GAP: Final = re.compile(rb"\n\s*\n")
_HEAD_BYTES: Final = 64
_COMMENT_MARKS: Final = b"#/*;%!-<>"


class NoSecret(DsecError):  # noqa: N818  what is looked for is at fault
    """A file of solution or tests that is known already.

    Args:
        secret: the file.
    """

    def __init__(self, secret: Secret) -> None:
        super().__init__(
            ErrorCode.INVALID,
            f"every line of {secret.path} of the {secret.what} stands at its place in the base, "
            "the files or the environment, or is public",
            details={"path": secret.path},
        )
        self.secret = secret


class Secret(msgspec.Struct, frozen=True):
    """One file that no environment may hold, and its pieces, as ``plain`` leaves them.

    Attributes:
        what: ``solution`` or ``tests``.
        path: where it is laid when it is used, from the root: ``/app/sum.py``.
        whole: all of it.
        blocks: its functions, classes and paragraphs; the name of each by its text.
        lines: those long enough to say something.
        every_line: all that are not empty, without marks of comments.
    """

    what: str
    path: str
    whole: bytes
    blocks: dict[bytes, str]
    lines: tuple[bytes, ...]
    every_line: frozenset[bytes] = frozenset()

    @property
    def lines_betray(self) -> int:
        """How many of its lines in one file are too many."""
        return min(LINES_BETRAY, len(self.lines))


class Evidence(msgspec.Struct, frozen=True):
    """What is looked for.

    Attributes:
        secrets: files.
        canaries: texts that stand nowhere else; each as it was given, by its plain form.
    """

    secrets: tuple[Secret, ...] = ()
    canaries: dict[bytes, str] = {}

    @property
    def ascii(self) -> bool:
        """Whether all of it is ASCII, so that UTF-16 needs no decoding."""
        texts = [*self.canaries, *(secret.whole for secret in self.secrets)]
        return all(text.isascii() for text in texts)

    def without(self, known: Mapping[str, bytes], public: Iterable[bytes] = ()) -> Evidence:
        """Return what is left when some is no secret.

        An answer that changes three lines of a file shares the others with what was there before:
        its functions and lines are no secret then, the file as a whole still is.

        Args:
            known: what lies at a secret file's own path before anything is built, by the path.
            public: texts that anybody may know.

        Raises:
            NoSecret: for a file of which every line is known, if only as a comment.
            DsecError: ``invalid`` for a file of which the rest could not be found again.
        """
        shown = b"\n".join(public)
        return msgspec.structs.replace(
            self,
            secrets=tuple(
                self._less(secret, shown + b"\n" + known.get(secret.path, b""))
                for secret in self.secrets
            ),
        )

    def _less(self, secret: Secret, shown: bytes) -> Secret:
        open_text = plain(shown)
        if secret.every_line and secret.every_line <= _bare_lines(shown):
            raise NoSecret(secret)
        blocks = {text: name for text, name in secret.blocks.items() if text not in open_text}
        lines = tuple(line for line in secret.lines if line not in open_text)
        canary = any(canary in secret.whole for canary in self.canaries)
        if canary or not open_text:
            return msgspec.structs.replace(secret, blocks=blocks, lines=lines)
        if not blocks and not lines:
            raise invalid(
                f"what {secret.path} of the {secret.what} has beside what is known is too short to "
                "be found again: write a canary into it and name that among the canaries"
            )
        return msgspec.structs.replace(secret, blocks=blocks, lines=lines)


def read_secrets(what: str, root: Path) -> tuple[Secret, ...]:
    """Return the files below a directory that is laid over the root of an environment.

    A file instead of a directory is taken as one that is laid at the root; links are passed over.

    Raises:
        DsecError: ``not_found``; ``invalid`` for more than 16 MiB.
    """
    if not root.exists():
        raise not_found(f"there is no {what} at {root}")
    files = [root] if root.is_file() else sorted(_files_below(root))
    size = sum(path.stat().st_size for path in files)
    if size > SECRET_BYTES_MAX:
        raise invalid(f"the {what} at {root} has {size} bytes; {SECRET_BYTES_MAX} are the most")
    top = root.parent if root.is_file() else root
    return tuple(
        secret_of(what, f"/{path.relative_to(top).as_posix()}", path.read_bytes()) for path in files
    )


def _files_below(root: Path) -> list[Path]:
    found = []
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            if stat_bits.S_ISREG(path.lstat().st_mode):
                found.append(path)
    return found


def secret_of(what: str, path: str, data: bytes) -> Secret:
    """Return a file's pieces."""
    lines = {plain(line) for line in data.splitlines()}
    long_lines = sorted((line for line in lines if len(line) >= LINE_BYTES_MIN), key=_rank)
    named = [*_functions(data, path), *_paragraphs(data)]
    blocks: dict[bytes, str] = {}
    for text, name in sorted(named, key=lambda one: _rank(one[0])):
        if len(text) >= BLOCK_BYTES_MIN and len(blocks) < PIECES_MAX:
            blocks.setdefault(text, name)
    return Secret(
        what=what,
        path=path,
        whole=plain(data),
        blocks=blocks,
        lines=tuple(long_lines[:PIECES_MAX]),
        every_line=_bare_lines(data),
    )


def _bare_lines(data: bytes) -> frozenset[bytes]:
    return frozenset({plain(line).lstrip(_COMMENT_MARKS) for line in data.splitlines()} - {b""})


def _rank(text: bytes) -> tuple[int, bytes]:
    return -len(text), text


def _functions(data: bytes, path: str) -> list[tuple[bytes, str]]:
    """Return the functions of a Python file, and what is in them: a copy may bear another name."""
    if not path.endswith(".py"):
        return []
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = data.splitlines()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"the function {node.name}"
            whole = b"\n".join(lines[node.lineno - 1 : node.end_lineno])
            body = b"\n".join(lines[node.body[0].lineno - 1 : node.end_lineno])
            found.append((plain(whole), name))
            if node.body[0].lineno > node.lineno and len(node.body) > 1:
                found.append((plain(body), f"what is in {name}"))
    return found


def _paragraphs(data: bytes) -> list[tuple[bytes, str]]:
    """Return what stands between empty lines, in any language; a line alone is a line."""
    return [
        (
            plain(part),
            f"the part that begins {part.strip()[:_HEAD_BYTES].decode(errors='replace')!r}",
        )
        for part in _BLOCK_GAP.split(data)
        if part.strip().count(b"\n")
    ]


def evidence_of(secrets: Iterable[Secret], canaries: Iterable[str] = ()) -> Evidence:
    """Return what to look for.

    Raises:
        DsecError: ``invalid`` for a canary that is too short to say anything, and for a file a
            solution or tests of which nothing can be found again: give them a canary.
    """
    known: dict[bytes, str] = {}
    for canary in canaries:
        text = plain(canary.encode())
        if len(text) < CANARY_BYTES_MIN:
            raise invalid(
                f"the canary {canary!r} is too short to be told from other text; give it at least "
                f"{CANARY_BYTES_MIN} letters besides spaces and quotes"
            )
        known[text] = canary
    some = tuple(secret for secret in secrets if secret.whole)
    for what in dict.fromkeys(secret.what for secret in some):
        alike = [secret for secret in some if secret.what == what]
        if not any(_can_be_found(secret, known) for secret in alike):
            raise invalid(
                f"{alike[0].path} of the {what} is too short to be found again: write a canary, a "
                "text that stands nowhere else, into it and name it among the canaries"
            )
    return Evidence(secrets=some, canaries=known)


def _can_be_found(secret: Secret, canaries: Iterable[bytes]) -> bool:
    if secret.blocks or secret.lines or len(secret.whole) >= BLOCK_BYTES_MIN:
        return True
    return any(canary in secret.whole for canary in canaries)
