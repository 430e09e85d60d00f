"""Key prefixes that spread hot keys: a contract's ``state_key_prefix``.

A prefix such as ``{agent_type}_{shard_id}`` begins the keys of an agent's state. The shard is
computed from the rest of the key, so that keys which would be hot together are apart, and whoever
knows the key knows the shard.
"""

from __future__ import annotations

import string
import zlib
from typing import Final

from dsec_common.errors import invalid

SHARDS_MAX: Final = 4096
_FIELDS: Final = frozenset({"agent_type", "shard_id"})


def shard_of(key: str, shards: int) -> int:
    """Return the shard of a key, 0 to ``shards`` - 1: the same in every process and language.

    It is the CRC-32 (of zlib) of the key's UTF-8, modulo the number of shards.

    Raises:
        DsecError: ``invalid`` for a number of shards outside 1 to :data:`SHARDS_MAX`, and
            for a key that is no UTF-8.
    """
    if not 1 <= shards <= SHARDS_MAX:
        raise invalid(f"there are 1 to {SHARDS_MAX} shards, not {shards}")
    try:
        return zlib.crc32(key.encode()) % shards
    except UnicodeEncodeError as error:
        raise invalid(f"{key!r} is not text that UTF-8 can write") from error


class KeyPrefix:
    """A ``state_key_prefix`` with its fields filled in.

    Args:
        template: text with ``{agent_type}`` and ``{shard_id}``, each at most once.
        agent_type: what the agent is.
        shards: among how many the keys are spread; 1 when the template has no ``{shard_id}``.

    Raises:
        DsecError: ``invalid`` for any other field, a brace that ends nowhere, or a number of
            shards that the template cannot tell apart.
    """

    def __init__(self, template: str, agent_type: str, shards: int = 1) -> None:
        fields = _fields_of(template)
        shard_of("", shards)
        if shards > 1 and "shard_id" not in fields:
            raise invalid(f"{shards} shards need {{shard_id}} in the prefix {template!r}")
        self._shards = shards
        self._prefixes = tuple(
            template.format(agent_type=agent_type, shard_id=f"{shard:0{_digits(shards)}}") + "/"
            for shard in range(shards)
        )

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What keys may begin with, by shard: for scans over all of them."""
        return self._prefixes

    def key(self, name: str) -> str:
        """Return the key of a name: its shard's prefix, ``/``, and the name."""
        return self._prefixes[shard_of(name, self._shards)] + name


def _digits(shards: int) -> int:
    """Return the width that has shards sort by number."""
    return len(str(shards - 1))


def _fields_of(template: str) -> frozenset[str]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise invalid(f"the prefix {template!r} cannot be read: {error}") from error
    fields = [name for _, name, _, _ in parts if name is not None]
    plain = all(not spec and not conversion for _, _, spec, conversion in parts)
    if not plain or not _FIELDS.issuperset(fields) or len(set(fields)) < len(fields):
        raise invalid(
            f"the prefix {template!r} may name {{agent_type}} and {{shard_id}}, each once and plain"
        )
    return frozenset(fields)
