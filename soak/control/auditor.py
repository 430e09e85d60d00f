"""Reads every record that brokers write and says what does not add up. Believes no broker."""

from __future__ import annotations

from dsec_broker.audit import check_record, violations
from dsec_broker.record import NodeRecord
from dsec_common.bus import KeyValue
from dsec_common.compute.slice_pool import SlicePool
from dsec_common.subjects import ScopedId
from soak.control.model import Model


class Auditor:
    """Holds each revision of each node's record against the one before and against the others.

    Attributes:
        records: the last of each node.
        revisions: how many were looked at.
        unseen: how many were replaced before they could be read. A later one shows what they did;
            the broker that wrote them has checked them itself.
    """

    def __init__(self, model: Model) -> None:
        self.records: dict[str, NodeRecord] = {}
        self.revisions = 0
        self.unseen = 0
        self._model = model
        self._last_revision = 0
        # Of every lease that ever was: its node and its token, by the part of its id that the
        # request gave it. Whoever asks twice must get the same lease.
        self._granted: dict[str, tuple[str, int]] = {}
        self._ended: set[str] = set()

    @property
    def leases(self) -> int:
        """How many different leases were seen."""
        return len(self._granted)

    def held(self) -> list[str]:
        """Return the ids of all leases that there are now."""
        return [lease.lease_id for record in self.records.values() for lease in record.leases]

    async def run(self, bucket: KeyValue[NodeRecord]) -> None:
        """Look at every change until cancelled."""
        async for entry in bucket.watch():
            if entry is not None:
                self.see(entry.key, entry.value, entry.revision)

    def see(self, node: str, record: NodeRecord | None, revision: int) -> None:
        """Look at one revision."""
        self.revisions += 1
        if revision <= self._last_revision:
            self._wrong(node, f"revision {revision} came after {self._last_revision}")
        elif self._last_revision:
            self.unseen += revision - self._last_revision - 1
        self._last_revision = revision
        if record is None:
            self._wrong(node, "its record was deleted while it lives")
            return
        self._adds_up(node, record)
        self._only_grows(node, record, self.records.get(node))
        self.records[node] = record

    def _adds_up(self, node: str, record: NodeRecord) -> None:
        """Check that what is held and what is free are all there is, on every card."""
        try:
            check_record(node, record)
        except AssertionError as error:
            self._wrong(node, f"its record makes no sense: {error}")
        slices = [slice_ for lease in record.leases for slice_ in lease.slices]
        free = SlicePool(record.cards, slices).free()
        for found in violations(record, free):
            self._wrong(node, found)
        for slice_ in slices:
            if slice_.place not in free:
                self._wrong(node, f"a lease holds {slice_.place}, which is not there")

    def _only_grows(self, node: str, record: NodeRecord, before: NodeRecord | None) -> None:
        """Check the tokens, and that no lease is given twice or comes back."""
        last_token = before.last_token if before is not None else 0
        if record.last_token < last_token:
            self._wrong(node, f"the last token fell from {last_token} to {record.last_token}")
        for lease in record.leases:
            local = ScopedId.parse(lease.lease_id).local
            known = self._granted.setdefault(local, (node, lease.token))
            if known == (node, lease.token):
                fresh = before is None or all(it.lease_id != lease.lease_id for it in before.leases)
                if lease.lease_id in self._ended:
                    self._wrong(node, f"lease {lease.lease_id} had ended and is there again")
                elif fresh and lease.token <= last_token:
                    said = f"{lease.lease_id} has token {lease.token} after {last_token}"
                    self._wrong(node, said)
            else:
                said = f"lease {local} is {known} and ({node}, {lease.token}): granted twice"
                self._wrong(node, said)
        held = {lease.lease_id for lease in record.leases}
        if before is not None:
            ended = {lease.lease_id for lease in before.leases} - held
            self._ended |= ended
            for lease_id in ended:
                self._model.note(f"lease {lease_id} ended")

    def _wrong(self, node: str, what: str) -> None:
        self._model.violate(f"revision {self._last_revision}: {what}", node)
