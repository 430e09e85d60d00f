"""The model endpoints of sandboxes: each listens on loopback in its sandbox's network namespace.

The socket is the node's own. Whoever connects to it is in that sandbox, whatever its requests say,
and nothing else can be reached through it. It needs no network, and no credentials are known here.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

import msgspec
import structlog
from aiohttp import web

from dsec_common import bus_types, subjects
from dsec_common.bus import Bus
from dsec_common.clock import Clock, SystemClock
from dsec_common.errors import DsecError, from_os_error
from dsec_common.model_calls import MODEL_BODY_BYTES_MAX
from dsec_common.model_errors import API_OF_PATH, ModelApi, ModelCallError
from dsec_common.wire.network import NetworkPolicy
from dsec_common.wire.rollout_stream import FeedbackTaken, HandFeedback
from dsec_sandboxd.agent_gateway import AgentGateway
from dsec_sandboxd.agent_limits import ByteBudget, RequestRate
from dsec_sandboxd.model_environment import MODEL_PORT
from dsec_sandboxd.model_session import (
    MODEL_GRACE_S,
    MODEL_WAIT_MAX_S,
    BrokenStreamError,
    ModelSession,
    PendingCall,
    Request,
    no_call,
)
from dsec_sandboxd.network.namespaces import make_in
from dsec_sandboxd.ports import SandboxNetworks, Uses
from dsec_sandboxd.records import SandboxRecord

_log: Final = structlog.get_logger(__name__)

MODEL_CONNECTIONS_MAX: Final = 32
"""Connections to the model endpoint of one sandbox at once; further ones wait."""

MODEL_CALLS_PER_S_MAX: Final = 50.0
"""Calls of one sandbox a second; every 64 KiB of a request count as one more."""

_BURST: Final = 200
#: Of all sandboxes: each is a descriptor of the daemon.
_NODE_CONNECTIONS_MAX: Final = 2048
#: Requests that are being read, of one sandbox and of all.
_BODIES_BYTES: Final = 4 * MODEL_BODY_BYTES_MAX
_NODE_BODIES_BYTES: Final = 64 * MODEL_BODY_BYTES_MAX
_BODY_S: Final = 60.0
_BACKLOG: Final = 64
_ACCEPTS_AT_ONCE: Final = 8
_RETRY_S: Final = 0.5
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_CHUNK_BYTES: Final = 64 * 1024
_KEY_CHARACTERS_MAX: Final = 256
_STOP_S: Final = 1.0


class ModelDoors:
    """The endpoints of the node's sandboxes; told of each one's beginning and end."""

    def __init__(
        self,
        namespace_of: Callable[[str], int],
        gateway: AgentGateway,
        uses: Uses | None = None,
        clock: Clock | None = None,
        *,
        port: int = MODEL_PORT,
        wait_max_s: float = MODEL_WAIT_MAX_S,
        grace_s: float = MODEL_GRACE_S,
    ) -> None:
        """Take the parts.

        Args:
            namespace_of: returns a descriptor of a sandbox's network namespace, to be closed.
            gateway: the way to rollouts.
            uses: is told of every call, so that nobody takes its sandbox for idle.
            clock: for deadlines.
            port: where to listen.
            wait_max_s: how long one request waits.
            grace_s: how long a call goes on without anybody who waits for it.
        """
        self._namespace_of = namespace_of
        self._gateway = gateway
        self._uses = uses
        self._clock: Clock = clock or SystemClock()
        self._port = port
        self._wait_max_s = wait_max_s
        self._grace_s = grace_s
        #: Is asked before a call begins, and raises for one that is one too many.
        self.admit: Callable[[SandboxRecord], None] = lambda _record: None
        self._doors: dict[str, _Door] = {}
        self._put_back: dict[str, ModelSession] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.budget = ByteBudget(_NODE_BODIES_BYTES)

    async def serve(self, bus: Bus, node: str) -> None:
        """Take pieces of answers from now on."""
        pieces = subjects.node_request(node, "stream")
        await bus.serve(pieces, HandFeedback, partial(self.take, bus=bus))

    async def take(self, request: bus_types.Request[HandFeedback], bus: Bus) -> None:
        """Take what a trainer says of an answer that is not whole yet, and answer the trainer."""
        try:
            reply = FeedbackTaken(size=self.told(request.message))
        except DsecError as error:
            await bus.reply_error(request.caller, error)
        else:
            await bus.reply(request.caller, reply)

    def told(self, message: HandFeedback) -> int:
        """Take a piece of an answer in; see :meth:`ModelSession.told`.

        Raises:
            DsecError: ``not_found`` unless that call is under way in a sandbox of that project.
        """
        door = self._doors.get(message.local)
        if door is None or not door.session.is_of(message.project, message.rollout_id):
            raise no_call(message.piece.seq)
        return door.session.told(message.piece)

    async def attach(self, record: SandboxRecord) -> None:
        """Listen in a sandbox that asked for it; once more changes nothing.

        Raises:
            DsecError: naming the call that failed.
        """
        if not record.model_rollout_id or record.local in self._doors:
            return
        session = self._put_back.pop(record.local, None) or ModelSession(
            record,
            self._gateway,
            self._clock,
            self._uses,
            spawn=self._spawn,
            wait_max_s=self._wait_max_s,
            grace_s=self._grace_s,
            admit=self.admit,
        )
        namespace_fd = self._namespace_of(record.local)
        try:
            listener = make_in(namespace_fd, self._listen)
        finally:
            os.close(namespace_fd)
        self._doors[record.local] = _Door(self, session, listener)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # Connections of an earlier daemon may still be ending.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self._port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise from_os_error("bind", error, f"127.0.0.1:{self._port}") from error
        except BaseException:
            listener.close()
            raise
        return listener

    async def sandbox_adopted(self, record: SandboxRecord) -> None:
        """Listen again in a sandbox of an earlier daemon.

        Something in it may have taken the place meanwhile: then that sandbox has no endpoint, as it
        wished, and lives on.
        """
        try:
            await self.attach(record)
        except DsecError as error:
            _log.warning("no_model_endpoint", local=record.local, error=str(error))

    async def sandbox_ending(self, local: str) -> None:
        """Stop listening and give up what is under way. Idempotent."""
        self._put_back.pop(local, None)
        door = self._doors.pop(local, None)
        if door is not None:
            await door.close(ended=True)

    async def sandbox_put_back(self, local: str) -> None:
        """Do the same for one that goes on: what its harness was told before, it was told."""
        door = self._doors.pop(local, None)
        if door is not None:
            await door.close(ended=True)
            self._put_back[local] = door.session

    async def aclose(self) -> None:
        """Stop listening everywhere; what is under way goes on when it is asked for again."""
        for local in list(self._doors):
            await self._doors.pop(local).close(ended=False)
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)

    def _spawn(self, telling: Coroutine[None, None, None]) -> None:
        """Have something told while its sandbox goes away."""
        task = asyncio.get_running_loop().create_task(telling, name="tell of a model call")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


class WithModels:
    """What connects sandboxes: their networks, and after those their model endpoints."""

    def __init__(self, networks: SandboxNetworks, doors: ModelDoors) -> None:
        self._networks = networks
        self._doors = doors

    async def check(self, *policies: NetworkPolicy | None) -> None:
        """Refuse policies that are wrong, or that this host cannot enforce."""
        await self._networks.check(*policies)

    def expect(self, record: SandboxRecord) -> None:
        """Begin with the rules of a sandbox that is being made, if it is to have a network."""
        self._networks.expect(record)

    def inherited(self, local: str) -> tuple[NetworkPolicy | None, NetworkPolicy | None]:
        """Return ``network`` and ``setup_network`` of a child that begins where a sandbox is."""
        return self._networks.inherited(local)

    async def attach(self, record: SandboxRecord) -> None:
        """Connect a sandbox that nothing runs in yet."""
        await self._networks.attach(record)
        await self._doors.attach(record)

    async def sandbox_ending(self, local: str) -> None:
        """Let go of everything that belongs to a sandbox. Idempotent."""
        await self._doors.sandbox_ending(local)
        await self._networks.sandbox_ending(local)


class _Server(web.Server):
    """Tells its door of each connection's end."""

    on_lost: Callable[[], None]

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        super().connection_lost(handler, exc)
        self.on_lost()


