"""Peers of a scheduler that cost next to nothing: nodes that make no sandboxes, callers that ask.

They speak NATS on the wire with the credentials of real nodes and of a real project, and say what
those say: heartbeats once a second, and to a request to place the two answers of a node that made
the sandbox. As many sandboxes end as begin: a node holds what it was told to hold, and never fills.
``python -m benchmarks._thin_peers`` is a process of nodes: a line of JSON on its standard input
says which, a further line of JSON how many each holds, and each empty one is answered with what was
placed so far.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import nkeys
import uvloop

from dsec_common import subjects
from dsec_common.accounts_jwt import read_credentials
from dsec_common.wire.base import encode, new_id
from dsec_common.wire.node import NodeHeartbeat, Resources
from dsec_common.wire.sandbox import MIB, Limits, SandboxCreated

HEARTBEAT_S: Final = 1.0
#: As many as a node may have, and more of all else than they take.
SANDBOXES_MAX: Final = 3_200
_ROOMY: Final = Resources(cpus=100_000.0, memory_bytes=1 << 50, sandboxes=SANDBOXES_MAX)
_PHYSICAL: Final = Resources(cpus=128.0, memory_bytes=2 << 40)

OnMessage = Callable[["ThinConnection", bytes, bytes, bytes, bytes], None]
"""Is given a connection, and a message's subject, reply subject, header block and body."""


class ThinConnection(asyncio.Protocol):
    """One connection to NATS, without anything that a benchmark does not need."""

    def __init__(self, credentials: str, on_message: OnMessage) -> None:
        self._credentials = credentials
        self._on_message = on_message
        self._rest = b""
        self._transport: asyncio.WriteTransport
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, url: str, credentials: str, on_message: OnMessage) -> ThinConnection:
        """Return a connection on which subscriptions can be made."""
        host, _, port = url.removeprefix("nats://").partition(":")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: cls(credentials, on_message), host, int(port)
        )
        await connection.ready
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; the server speaks first."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def write(self, data: bytes) -> None:
        """Send lines of the protocol."""
        self._transport.write(data)

    def close(self) -> None:
        """Leave."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take apart what came; a piece that is not whole waits for its rest."""
        rest = self._rest + data if self._rest else data
        at = 0
        while (end := rest.find(b"\r\n", at)) >= 0:
            line = rest[at:end]
            if line.startswith((b"MSG", b"HMSG")):
                words = line.split()
                has_header = line.startswith(b"H")
                total = int(words[-1])
                stop = end + 2 + total
                if len(rest) < stop + 2:
                    break
                header = int(words[-2]) if has_header else 0
                replies = len(words) == 4 + has_header + 1
                start = end + 2
                self._on_message(
                    self,
                    words[1],
                    words[3] if replies else b"",
                    rest[start : start + header],
                    rest[start + header : stop],
                )
                at = stop + 2
                continue
            at = end + 2
            self._control(line)
        self._rest = rest[at:]

    def _control(self, line: bytes) -> None:
        if line.startswith(b"PING"):
            self.write(b"PONG\r\n")
        elif line.startswith(b"PONG") and not self.ready.done():
            self.ready.set_result(None)
        elif line.startswith(b"INFO") and not self.ready.done():
            self._log_in(json.loads(line[4:])["nonce"])
        elif line.startswith(b"-ERR"):
            print(line.decode(), file=sys.stderr)

    def _log_in(self, nonce: str) -> None:
        jwt, seed = read_credentials(Path(self._credentials).read_text(encoding="ascii"))
        pair = nkeys.from_seed(bytearray(seed.encode()))
        signature = base64.b64encode(pair.sign(nonce.encode())).decode()
        options = {
            "jwt": jwt,
            "sig": signature,
            "headers": True,
            "no_responders": True,
            "verbose": False,
            "lang": "python",
            "version": "1",
        }
        self.write(b"CONNECT %s\r\nPING\r\n" % json.dumps(options).encode())


class _Request(msgspec.Struct):
    message_id: str
    limits: Limits


class _Place(msgspec.Struct):
    local: str
    request: _Request


