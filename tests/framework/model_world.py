"""A sandbox's model endpoint, its rollout, and a trainer: all parts but the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai

from agent_world import NODE, sandbox_record
from chronus_parties import chronus_service
from dsec.channel import Channel
from dsec.model_relay import ModelRelay
from dsec.rollouts import Rollout, Rollouts
from dsec_common import subjects
from dsec_common.behavior import BehaviorLog
from dsec_common.bus import Bus, Request
from dsec_common.clock import SystemClock
from dsec_common.testing.nats import NatsForTests
from dsec_common.wire.rollout_stream import HandFeedback
from dsec_sandboxd.agent_gateway import ChronusGateway
from dsec_sandboxd.model_doors import ModelDoors
from dsec_sandboxd.step_log import StepLog

HI: Any = [{"role": "user", "content": "hi"}]


def _own_namespace(local: str) -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Steps:
    """Takes what the node logs."""

    def __init__(self, taken: list[BehaviorLog]) -> None:
        self._taken = taken

    def append(self, record: BehaviorLog) -> None:
        self._taken.append(record)


class ModelWorld:
    """One sandbox's endpoint, its rollout, and a way to train it."""

    def __init__(self, node_bus: Bus, rollout: Rollout, directory: Path) -> None:
        self.rollout = rollout
        self.journal = directory / "calls.jsonl"
        self.port = _free_port()
        self._bus = node_bus
        self.steps: list[BehaviorLog] = []
        self.doors = self._new_doors()

    def _new_doors(
        self, wait_max_s: float = 60.0, kind: type[ChronusGateway] = ChronusGateway
    ) -> ModelDoors:
        gateway = kind(self._bus, StepLog(NODE, _Steps(self.steps)), NODE, SystemClock())
        return ModelDoors(
            _own_namespace, gateway, port=self.port, wait_max_s=wait_max_s, grace_s=0.3
        )

    async def serve(self) -> None:
        """Take what trainers say of answers on their way, whichever daemon there is."""

        async def told(request: Request[HandFeedback]) -> None:
            await self.doors.take(request, self._bus)

        await self._bus.serve(subjects.node_request(NODE, "stream"), HandFeedback, told)

    async def open(self) -> None:
        """Do what happens when the sandbox is made."""
        record = msgspec.structs.replace(sandbox_record(), model_rollout_id=self.rollout.id)
        await self.doors.attach(record)

    async def restart_node(
        self, wait_max_s: float = 60.0, kind: type[ChronusGateway] = ChronusGateway
    ) -> None:
        """Do what a new daemon does: nothing is known but the record."""
        await self.doors.aclose()
        self.doors = self._new_doors(wait_max_s, kind)
        await self.open()

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", **options
        )

    @contextlib.asynccontextmanager
    async def relay(self, engine: Any, **options: Any) -> AsyncIterator[ModelRelay]:
        """Have a relay at work; its failure fails the test."""
        async with ModelRelay(self.rollout, engine, journal=self.journal, **options) as relay:
            running = asyncio.create_task(relay.run())
            try:
                yield relay
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running


@contextlib.asynccontextmanager
async def model_world(nats: NatsForTests, directory: Path) -> AsyncIterator[ModelWorld]:
    """Yield an endpoint that listens, with a Chronus and a rollout behind it."""
    async with (
        chronus_service(nats),
        nats.project() as trainer_bus,
        nats.service("sandboxd", NODE) as node_bus,
    ):
        rollout = await Rollouts(Channel(trainer_bus, "default")).open()
        world = ModelWorld(node_bus, rollout, directory)
        await world.serve()
        await world.open()
        try:
            yield world
        finally:
            await world.doors.aclose()


async def chat(client: openai.AsyncOpenAI, messages: Any = HI, **options: Any) -> str:
    """Return what the model says."""
    done = await client.chat.completions.create(model="m", messages=messages, **options)
    return str(done.choices[0].message.content)


async def raw_call(
    world: ModelWorld, *, read: bool, retry: int = 0, text: str = "hi", **more: str
) -> bytes:
    """Call with bytes of our own; hang up at once, or read the answer."""
    messages = [{"role": "user", "content": text}]
    body = msgspec.json.encode({"model": "m", "messages": messages, **more})
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"x-stainless-retry-count: {retry}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    told = await reader.read() if read else b""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return told
