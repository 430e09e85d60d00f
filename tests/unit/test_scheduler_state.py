from __future__ import annotations

import random
from collections import Counter
from typing import Any, TypeVar

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.network import NetworkMode, NetworkPolicy, NetworkRule
from dsec_common.wire.node import UPLINK, Gpu, NodeHeartbeat, Resources
from dsec_common.wire.sandbox import CreateSandbox, Limits, SandboxCreated
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.effects import (
    Effect,
    Place,
    Refuse,
    ReleaseLease,
    Resolve,
    Succeed,
    TakeUnits,
)
from dsec_scheduler.events import (
    CreateAbandoned,
    CreateAsked,
    Event,
    ForgetDue,
    HeartbeatSeen,
    Moment,
    PlaceRefused,
    PlaceResolved,
    PlaceSucceeded,
    PlaceUnanswered,
    UnitsRefused,
    UnitsTaken,
)
from dsec_scheduler.state import SchedulerState
from dsec_scheduler.views import VETO_S

START_S = 1_000_000.0
GPU = (Gpu(uuid="GPU-0", model="NVIDIA A100"),)

E = TypeVar("E")


class Simulation:
    """A core on a clock that the test turns."""

    def __init__(self, **changes: Any) -> None:
        self.config = SchedulerConfig(**changes)
        self.core = SchedulerState(self.config, random.Random(7))  # noqa: S311  repeatable
        self.now = START_S
        self.ids = 0

    @property
    def at(self) -> Moment:
        return Moment(self.now, self.now - START_S)

    def handle(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event)
        self.core.validate_state()
        return effects

    def beat(
        self,
        *nodes: str,
        capacity: float = 10,
        allocated: int = 0,
        sent_at: float | None = None,
        **changes: Any,
    ) -> None:
        """Have nodes say that they hold ``capacity`` sandboxes of one cpu and 1,000 bytes."""
        for node in nodes:
            fields: dict[str, Any] = {
                "node": node,
                "epoch": "1",
                "store_id": node,
                "capacity": size(capacity),
                "allocated": size(allocated),
                "sent_at": self.now if sent_at is None else sent_at,
                **changes,
            }
            self.handle(HeartbeatSeen(heartbeat=NodeHeartbeat(**fields), at=self.at))

    def ask(
        self, *, timeout_s: float = 30.0, network: NetworkPolicy | None = None, **limits: Any
    ) -> list[Effect]:
        self.ids += 1
        asked = CreateSandbox(
            base="debian@12",
            limits=Limits(**{"cpus": 1.0, "memory_bytes": 1000, **limits}),
            network=network,
        )
        return self.handle(
            CreateAsked(
                create_id=self.ids,
                project="default",
                request=asked,
                local=f"local-{self.ids}",
                timeout_s=timeout_s,
                at=self.at,
            )
        )

    def place(self, **limits: Any) -> Place:
        return only(self.ask(**limits), Place)

    def succeed(self, place: Place) -> None:
        created = SandboxCreated(
            sandbox_id=f"{place.node}.{place.local}",
            node=place.node,
            created_at=self.now,
            sent_at=self.now,
            layers=(),
            limits=Limits(),
        )
        effects = self.handle(
            PlaceSucceeded(create_id=place.create_id, created=created, at=self.at)
        )
        assert only(effects, Succeed).told

    def refuse(self, place: Place, error: DsecError) -> list[Effect]:
        return self.handle(PlaceRefused(create_id=place.create_id, error=error, at=self.at))


def size(sandboxes: float) -> Resources:
    return Resources(
        cpus=float(sandboxes), memory_bytes=int(1000 * sandboxes), sandboxes=int(sandboxes)
    )


def only(effects: list[Effect], kind: type[E]) -> E:
    (effect,) = effects
    assert isinstance(effect, kind)
    return effect


def full() -> DsecError:
    return DsecError(ErrorCode.EXHAUSTED, "full")


def units(wish: TakeUnits, node: str) -> UnitsTaken:
    """Return the event of units that were leased on a node."""
    at = Moment(START_S, START_S)
    return UnitsTaken(create_id=wish.create_id, node=node, lease_id="lease-1", at=at)


def test_load_is_spread_over_the_nodes() -> None:
    simulation = Simulation()
    names = [f"node-{number}" for number in range(20)]
    simulation.beat(*names, capacity=100)
    counts = Counter(simulation.place().node for _ in range(1000))
    assert set(counts) == set(names)
    assert max(counts.values()) - min(counts.values()) <= 15


def test_the_less_loaded_of_two_is_taken() -> None:
    simulation = Simulation()
    simulation.beat("busy", allocated=8)
    simulation.beat("idle", allocated=1)
    assert {simulation.place().node for _ in range(5)} == {"idle"}


