"""What an agent has of the platform: stages, feedback, state, checkpoints, artefacts, the log."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from dsec.agent.state import State
from dsec.agent_channel import DEFAULT_PATH, AgentChannel, AgentError
from dsec.tools.calls import ToolResult
from dsec.tools.tool import NodeCall
from dsec_common.errors import DsecError, ErrorCode, from_os_error

SOCKET_VARIABLE: Final = "DSEC_AGENT_SOCKET"
STATE_VARIABLE: Final = "DSEC_AGENT_STATE"
#: Of a sandbox: it is there whoever the agent runs as, and part of every snapshot.
_STATE_DIRECTORY: Final = "/var/tmp/dsec-agent"  # noqa: S108  the sandbox is the agent's own
_ATTRIBUTE_MAX: Final = 1024


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """The trainer's answer to a stage.

    Attributes:
        seq: the report that it answers; 0 where there is no trainer.
        payload: any JSON value.
        reward: None when none was given.
        done: the agent is to stop.
    """

    seq: int = 0
    payload: Any = None
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """A file that was handed over.

    Attributes:
        name: what it is called.
        path: where it is in the sandbox.
        bytes: how long it is.
        sha256: of what is in it, in hexadecimal digits.
    """

    name: str
    path: str
    bytes: int
    sha256: str


class Context:
    """One agent's way to the platform; outside of a sandbox it remembers and reports nothing.

    Any thread may use it. Errors of every method are :class:`DsecError`, as the agent protocol has
    them: ``conflict`` when another process reports for the same rollout, ``expired`` when the
    rollout is closed, ``unavailable`` when the platform is away for longer than two minutes.
    """

    def __init__(
        self, agent: str, *, socket_path: str | None = None, state_path: str | None = None
    ) -> None:
        """Take where the platform is.

        Args:
            agent: the agent's name, after which its state's file is called.
            socket_path: the agent socket; by default ``DSEC_AGENT_SOCKET``, else its usual place.
            state_path: the state's file; by default ``DSEC_AGENT_STATE``, else a file below
                ``/var/tmp`` of a sandbox, and memory outside of one.
        """
        path = socket_path or self.usual_socket()
        #: Whether there is a platform: this runs in a sandbox.
        self.in_sandbox = Path(path).exists()
        self._path = path
        # Steps wait for the trainer for as long as it takes; what is logged must not wait for them.
        self._steps = AgentChannel(path)
        self._log = AgentChannel(path)
        self._stepping = threading.Lock()
        self._logging = threading.Lock()
        self._about: dict[str, Any] | None = None
        self._agent = agent
        self._state_path = state_path or os.environ.get(STATE_VARIABLE, "")
        self._state: State | None = None
        #: Whether some feedback told the agent to stop.
        self.done = False

    @staticmethod
    def usual_socket() -> str:
        """Return where the agent socket is: what ``DSEC_AGENT_SOCKET`` says, else its place."""
        return os.environ.get(SOCKET_VARIABLE) or DEFAULT_PATH

    # --- Who one is ---------------------------------------------------------------------------

    @property
    def sandbox_id(self) -> str:
        """The sandbox; empty outside of one."""
        return str(self._hello().get("sandbox_id", ""))

    @property
    def rollout_id(self) -> str:
        """The rollout that the sandbox serves; empty when it serves none."""
        return str(self._hello().get("rollout_id", ""))

    @property
    def last_seq(self) -> int:
        """The number of the rollout's newest report when this process first asked."""
        return int(self._hello().get("last_seq", 0))

    # --- Stages -------------------------------------------------------------------------------

    def stage(self, name: str, payload: Any = None) -> Feedback:
        """Report a stage, wait for as long as the trainer takes, and return its feedback.

        A report counts once, whatever breaks meanwhile. Without a rollout nobody reads it, and the
        feedback is empty.
        """
        if not self.rollout_id:
            return Feedback()
        with self._stepping, _told():
            return self._taken(self._steps.step(name, payload))

    def report(self, name: str, payload: Any = None) -> int:
        """Report a stage and return its number once it is durable; 0 without a rollout."""
        if not self.rollout_id:
            return 0
        with self._stepping, _told():
            return self._steps.report(name, payload)

    def feedback(self, seq: int) -> Feedback:
        """Wait for as long as the trainer takes for its feedback to a report."""
        with self._stepping, _told():
            answer = self._steps.await_feedback(seq)
        return self._taken(answer or {})

    # --- What is kept and handed over ---------------------------------------------------------

    @property
    def state(self) -> State:
        """What the agent remembers."""
        if self._state is None:
            path = self._state_path
            if not path and self.in_sandbox:
                path = f"{_STATE_DIRECTORY}/{self._agent}.sqlite"
            self._state = State(Path(path) if path else None)
        return self._state

    def checkpoint(self, name: str) -> Feedback:
        """Keep the state under ``name``, then report the stage ``checkpoint`` and wait.

        While it waits nothing of the agent is under way, so a trainer that takes a snapshot of the
        sandbox before it answers has both as they belong together.
        """
        self.state.checkpoint(name)
        return self.stage("checkpoint", {"name": name, "keys": len(self.state.keys())})

    def artefact(self, path: str | Path, name: str = "") -> Artefact:
        """Hand a file over: report the stage ``artefact`` with its path, length and hash.

        The trainer reads the file from the sandbox; it is not copied, so leave it as it is.
        """
        absolute = Path(path).absolute()
        digest = hashlib.sha256()
        count = 0
        try:
            with absolute.open("rb") as source:
                while piece := source.read(1 << 20):
                    digest.update(piece)
                    count += len(piece)
        except OSError as error:
            raise from_os_error("read", error, str(path)) from error
        artefact = Artefact(
            name=name or absolute.name, path=str(absolute), bytes=count, sha256=digest.hexdigest()
        )
        self.report(
            "artefact",
            {
                "name": artefact.name,
                "path": artefact.path,
                "bytes": artefact.bytes,
                "sha256": artefact.sha256,
            },
        )
        return artefact

    # --- The behaviour log --------------------------------------------------------------------

    def log(
        self,
        action: str,
        *,
        status: str = "ok",
        latency_ms: float = 0.0,
        tokens_in: int = 0,
        tokens_out: int = 0,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        """Write a step of the behaviour log; outside of a sandbox there is none."""
        if not self.in_sandbox:
            return
        with self._logging, _told():
            self._log.log(
                action=action,
                status=status,
                latency_ms=latency_ms,
                tokens_in=tokens_in,
                tokens_out=tokens_out,
                attributes={
                    key: value[:_ATTRIBUTE_MAX] for key, value in (attributes or {}).items()
                },
            )

    def log_call(self, result: ToolResult) -> None:
        """Write a tool's call as a step of the behaviour log, as the agent protocol has it.

        What the node made is in the log by the node's own word.
        """
        if result.by_node:
            return
        told = {**result.notes, "arguments_sha256": result.call.arguments_sha256}
        if result.error is not None:
            told["error"] = result.error.message
        self.log(
            result.call.action[:128],
            status=result.status[:128],
            latency_ms=result.latency_ms,
            tokens_in=result.tokens_in,
            tokens_out=result.tokens_out,
            attributes=told,
        )

    def node_tool(self, tool: str) -> NodeCall | None:
        """Return what has the node make a tool's calls; None where it does not."""
        if tool not in self._hello().get("tools", ()):
            return None

        def call(
            method: str, arguments: Mapping[str, Any], timeout_s: float
        ) -> tuple[Mapping[str, Any], bytes]:
            # Calls may be long and at once: each has a connection of its own.
            with AgentChannel(self._path) as channel, _told():
                return channel.call_tool(tool, method, dict(arguments), timeout_s)

        return call

    def close(self) -> None:
        """Close connections and the state's file. Idempotent."""
        self._steps.close()
        self._log.close()
        if self._state is not None:
            self._state.close()
            self._state = None

    def __enter__(self) -> Self:
        """Return the context itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _hello(self) -> dict[str, Any]:
        if not self.in_sandbox:
            return {}
        if self._about is None:  # who asks later must not wait for a step that waits
            with self._stepping, _told():
                self._about = self._steps.hello()
        return self._about

    def _taken(self, answer: Mapping[str, Any]) -> Feedback:
        reward = answer.get("reward")
        feedback = Feedback(
            seq=int(answer.get("seq", 0)),
            payload=answer.get("payload"),
            reward=None if reward is None else float(reward),
            done=bool(answer.get("done", False)),
        )
        self.done = self.done or feedback.done
        return feedback


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raise the channel's errors as the platform's."""
    try:
        yield
    except AgentError as error:
        known = {code.value: code for code in ErrorCode}
        raise DsecError(
            known.get(error.code, ErrorCode.INTERNAL),
            error.message,
            retryable=error.retryable,
            retry_after_s=error.retry_after_s,
            details=error.details,
        ) from error
