"""What waits for Compute Units: why, giving it up, and several sandboxes at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, Unpack

import msgspec

from dsec.channel import ANSWER_PATIENCE_S, AWAY_S, Channel
from dsec.creating import create_request, limits_of
from dsec.sandbox import Sandbox
from dsec_common import subjects
from dsec_common.wire.base import new_id
from dsec_common.wire.waiting import (
    CancelWaiting,
    CreateGang,
    ExplainWaiting,
    GangCreated,
    WaitingCancelled,
    WaitingExplained,
)

if TYPE_CHECKING:
    from dsec.creating import CreateOptions

_TIMEOUT_S: Final = 10.0
_ANSWER_MARGIN_S: Final = 5.0
_LEAST_S: Final = 0.01
_LIMITS: Final = ("limits", "cpus", "memory_bytes", "disk_bytes", "pids")


class Waits(ABC):
    """What the client does about requests that wait for Compute Units."""

    @abstractmethod
    def _connected(self) -> Channel:
        """Return the connection, or raise ``invalid`` before there is one."""

    async def explain_waiting(self, request_id: str) -> WaitingExplained:
        """Return why a request waits, and what would change that.

        Args:
            request_id: as given to :meth:`~dsec.client.DSecClient.create_sandbox`.

        Raises:
            DsecError: ``not_found`` when no such request of the project waits.
        """
        channel = self._connected()
        return await channel.ask(
            subjects.sandbox_waiting(channel.project, "explain"),
            ExplainWaiting(request_id=request_id),
            WaitingExplained,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def cancel_waiting(self, request_id: str) -> None:
        """Give up a request that waits; whoever waits for it is told ``conflict``.

        For a queued one this holds over restarts of everything, whether or not it has been taken
        from the queue; the same again is fine.

        Raises:
            DsecError: ``conflict`` when a node has been asked for it already, with ``sandbox_id``
                in the details; ``not_found`` when it waits nowhere and nothing is queued.
        """
        channel = self._connected()
        await channel.ask(
            subjects.sandbox_waiting(channel.project, "cancel"),
            CancelWaiting(request_id=request_id),
            WaitingCancelled,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def create_gang(
        self,
        base: str,
        count: int,
        *,
        timeout_s: float = 30.0,
        request_id: str = "",
        **options: Unpack[CreateOptions],
    ) -> list[Sandbox]:
        """Return ``count`` equal sandboxes, all of which run; or raise, and then there are none.

        Args:
            base: the base layer; empty with a ``snapshot``.
            count: how many.
            timeout_s: how long to wait for all of them.
            request_id: by which the whole is known while it waits; by default one of its own.
            options: what each is given; see :meth:`~dsec.client.DSecClient.create_sandbox`. An
                ``idempotency_key`` is the whole gang's.

        Raises:
            DsecError: as :meth:`~dsec.client.DSecClient.create_sandbox`.
        """
        channel = self._connected()
        given: dict[str, Any] = dict(options)
        limits = limits_of(**{name: given.pop(name) for name in _LIMITS if name in given})
        # One of its own: whoever makes the gang may die, and it must be asked for again then.
        key = given.pop("idempotency_key", "") or new_id()
        requests = tuple(
            create_request(base, limits=limits, timeout_s=timeout_s, **given) for _ in range(count)
        )
        gang = CreateGang(
            requests=requests,
            timeout_s=timeout_s,
            message_id=request_id or new_id(),
            idempotency_key=key,
        )
        created = await channel.ask(
            subjects.sandbox_create_gang(channel.project),
            gang,
            GangCreated,
            timeout_s=timeout_s + _ANSWER_MARGIN_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
            shortened=lambda left_s: msgspec.structs.replace(
                gang, timeout_s=max(left_s - _ANSWER_MARGIN_S, _LEAST_S)
            ),
            away_s=AWAY_S,
        )
        return [Sandbox(channel, one.sandbox_id, one) for one in created.sandboxes]
