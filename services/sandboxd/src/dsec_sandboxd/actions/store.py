"""The actions of a node's sandboxes in its StateDB, kept for as long as their sandbox's record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from dsec_common.errors import unavailable
from dsec_sandboxd.actions.records import ActionRecord
from dsec_sandboxd.state_database import StateDatabase

_log: Final = structlog.get_logger(__name__)
_PREFIX: Final = b"action|"
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(ActionRecord)


class ActionStore:
    """A write has survived a crash of this process when it returns."""

    def __init__(self, database: StateDatabase) -> None:
        self._database = database
        #: Is told of a sandbox whose actions are forgotten.
        self.on_delete: Callable[[str], None] = lambda _local: None

    def put(self, action: ActionRecord) -> None:
        """Keep an action in place of what it was before.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses (a full disk).
        """
        try:
            self._database[_key(action.local, action.action_id)] = _encoder.encode(action)
        except Exception as error:  # rocksdict raises plain Exception
            raise unavailable(
                f"the StateDB refuses the record of action {action.action_id}: {error}"
            ) from error

    def delete(self, local: str, action_id: str) -> None:
        """Drop an action; none is fine."""
        del self._database[_key(local, action_id)]

    def delete_all(self, local: str) -> None:
        """Drop all actions of a sandbox."""
        prefix = _key(local, "")
        keys = []
        for key, _ in self._database.items(prefix):
            if not key.startswith(prefix):
                break
            keys.append(key)
        for key in keys:
            del self._database[key]
        self.on_delete(local)

    def load(self) -> list[ActionRecord]:
        """Return all actions; one that cannot be read is left out and logged."""
        found = []
        for key, value in self._database.items(_PREFIX):
            if not key.startswith(_PREFIX):
                break
            try:
                found.append(_decoder.decode(value))
            except msgspec.DecodeError as error:
                _log.error("action_unreadable", key=repr(key), error=str(error))
        return found


def _key(local: str, action_id: str) -> bytes:
    return b"|".join((b"action", local.encode(), action_id.encode()))