def test_a_large_cluster_that_is_nearly_full_is_searched_to_the_end() -> None:
    simulation = Simulation()
    simulation.beat(*(f"node-{number}" for number in range(300)), allocated=10)
    simulation.beat("roomy")
    assert simulation.place().node == "roomy"


def test_its_own_grants_count_before_any_heartbeat_does() -> None:
    simulation = Simulation()
    simulation.beat("node-1", capacity=2)
    simulation.place()
    simulation.place()
    error = only(simulation.ask(), Refuse).error
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, True)
    assert error.retry_after_s > 0


def test_a_grant_is_counted_until_a_heartbeat_sent_after_it_counts_it() -> None:
    simulation = Simulation()
    simulation.beat("node-1", capacity=2)
    place = simulation.place()
    simulation.now += 0.5
    simulation.succeed(place)
    # Sent before the sandbox was made, arrived after.
    simulation.beat("node-1", capacity=2, allocated=0, sent_at=simulation.now - 0.1)
    view = simulation.core.views.get("node-1")
    assert view is not None
    assert view.taken().sandboxes == 1
    simulation.now += 0.5
    simulation.beat("node-1", capacity=2, allocated=1)
    assert view.taken().sandboxes == 1
    assert not view.grants


def test_a_node_that_only_seems_full_is_asked_after_those_with_room() -> None:
    simulation = Simulation()
    simulation.beat("seems-full", capacity=2, allocated=2)
    simulation.beat("roomy", capacity=1)
    assert simulation.place().node == "roomy"
    assert simulation.place().node == "seems-full"


def test_a_node_that_said_it_is_full_is_left_alone_for_a_moment() -> None:
    simulation = Simulation()
    simulation.beat("node-1", capacity=2, allocated=2)
    refused = only(simulation.refuse(simulation.place(), full()), Refuse)
    assert refused.error.code is ErrorCode.EXHAUSTED
    assert "none has room now" in only(simulation.ask(), Refuse).error.message
    simulation.now += 1.01 * VETO_S
    assert simulation.place().node == "node-1"


def test_a_silent_node_is_not_asked_and_comes_back_with_its_heartbeat() -> None:
    simulation = Simulation()
    simulation.beat("node-1")
    simulation.now += 3.1
    error = only(simulation.ask(), Refuse).error
    assert error.code is ErrorCode.UNAVAILABLE
    assert "1 known nodes are silent" in error.message
    simulation.beat("node-1")
    assert simulation.place().node == "node-1"


def test_a_refusal_moves_on_and_never_back() -> None:
    simulation = Simulation()
    simulation.beat("node-1", "node-2", "node-3")
    effects = simulation.ask()
    asked = []
    for _ in range(3):
        place = only(effects, Place)
        asked.append(place.node)
        effects = simulation.refuse(place, full())
    assert sorted(asked) == ["node-1", "node-2", "node-3"]
    error = only(effects, Refuse).error
    assert "3 nodes refused" in error.message
    assert error.details["attempts"] == 3


def test_a_node_without_the_layer_rules_out_all_that_share_its_store() -> None:
    simulation = Simulation()
    simulation.beat("node-1", "node-2", store_id="shared")
    simulation.beat("node-3", allocated=9)
    place = simulation.place()
    assert place.node in {"node-1", "node-2"}
    missing = DsecError(ErrorCode.NOT_FOUND, "no such layer", details={"store_id": "shared"})
    place = only(simulation.refuse(place, missing), Place)
    assert place.node == "node-3"
    # What the first said is more telling than that the second was full; and that had no say.
    error = only(simulation.refuse(place, full()), Refuse).error
    assert (error.code, error.retryable) == (ErrorCode.NOT_FOUND, True)
    assert error.message.startswith("no such layer. Not every layer store was looked in: node-3 ")
    assert "layers_backend" in error.message
    assert error.details["nodes_not_asked"] == 1


def test_a_layer_that_no_store_has_is_not_to_be_asked_for_again() -> None:
    simulation = Simulation()
    simulation.beat("node-1", store_id="one")
    simulation.beat("node-2")
    missing = DsecError(ErrorCode.NOT_FOUND, "no such layer")
    place = only(simulation.refuse(simulation.place(), missing), Place)
    assert only(simulation.refuse(place, missing), Refuse).error is missing


def test_the_request_s_own_fault_ends_it() -> None:
    simulation = Simulation()
    simulation.beat("node-1", "node-2")
    for code in (ErrorCode.INVALID, ErrorCode.LAYER_ERROR, ErrorCode.DENIED):
        error = DsecError(code, "no")
        assert only(simulation.refuse(simulation.place(), error), Refuse).error is error


