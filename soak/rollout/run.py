"""One run from beginning to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dsec import DSecClient, DsecError, Process, Sandbox
from dsec import agent_channel as channel_module
from dsec.rootfs import build_host_rootfs
from dsec.stack.layout import Layout
from dsec.stack.options import SANDBOXD, StackOptions, service_specs
from dsec.stack.sweep import hold_node_name, sweep_node
from dsec_common.accounts import AuthDirectory
from dsec_common.bus import Bus, BusConfig
from dsec_common.embedded.nats import NatsServer
from dsec_common.errors import unavailable
from dsec_common.wire.rollout import RolloutInfo
from soak.chaos_run import (
    READY_S,
    Part,
    RunModel,
    RunOptions,
    RunSummary,
    all_ready,
    facts_of,
    keep_logs,
    running,
)
from soak.rollout import agent, effects
from soak.rollout.checker import check_ledgers, check_rollout
from soak.rollout.journal import JournalAuditor, Written
from soak.rollout.ledger import read_all
from soak.rollout.parts import Chaos, NatsPart, Trainers, kinds
from soak.rollout.trainer import OVER, ROLLOUTS, Settings

#: When nobody is killed any more, every rollout comes to its end within this time.
_END_S: Final = 90.0
_POLL_S: Final = 0.05
_BASE: Final = "agent@1"
_CODE: Final = "/opt/agent"
#: What the agent is: it is started again when it was killed, and only then.
_COMMAND: Final = (
    f"cd {_CODE} && while :; do python3 -m soak.rollout.agent $SEED; "
    "code=$?; [ $code = 137 ] || exit $code; done"
)
#: Short journals, so that snapshots come and replace them while parts are killed.
_SETTINGS: Final = {"chronus": ("--snapshot-after-frames=2000",)}


class ChaosOptions(RunOptions, frozen=True, kw_only=True):
    """What to run.

    Attributes:
        agents: sandboxes, each with a rollout of its own.
    """

    nodes: int
    chronuses: int
    agents: int


class Summary(RunSummary, frozen=True, kw_only=True):
    """What came of a run.

    Attributes:
        steps: that had their effect, in all rollouts.
        seen_again: that came to a trainer more than once.
        agents_died: how often an agent was killed and started again.
        rivals: trainers that were started while another lived.
        fenced: trainers that were told of a newer one.
        stalls: how often a Chronus stood still for about as long as its lease, or longer.
        owners: how often a shard of the journal got an owner.
        unseen: frames that a snapshot replaced before they were read.
    """

    name = "chaos-rollout"
    told = ("rollouts", "steps", "frames")

    rollouts: int
    steps: int
    seen_again: int
    agents_died: int
    rivals: int
    fenced: int
    stalls: int
    owners: int
    frames: int
    unseen: int


class _Run:
    """What one run has, and what it found."""

    def __init__(self, options: ChaosOptions, directory: Path) -> None:
        self.options = options
        self.directory = directory
        self.stack = StackOptions(
            directory=directory / "platform",
            nodes=options.nodes,
            node_prefix=f"chaos{os.getpid()}",
            uplink=False,
        )
        self.layout = Layout(self.stack.directory)
        self.model = RunModel()
        self.auditor = JournalAuditor(self.model)
        self.steps = 0
        self.died = 0
        self.stalls = 0
        self.seen_again = 0

    def wrong(self, what: str, who: str) -> None:
        """Note what must not be."""
        self.model.violate(what, who)


async def chaos(options: ChaosOptions) -> Summary:
    """Run a platform of our own and kill its parts.

    Raises:
        DsecError: it cannot be started here.
    """
    with tempfile.TemporaryDirectory(prefix="dsec-chaos-") as scratch:
        run = _Run(options, Path(scratch))
        run.stack.check()
        run.layout.prepare()
        auth = AuthDirectory.create_or_open(run.layout.auth)
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(NatsServer(run.layout.nats, auth))
            parts = await stack.enter_async_context(_parts(run, auth, server))
            await all_ready(parts)
            credentials = str(auth.project("default"))
            client = await stack.enter_async_context(DSecClient(server.url, credentials))
            watcher = await stack.enter_async_context(
                await Bus.connect(
                    BusConfig(
                        servers=(server.url,),
                        credentials_path=str(auth.service_credentials("chronus")),
                        name="auditor",
                    )
                )
            )
            settings = Settings(
                seed=options.seed,
                number=0,
                directory=str(run.directory),
                nats=server.url,
                credentials=credentials,
                group="chaos",
                rollouts=options.agents,
            )
            trainers = Trainers(settings, run.model)
            stack.push_async_callback(trainers.stop)
            auditing = asyncio.create_task(run.auditor.run(watcher), name="audit")
            try:
                accounts = await _use(run, client, server, parts, trainers)
            finally:
                auditing.cancel()
                await asyncio.gather(auditing, return_exceptions=True)
            await _judge(run, watcher, accounts, trainers)
        if run.model.violations:
            logs = ("*.log", "platform/logs/*.log", "platform/nats/*.log")
            keep_logs("CHAOS_LOGS", run.directory, "ledger-*", *logs)
    return _summary(run, trainers)


def _summary(run: _Run, trainers: Trainers) -> Summary:
    return Summary(
        **(facts_of(run.options, run.model) | {"kills": kinds(run.model.kills)}),
        rollouts=len(run.auditor.rollouts),
        steps=run.steps,
        seen_again=run.seen_again,
        agents_died=run.died,
        rivals=trainers.rivals,
        fenced=trainers.fenced,
        stalls=run.stalls,
        owners=run.auditor.owners,
        frames=run.auditor.frames,
        unseen=run.auditor.unseen,
    )


# --- Parts ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _parts(run: _Run, auth: AuthDirectory, server: NatsServer) -> AsyncIterator[list[Part]]:
    """Yield services that start, and start again; nodes are stopped first, and leave nothing."""
    parts = []
    for spec in service_specs(run.stack, run.layout, auth, server.url, ""):
        role = spec.name.partition("-")[0]
        if role == "tracer":
            continue
        for number in range(1, 1 + (run.options.chronuses if role == "chronus" else 1)):
            name = spec.name if role == SANDBOXD else f"{role}-{number}"
            runtime_file = run.layout.runtime / f"{name}.json"
            own = msgspec.structs.replace(
                spec,
                name=name,
                runtime_file=runtime_file,
                log=run.layout.logs / f"{name}.log",
                # The last one counts.
                arguments=(
                    *spec.arguments,
                    f"--runtime-file={runtime_file}",
                    *_SETTINGS.get(role, ()),
                ),
            )
            parts.append(Part(own, run.model))
    holders = [hold_node_name(node) for node in run.stack.node_names()]
    try:
        async with running(parts, SANDBOXD, "chronus", "scheduler", "broker"):
            yield parts
    finally:
        for node in run.stack.node_names():
            await asyncio.to_thread(sweep_node, node)
        run.layout.remove_traces()
        for holder in holders:
            if holder is not None:
                holder.close()


# --- The run ----------------------------------------------------------------------------------


class _Agent(msgspec.Struct):
    """One agent: its rollout, its sandbox, and its command."""

    rollout: str
    sandbox: Sandbox
    process: Process


class _Account(msgspec.Struct):
    """What is known of a rollout at its end: the lines of its agent, and the platform's figures."""

    rollout: str
    applied: list[str]
    info: RolloutInfo


