"""What the node remembers of its sandboxes' networks, over the death of the daemon.

One small file per sandbox with a network, on the tmpfs of the run directory: the sandboxes, the
router and these files all last until the host starts anew. A file is written before the kernel is
told, so that whatever line a crash comes after, the next daemon enforces what was last asked for.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import msgspec

from dsec_common.errors import from_os_error
from dsec_common.wire.network import NetworkPhase, NetworkPolicy


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox's place at the router and its policies.

    Attributes:
        number: whose addresses and device it has.
        mark: of the connections that the policy in force let through.
        policy: the one in force.
        agent: the one that the agent phase begins with; in that phase, None.
    """

    number: int
    mark: int
    policy: NetworkPolicy
    phase: NetworkPhase = NetworkPhase.AGENT
    agent: NetworkPolicy | None = None


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Remembered)


class Memory:
    """The files of one node."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, local: str, remembered: Remembered) -> None:
        """Keep what is known of a sandbox; readers see the old or the new, never a part.

        Raises:
            DsecError: ``exhausted`` when the disk is full, else ``internal``.
        """
        path = self._directory / local
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = path.with_name(f"{local}.new")
            fresh.write_bytes(_encoder.encode(remembered))
            fresh.replace(path)
        except OSError as error:
            raise from_os_error("remembering a network policy", error) from error

    def get(self, local: str) -> Remembered | None:
        """Return what is known of a sandbox; None when it has no network."""
        try:
            return _decoder.decode((self._directory / local).read_bytes())
        except (OSError, msgspec.DecodeError):
            return None

    def forget(self, local: str) -> None:
        """Drop what is known of a sandbox. Idempotent."""
        with contextlib.suppress(OSError):
            (self._directory / local).unlink(missing_ok=True)

    def keep_only(self, living: set[str]) -> None:
        """Drop what is known of all others."""
        with contextlib.suppress(OSError):
            for path in list(self._directory.iterdir()):
                if path.name not in living:
                    self.forget(path.name)
