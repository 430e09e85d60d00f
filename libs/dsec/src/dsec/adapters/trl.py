"""Rewards of TRL's trainers from what sandboxes did: behaviour logs as a reward function.

It has the signature that TRL documents for a custom reward function and imports nothing of it; the
extra ``dsec[trl]`` brings TRL and PyTorch::

    with DSecClient() as client, reward_from_logs(client) as reward:
        GRPOTrainer(model, reward_funcs=reward, rollout_func=in_sandboxes, ...)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, Self

from dsec import sync
from dsec.client import DSecClient
from dsec_common.behavior import BehaviorLog
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.log import KafkaConfig, LogConsumer, StartAt

#: What the node itself says of an agent's work. Everything else an agent may log as it likes.
ACTIONS: Final = frozenset({"exec", "model_call"})
_LAST_ACTIONS: Final = frozenset({"delete", "end"})
#: The newest sandboxes are remembered, also those that nobody has asked for.
_SANDBOXES_MAX: Final = 100_000
_CONNECT_S: Final = 15.0


def latency_and_tokens(log: BehaviorLog) -> float:
    """Return ``100 - latency_ms / 10 + tokens_out / 100``: quick answers, and not too short."""
    return 100 - log.latency_ms / 10 + log.tokens_out / 100


def reward_from_logs(
    client: Any,
    *,
    formula: Callable[[BehaviorLog], float] = latency_and_tokens,
    combine: Callable[[Sequence[float]], float] = fmean,
    actions: Collection[str] = ACTIONS,
    column: str = "sandbox_id",
    patience_s: float = 60.0,
    from_beginning: bool = False,
) -> RewardFromLogs:
    """Return a reward function that reads the behaviour logs of each completion's sandbox.

    It reads them from when its ``with`` block is entered, so enter it before sandboxes are made.

    Args:
        client: a connected ``dsec.sync.DSecClient``.
        formula: what one record is worth.
        combine: makes one reward of the records of a sandbox.
        actions: of which records. An agent may log what it likes under any name that is not the
            platform's: count what it says of itself only where it cannot gain by it.
        column: the argument that names each completion's sandbox: a field of what a
            ``rollout_func`` returns, or a column of the dataset.
        patience_s: how long a sandbox's last record is waited for.
        from_beginning: read all that Kafka has kept, as for sandboxes that are gone already.

    Raises:
        DsecError: ``invalid`` when nothing says where Kafka is.
    """
    bootstrap = client.context.kafka_bootstrap
    if not bootstrap:
        raise invalid("no Kafka to read logs from: set DSEC_KAFKA_BOOTSTRAP to its host:port")
    consumer = LogConsumer(
        KafkaConfig(bootstrap_servers=bootstrap),
        projects=(client.context.project,),
        start_at=StartAt.EARLIEST if from_beginning else StartAt.LATEST,
    )
    scores = _Scores(consumer, formula, frozenset(actions))
    return RewardFromLogs(client, scores, combine, column, patience_s)


class RewardFromLogs:
    """What :func:`reward_from_logs` returns; a context manager. Call it from any thread.

    The same sandboxes have the same rewards however often they are asked for.
    """

    #: Under this name TRL reports the rewards.
    __name__ = "reward_from_logs"

    def __init__(
        self,
        client: Any,
        scores: _Scores,
        combine: Callable[[Sequence[float]], float],
        column: str,
        patience_s: float,
    ) -> None:
        self._client = client
        self._scores = scores
        self._combine = combine
        self._column = column
        self._patience_s = patience_s

    def __call__(
        self,
        prompts: Sequence[Any],  # noqa: ARG002  TRL gives them by name
        completions: Sequence[Any],
        **columns: Any,
    ) -> list[float | None]:
        """Return one reward for each completion; None where no record counts.

        Waits until each sandbox has ended and all its records are there.

        Raises:
            DsecError: ``invalid`` without a sandbox for each completion, ``timeout`` when one has
                not ended in time.
            Exception: what the formula failed with, for a record of one of these.
        """
        sandboxes = columns.get(self._column)
        if sandboxes is None or len(sandboxes) != len(completions):
            raise invalid(
                f"there has to be a {self._column!r} for each of the {len(completions)} completions"
            )

        async def scored(_: DSecClient) -> list[list[float]]:
            return await self._scores.of(list(sandboxes), self._patience_s)

        worth: list[list[float]] = sync.run_with(self._client, scored)
        return [self._combine(values) if values else None for values in worth]

    def __enter__(self) -> Self:
        sync.run_with(self._client, self._scores.start)
        return self

    def __exit__(self, *_: object) -> None:
        sync.run_with(self._client, self._scores.stop)


@dataclass
class _OfSandbox:
    values: list[float] = field(default_factory=list)
    has_ended: bool = False
    failure: Exception | None = None


class _Scores:
    """What each sandbox's records were worth, as they are read. Lives on the client's loop."""

    def __init__(
        self,
        consumer: LogConsumer,
        formula: Callable[[BehaviorLog], float],
        actions: frozenset[str],
    ) -> None:
        self._consumer = consumer
        self._formula = formula
        self._actions = actions
        self._sandboxes: OrderedDict[str, _OfSandbox] = OrderedDict()
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def start(self, _: DSecClient) -> None:
        """Begin to read; what is written after it returned is seen."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._consumer.start()
        except TimeoutError:
            await self._consumer.stop()
            raise DsecError(
                ErrorCode.UNAVAILABLE, f"Kafka does not answer within {_CONNECT_S:g} s"
            ) from None
        self._reading = asyncio.create_task(self._read())

    async def stop(self, _: DSecClient) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._consumer.stop()

    async def of(self, sandboxes: Sequence[str], patience_s: float) -> list[list[float]]:
        """Return the values of each, once all have ended."""
        if self._reading is None:
            raise DsecError(ErrorCode.CONFLICT, "nothing is read: enter the reward's with block")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._running(sandboxes) and not self._reading.done():
                    self._changed.clear()
                    self._consumer.hurry()
                    await self._changed.wait()
        if self._reading.done():
            self._reading.result()
        if running := self._running(sandboxes):
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"the logs of {len(running)} sandboxes say no end within {patience_s:g} s, such as "
                f"{running[0]}: is it deleted, and was the log read before it was made?",
                details={"sandbox_id": running[0]},
            )
        found = [self._sandboxes[sandbox] for sandbox in sandboxes]
        for one in found:
            if one.failure is not None:
                raise one.failure
        return [list(one.values) for one in found]

    def _running(self, sandboxes: Sequence[str]) -> list[str]:
        known = self._sandboxes
        return [it for it in sandboxes if it not in known or not known[it].has_ended]

    async def _read(self) -> None:
        try:
            async for record in self._consumer:
                self._note(record)
        finally:
            # Whoever waits learns that nothing comes any more.
            self._changed.set()

    def _note(self, record: BehaviorLog) -> None:
        if not record.sandbox_id:
            return
        known = self._sandboxes.setdefault(record.sandbox_id, _OfSandbox())
        if record.action in self._actions:
            self._count(known, record)
        if record.action in _LAST_ACTIONS:
            known.has_ended = True
            self._changed.set()
        if len(self._sandboxes) > _SANDBOXES_MAX:
            self._sandboxes.popitem(last=False)

    def _count(self, known: _OfSandbox, record: BehaviorLog) -> None:
        try:
            known.values.append(self._formula(record))
        except Exception as error:  # noqa: BLE001  told to who asks for this sandbox, and only there
            known.failure = known.failure or error