async def _use(
    run: _Run, client: DSecClient, server: NatsServer, parts: list[Part], trainers: Trainers
) -> list[_Account]:
    """Have agents step while parts are killed, until all rollouts have come to their end."""
    base = asyncio.create_task(_import_base(client))
    trainers.start()
    path = run.directory / ROLLOUTS
    try:
        async with asyncio.timeout(READY_S):
            await base
            while not path.exists():
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise unavailable(f"no base or no rollouts after {READY_S:g} s") from None
    rollouts = msgspec.json.decode(path.read_bytes(), type=list[str])
    agents = await asyncio.gather(
        *(_start_agent(run, client, rollout, place) for place, rollout in enumerate(rollouts))
    )
    nats = NatsPart(server, run.model)
    victims = [part for part in parts if part.kind in {SANDBOXD, "chronus"}]
    every_s = run.options.kill_every_s
    killing = Chaos(victims, nats, trainers, seed=run.options.seed, every_s=every_s)
    keeping = asyncio.create_task(nats.run(), name="nats")
    try:
        if every_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(killing.run(), run.options.seconds)
            run.stalls = killing.stalls
        else:
            await asyncio.sleep(run.options.seconds)
        run.model.note("nobody is killed any more")
        (run.directory / OVER).touch()
        await _come_to_an_end(run, parts, agents, trainers)
        accounts = [await _account(run, client, one) for one in agents]
        return [account for account in accounts if account is not None]
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _import_base(client: DSecClient) -> None:
    with tempfile.TemporaryDirectory(prefix="dsec-chaos-base-") as directory:
        base = Path(directory) / "base"
        await asyncio.to_thread(_build_base, base)
        name, _, version = _BASE.partition("@")
        await client.layers.import_directory(base, kind="base", name=name, version=version)


