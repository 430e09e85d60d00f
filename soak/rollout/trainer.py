"""The trainer, a process that is killed at any moment: ``python -m soak.rollout.trainer SETTINGS``.

It exits with 0 when all rollouts are over and with 3 when a newer trainer has taken over.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from dsec import DSecClient, DsecError, ErrorCode
from dsec.rollout_groups import Reply, Step
from soak.rollout.ledger import Answer, Began, Came, Confirmed, Decided, Ledger, Refused

FENCED: Final = 3
#: Exists from when rollouts are to come to their end.
OVER: Final = "over"
#: Where trainers say which rollouts there are.
ROLLOUTS: Final = "rollouts"
_AT_ONCE: Final = 64
_PATIENCE_S: Final = 300.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer is told, as JSON.

    Attributes:
        number: of this trainer; each is larger than that of any before.
        directory: where the ledgers are.
    """

    seed: int
    number: int
    directory: str
    nats: str
    credentials: str
    group: str
    rollouts: int


class Trainer:
    """Decides what steps are answered with, each once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directory = Path(settings.directory)
        self._ledger = Ledger.open(self._directory, settings.number)
        self._random = random.Random(f"{settings.seed} {settings.number}")  # noqa: S311  to be repeated
        self._decided = 0

    async def run(self) -> None:
        """Answer steps until all rollouts are over.

        Raises:
            DsecError: what the platform says.
        """
        settings = self._settings
        tasks = [{"task": number} for number in range(settings.rollouts)]
        async with (
            DSecClient(settings.nats, settings.credentials) as client,
            client.rollouts.group(settings.group, tasks, patience_s=_PATIENCE_S) as group,
        ):
            self._ledger.add(Began(fence=group.fence))
            new = self._directory / f"{ROLLOUTS}-{settings.number}"
            new.write_bytes(msgspec.json.encode([rollout.id for rollout in group.rollouts]))
            new.replace(self._directory / ROLLOUTS)
            async for steps in group.batches(_AT_ONCE):
                replies = [self._reply(step) for step in steps]
                self._ledger.sync()
                for step, error in zip(steps, await group.reply(replies), strict=True):
                    self._answered(step, error)

    def _reply(self, step: Step) -> Reply:
        key = (step.rollout.id, step.seq)
        self._ledger.add(Came(rollout=key[0], seq=key[1], digest=step.observation["digest"]))
        answer = self._ledger.decisions.get(key)
        if answer is None:
            answer = self._ledger.decisions[key] = self._decide()
            self._ledger.add(Decided(rollout=key[0], seq=key[1], answer=answer))
        return Reply(step, answer.payload, reward=answer.reward, done=answer.done)

    def _decide(self) -> Answer:
        """Return an answer that no other trainer could give, and that is given once."""
        self._decided += 1
        return Answer(
            payload={"action": f"{self._settings.number}-{self._decided}"},
            reward=self._random.randint(-4, 4) / 4,
            done=(self._directory / OVER).exists(),
        )

    def _answered(self, step: Step, error: DsecError | None) -> None:
        rollout, seq = step.rollout.id, step.seq
        if error is not None:
            self._ledger.add(Refused(rollout=rollout, seq=seq, why=str(error)))
        else:
            answer = self._ledger.decisions[rollout, seq]
            self._ledger.add(Confirmed(rollout=rollout, seq=seq, answer=answer))

    def end(self) -> None:
        """Write what is not written yet."""
        self._ledger.close()


def main(settings: Settings) -> int:
    """Train, and return how it ended."""
    trainer = Trainer(settings)
    try:
        uvloop.run(trainer.run())
    except DsecError as error:
        if error.code is ErrorCode.CONFLICT and error.details.get("reason") == "fenced":
            return FENCED
        print(f"trainer {settings.number}: {error}", file=sys.stderr)
        return 1
    finally:
        trainer.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Settings)))
