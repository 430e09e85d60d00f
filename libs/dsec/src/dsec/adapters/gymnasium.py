"""Sandboxes as environments of Gymnasium: ``reset`` and ``step``, one or many at once.

Needs the extra ``dsec[gymnasium]``. The action is a command line, the observation what it printed
and how it ended::

    task = ShellTask({"base": "host@1"}, Verifier("grep -qx 42 /work/answer"), prompt="Write 42.")
    with DSecClient() as client:
        env = DsecEnv(client, task)
        observation, _ = env.reset(seed=1)
        observation, reward, terminated, truncated, info = env.step("echo 42 > answer")
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Sequence
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from numpy.typing import NDArray

from dsec import sync
from dsec.adapters.episodes import Episode, Outcome, ShellTask
from dsec_common.errors import DsecError, ErrorCode, invalid

#: Characters of each stream that are observed, from its end.
OUTPUT_MAX: Final = 16_384
_ACTION_MAX: Final = 65_536
_SEED_MAX: Final = 2**31
#: No code: a signal ended the command, or there was none.
_NO_CODE: Final = -1

Observation = dict[str, Any]


class AnyText(spaces.Text):
    """Text of any characters. What is sampled is printable ASCII."""

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length


def _observation_space() -> spaces.Dict:
    return spaces.Dict(
        {
            "stdout": AnyText(OUTPUT_MAX),
            "stderr": AnyText(OUTPUT_MAX),
            "exit_code": spaces.Discrete(257, start=_NO_CODE),
            "timed_out": spaces.Discrete(2),
        }
    )


def _action_space(commands: Sequence[str]) -> spaces.Space[Any]:
    return spaces.Discrete(len(commands)) if commands else AnyText(_ACTION_MAX)


class _Actions:
    """What is done: the command lines themselves, or the numbers of some."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = tuple(commands)

    def command(self, action: Any) -> str:
        if not self._commands:
            if not isinstance(action, str):
                raise invalid(f"an action is a command line, not {type(action).__name__}")
            return action
        if not 0 <= int(action) < len(self._commands):
            raise invalid(f"action {action} is none of the {len(self._commands)} commands")
        return self._commands[int(action)]


def _begun(task: ShellTask) -> Observation:
    return _seen(task.prompt, "", 0, timed_out=False)


def _observed(outcome: Outcome) -> Observation:
    result = outcome.turn.result
    if result is None:
        return _seen("", outcome.turn.refused, _NO_CODE, timed_out=False)
    code = _NO_CODE if result.exit_code is None else result.exit_code
    return _seen(result.stdout_text, result.stderr_text, code, timed_out=result.timed_out)


def _seen(stdout: str, stderr: str, code: int, *, timed_out: bool) -> Observation:
    return {
        "stdout": stdout[-OUTPUT_MAX:],
        "stderr": stderr[-OUTPUT_MAX:],
        "exit_code": np.int64(code),
        "timed_out": np.int64(timed_out),
    }


class DsecEnv(gymnasium.Env[Observation, Any]):
    """One sandbox an episode; Gymnasium's own ``check_env`` passes.

    A command that fails, hangs or prints without end is an observation. Where the platform itself
    fails, :meth:`step` and :meth:`reset` raise its ``DsecError``; the next reset begins anew.

    Args:
        client: a connected ``dsec.sync.DSecClient``; it may serve several environments.
        task: what each episode is.
        commands: actions are numbers of these; without any they are command lines.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  as Gymnasium has it

    def __init__(self, client: Any, task: ShellTask, *, commands: Sequence[str] = ()) -> None:
        self.observation_space = _observation_space()
        self.action_space = _action_space(commands)
        self._client = client
        self._task = task
        self._actions = _Actions(commands)
        self._episode: Episode | None = None

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002  it has none
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in a new sandbox; ``prepare`` gets the seed, or one drawn after it.

        Returns:
            The prompt as ``stdout``, and the sandbox's id as ``info["sandbox_id"]``.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(_SEED_MAX)) if seed is None else seed

        async def begin(client: Any) -> str:
            if self._episode is None:
                self._episode = Episode(client, self._task)
            await self._episode.begin(drawn)
            return _id_of(self._episode)

        return _begun(self._task), {"sandbox_id": sync.run_with(self._client, begin)}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run a command; see :class:`Outcome` for when an episode is over."""
        command = self._actions.command(action)

        async def run(_: Any) -> Outcome:
            if self._episode is None:
                raise DsecError(ErrorCode.CONFLICT, "no episode is under way; reset first")
            return await self._episode.step(command)

        outcome: Outcome = sync.run_with(self._client, run)
        info = {"cause": outcome.cause} if outcome.cause else {}
        return (
            _observed(outcome),
            outcome.reward,
            outcome.terminated,
            outcome.truncated,
            info,
        )

    def close(self) -> None:
        """Delete the sandbox. The client stays as it is."""
        episode, self._episode = self._episode, None
        if episode is not None:
            sync.run_with(self._client, lambda _: episode.end())


