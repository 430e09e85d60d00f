"""Whether a node can take a sandbox: checks of the request, and of the room left. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from dsec_common.subjects import ScopedId, validate_local, validate_project
from dsec_common.wire.node import PlaceSandbox, Resources
from dsec_common.wire.sandbox import AGENT_CHARACTERS_MAX, MIB, Limits
from dsec_sandboxd.errors import invalid_field, node_full, node_too_small
from dsec_sandboxd.layers.folding import NAMED_MAX

_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
#: The kernel takes no single string over 128 KiB, and an environment has to fit beside arguments.
ENV_BYTES_MAX: Final = 128 * 1024
_LABELS_MAX: Final = 64
_LABEL_TEXT_MAX: Final = 256
_MEMORY_MIN_BYTES: Final = 4 * MIB
_DISK_MIN_BYTES: Final = 64 * 1024
_INODES_MIN: Final = 16
_PIDS_MIN: Final = 2
_CPUS_MIN: Final = 0.01
#: Fractions of a processor do not add up exactly.
_CPU_ROUNDING: Final = 1e-6


class LimitMaxima(msgspec.Struct, frozen=True, kw_only=True):
    """The most that one sandbox may ask for, beyond the node's own size."""

    pids: int = 32_768
    inodes: int = 4_194_304


class NodeRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the core must keep to.

    Attributes:
        node: the node's name.
        physical: what the machine has.
        capacity: what may be handed out, oversubscription included.
        memory_reserve_bytes: the kernel must be able to hand out more than this, or the node takes
            no new sandbox whatever its books say.
        ended_kept_s: how long the record of an ended sandbox stays readable.
        ended_kept_max: how many of them stay, the newest.
    """

    node: str
    physical: Resources
    capacity: Resources
    memory_reserve_bytes: int = 0
    ended_kept_s: float = 3600.0
    ended_kept_max: int = 20_000


def check_placement(place: PlaceSandbox, maxima: LimitMaxima) -> Limits:
    """Return the limits in force for a placement.

    They are the limits asked for, but that the writable layer, which lives in memory, is never
    larger than the memory.

    Raises:
        DsecError: ``invalid``, naming the field and what is allowed.
    """
    request = place.request
    validate_project(place.project)
    validate_local(place.local)
    layers = (request.base, *([request.workspace] if request.workspace else []), *request.toolkits)
    if not request.base and not request.snapshot:
        raise invalid_field("base", "name a base layer, such as python@3.11")
    if len(layers) > NAMED_MAX:
        raise invalid_field("toolkits", f"{len(layers)} layers in all; {NAMED_MAX} are the most")
    check_env(request.env, "env")
    check_labels(request.labels)
    if len(request.agent) > AGENT_CHARACTERS_MAX or not request.agent.isprintable():
        raise invalid_field("agent", f"use at most {AGENT_CHARACTERS_MAX} printable characters")
    for rollout_id in (request.rollout_id, request.model_rollout_id):
        if rollout_id:
            ScopedId.parse(rollout_id, "rollout id")
    check_seconds(request.ttl_s, "ttl_s")
    check_seconds(request.deadline_s, "deadline_s")
    check_seconds(request.idle_ttl_s, "idle_ttl_s")
    if request.delete_after and request.command is None:
        raise invalid_field("delete_after", "there is no command after which to delete it")
    if request.gpu_demand is not None and not (place.lease_id and place.slices):
        field = "gpu" if request.gpu is not None else "limits.cu"
        raise invalid_field(field, "Compute Units need a lease; create through the scheduler")
    return check_limits(request.limits, maxima)


def check_limits(limits: Limits, maxima: LimitMaxima) -> Limits:
    """Return the limits that are in force when these are asked for.

    Raises:
        DsecError: ``invalid``, naming the field and what is allowed.
    """
    for name in ("cpus", "cu"):
        if not math.isfinite(getattr(limits, name)):
            raise invalid_field(f"limits.{name}", f"{getattr(limits, name)} is not an amount")
    if limits.cu < 0:
        raise invalid_field("limits.cu", f"{limits.cu:g} is negative")
    for name, least, most in (
        ("cpus", _CPUS_MIN, math.inf),
        ("memory_bytes", _MEMORY_MIN_BYTES, math.inf),
        ("pids", _PIDS_MIN, maxima.pids),
        ("disk_bytes", _DISK_MIN_BYTES, math.inf),
        ("inodes", _INODES_MIN, maxima.inodes),
    ):
        value = getattr(limits, name)
        if value < least:
            raise invalid_field(f"limits.{name}", f"{value} is too little; the least is {least}")
        if value > most:
            raise invalid_field(f"limits.{name}", f"{value} is too much; the most is {most}")
    if limits.disk_bytes > limits.memory_bytes:
        return msgspec.structs.replace(limits, disk_bytes=limits.memory_bytes)
    return limits


def check_env(env: Mapping[str, str], field: str) -> None:
    """Return if a command can be given these variables.

    Raises:
        DsecError: ``invalid``, naming the variable.
    """
    size = 0
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name):
            raise invalid_field(
                field, f"{name[:80]!r} is not a variable's name: use letters, digits and _"
            )
        if "\0" in value:
            raise invalid_field(field, f"the value of {name} holds a NUL byte")
        size += len(name) + len(value.encode("utf-8", "surrogateescape")) + 2
    if size > ENV_BYTES_MAX:
        raise invalid_field(field, f"{size} bytes in all; {ENV_BYTES_MAX} are the most")


def check_seconds(value: float, field: str) -> None:
    """Return if ``value`` can be a time to live; 0 means never.

    Raises:
        DsecError: ``invalid``.
    """
    if not math.isfinite(value) or value < 0:
        raise invalid_field(field, f"{value} is not a number of seconds; 0 means never")


def check_labels(labels: Mapping[str, str]) -> None:
    """Return if a sandbox can carry these labels.

    Raises:
        DsecError: ``invalid``, naming what is allowed.
    """
    if len(labels) > _LABELS_MAX:
        raise invalid_field("labels", f"{len(labels)} labels; {_LABELS_MAX} are the most")
    for name, value in labels.items():
        if not name or len(name) > _LABEL_TEXT_MAX or len(value) > _LABEL_TEXT_MAX:
            raise invalid_field(
                "labels", f"{name[:40]!r}: use 1-{_LABEL_TEXT_MAX} characters for name and value"
            )


def check_room(
    rules: NodeRules, allocated: Resources, limits: Limits, memory_bytes_available: int
) -> None:
    """Return if the node has room for one more sandbox with these limits.

    Raises:
        DsecError: ``exhausted``; not retryable when the node could never hold it.
    """
    node, capacity, physical = rules.node, rules.capacity, rules.physical
    if limits.memory_bytes > physical.memory_bytes:
        raise node_too_small(node, "bytes of memory", limits.memory_bytes, physical.memory_bytes)
    if limits.cpus > physical.cpus:
        raise node_too_small(node, "cpus", limits.cpus, physical.cpus)
    if allocated.sandboxes >= capacity.sandboxes:
        raise node_full(node, "sandboxes", 1, 0)
    free_cpus = capacity.cpus - allocated.cpus
    if limits.cpus > free_cpus + _CPU_ROUNDING:
        raise node_full(node, "cpus", limits.cpus, free_cpus)
    free_bytes = capacity.memory_bytes - allocated.memory_bytes
    if limits.memory_bytes > free_bytes:
        raise node_full(node, "bytes of memory", limits.memory_bytes, free_bytes)
    spare_bytes = memory_bytes_available - rules.memory_reserve_bytes
    if spare_bytes <= 0:
        # The books allow it, the machine does not: what was promised is in use.
        raise node_full(node, "bytes of memory above its reserve", 1, 0)
