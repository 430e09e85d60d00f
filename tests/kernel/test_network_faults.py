"""Each request to the kernel's network fails in turn, and requests that come all at once."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.network import NetworkMode, NetworkPhase
from dsec_sandboxd.network import namespaces
from dsec_sandboxd.network import nftables as nft
from dsec_sandboxd.network.netlink import Message, Netlink, attributes, refused
from kernel_world import World
from network_world import (
    ALLOWED,
    NONE,
    OPEN,
    OTHER,
    TCP_PORT,
    NetworkWorld,
    allow,
    in_thread,
    named,
    record_of,
    to,
)

_GET_CHAIN = 10 << 8 | 4


class Faults:
    """Has the kernel refuse the n-th request of all that are made while it is armed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._left = 0
        send, send_batch = Netlink.send, Netlink.send_batch

        def failing_send(netlink: Netlink, requests: Sequence[Message], operation: str) -> None:
            self._pass(operation)
            send(netlink, requests, operation)

        def failing_batch(
            netlink: Netlink, begin: Message, requests: Sequence[Message], end: Message
        ) -> None:
            self._pass("a change of the rules")
            send_batch(netlink, begin, requests, end)

        patch.setattr(Netlink, "send", failing_send)
        patch.setattr(Netlink, "send_batch", failing_batch)

    def _pass(self, operation: str) -> None:
        self._left -= 1
        if self._left == 0:
            raise refused(operation, errno.ENOMEM)

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        self._left = number
        try:
            yield
        finally:
            self.fired = self._left <= 0
            self._left = 0

    fired = False

    async def each(self, work: Callable[[], Awaitable[object]]) -> AsyncIterator[str]:
        """Do ``work`` again and again, each time with the next request refused; yield what came."""
        for number in itertools.count(1):
            with self.at(number):
                try:
                    await work()
                except DsecError as error:
                    outcome = str(error.code)
                else:
                    outcome = "done"
            if not self.fired:
                assert outcome == "done"
                assert number > 1, "nothing was asked of the kernel"
                return
            yield outcome


@pytest.fixture
async def net(world: World) -> AsyncIterator[NetworkWorld]:
    made = await NetworkWorld.start(world)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def chains(net: NetworkWorld) -> set[str]:
    """Return the router's chains that are a sandbox's."""

    def read() -> set[str]:
        kept = os.open(net.directory / "router", os.O_RDONLY)
        try:
            namespaces.enter(kept)
        finally:
            os.close(kept)
        with nft.rules_socket() as table:
            bodies = table.dump(_GET_CHAIN, struct.pack("=BBH", 1, 0, 0))
        names = (
            value.rstrip(b"\0").decode()
            for body in bodies
            for kind, value in attributes(body[4:])
            if kind == 3
        )
        return {name for name in names if name[1:].isdigit()}

    return in_thread(read)


async def test_a_network_that_the_kernel_refuses_leaves_nothing(
    net: NetworkWorld, faults: Faults
) -> None:
    record = record_of("a", OPEN)
    await net.world.create("a")

    async def attach() -> None:
        net.networks.expect(record)
        await net.networks.attach(record)

    outcomes = []
    async for outcome in faults.each(attach):
        outcomes.append(outcome)
        if outcome == "done":  # what was refused was tried again
            await net.networks.sandbox_ending("a")
        assert chains(net) == set()
        assert net.networks.addresses("a") == ()
        assert list((net.directory / "sandboxes").iterdir()) == []
        await net.world.kernel.destroy("a")
        await net.world.create("a")
    assert ErrorCode.INTERNAL in outcomes
    net.records["a"] = record
    assert await net.tcp("a", ALLOWED) == "ok"


async def test_a_policy_that_the_kernel_refuses_leaves_the_one_before(
    net: NetworkWorld, faults: Faults
) -> None:
    record = await net.create("a", allow(to(OTHER)))
    other = allow(to(ALLOWED))
    async for outcome in faults.each(lambda: net.networks.set_policy(record, other)):
        assert outcome == ErrorCode.INTERNAL
        assert (await net.networks.info(record)).policy == allow(to(OTHER))
        assert net.networks._memory.get("a").policy == allow(to(OTHER))  # type: ignore[union-attr]
        assert await net.tcp("a", OTHER) == "ok"
        assert await net.tcp("a", ALLOWED) == "ECONNREFUSED"
    assert await net.tcp("a", ALLOWED) == "ok"
    assert await net.tcp("a", OTHER) == "ECONNREFUSED"


async def test_an_agent_phase_that_the_kernel_refuses_may_begin_later(
    net: NetworkWorld, faults: Faults
) -> None:
    record = await net.create("a", allow(to(ALLOWED)), setup_network=OPEN)
    async for outcome in faults.each(lambda: net.networks.enter_agent_phase(record)):
        assert outcome == ErrorCode.INTERNAL
        assert (await net.networks.info(record)).phase is NetworkPhase.SETUP
        assert await net.tcp("a", OTHER) == "ok"
    assert await net.tcp("a", OTHER) == "ECONNREFUSED"