class _Telling:
    """A response that is written as it comes."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None

    async def tell(self, headers: dict[str, str], data: bytes) -> None:
        """Write some more.

        Raises:
            BrokenStreamError: the client is gone.
        """
        try:
            if self.response is None:
                self.response = web.StreamResponse(headers=headers)
                self.response.content_type = "text/event-stream"
                await self.response.prepare(self._request)
            await self.response.write(data)
        except ConnectionError as error:
            raise BrokenStreamError from error

    def break_off(self) -> web.StreamResponse:
        """Have the client see that the response is not whole."""
        if self._request.transport is not None:
            self._request.transport.abort()
        assert self.response is not None  # noqa: S101  only what was begun is broken off
        return self.response


class _Door:
    """One sandbox's listening socket, and who came through it."""

    def __init__(self, doors: ModelDoors, session: ModelSession, listener: socket.socket) -> None:
        self._doors = doors
        self.session = session
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._budget = ByteBudget(_BODIES_BYTES, doors.budget)
        self._rate = RequestRate(MODEL_CALLS_PER_S_MAX, _BURST, self._loop.time())
        # A request whose connection is lost is cancelled, so that it is known to be given up.
        self._server = _Server(self._handle, handler_cancellation=True, access_log=None)
        self._server.on_lost = self._lost
        self._connections = 0
        self._connecting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._full = False
        self._loop.add_reader(listener, self._accept)

    async def close(self, *, ended: bool) -> None:
        self._loop.remove_reader(self._listener)
        self._full = False
        self._server.on_lost = self._lost_later
        self._listener.close()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        await self.session.close(ended=ended)
        await self._server.shutdown(_STOP_S)

    def _lost_later(self) -> None:
        self._connections -= 1
        self._doors.connections -= 1

    def _lost(self) -> None:
        self._lost_later()
        if self._full:
            self._full = False
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if self._connections >= MODEL_CONNECTIONS_MAX:
                self._loop.remove_reader(self._listener)
                self._full = True
                return
            if self._doors.connections >= _NODE_CONNECTIONS_MAX:
                self._wait()
                return
            try:
                peer, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._wait()
                return
            peer.setblocking(False)
            self._connections += 1
            self._doors.connections += 1
            task = self._loop.create_task(self._connect(peer))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, peer: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._server, peer)
        except BaseException as error:
            peer.close()
            self._server.on_lost()
            if not isinstance(error, OSError):
                raise

    def _wait(self) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(
            _RETRY_S, self._loop.add_reader, self._listener, self._accept
        )

    # --- Requests -----------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        api = API_OF_PATH.get(request.path, _api_of_errors(request.path))
        telling = _Telling(request)
        response: web.StreamResponse
        call: PendingCall | None = None
        try:
            call, response = await self._response(request, api, telling)
        except ModelCallError as error:
            response = web.Response(
                status=error.status,
                body=error.body(api),
                content_type="application/json",
                headers=error.headers(),
            )
        except BrokenStreamError:
            return telling.break_off()
        await response.prepare(request)
        await response.write_eof()
        # Not before: a harness that calls again has not got it.
        if (
            call is not None
            and request.transport is not None
            and not request.transport.is_closing()
        ):
            self.session.delivered(call)
        return response

    async def _response(
        self, request: web.BaseRequest, api: ModelApi, telling: _Telling
    ) -> tuple[PendingCall | None, web.StreamResponse]:
        """Return the answer, and the call that it is the answer to, if it is one.

        Raises:
            ModelCallError: why there is none.
            BrokenStreamError: there is none, but some was told.
        """
        if request.method == "GET" and request.path == "/v1/models":
            return None, _models()
        if request.method != "POST" or request.path not in API_OF_PATH:
            told = f"there is no {request.method} {request.path[:100]} here"
            raise ModelCallError(404, told, code="not_found")
        if delay_s := self._rate.delay_s(self._loop.time()):
            told = f"more than {MODEL_CALLS_PER_S_MAX:g} calls a second"
            raise ModelCallError(
                429, told, code="too_many_calls", retry=True, retry_after_s=round(delay_s, 1) or 0.1
            )
        call = self.session.take(await self._read(request, api))
        answer = await self.session.wait(call, api, telling.tell)
        if telling.response is not None:
            return call, telling.response
        response = web.Response(
            status=answer.status,
            body=answer.body,
            content_type=answer.content_type,
            headers=answer.headers,
        )
        return call, response

    async def _read(self, request: web.BaseRequest, api: ModelApi) -> Request:
        """Return the request, whose bytes are charged to the budget until they are released.

        Raises:
            ModelCallError: it is too large, too slow, or there are too many of them.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.content.iter_chunked(_CHUNK_BYTES):
                    self._charge(len(body), len(chunk))
                    body += chunk
        except BaseException as error:
            self._budget.give(len(body))
            if isinstance(error, TimeoutError):
                told = f"the request was not whole after {_BODY_S:g} s"
                raise ModelCallError(400, told) from None
            raise
        self._rate.charge(len(body) // _CHUNK_BYTES)
        return Request(
            api=api,
            body=bytes(body),
            retried=request.headers.get("x-stainless-retry-count", "0") != "0",
            idempotency_key=request.headers.get("idempotency-key", "")[:_KEY_CHARACTERS_MAX],
            release=partial(self._budget.give, len(body)),
        )

    def _charge(self, so_far: int, count: int) -> None:
        if so_far + count > MODEL_BODY_BYTES_MAX:
            told = f"the request has more than {MODEL_BODY_BYTES_MAX} bytes"
            raise ModelCallError(413, told, code="too_large")
        if not self._budget.take(count):
            told = "too many large requests are under way"
            raise ModelCallError(429, told, code="too_large", retry=True, retry_after_s=1.0)


def _api_of_errors(path: str) -> ModelApi:
    return ModelApi.MESSAGES if path.startswith("/v1/messages") else ModelApi.CHAT


def _models() -> web.Response:
    """Return the one model that there is; calls may name it as they like."""
    model = {"id": "policy", "object": "model", "created": int(time.time()), "owned_by": "dsec"}
    body = msgspec.json.encode({"object": "list", "data": [model]})
    return web.Response(body=body, content_type="application/json")
