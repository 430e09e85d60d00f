"""State consistency: how new dependencies are, and bringing instances of agents up to them.

A *dependency* is what an agent's state is made of and others change: a database, an API, another
agent's output. Its *version* is the Unix time in milliseconds of its last change, by the clock of
whoever keeps it. See :mod:`dsec_common.compute.consistency` for the equation.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from dsec_common.compute.consistency import CLOCK_TOLERANCE_MS
from dsec_common.errors import invalid
from dsec_common.wire.base import Message

DEPENDENCIES_MAX: Final = 256
"""The most dependencies that a project may have, and that one agent may name."""

AHEAD_MAX_MS: Final = 10_000
"""A version further in the future than this is refused: no clock is so far ahead."""

SYNCHRONISE_TIMEOUT_S: Final = 120.0
"""How long an agent's command may take to synchronise an instance."""

DEPENDENCY: Final = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62})")
"""How a dependency may be called."""


def validate_dependency(name: str) -> str:
    """Return a dependency's name unchanged, or raise ``invalid``."""
    if not DEPENDENCY.fullmatch(name):
        raise invalid(
            f"{name[:64]!r} is no name of a dependency: use 1-63 lower-case letters, digits, '.', "
            "'_' and '-', such as orders-db",
            field="name",
        )
    return name


# --- What a project asks --------------------------------------------------------------------------


class ReportDependencies(Message, frozen=True, kw_only=True):
    """Say how new dependencies are. An older version than the known one changes nothing.

    Attributes:
        versions: by name; at most :data:`AHEAD_MAX_MS` ahead of the scheduler's clock.
        forget: names that are nobody's dependencies any more; before ``versions`` are taken in.
    """

    versions: dict[str, int] = msgspec.field(default_factory=dict)
    forget: tuple[str, ...] = ()


class ListDependencies(Message, frozen=True, kw_only=True):
    """Ask for the project's dependencies."""


class DependencyVersions(Message, frozen=True, kw_only=True):
    """All dependencies of the project and their versions, as they are kept."""

    versions: dict[str, int] = msgspec.field(default_factory=dict)


class SynchroniseInstances(Message, frozen=True, kw_only=True):
    """Have instances of an agent that are behind synchronised now, those that failed at it too."""

    name: str
    instances: tuple[str, ...]


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's state.

    Attributes:
        version_ms: how new it is.
        behind: why the instance stands still; empty when it does not for that.
        error: why it could not be synchronised.
    """

    sandbox_id: str
    version_ms: int = 0
    behind: str = ""
    error: str = ""


class InstancesSynchronised(Message, frozen=True, kw_only=True):
    """What came of it, in the order of the request."""

    states: tuple[InstanceState, ...] = ()


# --- Between scheduler and node -------------------------------------------------------------------


class SynchroniseInstance(Message, frozen=True, kw_only=True):
    """Scheduler to node: have an instance that is behind stand still, synchronise it, let it go on.

    The same again is answered with what is so: one that is not behind is not touched, and one that
    failed is not tried again for the same versions unless ``again``.

    Attributes:
        local: which of the node's sandboxes.
        versions: of all that it depends on, as far as they are known.
        command: brings its state up to them.
        timeout_s: how long it may take.
        clock_tolerance_ms: delta.
    """

    project: str
    local: str
    agent: str
    versions: dict[str, int]
    command: tuple[str, ...]
    timeout_s: float = SYNCHRONISE_TIMEOUT_S
    clock_tolerance_ms: int = CLOCK_TOLERANCE_MS
    again: bool = False


class InstanceSynchronised(Message, frozen=True, kw_only=True):
    """The instance's state now; it has been synchronised, or its ``error`` says why not."""

    state: InstanceState
