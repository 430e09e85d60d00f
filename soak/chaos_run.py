"""What both runs of chaos have: options, what is told of them, and parts that start again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from dsec.stack.child import Child, ServiceSpec
from dsec_common.errors import DsecError, unavailable
from dsec_common.processes import wait_exit
from soak.model import Violation

READY_S: Final = 90.0
"""How long a part may take to start, and whatever else waits for parts alone."""
#: So much of what happened before the first violation is told.
HISTORY_MAX: Final = 400
_STOP_S: Final = 30.0
#: A part that will not live is tried again after this long.
_PAUSE_S: Final = 1.0


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    Attributes:
        kill_every_s: pauses between kills are this long on average; 0 kills nothing.
    """

    seed: int
    seconds: float
    kill_every_s: float


class RunModel:
    """What is known of a run.

    Attributes:
        history: what happened last.
        history_then: what had happened last when something was violated for the first time.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.kills: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.history: deque[str] = deque(maxlen=HISTORY_MAX)
        self.history_then: list[str] = []

    def note(self, what: str) -> None:
        """Keep what happened, for the last history of a run that failed."""
        self.history.append(f"{self._after_s():.3f} {what}")

    def violate(self, what: str, who: str) -> None:
        """Note what must not be."""
        self.note(f"VIOLATION {who}: {what}")
        if not self.violations:
            self.history_then = [*self.history]
        self.violations.append(Violation(what, "", who, self._after_s()))

    def killed(self, part: str) -> None:
        """Note that a part was killed."""
        self.kills[part] += 1
        self.note(f"kill -9 {part}")

    def _after_s(self) -> float:
        return round(time.monotonic() - self.started, 3)


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run.

    Attributes:
        name: of the kind of run.
        told: names of the counts that the one line says beside what it says of every run.
        history: what happened last before something was violated for the first time.
    """

    name: ClassVar[str]
    told: ClassVar[tuple[str, ...]]

    seed: int
    seconds: float
    kills: dict[str, int]
    violations: list[str]
    history: list[str]

    @property
    def clean(self) -> bool:
        """Whether all is as it must be."""
        return not self.violations

    def line(self) -> str:
        """Return the whole in one line."""
        counts = {"kills": sum(self.kills.values())}
        counts |= {what: getattr(self, what) for what in self.told}
        counts["violations"] = len(self.violations)
        return (
            f"{self.name}: {'clean' if self.clean else 'NOT CLEAN'}: seed {self.seed}, "
            f"{self.seconds:.0f} s, " + ", ".join(f"{count} {of}" for of, count in counts.items())
        )


def facts_of(options: RunOptions, model: RunModel) -> dict[str, Any]:
    """Return what the summary of every run says; ``kills`` by the names of parts."""
    return {
        "seed": options.seed,
        "seconds": time.monotonic() - model.started,
        "kills": dict(model.kills),
        "violations": [f"{it.after_s:.3f} s {it.sandbox_id}: {it.what}" for it in model.violations],
        "history": model.history_then,
    }


def tell_history(summary: RunSummary) -> None:
    """Print what led to the first violation, if there was one."""
    if not summary.clean:
        print("history up to the first violation:")
        for line in summary.history:
            print(f"  {line}")


# --- Parts ------------------------------------------------------------------------------------


class Part:
    """One service for the whole run: when its process ends, the next one starts."""

    def __init__(self, spec: ServiceSpec, model: RunModel) -> None:
        self.spec = spec
        self.ready = asyncio.Event()
        self._model = model
        self._child: Child | None = None
        self._killed = False

    @property
    def kind(self) -> str:
        """``broker``, ``scheduler``, … : what its name begins with."""
        return self.spec.name.split("-")[0]

    def kill(self) -> None:
        """End its process with SIGKILL, also one that still starts; one that is gone stays so."""
        identity = self._child.identity if self._child is not None else None
        if identity is not None and identity.signal(signal.SIGKILL):
            self._killed = True
            self._model.killed(self.spec.name)

    def stall(self, for_s: float) -> bool:
        """Let its process stand still for so long; return whether there was one."""
        identity = self._child.identity if self._child is not None else None
        if identity is None or not identity.signal(signal.SIGSTOP):
            return False
        self._model.note(f"{self.spec.name} stands still for {for_s:g} s")
        asyncio.get_running_loop().call_later(for_s, identity.signal, signal.SIGCONT)
        return True

    async def run(self) -> None:
        """Keep it running until cancelled, then stop it in order."""
        while True:
            self._killed = False
            await self._live_once()
            if not self._killed:
                self._model.violate("ended by itself, or did not start", self.spec.name)
                await asyncio.sleep(_PAUSE_S)

    async def _live_once(self) -> None:
        child = self._child = Child(self.spec, _say_nothing)
        stopped = False
        try:
            await child.start(READY_S)
            identity = child.identity
            if identity is not None:
                self.ready.set()
                await wait_exit(identity.pid)
        except DsecError as error:
            if not self._killed:
                self._model.violate(error.message, self.spec.name)
        except asyncio.CancelledError:
            stopped = True
            raise
        finally:
            self.ready.clear()
            in_order = await child.stop(_STOP_S)
            if stopped and not in_order and not self._killed:
                self._model.violate("did not stop in order", self.spec.name)


@contextlib.asynccontextmanager
async def running(parts: Sequence[Part], *kinds: str) -> AsyncIterator[None]:
    """Keep parts running within the context; at its end stop them, one kind after another."""
    tasks = {part: asyncio.create_task(part.run(), name=part.spec.name) for part in parts}
    try:
        yield
    finally:
        for kind in kinds:
            ending = [task for part, task in tasks.items() if part.kind == kind]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)


async def all_ready(parts: Sequence[Part]) -> None:
    """Return when every part takes requests.

    Raises:
        DsecError: ``unavailable``, naming those that do not in time.
    """
    try:
        async with asyncio.timeout(READY_S):
            for part in parts:
                await part.ready.wait()
    except TimeoutError:
        names = [part.spec.name for part in parts if not part.ready.is_set()]
        raise unavailable(f"not ready after {READY_S:g} s: {', '.join(names)}") from None


def keep_logs(variable: str, directory: Path, *patterns: str) -> None:
    """Copy a run's logs to where the environment variable says, if it does."""
    keep = os.environ.get(variable)
    if not keep:
        return
    target = Path(keep)
    target.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for log in directory.glob(pattern):
            shutil.copy(log, target)


async def _say_nothing(what: str, facts: Mapping[str, Any]) -> None:
    """Take a report that nobody waits for."""
