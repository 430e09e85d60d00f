"""State consistency: an agent's state is newer than all that it depends on.

    version(agent) = max(version(dependency_k)) + delta

A version is the Unix time in milliseconds at which a state was last changed, by the clock of
whoever keeps it. ``delta`` is how far two such clocks may be apart. An agent below the line may
read what is not there yet, or not any more: it is paused and synchronised, and does not try again
blindly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

CLOCK_TOLERANCE_MS: Final = 50
"""How far the clocks of an agent and of what it depends on may be apart."""


class Behind(NamedTuple):
    """Why an agent may not go on as it is.

    Attributes:
        version_ms: the agent's own version.
        required_ms: the version that it has once it is synchronised.
        dependency: whose version asks for that; of several, the first by name.
    """

    version_ms: int
    required_ms: int
    dependency: str

    @property
    def reason(self) -> str:
        """The same in a sentence, for logs."""
        return (
            f"its state of {self.version_ms} is behind {self.dependency}: synchronise to "
            f"{self.required_ms}"
        )


def required_version_ms(
    dependencies: Mapping[str, int], clock_tolerance_ms: int = CLOCK_TOLERANCE_MS
) -> int:
    """Return the version of an agent that is consistent; 0 for one that depends on nothing."""
    return max(dependencies.values()) + clock_tolerance_ms if dependencies else 0


def judge(
    version_ms: int,
    dependencies: Mapping[str, int],
    clock_tolerance_ms: int = CLOCK_TOLERANCE_MS,
) -> Behind | None:
    """Return why the agent is to be paused and synchronised, or None when it may go on.

    Args:
        version_ms: of the agent's state.
        dependencies: the versions of all that it depends on, by name.
        clock_tolerance_ms: delta.
    """
    required_ms = required_version_ms(dependencies, clock_tolerance_ms)
    if version_ms >= required_ms:
        return None
    newest = max(dependencies.values())
    name = min(name for name, version in dependencies.items() if version == newest)
    return Behind(version_ms, required_ms, name)
