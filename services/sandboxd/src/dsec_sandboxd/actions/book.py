"""All actions of a node's sandboxes, as they are now. No I/O."""

from __future__ import annotations

import math

from dsec_common.compute.model import Slice
from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_common.wire.action import ACTIONS_KEPT_MAX, ActionState
from dsec_common.wire.network import NetworkPhase, NetworkPolicy
from dsec_sandboxd.actions.records import ActionRecord


class ActionBook:
    """Actions by sandbox, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, ActionRecord]] = {}
        self._by_lease: dict[str, tuple[str, str]] = {}

    def put(self, action: ActionRecord) -> list[ActionRecord]:
        """Know an action as it is now; return those that are too many and are to be forgotten."""
        actions = self._of.setdefault(action.local, {})
        actions[action.action_id] = action
        if action.granted:
            self._by_lease[action.lease_id] = (action.local, action.action_id)
        else:
            self._by_lease.pop(action.lease_id, None)
        ended = [one for one in actions.values() if not one.is_open]
        old = ended[: max(len(actions) - ACTIONS_KEPT_MAX, 0)]
        for one in old:
            del actions[one.action_id]
        return old

    def forget(self, local: str) -> None:
        """Forget the actions of a sandbox that have ended: its record is forgotten."""
        left = {action.action_id: action for action in self.open(local)}
        if left:
            self._of[local] = left
        else:
            self._of.pop(local, None)

    def find(self, local: str, action_id: str) -> ActionRecord | None:
        """Return an action of a sandbox, or None."""
        return self._of.get(local, {}).get(action_id)

    def get(self, local: str, action_id: str) -> ActionRecord:
        """Return an action of a sandbox.

        Raises:
            DsecError: ``not_found``.
        """
        action = self.find(local, action_id)
        if action is None:
            raise not_found(
                f"there is no action {action_id[:64]!r} in this sandbox; list its actions",
                what="action",
            )
        return action

    def running(self, local: str, action_id: str) -> ActionRecord:
        """Return an action that commands may run in.

        Raises:
            DsecError: ``not_found``; ``unavailable`` while it begins; ``expired`` when it has
                ended, or is ending.
        """
        action = self.get(local, action_id)
        if action.state is ActionState.BEGINNING:
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                f"action {action.name!r} has not got all that it asked for yet; wait for the "
                "answer to its beginning",
                retry_after_s=0.1,
                details={"what": "action"},
            )
        if action.state is not ActionState.RUNNING:
            raise ended(action)
        return action

    def all(self, local: str) -> list[ActionRecord]:
        """Return the actions of a sandbox, the first asked for first."""
        return list(self._of.get(local, {}).values())

    def open(self, local: str) -> list[ActionRecord]:
        """Return those that have not ended."""
        return [action for action in self.all(local) if action.is_open]

    def children(self, action: ActionRecord) -> list[ActionRecord]:
        """Return the open actions that are a part of an action."""
        return [one for one in self.open(action.local) if one.parent == action.action_id]

    def cu(self, local: str) -> float:
        """Return the Compute Units that a sandbox's open actions have, or may be given."""
        return math.fsum(action.cu_wanted for action in self.open(local))

    def slices(self, local: str, *, but: str = "") -> tuple[Slice, ...]:
        """Return the slices that a sandbox's open actions have, but for one action's."""
        return tuple(
            slice_
            for action in self.open(local)
            if action.granted and action.action_id != but
            for slice_ in action.slices
        )

    def devices(self, local: str, *, but: str) -> frozenset[str]:
        """Return the names of the devices that a sandbox's open actions have but for one action."""
        return frozenset(
            device.name
            for action in self.open(local)
            if action.granted and action.action_id != but
            for device in action.devices
        )

    def with_network(self, local: str) -> ActionRecord | None:
        """Return the open action that says what a sandbox may reach, if there is one."""
        return next((it for it in self.open(local) if it.network is not None), None)

    def network_before(self, local: str, *, in_setup: bool) -> NetworkPolicy | None:
        """Return what a sandbox may reach but for its actions; None when none of them says it.

        Nor does one that began in the phase for setting up, once that is over.
        """
        action = self.with_network(local)
        if action is None or (action.phase_before is NetworkPhase.SETUP and not in_setup):
            return None
        return action.network_before

    # --- Leases -------------------------------------------------------------------------------

    @property
    def leases(self) -> tuple[str, ...]:
        """The leases that open actions have."""
        return tuple(self._by_lease)

    @property
    def lease_resizes(self) -> dict[str, int]:
        """How often they have got other slices; those that did."""
        found = {}
        for lease_id, (local, action_id) in self._by_lease.items():
            action = self._of[local][action_id]
            if action.lease_resizes:
                found[lease_id] = action.lease_resizes
        return found

    def of_lease(self, lease_id: str) -> ActionRecord | None:
        """Return the open action that has a lease, or None."""
        found = self._by_lease.get(lease_id)
        return self.find(*found) if found is not None else None


def ended(action: ActionRecord) -> DsecError:
    """Return the answer for an action that is over, with how it ended."""
    outcome = action.outcome.value if action.outcome else "ending"
    detail = f": {action.detail}" if action.detail else ""
    return DsecError(
        ErrorCode.EXPIRED,
        f"action {action.name!r} has ended ({outcome}{detail}); begin another",
        details={"what": "action", "action_id": action.action_id, "outcome": outcome},
    )
