"""Versions: a hybrid clock of milliseconds and a counter in one number.

The upper 48 bits are Unix time in milliseconds, the lower 16 count what happened within one. A
version is never behind the one before it of its namespace, whatever the wall clock does, and never
behind what it depends on: ``version = max(version(dependencies)) + clock tolerance``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dsec_common.compute.consistency import required_version_ms
from dsec_common.errors import DsecError, ErrorCode, invalid

_COUNTER_BITS: Final = 16
_EARLIEST: Final = 10**12 << _COUNTER_BITS
"""Of 2001: what is less is no version, but perhaps a time."""

DEPENDENCY_AHEAD_MAX_S: Final = 3600.0
"""How far ahead of the clock a version may be that something depends on."""


def version_at(unix_ms: int) -> int:
    """Return the first version of a millisecond."""
    return unix_ms << _COUNTER_BITS


def version_ms(version: int) -> int:
    """Return a version's Unix time in milliseconds, as ``compute.consistency`` compares them."""
    return version >> _COUNTER_BITS


def version_required(dependencies: Mapping[str, int], clock_tolerance_ms: int, now_ms: int) -> int:
    """Return the least version that is consistent with the dependencies; 0 without any.

    Raises:
        DsecError: ``invalid`` for what is no version; ``conflict`` for one that is more than
            :data:`DEPENDENCY_AHEAD_MAX_S` ahead of the clock: one of the two clocks is wrong, and
            what followed it would never come back.
    """
    latest_ms = now_ms + int(DEPENDENCY_AHEAD_MAX_S * 1000)
    for name, version in dependencies.items():
        if version < 0 or 0 < version < _EARLIEST:
            raise invalid(
                f"{version} of {name!r} is no version; version_at makes one of milliseconds"
            )
        if version_ms(version) > latest_ms:
            raise DsecError(
                ErrorCode.CONFLICT,
                f"the version {version} of {name!r} is {(version_ms(version) - now_ms) // 1000} s "
                "ahead of this machine's clock; see which of the two clocks is wrong",
                details={"dependency": name, "version": version},
            )
    times = {name: version_ms(version) for name, version in dependencies.items()}
    return version_at(required_version_ms(times, clock_tolerance_ms))
