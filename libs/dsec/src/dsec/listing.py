"""What a request to list sandboxes is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict, Unpack

from dsec_common.errors import invalid
from dsec_common.wire.sandbox import ListSandboxes, SandboxState


class ListFilters(TypedDict, total=False):
    """Which sandboxes to list; what is not given leaves none out.

    Attributes:
        labels: only those that carry all of these.
        states: only those in one of these states; ``ended`` includes the ended.
        agent: only those of this agent type.
        rollout_id: only those of this rollout.
        created_after: only those created at this Unix time or later.
        created_before: only those created before it.
        include_ended: also those whose record is kept after their end.
        usage: tell what each uses, too; else ``memory_bytes_used`` and so on are None.
    """

    labels: Mapping[str, str] | None
    states: Iterable[SandboxState | str]
    agent: str
    rollout_id: str
    created_after: float
    created_before: float
    include_ended: bool
    usage: bool


def list_request(limit: int, cursor: str, **filters: Unpack[ListFilters]) -> ListSandboxes:
    """Return the request for one page.

    Raises:
        DsecError: ``invalid`` for an unknown state.
    """
    return ListSandboxes(
        labels=dict(filters.get("labels") or {}),
        states=states_of(filters.get("states", ())),
        agent=filters.get("agent", ""),
        rollout_id=filters.get("rollout_id", ""),
        created_after=filters.get("created_after", 0.0),
        created_before=filters.get("created_before", 0.0),
        include_ended=filters.get("include_ended", False),
        usage=filters.get("usage", False),
        limit=limit,
        cursor=cursor,
    )


def states_of(states: Iterable[SandboxState | str]) -> tuple[SandboxState, ...]:
    """Return the states that a listing asks for.

    Raises:
        DsecError: ``invalid`` for one that no sandbox can be in.
    """
    known = ", ".join(SandboxState)
    try:
        return tuple(SandboxState(state) for state in states)
    except ValueError as error:
        raise invalid(f"{error}: use {known}", field="states") from None
