"""An agent loop of verl whose agent is an unmodified harness in a sandbox without a network.

Needs the extra ``dsec[verl]``. The harness calls its model at ``OPENAI_BASE_URL``; what answers are
verl's own inference servers, and the row that is trained on has the tokens that they were given and
sampled: nothing is tokenised twice. Inherit, and name the class to verl as it wants it
(``agent_loop_config_path``)::

    class Repair(DsecAgentLoop):
        def harness(self, row: Mapping[str, Any]) -> HarnessRun:
            return HarnessRun(ShellTask({"base": "host@1"}, judge), "python3 /opt/agent.py")
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from dsec.adapters.episodes import Episode, Outcome, ShellTask, Verifier
from dsec.adapters.verl_engine import VerlEngine
from dsec.client import DSecClient
from dsec.model_relay import Budget, ModelRelay
from dsec.model_trace import Trace, VerlRow, verl_rows
from dsec.rollouts import Rollout
from dsec_common.errors import DsecError, ErrorCode, invalid

#: After these another sandbox may do what the first could not.
_OF_THE_PLATFORM: Final = frozenset(
    {
        ErrorCode.UNAVAILABLE,
        ErrorCode.EXPIRED,
        ErrorCode.TIMEOUT,
        ErrorCode.EXHAUSTED,
        ErrorCode.INTERNAL,
    }
)


@dataclass(frozen=True)
class HarnessRun:
    """What is done for one row of the dataset.

    Attributes:
        task: the sandbox, what prepares it, and who judges; its ``command_timeout_s`` is for the
            whole harness, and there is one step.
        command: the line that runs the harness.
        seed: that ``prepare`` is called with.
        budget: what its calls may use.
    """

    task: ShellTask
    command: str
    seed: int = 0
    budget: Budget | None = None


class DsecAgentLoop(AgentLoopBase):
    """Runs a harness in a sandbox of its own, judges it, and gives verl its tokens.

    A rollout may have several sequences, such as those of sub-agents. verl's trainers of today
    (``trainer.use_v1``) are given all of them, all with its reward; older ones take one of a
    rollout, the one with the most sampled tokens. A harness that called no model gives a row of
    which nothing is trained on. No row is longer than ``prompt_length`` and ``response_length``: a
    call that would make it so is refused as one with too long a context.

    Attributes:
        ATTEMPTS: how often a run is begun, each time in another sandbox, when the platform fails.
    """

    ATTEMPTS: ClassVar[int] = 3

    @abstractmethod
    def harness(self, row: Mapping[str, Any]) -> HarnessRun:
        """Return what to do for a row: the dataset's fields, ``raw_prompt`` among them."""

    async def run(
        self, sampling_params: dict[str, Any], priority: int = 0, **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Play one rollout.

        Returns:
            A row for each of its sequences, the main one last; that one alone to a trainer that
            takes no more.

        Raises:
            DsecError: the platform's, after all attempts; ``unsupported`` where the servers do not
                tell log-probabilities, or experts are to be replayed.
        """
        if self.rollout_config.get("enable_rollout_routing_replay", False):
            raise DsecError(
                ErrorCode.UNSUPPORTED, "the experts of calls are not kept: no replay of routing"
            )
        run = self.harness(row)
        for left in reversed(range(self.ATTEMPTS)):
            engine = VerlEngine(self, sampling_params, int(priority))
            try:
                began = time.monotonic()
                trace, outcome = await _played(run, engine)
                outputs = await self._outputs(
                    trace, outcome, engine, row, elapsed_s=time.monotonic() - began
                )
                return outputs if self.config.trainer.get("use_v1", False) else outputs[-1]
            except DsecError as error:
                if not left or error.code not in _OF_THE_PLATFORM:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _outputs(
        self,
        trace: Trace,
        outcome: Outcome,
        engine: VerlEngine,
        row: Mapping[str, Any],
        *,
        elapsed_s: float,
    ) -> list[AgentLoopOutput]:
        """Return a row for each sequence, the one with the most sampled tokens last."""
        told: list[VerlRow] = []
        if trace.sequences:
            main = trace.main()
            told = verl_rows([*(it for it in trace.sequences if it is not main), main])
        return [
            self._output(one, outcome, engine, elapsed_s=elapsed_s)
            for one in told or [await self._nothing(row)]
        ]

    def _output(
        self, told: VerlRow, outcome: Outcome, engine: VerlEngine, *, elapsed_s: float
    ) -> AgentLoopOutput:
        most = self.rollout_config.response_length
        logprobs = told["response_logprobs"][:most]
        return AgentLoopOutput(
            prompt_ids=told["prompt_ids"],
            response_ids=told["response_ids"][:most],
            response_mask=told["response_mask"][:most],
            response_logprobs=logprobs if self.rollout_config.calculate_log_probs else None,
            reward_score=outcome.reward,
            num_turns=told["num_turns"],
            metrics={
                "generate_sequences": engine.sampling_s,
                "tool_calls": max(elapsed_s - engine.sampling_s, 0.0),
                "num_preempted": engine.preempted,
            },
            extra_fields={
                **told["extra_fields"],
                "min_global_steps": engine.min_global_steps,
                "max_global_steps": engine.max_global_steps,
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": {},
                "cause": outcome.cause,
            },
        )

    async def _nothing(self, row: Mapping[str, Any]) -> VerlRow:
        """Return a row without a sampled token; verl takes none without any token."""
        return VerlRow(
            prompt_ids=await self.ct_build_initial_tokens(list(row["raw_prompt"])),
            response_ids=[self.tokenizer.eos_token_id],
            response_mask=[0],
            response_logprobs=[0.0],
            reward_score=None,
            num_turns=0,
            metrics={},
            extra_fields={"model_versions": [], "finish_reasons": []},
        )


async def _played(run: HarnessRun, engine: VerlEngine) -> tuple[Trace, Outcome]:
    with tempfile.TemporaryDirectory(prefix="dsec-verl-") as scratch:
        async with _connected() as client:
            rollout = await client.rollouts.open()
            journal = Path(scratch) / "calls.jsonl"
            async with ModelRelay(rollout, engine, journal=journal, budget=run.budget) as relay:
                answering = asyncio.ensure_future(relay.run())
                playing = asyncio.ensure_future(_judged(client, run, rollout))
                try:
                    # A relay that ends first has failed, and nobody would answer the harness.
                    await asyncio.wait({answering, playing}, return_when=asyncio.FIRST_COMPLETED)
                    if answering.done():
                        answering.result()
                    outcome = await playing
                finally:
                    playing.cancel()
                    await asyncio.gather(playing, return_exceptions=True)
                    await rollout.close()
                    await asyncio.gather(answering, return_exceptions=True)
                answering.result()
                return relay.trace(), outcome


async def _judged(client: DSecClient, run: HarnessRun, rollout: Rollout) -> Outcome:
    create, judge = dict(run.task.create), run.task.judge
    if isinstance(judge, Verifier) and judge.create is None:
        # Where it judges there is no model, and a rollout is one sandbox's alone.
        judge = replace(judge, create=create)
    create["model_rollout_id"] = rollout.id
    episode = Episode(client, replace(run.task, create=create, judge=judge, steps_max=1))
    try:
        await episode.begin(run.seed)
        outcome = await episode.step(run.command)
    finally:
        await episode.end()
    if outcome.turn.refused:
        raise invalid(f"the harness cannot be run: {outcome.turn.refused}")
    return outcome


@dataclass
class _Shared:
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    client: DSecClient | None = None


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


@asynccontextmanager
async def _connected() -> AsyncIterator[DSecClient]:
    """Yield the connection of all rollouts that a worker plays at once."""
    shared = _SHARED.setdefault(asyncio.get_running_loop(), _Shared())
    async with shared.changing:
        if shared.client is None:
            shared.client = await DSecClient().connect()
        client = shared.client
        shared.users += 1
    try:
        yield client
    finally:
        shared.users -= 1
        async with shared.changing:
            if not shared.users and shared.client is not None:
                shared.client = None
                await client.close()
