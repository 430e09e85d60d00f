"""Sandboxes that are over: their records, until they are old or too many. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dsec_sandboxd.records import SandboxRecord


class EndedRecords(Mapping[str, SandboxRecord]):
    """Records by local id, in the order in which their sandboxes ended.

    Args:
        kept_s: how long one stays.
        kept_max: how many stay, the newest.
    """

    def __init__(self, kept_s: float, kept_max: int) -> None:
        self._kept_s = kept_s
        self._kept_max = kept_max
        self._records: dict[str, SandboxRecord] = {}
        self._since_s: dict[str, float] = {}

    def __getitem__(self, local: str) -> SandboxRecord:
        return self._records[local]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: SandboxRecord, now_s: float) -> list[str]:
        """Keep a record; return the local ids of those that are dropped for it."""
        self._records[record.local] = record
        self._since_s[record.local] = now_s
        excess = len(self._records) - self._kept_max
        return self._drop([local for local, _ in zip(self._records, range(excess), strict=False)])

    def drop_old(self, now_s: float) -> list[str]:
        """Drop what has been kept for long enough; return the local ids."""
        old: list[str] = []
        for local, since_s in self._since_s.items():
            if since_s > now_s - self._kept_s:
                break
            old.append(local)
        return self._drop(old)

    def _drop(self, names: Iterable[str]) -> list[str]:
        dropped = list(names)
        for local in dropped:
            del self._records[local], self._since_s[local]
        return dropped
