"""One soak from beginning to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from dsec import DSecClient, DsecError, Limits, SandboxState
from dsec.rootfs import build_host_rootfs
from dsec.stack.options import StackOptions
from dsec.stack.supervisor import Supervisor
from dsec_common.embedded.kafka import apache_is_there
from soak import leaks
from soak.chaos import Chaos, spawners
from soak.chaos_run import RunOptions, keep_logs
from soak.model import Known, Model
from soak.users import SMALL, STUCK_AFTER_S, User

#: How long a platform that nobody disturbs may take to have nothing left.
_SETTLE_S: Final = 90.0
_POLL_S: Final = 0.25
#: Descriptors of a node that come and go by themselves: connections, files of a database.
_DESCRIPTORS_MORE: Final = 32
#: A sandbox that waits to be handed out has so many at most, in the daemon and in the spawner.
_DESCRIPTORS_OF_ONE: Final = 6
#: Namespaces that a spawner keeps ready for the next sandboxes, two for each id range that
#: was ever in use, as many as sandboxes lived at once. Beside these it makes some ahead.
_KEPT_READY: Final = ("user", "net")
_READY_AHEAD: Final = 16
#: A node makes these with its first sandbox that has a network, and keeps them.
_MADE_ONCE: Final = ("/network", "/network/router", "/network/sandboxes")
_ENVIRONMENT: Final = {
    # Leftovers are searched often, so that the end does not have to be waited for.
    "DSEC_SANDBOXD_RECONCILE_INTERVAL_S": "5",
}


class SoakOptions(RunOptions, frozen=True, kw_only=True):
    """How to soak.

    Attributes:
        most: sandboxes of one user at once.
    """

    nodes: int
    users: int
    kill_every_s: float = 5.0
    most: int = 6


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a soak."""

    seed: int
    seconds: float
    operations: dict[str, int]
    refused: dict[str, int]
    kills: dict[str, int]
    sandboxes: int
    untold: int
    lost: int
    leaks: list[str]
    violations: list[str]

    @property
    def clean(self) -> bool:
        """Whether all is as it must be."""
        return not self.leaks and not self.violations

    def line(self) -> str:
        """Return the whole in one line."""
        return (
            f"soak: {'clean' if self.clean else 'NOT CLEAN'}: seed {self.seed}, "
            f"{self.seconds:.0f} s, {sum(self.operations.values())} operations, "
            f"{sum(self.kills.values())} kills, {self.sandboxes} sandboxes, {self.lost} lost, "
            f"{len(self.leaks)} leaks, {len(self.violations)} violations"
        )


async def soak(options: SoakOptions) -> Summary:
    """Soak a platform of our own.

    Raises:
        DsecError: the platform cannot be started here.
    """
    model = Model()
    average = options.kill_every_s
    chaos = Chaos(model, seed=options.seed, pause_s=(average * 0.4, average * 1.6))
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="dsec-soak-") as scratch, _environment():
        directory = Path(scratch) / "platform"
        prefix = f"soak{os.getpid()}"
        stack = StackOptions(
            directory=directory,
            nats_port=0,
            nodes=options.nodes,
            node_prefix=prefix,
            log_level="info",
            kafka="apache" if apache_is_there() else "embedded",
        )
        supervisor = Supervisor(stack, chaos.heard)
        try:
            await supervisor.start()
            found += await _use(options, supervisor, model, chaos)
        finally:
            await supervisor.stop()
            if model.violations or found:
                keep_logs("SOAK_LOGS", directory / "logs", "*.log")
        words = (str(directory), prefix)
        left = {
            "process": leaks.processes_naming(*words),
            "mount": leaks.mounts(*words),
            "socket": leaks.sockets(*words),
            "cgroup": leaks.cgroups(stack.node_names()),
        }
        found += [f"after the stop: {kind} {one}" for kind, all_ in left.items() for one in all_]
    return Summary(
        seed=options.seed,
        seconds=time.monotonic() - model.started,
        operations=dict(model.done),
        refused=dict(model.refused),
        kills=dict(model.kills),
        sandboxes=len(model.known),
        untold=model.untold,
        lost=sum("lost:" in violation.what for violation in model.violations),
        leaks=found,
        violations=[
            f"{one.after_s:.1f} s {one.operation} {one.sandbox_id}: {one.what}"
            for one in model.violations
        ],
    )


