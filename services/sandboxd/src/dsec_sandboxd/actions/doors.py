"""Actions put together with the rest of the daemon, and the verbs about them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from dsec_common.bus import Bus
from dsec_common.bus_types import Request
from dsec_common.compute.model import Slice
from dsec_common.wire.action import (
    ActionInfo,
    ActionList,
    BeginAction,
    EndAction,
    KeepAction,
    ListActions,
)
from dsec_common.wire.network import NetworkPolicy
from dsec_common.wire.sandbox import LISTING_PAGE_BYTES
from dsec_sandboxd.actions.checks import (
    check_begin,
    check_end,
    check_governed,
    check_room,
    check_terms,
)
from dsec_sandboxd.actions.keeper import ActionKeeper
from dsec_sandboxd.actions.resources import Lenders
from dsec_sandboxd.exec_service import ExecService
from dsec_sandboxd.gate import Guard
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.lifecycle import Sandboxes, local_of
from dsec_sandboxd.making import Maker
from dsec_sandboxd.network.networks import Networks
from dsec_sandboxd.ports import SandboxNetworks, Uses
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.run_directory import RunDirectory


class Actions:
    """What the daemon's shell knows of actions.

    Args:
        sandboxes: of the node, with what they work with.
        maker: makes them; tells of their ends.
        execs: runs their commands.
        holds: has layers mounted.
        directories: of the sandboxes.
        bus: leads to the broker.
        uses: counts what is in use.
    """

    def __init__(  # noqa: PLR0917  parts of the daemon, each of a type of its own
        self,
        sandboxes: Sandboxes,
        maker: Maker,
        execs: ExecService,
        holds: LayerHolds,
        directories: RunDirectory,
        bus: Bus,
        uses: Uses,
    ) -> None:
        parts, self._state = sandboxes.parts, sandboxes.state
        assert maker.gpus is not None  # noqa: S101  it was given them when it was made
        self._networks: Networks
        self._keeper = ActionKeeper(
            self._state,
            parts.store.actions,
            parts.steps,
            Lenders(
                node=self._state.rules.node,
                bus=bus,
                kernel=parts.kernel,
                clock=parts.clock,
                layers=parts.layers,
                holds=holds,
                directories=directories,
                gpus=maker.gpus,
                uses=uses,
                meters=parts.meters,
                networks=lambda: self._networks,
            ),
            execs,
        )
        self._book = self._keeper.book
        if parts.meters is not None:
            parts.meters.gpus.lent = self._book.slices
        parts.store.actions.on_delete = self._book.forget
        execs.use_actions(self._keeper.admit)
        # Before the networks are told: a rollback keeps what may be reached then.
        maker.on_end(self._keeper, self._keeper.sandbox_put_back)

    def use_networks(self, networks: Networks, maker: Maker) -> None:
        """Take what says what sandboxes may reach; what an action may, no child inherits."""
        self._networks = networks
        assert maker.networks is not None  # noqa: S101  who calls has set them
        maker.networks = _WithoutActions(maker.networks, self._book.network_before)

    def recovered(self, adopted: Iterable[SandboxRecord]) -> None:
        """Take over the actions of an earlier daemon, of the sandboxes that live on."""
        self._keeper.recovered(record.local for record in adopted)

    async def serve(
        self, serve: Callable[..., Awaitable[Any]], verb: Callable[[str], str], inside: Guard
    ) -> None:
        """Take requests. What only looks, or says that an action is wanted, wakes nothing."""
        await serve(verb("begin_action"), BeginAction, inside(self.begin))
        await serve(verb("end_action"), EndAction, inside(self.end))
        await serve(verb("keep_action"), KeepAction, self.keep)
        await serve(verb("list_actions"), ListActions, self.list)

    async def close(self) -> None:
        """Stop: what is open goes on for a later daemon."""
        await self._keeper.close()

    # --- Leases -------------------------------------------------------------------------------

    def all_leases(self, unnamed: Iterable[str]) -> tuple[str, ...]:
        """Return the leases of sandboxes and open actions, with those of another list."""
        return tuple({*self._state.leases, *self._book.leases, *unnamed})

    @property
    def lease_resizes(self) -> dict[str, int]:
        """How often they have got other slices; those that did."""
        return self._book.lease_resizes

    def lost(self, lease_id: str, reason: str) -> bool:
        """End the action that lives on a lease; return whether there is one."""
        return self._keeper.lost(lease_id, reason)

    def resized(self, lease_id: str, slices: tuple[Slice, ...], resizes: int) -> bool:
        """Give the next commands of a lease's action other slices; return whether there is one."""
        return self._keeper.resized(lease_id, slices, resizes)

    # --- Requests -----------------------------------------------------------------------------

    async def begin(self, request: Request[BeginAction]) -> ActionInfo:
        """Give a sandbox an action with all that it asks for, or not at all.

        Raises:
            DsecError: ``invalid``, ``denied``; ``conflict`` when another action says what the
                sandbox may reach; ``exhausted`` when there are no such units free, or too many
                actions are open; ``expired`` for a message whose action has ended.
        """
        record, asked = self._running(request), request.message
        check_begin(asked, record)

        def check() -> None:
            check_governed(asked, record, self._networks.governed(record))
            check_terms(asked, record, self._book)
            check_room(asked, record, self._book)

        action = await self._keeper.begin(asked, record, check)
        return action.info(self._state.rules.node, asked.message_id)

    async def end(self, request: Request[EndAction]) -> ActionInfo:
        """End an action; answered when all that it had is returned.

        Raises:
            DsecError: ``not_found``, ``invalid``; ``unavailable`` when something could not be
                returned yet: its node goes on trying.
        """
        record, asked = self._running(request), request.message
        check_end(asked)
        action = self._book.get(record.local, asked.action_id)
        action = await self._keeper.end(action, asked.outcome, asked.detail)
        return action.info(self._state.rules.node, asked.message_id)

    async def keep(self, request: Request[KeepAction]) -> ActionInfo:
        """Have an action last for another ``hold_s``, its time permitting.

        Raises:
            DsecError: ``not_found``; ``expired`` when it has ended.
        """
        record, asked = self._running(request), request.message
        action = self._keeper.keep(self._book.running(record.local, asked.action_id))
        return action.info(self._state.rules.node, asked.message_id)

    async def list(self, request: Request[ListActions]) -> ActionList:
        """Return a page of a sandbox's actions, of one that has ended, too."""
        record = self._state.find(request.project, local_of(request))
        asked, node = request.message, self._state.rules.node
        actions = self._book.all(record.local)
        if asked.after:
            at = [action.action_id for action in actions]
            actions = actions[at.index(asked.after) + 1 :] if asked.after in at else []
        found: list[ActionInfo] = []
        size = 0
        for action in actions:
            info = action.info(node)
            size += len(msgspec.json.encode(info))
            if found and size > LISTING_PAGE_BYTES:
                return ActionList(cause_id=asked.message_id, actions=tuple(found), more=True)
            found.append(info)
        return ActionList(cause_id=asked.message_id, actions=tuple(found))

    def _running(self, request: Request[Any]) -> SandboxRecord:
        return self._state.running(request.project, local_of(request))


