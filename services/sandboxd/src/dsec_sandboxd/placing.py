"""What placements come to: by which ids a sandbox is known, and what is too late. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dsec_common.errors import DsecError, unavailable
from dsec_common.wire.sandbox import EndCause
from dsec_sandboxd import errors
from dsec_sandboxd.effects import ConfirmPlacement, Effect
from dsec_sandboxd.living import Living
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.states import AWAKE_OR_ASLEEP


class AskedNames:
    """The ids that schedulers meant sandboxes to have which have others of their own.

    A scheduler that got no answer asks for its sandbox by the id that it chose.
    """

    def __init__(self) -> None:
        self._meant: dict[str, str] = {}
        self._asked: dict[str, str] = {}

    def note(self, *records: SandboxRecord) -> None:
        """Have sandboxes found by the ids that were meant for them, too."""
        for record in records:
            if record.asked_as:
                self._meant[record.asked_as] = record.local
                self._asked[record.local] = record.asked_as

    def meant(self, name: str) -> str:
        """Return the id of the sandbox that a name means: itself, unless it was noted."""
        return self._meant.get(name, name)

    def forget(self, locals_: Iterable[str]) -> None:
        """Drop what is known of sandboxes, by their own ids."""
        for local in locals_:
            asked = self._asked.pop(local, None)
            if asked is not None and self._meant.get(asked) == local:
                del self._meant[asked]


def why_in_vain(living: Living, node: str, now: float) -> DsecError | None:
    """Return why one that has just been made is no answer to its placement; None if it is one."""
    record = living.record
    if living.gone:
        return unavailable(
            f"sandbox {node}.{record.local} ended while it was being created: {living.end_detail}"
        )
    if living.end_cause is not None:
        return errors.sandbox_ended(
            node, msgspec.structs.replace(record, end_cause=living.end_cause)
        )
    if now > living.valid_until:
        # The scheduler has gone on to another node: two sandboxes for one request must not be.
        living.end_cause = EndCause.CREATE_FAILED
        living.end_detail = "ready too late"
        return errors.placement_lapsed(node, record.local, now - living.valid_until)
    return None


def answer_again(
    record: SandboxRecord, known: SandboxRecord, living: Living | None, node: str
) -> list[Effect]:
    """Return the answer to a placement under whose id there is a sandbox already, or was.

    Raises:
        DsecError: ``conflict`` when another placement made it; why it has ended.
    """
    if known.placement_id != record.placement_id:
        raise errors.placement_conflict(node, known.local)
    if living is None or living.end_cause is not None:
        raise errors.sandbox_ended(node, known)
    if known.state in AWAKE_OR_ASLEEP:
        return [ConfirmPlacement(record.placement_id, known)]
    return []  # being made: its own answer is on the way
