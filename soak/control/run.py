"""One run from beginning to end."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from dsec import DSecClient
from dsec.stack.child import ServiceSpec
from dsec_broker.record import NodeRecord
from dsec_broker.service import BUCKET
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.errors import DsecError
from dsec_common.subjects import SYSTEM, ScopedId
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.lease import ConservationBroken
from dsec_common.wire.sandbox import SandboxRefused, SandboxRunning
from soak.chaos_run import Part, RunOptions, RunSummary, all_ready, facts_of, keep_logs, running
from soak.control.auditor import Auditor
from soak.control.model import Model
from soak.control.nodes import Node, nodes
from soak.control.parts import Chaos
from soak.control.users import PATIENCE_S, User

#: A lease whose scheduler died ends by itself, at the latest after the settings below together.
_DRAIN_S: Final = 60.0
_POLL_S: Final = 0.1
#: Times that let what a dead process left run out within the run. All clocks are one here.
_SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "broker": {"clock-skew-s": "1", "sweep-interval-s": "1"},
    "scheduler": {
        "attempt-timeout-s": "5",
        "lease-claim-s": "5",
        "queue-patience-s": "60",
        "starving-s": "10",
        # Batch work may wait for hours for cards that cost less: here all cost the same.
        "prices": "A100=1",
    },
}


class ChaosOptions(RunOptions, frozen=True, kw_only=True):
    """What to run."""

    brokers: int
    schedulers: int
    users: int


class Summary(RunSummary, frozen=True, kw_only=True):
    """What came of a run.

    Attributes:
        asked_again: requests that had to be sent again, by kind: whoever had them was dead.
        revisions: of node records that were checked.
        unseen: and that were replaced before they could be.
    """

    name = "chaos-control"
    told = ("requests", "sandboxes", "leases", "revisions")

    requests: int
    granted: dict[str, int]
    refused: dict[str, int]
    asked_again: dict[str, int]
    sandboxes: int
    died: int
    leases: int
    revisions: int
    unseen: int


async def chaos(options: ChaosOptions) -> Summary:
    """Run a control plane of our own and kill its parts.

    Raises:
        DsecError: it cannot be started here.
    """
    model = Model()
    auditor = Auditor(model)
    with tempfile.TemporaryDirectory(prefix="dsec-chaos-") as scratch:
        directory = Path(scratch)
        async with contextlib.AsyncExitStack() as stack:
            nats = await stack.enter_async_context(nats_for_tests())
            parts = await stack.enter_async_context(_parts(options, nats, directory, model))
            await all_ready(parts)
            cluster = await stack.enter_async_context(nodes(nats, model, options.seed))
            await stack.enter_async_context(_auditing(nats, auditor, model))
            client = await stack.enter_async_context(
                DSecClient(nats.server.url, nats.auth.project("default"))
            )
            services = await stack.enter_async_context(nats.service("scheduler"))
            await _use(options, model, parts, client=client, services=services, cluster=cluster)
            try:
                await all_ready(parts)
            except DsecError as error:
                model.violate(error.message, "parts")
            await _end_the_rest(client, model)
            await _drain(model, auditor, cluster)
        if model.violations:
            keep_logs("CHAOS_LOGS", directory, "*.log")
    for asked in model.unanswered():
        model.violate(f"lost: a {asked.kind} without an answer", asked.request_id)
    return _summary(options, model, auditor)


def _summary(options: ChaosOptions, model: Model, auditor: Auditor) -> Summary:
    return Summary(
        **facts_of(options, model),
        requests=len(model.asked),
        granted=dict(model.granted),
        refused=dict(model.refused),
        asked_again=dict(model.again),
        sandboxes=sum(len(asked.made) for asked in model.asked.values()),
        died=model.died,
        leases=auditor.leases,
        revisions=auditor.revisions,
        unseen=auditor.unseen,
    )


# --- Parts ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _parts(
    options: ChaosOptions, nats: NatsForTests, directory: Path, model: Model
) -> AsyncIterator[list[Part]]:
    """Yield brokers and schedulers that start, and start again; they are stopped in order."""
    counts = {"broker": options.brokers, "scheduler": options.schedulers}
    parts = [
        Part(_spec(kind, number, nats, directory), model)
        for kind, count in counts.items()
        for number in range(1, count + 1)
    ]
    async with running(parts, "scheduler", "broker"):
        yield parts


def _spec(kind: str, number: int, nats: NatsForTests, directory: Path) -> ServiceSpec:
    name = f"{kind}-{number}"
    runtime_file = directory / f"{name}.json"
    settings = {
        "nats-servers": nats.server.url,
        "nats-credentials": str(nats.auth.service_credentials(kind)),
        "state-directory": str(directory),
        "runtime-file": str(runtime_file),
        **_SETTINGS[kind],
    }
    return ServiceSpec(
        name=name,
        module=f"dsec_{kind}",
        arguments=tuple(f"--{key}={value}" for key, value in settings.items()),
        runtime_file=runtime_file,
        log=directory / f"{name}.log",
    )


# --- The run ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _auditing(nats: NatsForTests, auditor: Auditor, model: Model) -> AsyncIterator[None]:
    """Read what brokers write, and hear what they say of it themselves, within the context."""

    async def alarm(told: Request[ConservationBroken]) -> None:
        model.violate(f"a broker says: {told.message.violations}", told.message.node)

    async def outcome(told: Request[SandboxRunning | SandboxRefused]) -> None:
        message = told.message
        asked = model.asked[message.request_id]
        if isinstance(message, SandboxRunning):
            model.answered(asked, f"granted {message.sandbox_id}")
        else:
            model.was_refused(asked, message.code)

    async with nats.service("broker") as bus, nats.service("operator") as operator:
        bucket = await bus.kv(BUCKET, NodeRecord)
        alarms = f"{subjects.ROOT}.{SYSTEM}.evt.node.*.conservation_broken"
        await operator.subscribe(alarms, ConservationBroken, alarm)
        either: type[SandboxRunning | SandboxRefused] = SandboxRunning | SandboxRefused  # type: ignore[assignment]
        requests = f"{subjects.ROOT}.default.evt.request.*.*"
        await operator.subscribe(requests, either, outcome)
        await operator.flush()
        auditing = asyncio.create_task(auditor.run(bucket), name="audit")
        try:
            yield
        finally:
            auditing.cancel()
            for failure in await asyncio.gather(auditing, return_exceptions=True):
                if not isinstance(failure, asyncio.CancelledError):
                    model.violate(f"the audit ended: {failure!r}", "auditor")


async def _use(
    options: ChaosOptions,
    model: Model,
    parts: list[Part],
    *,
    client: DSecClient,
    services: Bus,
    cluster: dict[str, Node],
) -> None:
    """Have users use it while parts are killed, and let them end what they began."""
    over = asyncio.Event()
    users = [
        User(
            f"user{number}",
            client=client,
            services=services,
            nodes=cluster,
            model=model,
            seed=options.seed,
        )
        for number in range(options.users)
    ]
    using = asyncio.gather(*(user.run(over) for user in users))
    killing = Chaos(parts, seed=options.seed, every_s=options.kill_every_s)
    chaos = asyncio.create_task(killing.run(), name="chaos") if options.kill_every_s > 0 else None
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(using), options.seconds)
        over.set()
        if chaos is not None:
            chaos.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(using, 2 * PATIENCE_S)
    finally:
        for task in (using, chaos):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def _end_the_rest(client: DSecClient, model: Model) -> None:
    """End sandboxes that nobody holds: there must not be any."""
    for asked in model.asked.values():
        if asked.alive:
            model.violate(f"nobody's: {sorted(asked.alive)}", asked.request_id)
        for sandbox_id in sorted(asked.alive):
            await client.sandbox(sandbox_id).delete()


async def _drain(model: Model, auditor: Auditor, cluster: dict[str, Node]) -> None:
    """Return when no lease is left; what is left for too long is a violation."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            while auditor.held() or any(node.lease_ids for node in cluster.values()):
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        for lease_id in auditor.held():
            model.violate(f"still held: {lease_id}", ScopedId.parse(lease_id).owner)
