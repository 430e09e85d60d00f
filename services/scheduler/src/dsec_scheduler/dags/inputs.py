"""A step's input: made of the outputs of others, and never of ones older than the run knows.

A run's record says which version of each output it goes by. What is read for a step may be older: a
copy of the bucket that is behind, or what a scheduler wrote that had lost the run. The step's agent
is then behind its dependencies, and does not begin before it has been synchronised.
"""

from __future__ import annotations

from typing import Any, Final

import structlog

from dsec_common.clock import Clock
from dsec_common.compute.consistency import CLOCK_TOLERANCE_MS, required_version_ms
from dsec_common.consistency import keep_consistent
from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_common.wire.dag import WHOLE
from dsec_scheduler.dags.converters import Converters
from dsec_scheduler.dags.plans import PlannedStep
from dsec_scheduler.dags.runs import RunRecord
from dsec_scheduler.dags.store import DagStore

_log: Final = structlog.get_logger(__name__)

_READS_MAX: Final = 20
_PAUSE_S: Final = CLOCK_TOLERANCE_MS / 1000


class StepInput:
    """The state of an agent that a step is about to begin; the agent stands still until then.

    Attributes:
        value: the input, once :meth:`settle` has returned.
    """

    def __init__(
        self,
        store: DagStore,
        converters: Converters,
        clock: Clock,
        *,
        project: str,
        run: RunRecord,
        name: str,
        planned: PlannedStep,
        clock_tolerance_ms: int = CLOCK_TOLERANCE_MS,
    ) -> None:
        self.value: Any = None
        self._store = store
        self._converters = converters
        self._clock = clock
        self._project = project
        self._run = run
        self._planned = planned
        self._clock_tolerance_ms = clock_tolerance_ms
        self._log = _log.bind(run=run.run_id, step=name)
        self._known = {needed: run.steps[needed].version_ms for needed in planned.needs}

    async def settle(self) -> int:
        """Read the input, anew while it is behind; return the version of the agent's state.

        Raises:
            DsecError: ``unavailable`` when it stays behind; ``not_found`` when the run's own input
                is gone; what a converter raised.
        """
        old = await self._read()
        newer = {needed: self._known[needed] for needed in old}
        tolerance_ms = self._clock_tolerance_ms
        await keep_consistent(self, required_version_ms(old, tolerance_ms), newer, tolerance_ms)
        return required_version_ms(self._known, tolerance_ms)

    async def pause(self, reason: str) -> None:
        """Have the step not begin."""
        self._log.warning("a step stands still", reason=reason)

    async def synchronise(self, version_ms: int) -> None:
        """Read the input until nothing in it is older than the run knows.

        Raises:
            DsecError: ``unavailable`` when it stays so; the attempt has failed then.
        """
        for _ in range(_READS_MAX):
            if not await self._read():
                return
            await self._clock.sleep(_PAUSE_S)
        raise DsecError(
            ErrorCode.UNAVAILABLE,
            f"outputs that the step needs are older than the run knows; it needs {version_ms}",
        )

    async def resume(self) -> None:
        """Let the step begin."""
        self._log.info("a step goes on with what is so now")

    async def _read(self) -> dict[str, int]:
        """Read the input; return what of it is older than the run knows, and of which version."""
        old: dict[str, int] = {}
        values: dict[str, Any] = {}
        for of, source in self._planned.sources.items():
            kept = await self._store.kept(self._project, self._run.run_id, source.step)
            known_ms = self._known.get(source.step, 0)
            if kept is None and not known_ms:
                raise not_found(f"what {source.step or 'the run'} gave is kept no more")
            if kept is None or kept.version_ms < known_ms:
                old[source.step] = kept.version_ms if kept else 0
                continue
            value = kept.decoded
            for field in source.fields:
                value = value[field]
            values[of] = self._converters.convert(source.converters, value)
        if not old:
            self.value = values.get(WHOLE, values)
        return old
