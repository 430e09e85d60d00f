"""Lists of sandboxes, and what a request for one is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Final, TypedDict, Unpack

from dsec.channel import ANSWER_PATIENCE_S, Channel
from dsec.sandbox import Sandbox
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.sandbox import ListSandboxes, SandboxInfo, SandboxList, SandboxState

_TIMEOUT_S: Final = 10.0


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


class Listings(ABC):
    """What the client has of lists of sandboxes."""

    @abstractmethod
    def _connected(self) -> Channel:
        """Return the connection, or raise ``invalid`` before there is one."""

    async def list_sandboxes(self, **filters: Unpack[ListFilters]) -> list[SandboxInfo]:
        """Return the project's sandboxes on all nodes, oldest first.

        Args:
            filters: ``labels``, ``states``, ``agent``, ``rollout_id``, ``created_after``,
                ``created_before`` and ``include_ended``; see :class:`~dsec.listing.ListFilters`.

        Raises:
            DsecError: ``unavailable`` when a node did not answer, naming it: a listing that leaves
                sandboxes out must not look whole.
        """
        found: list[SandboxInfo] = []
        cursor = ""
        while True:
            page = await self.list_page(cursor=cursor, **filters)
            if page.silent_nodes:
                raise DsecError(
                    ErrorCode.UNAVAILABLE,
                    f"these nodes did not answer: {', '.join(page.silent_nodes)}; "
                    "list again, or see `dsec node list`",
                )
            found += page.sandboxes
            cursor = page.next_cursor
            if not cursor:
                return sorted(found, key=lambda sandbox: sandbox.created_at)

    async def list_page(
        self, *, limit: int = 0, cursor: str = "", **filters: Unpack[ListFilters]
    ) -> SandboxList:
        """Return one page of the project's sandboxes, and the nodes that did not answer.

        Args:
            limit: at most so many; 0 leaves it to the platform.
            cursor: ``next_cursor`` of the page before, which was asked for with the same filters.
            filters: as for :meth:`list_sandboxes`.

        Raises:
            DsecError: ``invalid`` for a cursor of another listing, or an unknown state.
        """
        return await self._connected().ask(
            subjects.sandbox_list(self._connected().project),
            list_request(limit, cursor, **filters),
            SandboxList,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def sandboxes(self, **filters: Unpack[ListFilters]) -> list[Sandbox]:
        """Return handles of the project's living sandboxes; see :meth:`list_sandboxes`."""
        found = await self.list_sandboxes(**filters)
        return [Sandbox(self._connected(), info.sandbox_id, None) for info in found]


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
