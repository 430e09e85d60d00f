"""Both sides of a rollout, and Chronus itself as a service here or as a process to be killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from dsec_chronus.config import ChronusConfig
from dsec_chronus.service import ChronusService
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import DsecError
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests
from dsec_common.wire.rollout import (
    AwaitFeedback,
    FeedbackAccepted,
    FeedbackState,
    NextStages,
    OpenRollout,
    RolloutOpened,
    SendFeedback,
    StageAccepted,
    StageBatch,
    StageReport,
    StepRollout,
)

T = TypeVar("T")

PATIENCE_S = 30.0
LEASE_TTL_S = 1.0


async def keep_asking(request: Callable[[], Awaitable[T]], patience_s: float = PATIENCE_S) -> T:
    """Return the answer, asking again for as long as the error says that it may help."""
    async with asyncio.timeout(patience_s):
        while True:
            try:
                return await request()
            except DsecError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(error.retry_after_s or 0.05)


class Trainer:
    """The trainer's side of one rollout."""

    def __init__(self, bus: Bus, rollout_id: str, project: str = "default") -> None:
        self.bus = bus
        self.rollout_id = rollout_id
        self._project = project

    def _subject(self, verb: str) -> str:
        return subjects.rollout(self._project, ScopedId.parse(self.rollout_id), verb)

    async def next(self, after_seq: int, *, wait_s: float = 1.0) -> StageBatch:
        """Return the reports after a number."""
        return await keep_asking(
            lambda: self.bus.request(
                self._subject("next"),
                NextStages(after_seq=after_seq, wait_s=wait_s),
                StageBatch,
                timeout_s=wait_s + 0.5,
            )
        )

    async def feedback(self, seq: int, payload: Any = None, *, reward: float = 0.0) -> bool:
        """Answer a report; return whether the same answer was there."""
        reply = await keep_asking(
            lambda: self.bus.request(
                self._subject("feedback"),
                SendFeedback(seq=seq, payload=payload, reward=reward),
                FeedbackAccepted,
                timeout_s=1.0,
            )
        )
        return reply.duplicate

    async def answer_all(self, count: int, seen: list[int]) -> None:
        """Answer each report with its own payload until ``count`` have come."""
        while not seen or seen[-1] < count:
            batch = await self.next(seen[-1] if seen else 0)
            for report in batch.reports:
                await self.feedback(report.seq, {"to": report.payload})
                seen.append(report.seq)


class Agent:
    """The sandbox's side of one rollout, as its node speaks for it."""

    def __init__(self, bus: Bus, rollout_id: str, project: str = "default") -> None:
        self.bus = bus
        self.rollout_id = rollout_id
        self._project = project

    def _subject(self, verb: str) -> str:
        return subjects.rollout_system(self._project, ScopedId.parse(self.rollout_id), verb)

    async def report(self, seq: int, payload: Any = None, *, stage: str = "stage") -> bool:
        """Report; return whether the same report was there."""
        reply = await keep_asking(
            lambda: self.bus.request(
                self._subject("report"),
                StageReport(seq=seq, stage=stage, payload=payload, sandbox_id="node-1.a"),
                StageAccepted,
                timeout_s=1.0,
            )
        )
        return reply.duplicate

    async def await_feedback(self, seq: int, *, wait_s: float = 1.0) -> FeedbackState:
        """Return the feedback to a report once it is there."""
        while True:
            state = await keep_asking(
                lambda: self.bus.request(
                    self._subject("await"),
                    AwaitFeedback(seq=seq, wait_s=wait_s),
                    FeedbackState,
                    timeout_s=wait_s + 0.5,
                )
            )
            if state.ready:
                return state

    async def step(self, seq: int, payload: Any = None, *, wait_s: float = 1.0) -> FeedbackState:
        """Report and return the feedback once it is there."""
        while True:
            state = await keep_asking(
                lambda: self.bus.request(
                    self._subject("step"),
                    StepRollout(
                        seq=seq,
                        stage="stage",
                        payload=payload,
                        sandbox_id="node-1.a",
                        wait_s=wait_s,
                    ),
                    FeedbackState,
                    timeout_s=wait_s + 0.5,
                )
            )
            if state.ready:
                return state

    async def step_until_done(self, first: int = 1) -> list[Any]:
        """Step until the trainer says that it is done; return what it answered."""
        answers = []
        for seq in itertools.count(first):
            state = await self.step(seq, {"step": seq})
            answers.append(state.payload)
            if state.done:
                return answers
        raise AssertionError

    async def step_all(self, count: int) -> None:
        """Report ``count`` times and check each feedback."""
        for seq in range(1, count + 1):
            await self.report(seq, {"step": seq})
            state = await self.await_feedback(seq)
            assert state.payload == {"to": {"step": seq}}


async def open_rollout(bus: Bus, key: str = "", project: str = "default") -> str:
    """Open a rollout and return its id."""
    reply = await keep_asking(
        lambda: bus.request(
            subjects.rollout_open(project), OpenRollout(idempotency_key=key), RolloutOpened
        )
    )
    return reply.rollout_id


@contextlib.asynccontextmanager
async def chronus_service(nats: NatsForTests, **settings: Any) -> AsyncIterator[ChronusService]:
    """Yield a Chronus in this process; stopped in order afterwards, which must succeed."""
    bus = nats.service_config("chronus")
    config = ChronusConfig(
        nats_servers=bus.servers,
        nats_credentials=bus.credentials_path,
        connect_timeout_s=10.0,
        **{"lease_ttl_s": LEASE_TTL_S, **settings},
    )
    service = ChronusService(config)
    try:
        await service.start()
        yield service
    finally:
        assert await service.stop() == 0


@contextlib.asynccontextmanager
async def chronus_process(
    nats: NatsForTests, directory: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a Chronus in a process of its own that is ready; killed afterwards."""
    bus = nats.service_config("chronus")
    runtime_file = directory / f"chronus-{os.urandom(4).hex()}.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dsec_chronus",
        f"--nats-servers={','.join(bus.servers)}",
        f"--nats-credentials={bus.credentials_path}",
        f"--lease-ttl-s={LEASE_TTL_S}",
        f"--runtime-file={runtime_file}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(20):
            while not _is_running(runtime_file):
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _is_running(runtime_file: Path) -> bool:
    try:
        return bool(json.loads(runtime_file.read_text())["state"] == "running")
    except OSError:
        return False


class DeafProxy:
    """A way to a NATS server on which answers can be lost while requests still arrive."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.deaf = False

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()
        await self._server.wait_closed()

    async def cut(self) -> None:
        """Break every connection and hear again."""
        self.deaf = False
        for writer in list(self._writers):
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        away_reader, away_writer = await asyncio.open_connection(*self._target)
        for source, sink, lossy in (
            (reader, away_writer, False),
            (away_reader, writer, True),
        ):
            self._writers.add(sink)
            task = asyncio.create_task(self._carry(source, sink, lossy=lossy))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, lossy: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if not (lossy and self.deaf):
                    writer.write(data)
                    await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)
