"""Ids made of what they stand for: spread evenly, and the same for the same."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache

from dsec_common.subjects import ScopedId


def rollout_id_of(project: str, key: str, shards: int) -> ScopedId:
    """Return the rollout id of an idempotency key."""
    return _scoped(f"{project}\0{key}", shards)


def task_id_of(project: str, group: str, index: int, shards: int) -> ScopedId:
    """Return the rollout id of a group's task."""
    return _scoped(_task(project, group, index), shards)


def task_local(project: str, group: str, index: int) -> str:
    """Return the same within its shard."""
    return _local(_task(project, group, index))


def group_id_of(project: str, group: str, shards: int) -> ScopedId:
    """Return what stands for a group, in the shard that numbers its trainers."""
    return _scoped(_group(project, group), shards)


@lru_cache(maxsize=1024)
def group_local(project: str, group: str) -> str:
    """Return the same within any shard."""
    return _local(_group(project, group))


# No project is empty, so that nothing here is the same as an idempotency key's.


def _group(project: str, group: str) -> str:
    return f"\0{project}\0{group}"


def _task(project: str, group: str, index: int) -> str:
    return f"\0{project}\0{group}\0{index}"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=20).digest()


def _local(text: str) -> str:
    return base64.b32encode(_digest(text)[:15]).decode("ascii").lower()


def _scoped(text: str, shards: int) -> ScopedId:
    number = int.from_bytes(_digest(text)[15:], "big")
    return ScopedId(f"s{number % shards}", _local(text))


def branch_local(rollout_id: str, number: int, index: int) -> str:
    """Return what stands for a branch within its rollout's shard: another for each action."""
    return _local(f"\0\0{rollout_id}\0{number}\0{index}")
