"""What agents depend on: how new it is, who declares it, and which instances are behind. No I/O.

A project's versions are one document, so that a look at them sees all that was said before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from dsec_common.compute.consistency import required_version_ms
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.base import Message
from dsec_common.wire.consistency import (
    AHEAD_MAX_MS,
    DEPENDENCIES_MAX,
    ReportDependencies,
    validate_dependency,
)
from dsec_scheduler.agents.records import InstanceRecord

BUCKET: Final = "dsec-dependencies"


class DependencyRecord(Message, frozen=True, kw_only=True):
    """A project's dependencies.

    Attributes:
        versions: Unix milliseconds, by name.
    """

    versions: dict[str, int] = msgspec.field(default_factory=dict)


class Declared(msgspec.Struct, frozen=True):
    """What of a contract state consistency goes by.

    Attributes:
        depends_on: names of dependencies.
        synchronise: brings an instance's state up to them; it reads their versions as JSON.
    """

    depends_on: tuple[str, ...] = ()
    synchronise: tuple[str, ...] = ()


def declared_in(contract: Mapping[str, Any]) -> Declared:
    """Return what a contract declares, checked.

    Raises:
        DsecError: ``invalid``, naming the field.
    """
    try:
        declared = msgspec.convert(contract, Declared)
    except msgspec.ValidationError as error:
        raise invalid(f"the contract makes no sense: {error}", field="contract") from None
    for name in declared.depends_on:
        validate_dependency(name)
    if len(declared.depends_on) > DEPENDENCIES_MAX:
        raise invalid(
            f"depends_on has {len(declared.depends_on)} names: {DEPENDENCIES_MAX} are the most",
            field="depends_on",
        )
    if bool(declared.depends_on) != bool(declared.synchronise):
        raise invalid(
            "depends_on names what an instance's state is made of, and synchronise is the command "
            "that takes over what is new of it: write both into the contract, or neither",
            field="synchronise",
        )
    return declared


def check_report(request: ReportDependencies, now_ms: int) -> None:
    """Return if a report makes sense.

    Raises:
        DsecError: ``invalid``, naming what is wrong; then nothing is to change.
    """
    if not 1 <= len(request.versions) + len(request.forget) <= DEPENDENCIES_MAX:
        raise invalid(f"say of 1 to {DEPENDENCIES_MAX} dependencies how new they are")
    for name in (*request.versions, *request.forget):
        validate_dependency(name)
    for name, version_ms in request.versions.items():
        if not 0 < version_ms <= now_ms + AHEAD_MAX_MS:
            raise invalid(
                f"the version of {name} is {version_ms}: it is the Unix time in milliseconds of "
                f"its last change, now {now_ms}, and at most {AHEAD_MAX_MS} more",
                name=name,
                version_ms=version_ms,
            )


def reported(record: DependencyRecord | None, request: ReportDependencies) -> DependencyRecord:
    """Return the document with a checked report; itself when that changes nothing.

    Raises:
        DsecError: ``exhausted`` for too many dependencies.
    """
    known = {} if record is None else record.versions
    versions = {name: at for name, at in known.items() if name not in request.forget}
    for name, version_ms in request.versions.items():
        versions[name] = max(version_ms, versions.get(name, 0))
    if record is not None and versions == known:
        return record
    if len(versions) > DEPENDENCIES_MAX:
        raise DsecError(
            ErrorCode.EXHAUSTED,
            f"the project would have {len(versions)} dependencies: {DEPENDENCIES_MAX} are the "
            "most; forget those that nobody depends on any more",
            retryable=False,
        )
    return DependencyRecord(versions=versions)


class InstanceBehind(NamedTuple):
    """An instance that has to be synchronised: how, and with what."""

    sandbox_id: str
    agent: str
    command: tuple[str, ...]
    versions: dict[str, int]
    required_ms: int


def needed_by(declared: Declared, known: Mapping[str, int]) -> dict[str, int]:
    """Return the versions of what an agent depends on, as far as anybody has said."""
    return {name: known[name] for name in declared.depends_on if name in known}


def behind(
    instances: Mapping[str, InstanceRecord],
    declared: Mapping[tuple[str, str], Declared],
    known: Mapping[str, int],
    settled: Mapping[str, int],
    clock_tolerance_ms: int,
) -> list[InstanceBehind]:
    """Return a project's instances that are behind what they depend on.

    Args:
        instances: by sandbox id.
        declared: what contracts declare, by agent and version.
        known: the versions of the project's dependencies.
        settled: up to which version an instance need not be looked at, by sandbox id: it has been
            synchronised with that, or failed to be. Without one, its state is as old as itself.
        clock_tolerance_ms: delta.
    """
    needed = {key: needed_by(one, known) for key, one in declared.items()}
    required_ms = {key: required_version_ms(one, clock_tolerance_ms) for key, one in needed.items()}
    return [
        InstanceBehind(sandbox_id, one.agent, declared[key].synchronise, needed[key], required)
        for sandbox_id, one in instances.items()
        if (required := required_ms.get(key := (one.agent, one.version), 0))
        > max(int(one.started_at * 1000), settled.get(sandbox_id, 0))
    ]
