"""Which requests make sense at all; checked before a node is troubled."""

from __future__ import annotations

import math
from typing import Final

from dsec_common.subjects import ScopedId
from dsec_common.wire.sandbox import AGENT_CHARACTERS_MAX, CreateSandbox, Limits
from dsec_scheduler.errors import bad_field, bad_limit

KEY_MAX: Final = 256
"""Characters of an idempotency key."""

TOOLKITS_MAX: Final = 62
"""Toolkit layers of one sandbox: overlayfs takes more, a request for more is a mistake."""

PRIORITY_MAX: Final = 1000
"""Of a request that waits for Compute Units, either way."""

LABELS_MAX: Final = 64
"""Labels of one sandbox."""


def check(request: CreateSandbox, timeout_max_s: float) -> None:
    """Return when the request makes sense.

    Raises:
        DsecError: ``invalid``, naming the field and what is allowed.
    """
    _check_limits(request.limits)
    _check_layers(request)
    if len(request.labels) > LABELS_MAX:
        raise bad_field("labels", len(request.labels), f"use at most {LABELS_MAX}")
    if len(request.agent) > AGENT_CHARACTERS_MAX or not request.agent.isprintable():
        rule = f"use at most {AGENT_CHARACTERS_MAX} printable characters"
        raise bad_field("agent", request.agent, rule)
    if len(request.idempotency_key) > KEY_MAX:
        raise bad_field(
            "idempotency_key", request.idempotency_key, f"use at most {KEY_MAX} characters"
        )
    for name in ("ttl_s", "idle_ttl_s"):
        if not 0 <= getattr(request, name) < math.inf:
            raise bad_field(name, getattr(request, name), "use seconds, or 0 for no end")
    if not 0 < request.timeout_s <= timeout_max_s:
        raise bad_field(
            "timeout_s", request.timeout_s, f"use more than 0 and at most {timeout_max_s:g} seconds"
        )
    _check_units(request)
    for rollout_id in (request.rollout_id, request.model_rollout_id):
        if rollout_id:
            ScopedId.parse(rollout_id, "rollout id")


def _check_units(request: CreateSandbox) -> None:
    demand = request.gpu_demand
    if demand is not None and demand.flaw:
        raise bad_field("gpu", demand.min_cu, demand.flaw)
    if not -PRIORITY_MAX <= request.priority <= PRIORITY_MAX:
        rule = f"use -{PRIORITY_MAX} to {PRIORITY_MAX}"
        raise bad_field("priority", request.priority, rule)
    if request.gpu is not None and request.limits.cu:
        raise bad_field("limits.cu", request.limits.cu, "gpu says it in full; leave this 0")


def _check_layers(request: CreateSandbox) -> None:
    if request.snapshot:
        ScopedId.parse(request.snapshot, "snapshot id")
        if request.base or request.workspace or request.toolkits:
            raise bad_field(
                "snapshot", request.snapshot, "it has its own layers; name no others beside it"
            )
    elif not request.base:
        raise bad_field("base", request.base, "name the base image, as name@version or sha256:…")
    if len(request.toolkits) > TOOLKITS_MAX:
        raise bad_field("toolkits", len(request.toolkits), f"use at most {TOOLKITS_MAX} layers")


def _check_limits(limits: Limits) -> None:
    for name in ("cpus", "memory_bytes", "pids", "disk_bytes", "inodes"):
        value = getattr(limits, name)
        if not 0 < value < math.inf:
            raise bad_limit(name, value, "use more than 0")
    if not 0 <= limits.cu < math.inf:
        raise bad_limit("cu", limits.cu, "use 0 or more")