def test_a_node_that_lacks_a_kernel_feature_is_passed_over() -> None:
    simulation = Simulation()
    simulation.beat("node-1", "node-2")
    unsupported = DsecError(ErrorCode.UNSUPPORTED, "no user namespaces here")
    place = only(simulation.refuse(simulation.place(), unsupported), Place)
    assert only(simulation.refuse(place, unsupported), Refuse).error is unsupported


def test_a_lost_answer_is_asked_for_before_another_node_is() -> None:
    simulation = Simulation()
    simulation.beat("node-1", "node-2")
    place = simulation.place()
    lost = DsecError(ErrorCode.TIMEOUT, "no answer")
    resolve = only(
        simulation.handle(PlaceUnanswered(create_id=place.create_id, error=lost, at=simulation.at)),
        Resolve,
    )
    assert (resolve.node, resolve.local) == (place.node, place.local)
    following = only(
        simulation.handle(PlaceResolved(create_id=place.create_id, created=None, at=simulation.at)),
        Place,
    )
    assert following.node != place.node
    # Until it beats again the silent one is asked by nobody.
    assert {simulation.place().node for _ in range(5)} == {following.node}


def test_a_node_that_was_never_reached_is_passed_over_at_once() -> None:
    simulation = Simulation()
    simulation.beat("node-1", "node-2")
    place = simulation.place()
    nobody = PlaceUnanswered(
        create_id=place.create_id, error=unavailable("nobody"), at=simulation.at, maybe_made=False
    )
    assert only(simulation.handle(nobody), Place).node != place.node


def test_a_sandbox_that_is_there_after_all_is_the_answer() -> None:
    simulation = Simulation()
    simulation.beat("node-1")
    place = simulation.place()
    simulation.handle(
        PlaceUnanswered(create_id=place.create_id, error=unavailable("gone"), at=simulation.at)
    )
    created = SandboxCreated(
        sandbox_id="node-1.x", node="node-1", created_at=0.0, layers=(), limits=Limits()
    )
    succeeded = only(
        simulation.handle(
            PlaceResolved(create_id=place.create_id, created=created, at=simulation.at)
        ),
        Succeed,
    )
    assert not succeeded.told


def test_each_attempt_ends_before_the_request_does() -> None:
    simulation = Simulation(attempt_timeout_s=10)
    simulation.beat("node-1", "node-2")
    place = only(simulation.ask(timeout_s=12), Place)
    assert place.valid_until == simulation.now + 10
    simulation.now += 9
    simulation.beat("node-1", "node-2")
    place = only(simulation.refuse(place, full()), Place)
    assert place.valid_until == simulation.now + 3
    simulation.now += 3
    assert only(simulation.refuse(place, full()), Refuse).error.code is ErrorCode.TIMEOUT


def test_units_are_leased_on_the_node_first_and_given_back_when_it_refuses() -> None:
    simulation = Simulation()
    simulation.beat("node-1", "node-2", gpus=GPU)
    simulation.beat("without-gpu")
    wish = only(simulation.ask(cu=10.0), TakeUnits)

    def allowed() -> set[str]:
        names = ("node-1", "node-2", "without-gpu", "unknown")
        return {it for it in names if simulation.core.may_take(1, it, simulation.at)}

    assert allowed() == {"node-1", "node-2"}
    place = only(simulation.handle(units(wish, "node-1")), Place)
    assert (place.node, place.lease_id) == ("node-1", "lease-1")
    released, again = simulation.refuse(place, full())
    assert released == ReleaseLease(lease_id="lease-1")
    assert isinstance(again, TakeUnits)
    assert again.needs != wish.needs
    assert allowed() == {"node-2"}


def test_units_are_taken_only_where_the_rest_of_the_sandbox_has_room() -> None:
    simulation = Simulation()
    simulation.beat("node-1", capacity=1, gpus=GPU)
    simulation.beat("node-2", capacity=1, gpus=GPU)
    first = only(simulation.ask(cu=10.0), TakeUnits)
    simulation.handle(units(first, "node-1"))
    second = only(simulation.ask(cu=10.0), TakeUnits)
    assert not simulation.core.may_take(second.create_id, "node-1", simulation.at)
    assert simulation.core.may_take(second.create_id, "node-2", simulation.at)


def test_what_waits_in_vain_for_units_is_refused_with_the_queue_s_words() -> None:
    simulation = Simulation()
    simulation.beat("node-1", gpus=GPU)
    wish = only(simulation.ask(cu=10.0), TakeUnits)
    why = full()
    refused = UnitsRefused(create_id=wish.create_id, error=why, at=simulation.at)
    assert only(simulation.handle(refused), Refuse).error is why
    assert not simulation.core.may_take(wish.create_id, "node-1", simulation.at)


