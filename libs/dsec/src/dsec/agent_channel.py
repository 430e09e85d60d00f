"""The agent's way out of its sandbox: stages to the trainer, feedback back, steps to the log.

This file stands alone: nothing but the standard library, Python 3.8 or newer. Copy it into a
toolkit layer and import it there; ``docs/agent-protocol.md`` describes what it speaks, for other
languages. ::

    channel = AgentChannel()
    answer = channel.step("tests_run", {"failed": 3})
    if answer["done"]:
        ...

Every report has a number. The channel repeats a request that got no answer, with the same number,
over a new connection if need be, so a report counts once however often the platform's parts are
restarted. One channel serves one thread; a process may hold several.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
import time
from typing import Any, Dict, Iterator  # noqa: UP035  3.8 is the oldest that this runs on

DEFAULT_PATH = "/run/dsec/agent.sock"
PAYLOAD_MAX_BYTES = 256 * 1024

_REQUEST_MAX_BYTES = PAYLOAD_MAX_BYTES + 16 * 1024
_REPLY_MAX_BYTES = 4 * 1024 * 1024
#: One request waits so long for feedback at the node; then it is asked again.
_SLICE_S = 60.0
#: A node that has not answered so long after a request's own wait is asked again.
_MARGIN_S = 30.0
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 2.0

Json = Dict[str, Any]  # noqa: UP006  evaluated, and 3.8 knows no dict[...]


class AgentError(Exception):
    """The platform refused a request, or was not there.

    Attributes:
        code: one of the platform's error codes, such as ``conflict`` or ``unavailable``.
        message: what failed and what to do.
        retryable: whether the same request may succeed later.
        retry_after_s: seconds to wait before that; 0 leaves it to the caller.
        details: flat facts for programs, such as ``expected_seq``.
    """

    def __init__(
        self,
        code: str,
        message: str,
        retryable: bool = False,
        retry_after_s: float = 0.0,
        details: Json | None = None,
    ) -> None:
        """Take the parts."""
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.details = dict(details or {})


class _Lost(Exception):  # noqa: N818  caught here; callers see AgentError
    """The connection broke before the answer came."""


class AgentChannel:
    """A connection to the sandbox's node. It connects when first used and again when it breaks."""

    def __init__(self, path: str = DEFAULT_PATH, patience_s: float = 120.0) -> None:
        """Take the settings; nothing is connected yet.

        Args:
            path: the agent socket.
            patience_s: how long a request is repeated while the platform cannot take it; then it
                fails with ``unavailable`` or what the platform last said.
        """
        self._path = path
        #: How long a request is repeated while the platform cannot take it, in seconds.
        self.patience_s = patience_s
        self._socket: socket.socket | None = None
        self._received = bytearray()
        self._last_id = 0
        self._next_seq = 0

    # --- What an agent does -------------------------------------------------------------------

    def hello(self) -> Json:
        """Return ``sandbox_id``, ``rollout_id``, ``last_seq``, ``protocol`` and the limits.

        ``last_seq`` is the newest report of the rollout; this channel goes on after it.
        """
        about = self._ask({"op": "hello"})
        self._next_seq = int(about["last_seq"]) + 1
        return about

    def report(self, stage: str, payload: Any = None, seq: int | None = None) -> int:
        """Report a stage and return its number once it is durable; do not wait for feedback.

        Args:
            stage: what was reached, a short word.
            payload: any JSON value, at most 256 KiB of it.
            seq: the report's number; by default the next one. The same number and content twice is
                one report.

        Raises:
            AgentError: ``conflict`` when the number carries other content already, ``invalid`` when
                it leaves a gap or the payload is too large, ``expired`` when the rollout is closed.
        """
        seq = self._number(seq)
        self._ask({"op": "report", "seq": seq, "stage": stage, "payload": payload})
        self._next_seq = max(self._next_seq, seq + 1)
        return seq

    def await_feedback(self, seq: int, wait_s: float | None = None) -> Json | None:
        """Return the feedback to report ``seq``: ``payload``, ``reward``, ``done`` and ``seq``.

        Args:
            seq: the report's number.
            wait_s: how long to wait; None waits for as long as it takes.

        Returns:
            None when the wait ended without feedback.
        """
        return self._feedback({"op": "await", "seq": seq}, wait_s)

    def step(
        self,
        stage: str,
        payload: Any = None,
        seq: int | None = None,
    ) -> Json:
        """Report a stage and return its feedback: ``payload``, ``reward``, ``done`` and ``seq``.

        It waits for as long as the trainer takes; errors are those of :meth:`report`.
        """
        seq = self._number(seq)
        request = {"op": "step", "seq": seq, "stage": stage, "payload": payload}
        answer = self._feedback(request, None)
        assert answer is not None  # noqa: S101  without a limit it waits until there is one
        self._next_seq = max(self._next_seq, seq + 1)
        return answer

    def log(
        self,
        *,
        action: str,
        status: str = "ok",
        latency_ms: float = 0.0,
        tokens_in: int = 0,
        tokens_out: int = 0,
        attributes: Json | None = None,
    ) -> None:
        """Write one step of the behaviour log. Who did it is known from the socket.

        Args:
            action: what was done, such as ``fetch_url``.
            status: how it ended.
            latency_ms: how long it took, in milliseconds.
            tokens_in: tokens that the model read.
            tokens_out: tokens that the model wrote.
            attributes: the action's own particulars; values become text, long ones are shortened.
        """
        self._ask(
            {
                "op": "log",
                "action": action,
                "status": status,
                "latency_ms": latency_ms,
                "tokens_in": tokens_in,
                "tokens_out": tokens_out,
                "attributes": {name: str(value) for name, value in (attributes or {}).items()},
            }
        )

    def call_tool(
        self, tool: str, call: str, arguments: Json, timeout_s: float
    ) -> tuple[Json, bytes]:
        """Have the node make a call of a tool; return its result, and its body.

        It is asked for once: what became of a call whose answer is lost is not known here.

        Args:
            tool: one of those that ``hello`` names in ``tools``.
            call: which of its calls.
            arguments: as the protocol has them.
            timeout_s: how long to wait for each part of the answer.

        Raises:
            AgentError: the node's refusal; ``unavailable`` when the answer is lost.
        """
        body = _encoded({"op": "tool", "tool": tool, "call": call, "arguments": arguments})
        parts = bytearray()
        try:
            return self._ask_once(body, timeout_s + _MARGIN_S, parts), bytes(parts)
        except (OSError, _Lost) as error:
            self.close()
            raise AgentError(
                "unavailable", f"the node's answer was lost ({error}); the call may have been made"
            ) from error

    def close(self) -> None:
        """Close the connection; a later request opens a new one."""
        connection, self._socket = self._socket, None
        self._received.clear()
        if connection is not None:
            connection.close()

    def __enter__(self) -> AgentChannel:  # noqa: PYI034  Self came with 3.11
        """Return the channel itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    # --- Asking, and asking again -------------------------------------------------------------

    def _number(self, seq: int | None) -> int:
        if seq is not None:
            return seq
        if not self._next_seq:
            self.hello()
        return self._next_seq

    def _feedback(self, request: Json, wait_s: float | None) -> Json | None:
        until = None if wait_s is None else time.monotonic() + wait_s
        while True:
            left_s = _SLICE_S if until is None else min(_SLICE_S, until - time.monotonic())
            answer = self._ask(dict(request, wait_s=max(left_s, 0.0)), max(left_s, 0.0))
            if answer.pop("ready"):
                return answer
            if until is not None and time.monotonic() >= until:
                return None

    def _ask(self, request: Json, wait_s: float = 0.0) -> Json:
        """Return the result of one request, repeated while it can help."""
        body = _encoded(request)
        pauses_s = _pauses()
        give_up_at = time.monotonic() + wait_s + self.patience_s
        while True:
            try:
                return self._ask_once(body, wait_s + _MARGIN_S)
            except AgentError as error:
                if not error.retryable or time.monotonic() > give_up_at:
                    raise
                time.sleep(error.retry_after_s or next(pauses_s))
            except (OSError, _Lost) as error:
                self.close()
                if time.monotonic() > give_up_at:
                    raise AgentError(
                        "unavailable",
                        f"no answer on {self._path} ({error}); is this a sandbox, and is its "
                        "node's daemon running?",
                        retryable=True,
                    ) from error
                time.sleep(next(pauses_s))

    def _ask_once(self, body: bytes, timeout_s: float, parts: bytearray | None = None) -> Json:
        connection = self._connected()
        self._last_id += 1
        head = b'{"id":%d,' % self._last_id
        connection.settimeout(timeout_s)
        connection.sendall(struct.pack(">I", len(head) + len(body) - 1) + head + body[1:])
        while True:
            reply = self._next_frame(connection)
            if "part" in reply:
                if parts is not None and reply.get("id") == self._last_id:
                    parts += base64.b64decode(reply["part"])
                continue
            error = reply.get("error")
            if reply.get("id") == self._last_id or (reply.get("id") is None and error):
                break  # an answer to an earlier request, given up long ago, is passed over
        if error:
            raise AgentError(
                str(error.get("code", "internal")),
                str(error.get("message", "")),
                bool(error.get("retryable", False)),
                float(error.get("retry_after_s", 0.0)),
                error.get("details"),
            )
        result = reply["result"]
        assert isinstance(result, dict)  # noqa: S101  the protocol's own
        return result

    def _connected(self) -> socket.socket:
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(_MARGIN_S)
                connection.connect(self._path)
            except OSError:
                connection.close()
                raise
            self._socket = connection
        return self._socket

    def _next_frame(self, connection: socket.socket) -> Json:
        (length,) = struct.unpack(">I", self._take(connection, 4))
        if length > _REPLY_MAX_BYTES:
            raise _Lost(f"the peer announced a frame of {length} bytes")
        reply = json.loads(self._take(connection, length).decode("utf-8"))
        if not isinstance(reply, dict):
            raise _Lost("the peer sent no object")
        return reply

    def _take(self, connection: socket.socket, count: int) -> bytes:
        while len(self._received) < count:
            piece = connection.recv(65536)
            if not piece:
                raise _Lost("the connection was closed")
            self._received += piece
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken


def _encoded(request: Json) -> bytes:
    try:
        body = json.dumps(request, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise AgentError("invalid", f"this is no JSON: {error}") from error
    if len(body) > _REQUEST_MAX_BYTES:
        raise AgentError(
            "invalid",
            f"a request of {len(body)} bytes: at most {PAYLOAD_MAX_BYTES} bytes of payload may be "
            "sent; put larger data into a file of the sandbox and report its path",
        )
    return body


def _pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 2, _LAST_PAUSE_S)