async def test_a_first_policy_that_the_kernel_refuses_leaves_a_sandbox_without_a_network(
    net: NetworkWorld, faults: Faults
) -> None:
    record = await net.create("a")
    outcomes = []
    async for outcome in faults.each(lambda: net.networks.set_policy(record, OPEN)):
        outcomes.append(outcome)
        if outcome == "done":
            await net.networks.set_policy(record, NONE)
            break
        assert chains(net) == set()
        assert (await net.networks.info(record)).policy.mode is NetworkMode.NONE
        assert await net.tcp("a", ALLOWED) == "ENETUNREACH"
    assert ErrorCode.INTERNAL in outcomes
    await net.networks.set_policy(record, OPEN)
    assert await net.tcp("a", ALLOWED) == "ok"


async def test_rules_that_could_not_be_removed_are_nobody_elses(
    net: NetworkWorld, faults: Faults
) -> None:
    names = iter("abcdefgh")
    stuck: set[str] = set()
    for number in (1, 2):
        name = next(names)
        await net.create(name, OPEN)
        taken = chains(net) - stuck
        with faults.at(number):
            await net.networks.sandbox_ending(name)
        assert faults.fired
        assert list((net.directory / "sandboxes").iterdir()) == []
        stuck |= chains(net) & taken
        heir = next(names)
        await net.create(heir, allow(to(ALLOWED)))
        assert chains(net) - stuck, "its number is its own"
        assert await net.tcp(heir, ALLOWED) == "ok"
        assert await net.tcp(heir, OTHER) == "ECONNREFUSED"
        await net.destroy(heir)
        await net.destroy(name)
    assert stuck


async def test_an_address_that_could_not_be_allowed_is_not_told(
    net: NetworkWorld, faults: Faults
) -> None:
    net.names.names["a.example"] = [ALLOWED]
    await net.create("a", allow(named("a.example")))
    with faults.at(1):
        assert (await net.tcp("a", "a.example")).startswith("gai")
    assert await net.tcp("a", "a.example") == "ok"


async def test_a_router_that_the_kernel_refuses_leaves_nothing_and_may_be_made_later(
    world: World, faults: Faults
) -> None:
    number = 0
    while True:
        number += 1
        net = await NetworkWorld.start_without_router(world)
        try:
            with faults.at(number):
                try:
                    await net.networks.check(allow(to(ALLOWED)))
                except DsecError as error:
                    assert error.code in {ErrorCode.UNSUPPORTED, ErrorCode.INTERNAL}  # noqa: PT017  only when refused
                    assert not net.networks._kept_at.exists()
                    refused_one = True
                else:
                    refused_one = False
            await net.networks.check(allow(to(ALLOWED)))
        finally:
            await net.close()
        if not refused_one:
            assert number > 3
            return


async def test_of_first_policies_at_once_the_last_one_is_in_force(net: NetworkWorld) -> None:
    for round_, policies in enumerate(
        (
            (OPEN, NONE, allow(to(ALLOWED))),
            (OPEN, allow(to(OTHER)), NONE),
            (allow(to(OTHER)), OPEN, allow(to(ALLOWED, str(TCP_PORT)))),
        )
    ):
        record = await net.create(f"a{round_}")
        await asyncio.gather(*(net.networks.set_policy(record, policy) for policy in policies))
        assert (await net.networks.info(record)).policy == policies[-1]
        assert await net.tcp(record.local, OTHER) != "ok"
        reached = await net.tcp(record.local, ALLOWED)
        assert (reached == "ok") == (policies[-1].mode is NetworkMode.ALLOW)
    assert len(net.networks._turns) == 0


async def test_the_last_policy_is_in_force_though_the_first_one_waits_for_the_router(
    world: World,
) -> None:
    net = await NetworkWorld.start_without_router(world)
    try:
        record = await net.create("a")
        await asyncio.gather(
            net.networks.set_policy(record, OPEN), net.networks.set_policy(record, NONE)
        )
        assert (await net.networks.info(record)).policy == NONE
    finally:
        await net.close()


async def test_a_sandbox_that_ends_meanwhile_gets_no_network_any_more(net: NetworkWorld) -> None:
    record = await net.create("a")
    ended = DsecError(ErrorCode.EXPIRED, "it has ended")
    over = False

    def check(_record: object) -> None:
        if over:
            raise ended

    net.networks.check_running = check
    first = asyncio.create_task(net.networks.set_policy(record, OPEN))
    await asyncio.sleep(0)
    ending = asyncio.create_task(net.networks.sandbox_ending("a"))
    await asyncio.sleep(0)
    late = asyncio.create_task(net.networks.set_policy(record, OPEN))
    over = True
    await asyncio.gather(first, ending, late, return_exceptions=True)
    assert late.exception() is ended
    assert chains(net) == set()
    assert net.networks.addresses("a") == ()
