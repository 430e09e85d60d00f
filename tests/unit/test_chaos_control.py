"""What judges a run of `make chaos-control` sees each thing that must not be."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from broker_world import World, heartbeat
from dsec_broker.record import Lease, NodeRecord
from dsec_common.wire.lease import LeaseGranted
from soak.control.auditor import Auditor
from soak.control.model import Asked, Model


class Run:
    """A broker with one node of two cards, an auditor who reads its records, and a model."""

    def __init__(self) -> None:
        self.model = Model()
        self.auditor = Auditor(self.model)
        self.world = World()
        self.world.see(heartbeat("node-1", "A100", "A100"))
        self.look()

    @property
    def found(self) -> str:
        return "\n".join(it.what for it in self.model.violations)

    def look(self) -> NodeRecord:
        record, revision = self.world.bucket.read("node-1")
        assert record is not None
        self.auditor.see("node-1", record, revision)
        return record

    def grant(self, cu: float) -> str:
        (broker,) = self.world.brokers
        request_id = broker.grant(cu)
        broker.settle()
        self.look()
        granted = broker.answers[request_id]
        assert isinstance(granted, LeaseGranted)
        return granted.lease_id

    def forge(self, *leases: Lease, node: str = "node-1", last_token: int = 0) -> None:
        """Have the auditor read a record with these leases that no broker would write."""
        record = self.world.record()
        forged = msgspec.structs.replace(
            record,
            heartbeat=msgspec.structs.replace(record.heartbeat, node=node),
            leases=leases,
            last_token=last_token or record.last_token,
        )
        self.world.bucket.revision += 1
        self.auditor.see(node, forged, self.world.bucket.revision)


@pytest.fixture
def run() -> Run:
    return Run()


def test_what_a_broker_writes_is_as_it_must_be(run: Run) -> None:
    (broker,) = run.world.brokers
    first, _ = run.grant(30), run.grant(100)
    broker.transfer(first)
    broker.settle()
    for lease in run.look().leases:
        broker.release(lease.lease_id)
        broker.settle()
        run.look()
    assert run.found == ""
    assert run.auditor.held() == []
    assert run.auditor.leases == 3
    assert run.auditor.revisions == 6


def test_a_slice_in_two_leases_is_seen(run: Run) -> None:
    run.grant(60)
    (lease,) = run.world.record().leases
    token = lease.token + 1
    run.forge(
        lease,
        msgspec.structs.replace(lease, lease_id="node-1.other", token=token),
        last_token=token,
    )
    assert "120 percent allocated + -20 free is not 100" in run.found


def test_a_slice_of_a_card_that_is_not_there_is_seen(run: Run) -> None:
    run.grant(60)
    (lease,) = run.world.record().leases
    (slice_,) = lease.slices
    run.forge(msgspec.structs.replace(lease, slices=(msgspec.structs.replace(slice_, card="no"),)))
    assert "a lease holds no, which is not there" in run.found


def test_a_request_that_is_granted_on_two_nodes_is_seen(run: Run) -> None:
    lease_id = run.grant(60)
    (lease,) = run.world.record().leases
    elsewhere = lease_id.replace("node-1", "node-2")
    run.forge(msgspec.structs.replace(lease, lease_id=elsewhere), node="node-2")
    assert "granted twice" in run.found


def test_a_lease_that_gets_another_token_is_seen(run: Run) -> None:
    run.grant(60)
    (lease,) = run.world.record().leases
    token = lease.token + 1
    run.forge(msgspec.structs.replace(lease, token=token), last_token=token)
    assert "granted twice" in run.found


def test_a_lease_that_comes_back_is_seen(run: Run) -> None:
    run.grant(60)
    (lease,) = run.world.record().leases
    run.forge()
    run.forge(lease)
    assert "had ended and is there again" in run.found


def test_a_token_that_does_not_grow_is_seen(run: Run) -> None:
    run.grant(60)
    (lease,) = run.world.record().leases
    older = msgspec.structs.replace(lease, lease_id="node-1.other", token=lease.token - 1)
    run.forge(older, lease)
    assert "node-1.other has token" in run.found
    run.forge(lease, last_token=lease.token - 1)
    assert "the last token fell" in run.found


def test_a_record_that_vanishes_or_goes_back_is_seen(run: Run) -> None:
    run.look()
    assert "came after" in run.found
    run.auditor.see("node-1", None, run.world.bucket.revision + 1)
    assert "its record was deleted" in run.found


def test_revisions_that_nobody_could_read_are_counted(run: Run) -> None:
    run.world.bucket.revision += 3
    run.grant(60)
    assert run.auditor.unseen == 3
    assert run.found == ""


# --- Requests ---------------------------------------------------------------------------------


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def asked(model: Model) -> Iterator[Asked]:
    asked = model.ask("one", "sandbox")
    model.told("node-1", "a", "one")
    model.made("node-1.a", "one")
    yield asked
    assert not model.unanswered()


def test_a_request_that_is_granted_once_is_as_it_must_be(model: Model, asked: Asked) -> None:
    model.was_granted(asked, "node-1.a")
    model.answered(asked, "granted node-1.a")
    model.gone("node-1.a", "one")
    assert model.violations == []


def test_a_request_that_is_granted_twice_is_seen(model: Model, asked: Asked) -> None:
    model.was_granted(asked, "node-1.a")
    model.gone("node-1.a", "one")
    model.made("node-2.b", "one")
    assert "granted twice" in model.violations[0].what


def test_a_placement_that_is_sent_twice_is_seen(model: Model, asked: Asked) -> None:
    model.was_granted(asked, "node-1.a")
    model.told("node-2", "a", "one")
    assert model.violations == [], "a node that refuses leads to another one"
    model.told("node-2", "a", "one")
    assert "node-2.a was sent twice" in model.violations[0].what
    model.note("later")
    assert model.history_then[-2:] == [it for it in model.history if "node-2.a" in it][-2:]


def test_two_answers_to_one_request_are_seen(model: Model, asked: Asked) -> None:
    model.was_granted(asked, "node-1.a")
    model.answered(asked, "refused exhausted")
    assert "two answers" in model.violations[0].what


def test_a_sandbox_of_who_was_refused_is_seen(model: Model, asked: Asked) -> None:
    model.was_refused(asked, "exhausted")
    assert "refused (exhausted), but there are ['node-1.a']" in model.violations[0].what
    model.gone("node-1.a", "one")
    model.made("node-1.b", "one")
    assert "made after it was refused" in model.violations[-1].what


def test_a_sandbox_that_is_told_of_and_not_there_is_seen(model: Model, asked: Asked) -> None:
    model.was_granted(asked, "node-2.b")
    assert "but there are ['node-1.a']" in model.violations[0].what


def test_a_gang_that_is_not_whole_is_seen(model: Model) -> None:
    gang = model.ask("gang", "gang", 2)
    model.made("node-1.a", "gang")
    model.was_granted(gang, "node-1.a", "node-1.b")
    assert "but there are ['node-1.a']" in model.violations[0].what
    model.made("node-1.b", "gang")
    model.made("node-1.c", "gang")
    assert "granted twice" in model.violations[-1].what


def test_a_request_without_an_answer_is_lost(model: Model) -> None:
    lost = model.ask("lost", "sandbox")
    assert model.unanswered() == [lost]