def _build_base(base: Path) -> None:
    """Make a root file system with Python and the agent, which needs nothing else of ours."""
    build_host_rootfs(base)
    for module in (channel_module, agent, effects):
        target = base.joinpath(_CODE[1:], *module.__name__.split(".")).with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(str(module.__file__), target)


async def _start_agent(run: _Run, client: DSecClient, rollout: str, place: int) -> _Agent:
    sandbox = await client.create_sandbox(
        _BASE, cpus=0.2, memory_bytes=96 << 20, disk_bytes=16 << 20, rollout_id=rollout
    )
    seed = {"SEED": f"{run.options.seed}-{place}"}
    process = await sandbox.start(_COMMAND, env=seed, merge_stderr=True)
    return _Agent(rollout, sandbox, process)


async def _come_to_an_end(
    run: _Run, parts: list[Part], agents: list[_Agent], trainers: Trainers
) -> None:
    """Return when every rollout is over; one that is not in time is a violation."""
    deadline = asyncio.get_running_loop().time() + _END_S
    try:
        async with asyncio.timeout_at(deadline):
            for part in parts:
                await part.ready.wait()
            await trainers.finished.wait()
            await trainers.all_ended()
    except TimeoutError:
        run.wrong(f"stuck: not over {_END_S:g} s after the last kill", "trainers")
    for one in agents:
        left_s = max(deadline - asyncio.get_running_loop().time(), 1.0)
        try:
            info = await one.process.wait(left_s)
        except DsecError as error:
            run.wrong(f"stuck: its agent does not end: {error.message}", one.rollout)
        else:
            if info.exit_code != 0:
                output = (await one.process.output()).stdout_text[-500:]
                run.wrong(f"its agent ended with {info.exit_code}: {output}", one.rollout)


async def _account(run: _Run, client: DSecClient, one: _Agent) -> _Account | None:
    """Return what an agent has done, and what the platform says of its rollout; None if lost."""
    try:
        applied = await one.sandbox.read_text(agent.APPLIED)
        starts = await one.sandbox.read_text(agent.STARTS)
        info = await client.rollouts.get(one.rollout).inspect()
        await one.sandbox.delete()
    except DsecError as error:
        run.wrong(f"lost: {one.sandbox.id}: {error.code}: {error.message}", one.rollout)
        return None
    run.died += len(starts.splitlines()) - 1
    return _Account(one.rollout, applied.splitlines(), info)


async def _judge(run: _Run, watcher: Bus, accounts: Sequence[_Account], trainers: Trainers) -> None:
    """Hold what each says of the steps against the others."""
    try:
        async with asyncio.timeout(READY_S):
            while not await run.auditor.read_on(watcher):
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        run.wrong(f"cannot be read to its end within {READY_S:g} s", "journal")
    written = run.auditor.rollouts
    if len(written) != run.options.agents:
        run.wrong(f"{len(written)} rollouts for {run.options.agents} tasks", "journal")
    for one in accounts:
        run.steps += len(one.applied)
        check_rollout(
            one.rollout,
            written.get(one.rollout, Written()),
            applied=one.applied,
            info=one.info,
            wrong=run.wrong,
        )
    ledgers = await asyncio.to_thread(lambda: list(read_all(run.directory)))
    run.seen_again = check_ledgers(written, ledgers, rivals=trainers.rivals, wrong=run.wrong)