async def _use(
    options: SoakOptions, supervisor: Supervisor, model: Model, chaos: Chaos
) -> list[str]:
    context = supervisor.context
    assert context is not None
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            DSecClient(context.nats_servers, context.credentials)
        )
        base = await _import_base(client)
        before = await _Held.now(supervisor)
        await client.pools.set(base, size=2 * options.nodes, limits=Limits(**SMALL))
        users = [
            User(f"user-{number}", client, model, seed=options.seed, base=base, most=options.most)
            for number in range(options.users)
        ]
        over = asyncio.Event()
        killing = asyncio.create_task(chaos.run(supervisor)) if options.kill_every_s > 0 else None
        counting = asyncio.create_task(_count_living(before.most_living))
        running = asyncio.gather(*(user.run(over) for user in users))
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(running), options.seconds)
            over.set()
            await running
        finally:
            running.cancel()
            for task in (killing, counting):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
        await _all_back(supervisor, options, client)
        await _check_all(client, model, users)
        await _end_all(client, model)
        return await _wait_for_nothing(supervisor, client, before)


async def _count_living(most: dict[str, int]) -> None:
    """Note the most sandboxes that each node has at once, until cancelled."""
    while True:
        for node, so_far in most.items():
            most[node] = max(so_far, len(leaks.living(node)))
        await asyncio.sleep(_POLL_S)


async def _import_base(client: DSecClient) -> str:
    with tempfile.TemporaryDirectory(prefix="dsec-soak-base-") as directory:
        base = Path(directory) / "base"
        build_host_rootfs(base, python=False)
        await client.layers.import_directory(base, kind="base", name="shell", version="1")
    return "shell@1"


async def _all_back(supervisor: Supervisor, options: SoakOptions, client: DSecClient) -> None:
    """Return when every part runs again and every node is ready."""
    names = set(supervisor.options.node_names())
    async with asyncio.timeout(_SETTLE_S):
        while len(supervisor.parts()) < 6 + options.nodes or not all(
            part.process is not None and part.address for part in supervisor.parts()
        ):
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(3.0)
        # A listing leaves out a node that its scheduler has not heard of since it started.
        while names - await _ready_nodes(client):
            await asyncio.sleep(_POLL_S)


async def _ready_nodes(client: DSecClient) -> set[str]:
    try:
        return {node.node for node in (await client.nodes()).nodes if node.ready}
    except DsecError:
        return set()


async def _check_all(client: DSecClient, model: Model, users: list[User]) -> None:
    """Hold every sandbox of the model against what the platform says of it."""
    listed = await client.list_sandboxes(include_ended=True)
    by_id = {info.sandbox_id: info for info in listed}

    async def check(user: User, known: Known) -> None:
        info = by_id.get(known.sandbox.id)
        if known.over:
            return
        if info is None:
            model.violate("lost: no listing names it", "final", known.sandbox.id)
            known.over = True
        elif info.state is SandboxState.ENDED:
            known.over = True
            if info.end_cause not in known.ends:
                said = f"lost: {info.end_cause} {info.end_detail}"
                model.violate(said, "final", known.sandbox.id)
        else:
            await user.attempt(_final_look, known)

    await asyncio.gather(*(check(user, known) for user in users for known in user.mine))
    for known in model.known.values():
        info = by_id.get(known.sandbox.id)
        if known.over and info is not None and info.state is not SandboxState.ENDED:
            model.violate(f"deleted and yet {info.state}", "final", known.sandbox.id)
    told = set(model.known)
    for sandbox_id, info in by_id.items():
        if sandbox_id not in told and info.state is not SandboxState.ENDED:
            # Its request was answered with an error that says that it may have happened.
            model.untold += 1


async def _final_look(user: User, known: Known) -> None:
    await user.look(known)
    if known.counter is not None:
        info = await known.counter.inspect()
        assert not info.ended_at, f"the command that counts has ended: {info}"


