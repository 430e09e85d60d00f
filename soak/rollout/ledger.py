"""What trainers decide: written and synced before the answer is given, one file for each trainer.

A trainer that was killed is followed by one that reads these files and answers a step that comes
again as it was decided. So it is idempotent by rollout and number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Self, TypeAlias

import msgspec

Key: TypeAlias = tuple[str, int]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a step is answered with. Rewards are whole quarters, so that sums are exact."""

    payload: dict[str, str]
    reward: float
    done: bool


class Began(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer took the group over, with this number."""

    fence: int


class Came(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step came, with what the agent reported."""

    rollout: str
    seq: int
    digest: str


class Decided(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the step is answered with from now on."""

    rollout: str
    seq: int
    answer: Answer


class Confirmed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The platform said that the answer is durable."""

    rollout: str
    seq: int
    answer: Answer


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The platform refused the answer for a reason other than a newer trainer."""

    rollout: str
    seq: int
    why: str


Entry: TypeAlias = Began | Came | Decided | Confirmed | Refused
_DECODER: Final[msgspec.json.Decoder[Entry]] = msgspec.json.Decoder(Entry)


class Ledger:
    """The ledger of one trainer, and what those before it decided."""

    def __init__(self, descriptor: int, decisions: dict[Key, Answer]) -> None:
        self._descriptor = descriptor
        self._waiting: list[Entry] = []
        self.decisions = decisions

    @classmethod
    def open(cls, directory: Path, number: int) -> Self:
        """Open that of trainer ``number``; no trainer has it twice."""
        decisions = {
            (entry.rollout, entry.seq): entry.answer
            for entries in read_all(directory)
            for entry in entries
            if isinstance(entry, Decided)
        }
        path = directory / f"ledger-{number:06}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        return cls(os.open(path, flags, 0o644), decisions)

    def add(self, *entries: Entry) -> None:
        """Take entries; :meth:`sync` makes them durable."""
        self._waiting += entries

    def sync(self) -> None:
        """Return when all that was taken is on the disk."""
        body = b"".join(msgspec.json.encode(entry) + b"\n" for entry in self._waiting)
        self._waiting.clear()
        while body:
            body = body[os.write(self._descriptor, body) :]
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Make what was taken durable, and let go of the file."""
        self.sync()
        os.close(self._descriptor)


def read_all(directory: Path) -> Iterator[list[Entry]]:
    """Yield what each trainer wrote."""
    for path in sorted(directory.glob("ledger-*")):
        yield list(_entries(path.read_bytes().splitlines(keepends=True)))


def _entries(lines: Iterable[bytes]) -> Iterator[Entry]:
    # Whoever was killed while it wrote left a line without an end.
    for line in lines:
        if line.endswith(b"\n"):
            yield _DECODER.decode(line)
