"""Tags of a store directory: ``tags/<project>/<name>:<tag>`` says which version is meant."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from dsec_sandboxd.layers.names import TagReference
from dsec_sandboxd.layers.records import TagRecord, read_record
from dsec_sandboxd.layers.staging import sync_directory, write_durably

if TYPE_CHECKING:
    from pathlib import Path


class TagFiles:
    """The tags in one directory; changes are made under the store's lock."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, project: str, tag: TagReference) -> TagRecord | None:
        """Return what a tag means.

        Raises:
            DsecError: ``layer_error`` when the record is damaged.
        """
        return read_record(self._directory / project / str(tag), TagRecord)

    def move(self, project: str, tag: TagReference, version: str, at: float, staging: Path) -> None:
        """Let a tag mean ``version``."""
        path = self._directory / project / str(tag)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        sync_directory(self._directory)
        standing = self.read(project, tag)
        record = (
            standing.moved(version, at) if standing else TagRecord(version=version, moved_at=at)
        )
        write_durably(path, msgspec.json.encode(record), staging)

    def remove(self, project: str, tag: TagReference) -> bool:
        """Remove a tag; tell whether it was there."""
        path = self._directory / project / str(tag)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        sync_directory(path.parent)
        return True

    def by_version(self, project: str, name: str = "") -> dict[tuple[str, str], tuple[str, ...]]:
        """Return the tags of each ``(name, version)`` that has some; of one name only, if given."""
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        directory = self._directory / project
        for path in sorted(directory.glob(f"{name}:*" if name else "*")):
            tagged, _, tag = path.name.partition(":")
            record = read_record(path, TagRecord)
            if record is not None:
                found[tagged, record.version].append(tag)
        return {key: tuple(tags) for key, tags in found.items()}