class DsecVectorEnv(VectorEnv[Observation, Any, NDArray[Any]]):
    """Many sandboxes that step at once, over one connection and in one thread.

    An environment whose episode is over is reset by the next step, whatever its action
    (Gymnasium's ``NEXT_STEP``). Where the platform fails for one, its episode is truncated without
    a reward, ``info["cause"]`` has the error's code, and the others go on; only :meth:`reset`
    raises, and a step for which no new sandbox can be made.

    Args:
        client: a connected ``dsec.sync.DSecClient``.
        task: what each episode is; give another for each environment as a sequence.
        num_envs: how many; with a sequence of tasks, as many as there are.
        commands: as for :class:`DsecEnv`.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012  as Gymnasium has it
        "render_modes": [],
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        client: Any,
        task: ShellTask | Sequence[ShellTask],
        num_envs: int = 1,
        *,
        commands: Sequence[str] = (),
    ) -> None:
        self._tasks = [task] * num_envs if isinstance(task, ShellTask) else list(task)
        if not self._tasks:
            raise invalid("there has to be an environment")
        self.num_envs = len(self._tasks)
        self.single_observation_space = _observation_space()
        self.single_action_space = _action_space(commands)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._client = client
        self._actions = _Actions(commands)
        self._episodes: list[Episode] = []

    def reset(
        self,
        *,
        seed: int | Sequence[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in each; of one seed the first gets it and each other the next."""
        super().reset(seed=seed if isinstance(seed, int) else None, options=options)
        if seed is None:
            seeds = [self._drawn() for _ in self._tasks]
        elif isinstance(seed, int):
            seeds = [seed + number for number in range(self.num_envs)]
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise invalid(f"{len(seeds)} seeds for {self.num_envs} environments")

        async def begin(client: Any) -> None:
            if not self._episodes:
                self._episodes = [Episode(client, task) for task in self._tasks]
            await _all(
                episode.begin(one) for episode, one in zip(self._episodes, seeds, strict=True)
            )

        sync.run_with(self._client, begin)
        infos: dict[str, Any] = {}
        for number, episode in enumerate(self._episodes):
            infos = self._add_info(infos, {"sandbox_id": _id_of(episode)}, number)
        return self._batch([_begun(task) for task in self._tasks]), infos

    def step(
        self, actions: Any
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Take one action in each, all at once."""
        if len(actions) != self.num_envs:
            raise invalid(f"{len(actions)} actions for {self.num_envs} environments")
        if not self._episodes:
            raise DsecError(ErrorCode.CONFLICT, "no episode is under way; reset first")
        # None: the episode is over, and the next one begins.
        commands = [
            None if episode.is_over else self._actions.command(action)
            for episode, action in zip(self._episodes, actions, strict=True)
        ]
        seeds = [self._drawn() if command is None else 0 for command in commands]

        async def run(_: Any) -> list[Outcome | ErrorCode | None]:
            return await _all(map(_advanced, self._episodes, commands, seeds))

        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminations = np.zeros(self.num_envs, dtype=np.bool_)
        truncations = np.zeros(self.num_envs, dtype=np.bool_)
        observations: list[Observation] = []
        infos: dict[str, Any] = {}
        for number, outcome in enumerate(sync.run_with(self._client, run)):
            if outcome is None:
                observations.append(_begun(self._tasks[number]))
                about = {"sandbox_id": _id_of(self._episodes[number])}
                infos = self._add_info(infos, about, number)
            elif isinstance(outcome, ErrorCode):
                observations.append(_seen("", "", _NO_CODE, timed_out=False))
                truncations[number] = True
                infos = self._add_info(infos, {"cause": outcome.value}, number)
            else:
                observations.append(_observed(outcome))
                rewards[number] = outcome.reward
                terminations[number] = outcome.terminated
                truncations[number] = outcome.truncated
                if outcome.cause:
                    infos = self._add_info(infos, {"cause": outcome.cause}, number)
        return self._batch(observations), rewards, terminations, truncations, infos

    def close_extras(self) -> None:
        """Delete all sandboxes. The client stays as it is."""
        episodes, self._episodes = self._episodes, []
        sync.run_with(self._client, lambda _: _all(episode.end() for episode in episodes))

    def _drawn(self) -> int:
        return int(self.np_random.integers(_SEED_MAX))

    def _batch(self, observations: Sequence[Observation]) -> Observation:
        space = self.single_observation_space
        empty: Any = create_empty_array(space, self.num_envs)
        batch: Any = concatenate(space, observations, empty)
        return dict(batch)


async def _advanced(episode: Episode, command: str | None, seed: int) -> Outcome | ErrorCode | None:
    if command is None:
        await episode.begin(seed)
        return None
    try:
        return await episode.step(command)
    except DsecError as error:
        return error.code


async def _all(works: Any) -> list[Any]:
    """Return what all return; when some fail, the others are not left running."""
    done = await asyncio.gather(*works, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return done


def _id_of(episode: Episode) -> str:
    assert episode.sandbox is not None  # noqa: S101  it has just begun
    return episode.sandbox.id
