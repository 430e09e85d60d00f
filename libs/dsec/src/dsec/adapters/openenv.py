"""Sandboxes as an environment of OpenEnv: a server each of whose sessions is a sandbox.

Needs the extra ``dsec[openenv]``. Serve :func:`environment_app` with any ASGI server; any client of
OpenEnv speaks to it::

    client = DSecClient().connect()
    app = environment_app(client, ShellTask({"base": "host@1"}, Verifier("test -e /work/done")))
"""

from __future__ import annotations

import functools
from typing import Any

from fastapi import FastAPI
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from dsec import sync
from dsec.adapters.episodes import Episode, Outcome, ShellTask
from dsec.client import DSecClient
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import new_id


class ShellAction(Action):
    """A command line, or the word that submits."""

    command: str


class ShellObservation(Observation):
    """What a command printed and how it ended; after a reset the prompt, as ``stdout``.

    ``metadata`` says ``truncated`` when no step is left, and as ``cause`` why the sandbox ended
    when that was the agent's doing.
    """

    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    timed_out: bool = False


class ShellState(State):
    """Which sandbox it is; empty before the first reset."""

    sandbox_id: str = ""


class DsecEnvironment(Environment[ShellAction, ShellObservation, ShellState]):
    """One session: an episode after the other, each in a new sandbox.

    Args:
        client: a connected ``dsec.sync.DSecClient``, shared by all sessions.
        task: what each episode is.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, client: Any, task: ShellTask) -> None:
        super().__init__()
        self._client = client
        self._task = task
        self._episode: Episode | None = None
        self._state = ShellState()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> ShellObservation:
        """Begin an episode; without a seed ``prepare`` gets 0."""

        async def begin(client: DSecClient) -> str:
            self._episode = self._episode or Episode(client, self._task)
            await self._episode.begin(seed or 0)
            return self._episode.sandbox.id if self._episode.sandbox else ""

        sandbox_id = sync.run_with(self._client, begin)
        self._state = ShellState(episode_id=episode_id or new_id(), sandbox_id=sandbox_id)
        return ShellObservation(stdout=self._task.prompt)

    def step(
        self, action: ShellAction, timeout_s: float | None = None, **_: Any
    ) -> ShellObservation:
        """Run a command, for at most ``timeout_s`` where that is less than the task allows.

        Raises:
            DsecError: ``conflict`` when no episode is under way, or the platform's own.
        """
        episode = self._episode
        if episode is None:
            raise DsecError(ErrorCode.CONFLICT, "no episode is under way; reset first")

        outcome: Outcome = sync.run_with(
            self._client, lambda _: episode.step(action.command, timeout_s=timeout_s)
        )
        self._state.step_count = outcome.turn.number
        return _observed(outcome)

    @property
    def state(self) -> ShellState:
        """The episode, its steps and its sandbox."""
        return self._state

    def close(self) -> None:
        """Delete the sandbox; the server does so when its client is gone."""
        episode, self._episode = self._episode, None
        if episode is not None:
            sync.run_with(self._client, lambda _: episode.end())


def environment_app(client: Any, task: ShellTask, *, sessions_max: int = 64) -> FastAPI:
    """Return the web application that serves the task, a session for each client.

    Args:
        client: a connected ``dsec.sync.DSecClient``; the caller closes it after the server.
        task: what each episode is.
        sessions_max: further clients are refused.
    """
    return create_fastapi_app(
        functools.partial(DsecEnvironment, client, task),
        ShellAction,
        ShellObservation,
        max_concurrent_envs=sessions_max,
    )


def _observed(outcome: Outcome) -> ShellObservation:
    about: dict[str, Any] = {"truncated": outcome.truncated}
    if outcome.cause:
        about["cause"] = outcome.cause
    seen = ShellObservation(
        done=outcome.terminated or outcome.truncated, reward=outcome.reward, metadata=about
    )
    result = outcome.turn.result
    if result is None:
        return seen.model_copy(update={"stderr": outcome.turn.refused})
    return seen.model_copy(
        update={
            "stdout": result.stdout_text,
            "stderr": result.stderr_text,
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
        }
    )