class _WithoutActions:
    """What connects sandboxes, but for what children inherit while an action says it."""

    def __init__(
        self, networks: SandboxNetworks, before: Callable[..., NetworkPolicy | None]
    ) -> None:
        self._networks = networks
        self._before = before

    async def check(self, *policies: NetworkPolicy | None) -> None:
        """Refuse policies that are wrong, or that this host cannot enforce."""
        await self._networks.check(*policies)

    def expect(self, record: SandboxRecord) -> None:
        """Begin with the rules of a sandbox that is being made, if it is to have a network."""
        self._networks.expect(record)

    def inherited(self, local: str) -> tuple[NetworkPolicy | None, NetworkPolicy | None]:
        """Return ``network`` and ``setup_network`` of a child that begins where a sandbox is."""
        network, setup_network = self._networks.inherited(local)
        before = self._before(local, in_setup=setup_network is not None)
        if before is None:
            return network, setup_network
        # What is in force is the action's: of the phase for setting up, if that is not over.
        return (before, None) if setup_network is None else (network, before)

    async def attach(self, record: SandboxRecord) -> None:
        """Give a sandbox that nothing runs in yet the network that was asked for with it."""
        await self._networks.attach(record)

    async def sandbox_ending(self, local: str) -> None:
        """Let go of everything that belongs to a sandbox. Idempotent."""
        await self._networks.sandbox_ending(local)
