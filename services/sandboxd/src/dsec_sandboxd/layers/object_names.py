"""The versions and tags of one name, as one document. No I/O."""

from __future__ import annotations

import msgspec

from dsec_sandboxd.layers.names import NamedReference, TagReference
from dsec_sandboxd.layers.records import ReferenceRecord, TagRecord


class NamedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a version means, and what its image must be."""

    reference: ReferenceRecord
    size_bytes: int
    entries: int


class NameDocument(msgspec.Struct, frozen=True, kw_only=True):
    """All versions and tags of one name in one project; every change gives another document."""

    versions: dict[str, NamedRecord] = {}
    tags: dict[str, TagRecord] = {}

    def meaning_of(self, wanted: NamedReference | TagReference) -> str | None:
        """Return the version that a reference means, or ``None`` when it means none."""
        if isinstance(wanted, TagReference):
            record = self.tags.get(wanted.tag)
            version = record.version if record else ""
        else:
            version = wanted.version
        return version if version in self.versions else None

    def has(self, wanted: NamedReference | TagReference) -> bool:
        """Tell whether there is such a version, or such a tag."""
        if isinstance(wanted, TagReference):
            return wanted.tag in self.tags
        return wanted.version in self.versions

    def tags_of(self, version: str) -> tuple[str, ...]:
        """Return the tags that mean a version, sorted."""
        return tuple(sorted(tag for tag, record in self.tags.items() if record.version == version))

    def with_version(self, version: str, record: NamedRecord) -> NameDocument:
        """Let a version mean something; what it meant goes into its history."""
        standing = self.versions.get(version)
        reference = record.reference.replacing(standing.reference if standing else None)
        record = msgspec.structs.replace(record, reference=reference)
        return msgspec.structs.replace(self, versions={**self.versions, version: record})

    def with_tag(self, tag: str, version: str, at: float) -> NameDocument:
        """Let a tag mean a version."""
        standing = self.tags.get(tag)
        record = (
            standing.moved(version, at) if standing else TagRecord(version=version, moved_at=at)
        )
        return msgspec.structs.replace(self, tags={**self.tags, tag: record})

    def without_version(self, version: str) -> NameDocument:
        """Forget a version."""
        rest = {key: record for key, record in self.versions.items() if key != version}
        return msgspec.structs.replace(self, versions=rest)

    def without_tag(self, tag: str) -> NameDocument:
        """Forget a tag."""
        rest = {key: record for key, record in self.tags.items() if key != tag}
        return msgspec.structs.replace(self, tags=rest)
