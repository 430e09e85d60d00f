"""How often each sandbox has called its tools; kept over the end of the daemon."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Final, Protocol

import msgspec
import structlog

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.tools import Rate

_log: Final = structlog.get_logger(__name__)

_PREFIX: Final = b"tool|"
#: Moments of a window that are told apart: what is kept is bounded, however many calls there are.
_SLOTS: Final = 256
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(dict[int, int])


class Database(Protocol):
    """Bytes by bytes; a write has survived a crash of this process when it returns."""

    def __setitem__(self, key: bytes, value: bytes) -> None: ...

    def __delitem__(self, key: bytes) -> None: ...

    def get(self, key: bytes) -> bytes | None:
        """Return a value, or None."""
        ...

    def items(self, from_key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values in order, from a key on."""
        ...


class CallRates:
    """Counts calls; in any window of a rate no more pass than it says.

    Time is the kernel's monotonic clock, which goes on while no daemon runs. Sandboxes live no
    longer than it does.
    """

    def __init__(self, database: Database, monotonic: Callable[[], float]) -> None:
        """Take where counts are kept, and a clock in seconds."""
        self._database = database
        self._monotonic = monotonic
        self._passed: dict[tuple[str, str], dict[int, int]] = {}

    def take(self, local: str, tool: str, rate: Rate) -> None:
        """Count one call of a sandbox's tool. It is kept before this returns.

        Raises:
            DsecError: ``exhausted``, with ``retry_after_s``, when there were too many;
                ``unavailable`` when it cannot be kept. The call is not counted then.
        """
        calls, window_s = _whole(rate)
        slot_s = window_s / _SLOTS
        now = self._monotonic()
        slots = self._known(local, tool)
        # A call counts as one at the end of its slot, so that it is never forgotten too early.
        recent = {slot: count for slot, count in slots.items() if slot * slot_s + window_s > now}
        if sum(recent.values()) >= calls:
            wait_s = min(recent) * slot_s + window_s - now
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"{tool}: the contract allows {calls} calls in {window_s:g} s; the next one is "
                f"allowed in {wait_s:.3g} s",
                retry_after_s=wait_s,
            )
        slot = math.ceil(now / slot_s)
        recent[slot] = recent.get(slot, 0) + 1
        try:
            self._database[_key(local, tool)] = _encoder.encode(recent)
        except Exception as error:  # rocksdict raises plain Exception
            raise unavailable(f"the StateDB refuses the calls of {tool}: {error}") from error
        self._passed[local, tool] = recent

    def _known(self, local: str, tool: str) -> dict[int, int]:
        known = self._passed.get((local, tool))
        if known is None:
            kept = self._database.get(_key(local, tool))
            known = {} if kept is None else _decoder.decode(kept)
        return known

    async def sandbox_ending(self, local: str) -> None:
        """Forget a sandbox. Idempotent."""
        for key in [key for key in self._passed if key[0] == local]:
            del self._passed[key]
        self._drop(key for key in self._keys(_key(local, "")))

    async def sandbox_put_back(self, local: str) -> None:
        """Go on counting: one that is put back to a snapshot has called what it called."""

    def recovered(self, living: Collection[str]) -> None:
        """Forget what ended while no daemon ran."""
        self._drop(
            key
            for key in self._keys(_PREFIX)
            if key.removeprefix(_PREFIX).partition(b"|")[0].decode() not in living
        )

    def _keys(self, prefix: bytes) -> Iterator[bytes]:
        for key, _ in self._database.items(prefix):
            if not key.startswith(prefix):
                return
            yield key

    def _drop(self, keys: Iterator[bytes]) -> None:
        try:
            for key in list(keys):
                del self._database[key]
        except Exception as error:  # noqa: BLE001  rocksdict's own; the next daemon drops them
            _log.warning("tool_calls_left", error=str(error))


def _key(local: str, tool: str) -> bytes:
    return _PREFIX + f"{local}|{tool}".encode()


def _whole(rate: Rate) -> tuple[int, float]:
    """Return a rate in whole calls: 0.5 in a second are one in two."""
    calls = max(math.floor(rate.count), 1)
    return calls, rate.window_s * calls / rate.count