async def _end_all(client: DSecClient, model: Model) -> None:
    async with asyncio.timeout(STUCK_AFTER_S):
        while living := await client.sandboxes():
            await asyncio.gather(*(sandbox.delete() for sandbox in living))
        for pool in await client.pools.list():
            await client.pools.remove(key=pool.key)
        snapshots = await client.snapshots.list()
        await asyncio.gather(*(snapshot.delete() for snapshot in snapshots))
    if left := await client.snapshots.list():
        model.violate(f"{len(left)} snapshots after their deletion", "final")


class _Held(msgspec.Struct):
    """What a platform without sandboxes holds."""

    cgroups: set[str]
    processes: set[str]
    mounts: set[str]
    run_files: set[str]
    spawner_mounts: int
    descriptors: dict[str, Counter[str]]
    living: dict[str, int]
    most_living: dict[str, int]

    @classmethod
    async def now(cls, supervisor: Supervisor) -> _Held:
        nodes = supervisor.options.node_names()
        daemons = {
            part.name: part.process.pid
            for part in supervisor.parts()
            if part.process is not None and part.name.startswith("sandboxd-")
        }
        children = [child for pid in daemons.values() for child in spawners(pid)]
        living = {f"sandboxd-{node}": len(leaks.living(node)) for node in nodes}
        counts = {name: leaks.descriptors(pid) for name, pid in daemons.items()}
        counts |= {
            f"spawner of {name}": leaks.descriptors(child)
            for name, pid in daemons.items()
            for child in spawners(pid)
        }
        return cls(
            cgroups=leaks.cgroups(nodes),
            processes=leaks.processes_in(nodes),
            mounts=leaks.mounts(str(supervisor.layout.run), str(supervisor.layout.directory)),
            run_files=leaks.files_below(supervisor.layout.run),
            spawner_mounts=sum(len(leaks.mounts(pid=child)) for child in children),
            descriptors=counts,
            living=living,
            most_living=dict.fromkeys(nodes, 0),
        )

    def beyond(self, before: _Held) -> list[str]:
        """Return what is held now and was not before."""
        found = [f"cgroup {one}" for one in self.cgroups - before.cgroups]
        found += [f"process {one}" for one in self.processes - before.processes]
        found += [f"mount {one}" for one in self.mounts - before.mounts if "/router " not in one]
        found += [
            f"file {one}"
            for one in self.run_files - before.run_files
            if not one.endswith(_MADE_ONCE)
        ]
        if self.spawner_mounts > before.spawner_mounts:
            found.append(f"spawner mounts {self.spawner_mounts} of {before.spawner_mounts}")
        return found + self._descriptors_beyond(before)

    def _descriptors_beyond(self, before: _Held) -> list[str]:
        found = []
        for name, counts in self.descriptors.items():
            node = name.removeprefix("spawner of ")
            earlier = before.descriptors.get(name, Counter())
            more = counts - earlier
            ready = [more.pop(kind, 0) for kind in _KEPT_READY]
            ready_max = before.most_living[node.removeprefix("sandboxd-")] + _READY_AHEAD
            others_max = _DESCRIPTORS_MORE + _DESCRIPTORS_OF_ONE * self.living[node]
            if max(ready) > ready_max or more.total() > others_max:
                found.append(f"descriptors of {name}: {dict(counts)}, once {dict(earlier)}")
        return found


async def _wait_for_nothing(supervisor: Supervisor, client: DSecClient, before: _Held) -> list[str]:
    """Return what is still held when the platform has had time to let go of it."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        found = held = (await _Held.now(supervisor)).beyond(before)
        with contextlib.suppress(DsecError):
            nodes = (await client.nodes()).nodes
            # Calls have some made ahead of the next ones, for minutes after the last; no more
            # sandboxes than these may have anything.
            ahead = sum(sum(node.heartbeat.warm.values()) for node in nodes)
            having = {
                name for node in supervisor.options.node_names() for name in leaks.living(node)
            }
            if len(having) <= ahead:
                found = [one for one in held if not any(name in one for name in having)]
            for node in nodes:
                allocated = node.heartbeat.allocated
                if allocated.sandboxes > sum(node.heartbeat.warm.values()) or node.cu_allocated:
                    found.append(f"ledger of {node.node}: {allocated}, CU {node.cu_allocated}")
                if node.heartbeat.lease_ids:
                    found.append(f"leases of {node.node}: {node.heartbeat.lease_ids}")
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_S)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before: Mapping[str, str | None] = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
