"""A shard's journal in memory, and what a node says that it kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsec_chronus.records import Frame, Taken
from dsec_common.wire.sandbox import CreateSandbox


@dataclass
class JournalOfTest:
    """What a JetStream subject does: sequences that only grow, and a purge from below."""

    frames: dict[int, Frame] = field(default_factory=dict)
    last: int = 0

    def append(self, frame: Frame) -> int:
        """Add a frame; return its sequence."""
        self.last += 1
        self.frames[self.last] = frame
        return self.last

    def purge(self, before: int) -> None:
        """Drop the frames before a sequence."""
        self.frames = {at: frame for at, frame in self.frames.items() if at >= before}


def taken(snapshot_id: str, *, durable: bool = False) -> Taken:
    """Return what a node kept."""
    return Taken(
        snapshot_id=snapshot_id,
        layers=("base@1",),
        template=CreateSandbox(base="", message_id="m", sent_at=0.0),
        layer="checkpoint@1" if durable else "",
    )
