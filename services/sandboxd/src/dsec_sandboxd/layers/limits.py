"""What one import may cost, and how a running import is watched and stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dsec_common.errors import DsecError, ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportLimits:
    """Bounds on what an import reads, writes and names.

    Attributes:
        bytes_max: file content that is written, duplicates included, holes counted as zeros.
        entries_max: files, directories and links, duplicates included.
        name_bytes_max: length of one path component; Linux allows 255.
        path_bytes_max: length of a whole path; below ``PATH_MAX`` by room for the staging folder.
        depth_max: components of a path.
        link_bytes_max: length of a symbolic link's target.
        header_bytes_max: extended headers of one archive member, which are held in memory.
        document_bytes_max: one JSON document of an image, which is held in memory.
    """

    bytes_max: int = 32 << 30
    entries_max: int = 2_000_000
    name_bytes_max: int = 255
    path_bytes_max: int = 3000
    depth_max: int = 128
    link_bytes_max: int = 4095
    header_bytes_max: int = 1 << 20
    document_bytes_max: int = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportProgress:
    """How far an import is.

    Attributes:
        stage: ``read`` (the source), ``build`` (the image), ``hash`` (its digest), ``publish``.
        done_bytes: what the stage has handled so far.
        total_bytes: what it will have handled at its end, or 0 when that is not known.
    """

    stage: str
    done_bytes: int
    total_bytes: int


@dataclass(slots=True)
class ImportWatch:
    """Carries progress out of an import's thread, and a cancellation into it."""

    report: Callable[[ImportProgress], None] = lambda _progress: None
    step_bytes: int = 4 << 20
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _stage: str = ""
    _reported_bytes: int = 0

    def cancel(self) -> None:
        """Make the next :meth:`advance` in the import's thread raise. Any thread may call it."""
        self._cancelled.set()

    def advance(self, stage: str, done_bytes: int, total_bytes: int = 0) -> None:
        """Report progress, at most once per ``step_bytes`` within a stage.

        Raises:
            DsecError: ``expired`` when the import has been cancelled.
        """
        if self._cancelled.is_set():
            raise DsecError(
                ErrorCode.EXPIRED, "the layer import was cancelled; nothing was changed"
            )
        if stage != self._stage or done_bytes - self._reported_bytes >= self.step_bytes:
            self._stage, self._reported_bytes = stage, done_bytes
            self.report(ImportProgress(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes))
