"""What a create request says of sandboxes that are there for one task, or made ahead of need."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class WarmUse(StrEnum):
    """Whether a sandbox may be one that was made ahead of need."""

    PREFER = "prefer"
    """One that waits, if there is one; else it is made now."""
    REQUIRE = "require"
    """One that waits, or ``exhausted``."""
    BYPASS = "bypass"
    """It is made now."""


class TaskFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a sandbox that is there for one task.

    Attributes:
        write: written before its command, by absolute path; directories above are made.
        read: paths of regular files whose contents are answered with the command's end.
    """

    write: dict[str, bytes] = msgspec.field(default_factory=dict)
    read: tuple[str, ...] = ()