class ThinNodes:
    """Nodes in one process; they count what they are asked for.

    Args:
        live: how many sandboxes each holds; another number is told with the next heartbeats.
    """

    def __init__(self, live: int) -> None:
        self.live = live
        self.placed: Counter[str] = Counter()
        self.by_scheduler: Counter[str] = Counter()
        self._decode = msgspec.msgpack.Decoder(_Place).decode

    async def run(self, url: str, nodes: dict[str, str]) -> None:
        """Beat and answer until cancelled; ``nodes`` are names and their credentials."""
        await asyncio.gather(
            *(
                self._node(url, name, credentials, at / len(nodes) * HEARTBEAT_S)
                for at, (name, credentials) in enumerate(nodes.items())
            )
        )

    async def _node(self, url: str, name: str, credentials: str, after_s: float) -> None:
        def answer(
            connection: ThinConnection, _subject: bytes, reply: bytes, header: bytes, body: bytes
        ) -> None:
            connection.write(self._made(name, reply, header, body))

        connection = await ThinConnection.open(url, credentials, answer)
        place = subjects.node_request(name, "place").encode()
        beat = subjects.heartbeat(name).encode()
        connection.write(b"SUB %s 1\r\n" % place)
        await asyncio.sleep(after_s)
        while True:
            heartbeat = NodeHeartbeat(
                node=name,
                epoch="1",
                store_id="shared",
                capacity=_ROOMY,
                physical=_PHYSICAL,
                allocated=Resources(
                    cpus=float(self.live),
                    memory_bytes=self.live * 256 * MIB,
                    sandboxes=self.live,
                ),
                version="1",
            )
            connection.write(_published(beat, encode(heartbeat)))
            await asyncio.sleep(HEARTBEAT_S)

    def _made(self, name: str, reply: bytes, header: bytes, body: bytes) -> bytes:
        asked = self._decode(body)
        self.placed[asked.request.message_id] += 1
        self.by_scheduler[reply.rpartition(b".")[0].decode()] += 1
        created = SandboxCreated(
            sandbox_id=f"{name}.{asked.local}",
            node=name,
            created_at=time.time(),
            layers=("sha256:0",),
            limits=asked.request.limits,
        )
        answer = encode(created)
        caller = header.split(b"reply-to: ", 1)[1].split(b"\r\n", 1)[0]
        return _published(caller, answer) + _published(reply, answer)

    def told(self) -> dict[str, Any]:
        """Return what was placed since the last time."""
        found = {
            "placed": len(self.placed),
            "twice": sum(count > 1 for count in self.placed.values()),
            "by_scheduler": dict(self.by_scheduler),
        }
        self.placed.clear()
        self.by_scheduler.clear()
        return found


_HEADER: Final = b"NATS/1.0\r\ncontent-type: application/msgpack\r\n\r\n"


def _published(subject: bytes, body: bytes) -> bytes:
    size = len(_HEADER)
    return b"HPUB %s %d %d\r\n%s%s\r\n" % (subject, size, size + len(body), _HEADER, body)


class ThinCaller:
    """A project's client that has a number of creations on their way all the time."""

    def __init__(self, request_body: Callable[[str], bytes], project: str) -> None:
        self._body = request_body
        self._subject = subjects.sandbox_create(project).encode()
        self._inbox = f"_INBOX.{new_id()}".encode()
        self._connection: ThinConnection
        self._going = False
        self.answered = 0
        self.failed: Counter[str] = Counter()
        self._asked_at: dict[bytes, float] = {}
        self.seconds: list[float] = []
        self._number = 0
        self._quiet = asyncio.Event()

    async def open(self, url: str, credentials: str) -> None:
        """Connect."""
        self._connection = await ThinConnection.open(url, credentials, self._on_answer)
        self._connection.write(b"SUB %s.* 1\r\n" % self._inbox)

    async def ask_for(self, seconds: float, in_flight: int) -> float:
        """Keep ``in_flight`` creations on their way for so long; return how many were made/s."""
        self.answered, self._going, self.seconds = 0, True, []
        started = time.perf_counter()
        self._connection.write(b"".join(self._next() for _ in range(in_flight)))
        await asyncio.sleep(seconds)
        self._going = False
        answered, took_s = self.answered, time.perf_counter() - started
        if self._asked_at:
            self._quiet.clear()
            await self._quiet.wait()
        return answered / took_s

    def _next(self) -> bytes:
        self._number += 1
        token = b"%x" % self._number
        self._asked_at[token] = time.perf_counter()
        body = self._body(new_id())
        size = len(_HEADER)
        return b"HPUB %s %s.%s %d %d\r\n%s%s\r\n" % (
            self._subject,
            self._inbox,
            token,
            size,
            size + len(body),
            _HEADER,
            body,
        )

    def _on_answer(
        self, connection: ThinConnection, subject: bytes, _reply: bytes, header: bytes, _body: bytes
    ) -> None:
        asked_at = self._asked_at.pop(subject.rpartition(b".")[2], None)
        if asked_at is None:
            self.failed["answered twice"] += 1
            return
        self.seconds.append(time.perf_counter() - asked_at)
        if b"Nats-Service-Error" in header or b" 503" in header[:20]:
            self.failed[header.decode().split("\r\n")[-4][:200]] += 1
        else:
            self.answered += 1
        if self._going:
            connection.write(self._next())
        elif not self._asked_at:
            self._quiet.set()

    def close(self) -> None:
        """Leave."""
        self._connection.close()


async def _serve_lines() -> None:
    """Be the nodes that the first line says, and tell what they did after each further one."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    asked = json.loads(await reader.readline())
    nodes = ThinNodes(asked["live"])
    beating = asyncio.create_task(nodes.run(asked["url"], asked["nodes"]))
    while line := await reader.readline():
        if line.strip():
            nodes.live = json.loads(line)["live"]
        else:
            print(json.dumps(nodes.told()), flush=True)
    beating.cancel()


if __name__ == "__main__":
    uvloop.run(_serve_lines())
