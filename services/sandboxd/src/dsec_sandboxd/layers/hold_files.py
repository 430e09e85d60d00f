"""Which nodes use which images of a shared directory: one file each, good for an hour.

Written and read under the store's lock, so that a garbage collection either sees a hold or has
deleted the image before the hold was there, and then the node's mount says so.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import msgspec

from dsec_sandboxd.layers.records import read_record
from dsec_sandboxd.layers.staging import write_durably

if TYPE_CHECKING:
    from pathlib import Path

#: A node that has been away for so long holds nothing any more.
HOLD_EXPIRES_S: Final = 3600.0


class HoldRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one node uses, until ``expires_at`` (Unix time in seconds)."""

    digests: tuple[str, ...]
    expires_at: float


class HoldFiles:
    """The holds in one directory; every call is made under the store's lock."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, holder: str, digests: Collection[str], now: float, staging: Path) -> None:
        """Replace what ``holder`` holds."""
        path = self._directory / f"{holder}.json"
        if not digests:
            path.unlink(missing_ok=True)
            return
        record = HoldRecord(digests=tuple(sorted(digests)), expires_at=now + HOLD_EXPIRES_S)
        write_durably(path, msgspec.json.encode(record), staging)

    def held(self, now: float) -> set[str]:
        """Return the digests that any node holds; forget the holds that have expired.

        Raises:
            DsecError: ``layer_error`` when a hold is damaged: nobody knows what it protects.
        """
        found: set[str] = set()
        for path in self._directory.glob("*.json"):
            record = read_record(path, HoldRecord)
            if record is None:
                continue
            if record.expires_at < now:
                path.unlink(missing_ok=True)
                continue
            found.update(record.digests)
        return found
