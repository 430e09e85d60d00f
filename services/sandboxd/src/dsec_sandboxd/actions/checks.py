"""What an action may ask for at all. No I/O."""

from __future__ import annotations

import math
import re
from typing import Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import validate_local
from dsec_common.wire.action import (
    ACTION_DETAIL_MAX,
    ACTION_HOLD_MAX_S,
    ACTION_NAME_MAX,
    ACTION_TIMEOUT_MAX_S,
    ACTION_VOLUMES_MAX,
    ACTIONS_OPEN_MAX,
    ActionOutcome,
    ActionVolume,
    BeginAction,
    EndAction,
)
from dsec_common.wire.network import NetworkMode, NetworkPolicy
from dsec_sandboxd.actions.book import ActionBook
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.records import SandboxRecord

_VOLUME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_INODES_MAX: Final = 1 << 31
_TOLERANCE: Final = 1e-9


def check_begin(asked: BeginAction, record: SandboxRecord) -> None:
    """Return when a request makes sense.

    Raises:
        DsecError: ``invalid``, naming the field and what is allowed.
    """
    validate_local(asked.message_id)  # it names a directory
    if not 0 < len(asked.name) <= ACTION_NAME_MAX or not asked.name.isprintable():
        raise invalid_field("name", f"use 1 to {ACTION_NAME_MAX} printable characters")
    if not 0 < asked.timeout_s <= ACTION_TIMEOUT_MAX_S:  # NaN is not
        raise invalid_field(
            "timeout_s",
            f"{asked.timeout_s} is not between 0 and {ACTION_TIMEOUT_MAX_S:g} seconds",
        )
    if not math.isfinite(asked.hold_s) or not 0 <= asked.hold_s <= ACTION_HOLD_MAX_S:
        raise invalid_field(
            "hold_s", f"{asked.hold_s} is not between 0 and {ACTION_HOLD_MAX_S:g} seconds"
        )
    if asked.gpu is not None and asked.gpu.flaw:
        raise invalid_field("gpu", asked.gpu.flaw)
    if len(asked.volumes) > ACTION_VOLUMES_MAX:
        raise invalid_field(
            "volumes", f"{len(asked.volumes)} volumes; {ACTION_VOLUMES_MAX} are the most"
        )
    if len({volume.name for volume in asked.volumes}) != len(asked.volumes):
        raise invalid_field("volumes", "two of them have the same name")
    for volume in asked.volumes:
        _check_volume(volume, record.limits.memory_bytes)


def _check_volume(volume: ActionVolume, memory_bytes: int) -> None:
    if not _VOLUME.fullmatch(volume.name):
        raise invalid_field("volumes", f"{volume.name[:80]!r} is no name: use [a-z0-9][a-z0-9_-]*")
    if volume.layer:
        if volume.size_bytes:
            raise invalid_field("volumes", f"{volume.name} is a layer: it has the size that it has")
        return
    if not 0 < volume.size_bytes <= memory_bytes:
        raise invalid_field(
            "volumes",
            f"{volume.name} has {volume.size_bytes} bytes: it is in memory, so it is from 1 to the "
            f"sandbox's memory_bytes ({memory_bytes})",
        )
    if not 0 < volume.inodes <= _INODES_MAX:
        raise invalid_field("volumes", f"{volume.name} has {volume.inodes} inodes: use 1 or more")


def check_end(asked: EndAction) -> None:
    """Return when a request makes sense.

    Raises:
        DsecError: ``invalid``, naming the field and what is allowed.
    """
    if asked.outcome not in {ActionOutcome.OK, ActionOutcome.FAILED}:
        raise invalid_field("outcome", f"{asked.outcome.value} is the platform's word")
    if len(asked.detail) > ACTION_DETAIL_MAX:
        raise invalid_field(
            "detail", f"{len(asked.detail)} characters; {ACTION_DETAIL_MAX} are the most"
        )


def check_room(asked: BeginAction, record: SandboxRecord, book: ActionBook) -> None:
    """Return when nothing that goes on in the sandbox is in the way.

    Raises:
        DsecError: ``exhausted`` for too many actions; ``conflict`` when another one says what the
            sandbox may reach; ``not_found`` or ``expired`` for the parent.
    """
    if asked.parent:
        book.running(record.local, asked.parent)
    if len(book.open(record.local)) >= ACTIONS_OPEN_MAX:
        raise DsecError(
            ErrorCode.EXHAUSTED,
            f"{ACTIONS_OPEN_MAX} actions are open in this sandbox, which is the most; end one",
            details={"what": "actions", "limit": ACTIONS_OPEN_MAX},
        )
    other = book.with_network(record.local)
    if asked.network is not None and other is not None:
        raise DsecError(
            ErrorCode.CONFLICT,
            f"action {other.name!r} says what this sandbox may reach; a sandbox has one network, "
            "so one action at a time can: end that one first",
            retryable=True,
            retry_after_s=1.0,
            details={"what": "network", "action_id": other.action_id},
        )


def check_terms(asked: BeginAction, record: SandboxRecord, book: ActionBook) -> None:
    """Return when the contract of the sandbox's agent allows what is asked for.

    Raises:
        DsecError: ``denied``, naming the field.
    """
    terms = record.action_terms
    if terms is None:
        return
    if asked.gpu is not None and terms.max_cu is not None:
        held = math.fsum(slice_.cu for slice_ in record.slices) + book.cu(record.local)
        if held + asked.gpu.max_cu > terms.max_cu + _TOLERANCE:
            has = f", of which it has {held:g}" if held else ""
            raise _denied(
                terms.agent,
                "gpu",
                f"{asked.gpu.max_cu:g} Compute Units: max_cu is {terms.max_cu:g}{has}",
            )
    if asked.network is None or asked.network.mode is NetworkMode.NONE:
        return
    if terms.network_allowed is False:
        raise _denied(terms.agent, "network", "a network without the permission network_access")
    narrower = terms.network is None or terms.network == NetworkPolicy(mode=NetworkMode.OPEN)
    if terms.network_allowed and not narrower and asked.network != terms.network:
        raise _denied(terms.agent, "network", "another network policy than its own, or none")


def _denied(agent: str, field: str, what: str) -> DsecError:
    return DsecError(
        ErrorCode.DENIED,
        f"the contract of {agent} does not allow an action {what}; ask for less, or change the "
        "contract",
        details={"field": field, "agent": agent},
    )


def check_governed(
    asked: BeginAction, record: SandboxRecord, governed: NetworkPolicy | None
) -> None:
    """Return unless a policy that was pushed to the sandbox's agent says what it may reach.

    Raises:
        DsecError: ``denied``.
    """
    if asked.network is not None and governed is not None:
        raise DsecError(
            ErrorCode.DENIED,
            f"the policy of agent {record.agent} says what its instances may reach; push another "
            "one to change that",
            details={"field": "network", "agent": record.agent},
        )