def test_units_that_a_silent_node_may_still_use_are_not_given_back() -> None:
    simulation = Simulation()
    simulation.beat("node-1", gpus=GPU)
    lease = only(simulation.ask(cu=10.0), TakeUnits)
    simulation.handle(units(lease, "node-1"))
    simulation.handle(
        PlaceUnanswered(create_id=lease.create_id, error=unavailable("gone"), at=simulation.at)
    )
    effects = simulation.handle(
        PlaceResolved(create_id=lease.create_id, created=None, at=simulation.at)
    )
    assert only(effects, Refuse).error.code is ErrorCode.UNAVAILABLE


def test_more_than_the_largest_node_is_refused_for_good_and_names_it() -> None:
    simulation = Simulation()
    simulation.beat("small", capacity=2)
    simulation.beat("large", capacity=20)
    error = only(simulation.ask(memory_bytes=20_001), Refuse).error
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, False)
    assert "large" in error.message
    assert error.details["memory_bytes"] == 20_000


def test_no_sandbox_is_larger_than_the_machine_however_much_is_handed_out_in_all() -> None:
    simulation = Simulation()
    simulation.beat("oversold", capacity=20, physical=size(2))
    error = only(simulation.ask(cpus=4.0), Refuse).error
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, False)
    assert error.details["cpus"] == 2.0
    simulation.beat("larger", capacity=20, physical=size(8))
    assert {simulation.place(cpus=4.0).node for _ in range(5)} == {"larger"}


def test_an_abandoned_creation_leaves_nothing() -> None:
    simulation = Simulation()
    simulation.beat("node-1", gpus=GPU)
    lease = only(simulation.ask(cu=1.0), TakeUnits)
    simulation.handle(units(lease, "node-1"))
    abandoned = CreateAbandoned(create_id=lease.create_id, at=simulation.at)
    assert simulation.handle(abandoned) == [ReleaseLease(lease_id="lease-1")]
    assert simulation.handle(abandoned) == []
    view = simulation.core.views.get("node-1")
    assert view is not None
    assert view.taken() == Resources()


def test_another_life_of_a_node_owes_nothing_to_the_one_before() -> None:
    simulation = Simulation()
    simulation.beat("node-1", capacity=1)
    place = simulation.place()
    simulation.beat("node-1", capacity=1, epoch="2")
    assert simulation.place().node == "node-1"
    assert only(simulation.refuse(place, full()), Refuse)


def test_nodes_that_are_silent_for_long_are_forgotten() -> None:
    simulation = Simulation(node_forget_s=60)
    simulation.beat("node-1", "node-2")
    place = simulation.place()
    simulation.now += 61
    simulation.beat("node-2")
    simulation.handle(ForgetDue(at=simulation.at))
    assert [view.name for view in simulation.core.views] == ["node-2"]
    simulation.succeed(place)


OPEN = NetworkPolicy(mode=NetworkMode.OPEN)


def test_what_needs_the_outside_goes_to_nodes_that_lead_there() -> None:
    simulation = Simulation()
    simulation.beat("in-1", "in-2", "in-3", missing={UPLINK: "the host has no default route"})
    simulation.beat("out", capacity=20)
    places = [only(simulation.ask(network=OPEN), Place) for _ in range(10)]
    assert {place.node for place in places} == {"out"}


def test_what_needs_the_outside_is_refused_where_no_node_leads_there() -> None:
    simulation = Simulation()
    simulation.beat("in-1", missing={UPLINK: "the host has no default route"})
    refusal = only(simulation.ask(network=OPEN), Refuse)
    assert refusal.error.code is ErrorCode.UNSUPPORTED
    assert "in-1: the host has no default route" in refusal.error.message
    assert "uplink" in refusal.error.message
    inside = NetworkPolicy(mode=NetworkMode.ALLOW, allow=(NetworkRule(cidr="10.0.0.0/8"),))
    assert only(simulation.ask(network=inside), Place).node == "in-1"
    assert only(simulation.ask(), Place).node == "in-1"


def test_a_heartbeat_that_arrives_twice_or_late_is_put_right_by_the_next() -> None:
    simulation = Simulation()
    simulation.beat("node-1", capacity=10)
    view = simulation.core.views.get("node-1")
    assert view is not None
    early, late = (
        NodeHeartbeat(
            node="node-1",
            epoch=view.heartbeat.epoch,
            sent_at=START_S + at,
            capacity=view.heartbeat.capacity,
            allocated=Resources(cpus=at, memory_bytes=0, sandboxes=int(at)),
        )
        for at in (1.0, 2.0)
    )
    for heartbeat in (late, late, early, late):
        simulation.handle(HeartbeatSeen(heartbeat=heartbeat, at=simulation.at))
    assert view.taken() == late.allocated
