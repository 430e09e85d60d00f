"""DAGs, their runs and the values in them, in JetStream."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, Final

import msgspec

from dsec_common.bus import Bus, KeyValue
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_common.retry import until_available
from dsec_common.wire.base import Message, encode
from dsec_common.wire.dag import DagSpec
from dsec_scheduler.dags import runs
from dsec_scheduler.dags.runs import RunRecord
from dsec_scheduler.swapping import DocumentT, swap

DAGS_BUCKET: Final = "dsec-dags"
RUNS_BUCKET: Final = "dsec-dag-runs"

RUN_BYTES_MAX: Final = 512 * 1024
"""The most that a run may take, without the values in it."""

_INPUT: Final = "_"


class DagRecord(Message, frozen=True, kw_only=True):
    """A DAG that was checked."""

    spec: DagSpec


class ValueRecord(Message, frozen=True, kw_only=True):
    """A run's input, or what a step gave, as JSON.

    Attributes:
        version_ms: of a step's output: see :mod:`dsec_common.compute.consistency`.
    """

    value: bytes
    version_ms: int = 0

    @property
    def decoded(self) -> Any:
        """The value."""
        return msgspec.json.decode(self.value)


class DagStore:
    """What is kept of DAGs. A project finds its own only."""

    def __init__(
        self,
        dags: KeyValue[DagRecord],
        kept_runs: KeyValue[RunRecord],
        values: KeyValue[ValueRecord],
    ) -> None:
        self._dags = dags
        self.runs = kept_runs
        self._values = values

    @classmethod
    async def open(
        cls, bus: Bus, clock: Clock, replicas: int, kept_s: float, runs_max_bytes: int
    ) -> DagStore:
        """Return the store once its buckets are there.

        Runs are kept for ``kept_s``; with their values they take ``runs_max_bytes`` at most.
        """

        async def bucket(name: str, kind: type[Any], **limits: Any) -> Any:
            return await until_available(
                f"the bucket {name}",
                functools.partial(bus.kv, name, kind, replicas=replicas, **limits),
                clock,
            )

        of_runs = {"ttl_s": kept_s, "max_bytes": runs_max_bytes}
        return cls(
            await bucket(DAGS_BUCKET, DagRecord),
            await bucket(RUNS_BUCKET, RunRecord, **of_runs),
            await bucket(RUNS_BUCKET, ValueRecord, **of_runs),
        )

    async def keep(self, project: str, spec: DagSpec) -> None:
        """Keep a DAG in place of any of the same name."""
        await self._dags.put(f"{project}.{spec.name}", DagRecord(spec=spec))

    async def remove(self, project: str, name: str) -> None:
        """Remove a DAG; its runs stay.

        Raises:
            DsecError: ``not_found``.
        """
        await self.dag(project, name)
        await self._dags.delete(f"{project}.{name}")

    async def dag(self, project: str, name: str) -> DagSpec:
        """Return a DAG.

        Raises:
            DsecError: ``not_found``.
        """
        record = await _found(self._dags, f"{project}.{name}", f"DAG {name[:64]!r}")
        return record.spec

    async def find(self, project: str, name: str) -> DagSpec | None:
        """Return a DAG, or None."""
        try:
            return await self.dag(project, name)
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return None

    async def dags(self, project: str) -> list[DagSpec]:
        """Return a project's DAGs in the order of their names."""
        entries = await self._dags.entries(f"{project}.>")
        kept = [entry.value.spec for entry in entries if entry.value is not None]
        return sorted(kept, key=lambda spec: spec.name)

    async def run(self, project: str, run_id: str) -> RunRecord:
        """Return a run.

        Raises:
            DsecError: ``not_found``.
        """
        return await _found(self.runs, f"{project}.{run_id}", f"run {run_id[:64]!r}")

    async def begin(self, project: str, run: RunRecord, value: Any) -> RunRecord:
        """Keep a new run with its input; return it, or the one that has its id.

        Raises:
            DsecError: ``invalid`` for a run that is too large, ``conflict`` for an id that was
                given with another input.
        """
        if len(encode(run)) > RUN_BYTES_MAX:
            raise invalid(f"the DAG is too large: it and its schemas take over {RUN_BYTES_MAX} B")
        key = f"{project}.{run.run_id}"
        try:
            # The input first: a run that is there has it. Only the first one counts.
            await self._values.create(f"{key}.{_INPUT}", _value(value))
            await self.runs.create(key, run)
        except DsecError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
            await self._check_input(project, run.run_id, value)
            try:
                return await self.run(project, run.run_id)
            except DsecError as missing:
                if missing.code is not ErrorCode.NOT_FOUND:
                    raise
                await self.runs.create(key, run)  # its input was kept and no more
        return run

    async def begun(self, project: str, run_id: str, value: Any) -> RunRecord:
        """Return a run that was begun with this input.

        Raises:
            DsecError: ``not_found``; ``conflict`` when it has another input.
        """
        run = await self.run(project, run_id)
        await self._check_input(project, run_id, value)
        return run

    async def _check_input(self, project: str, run_id: str, value: Any) -> None:
        if await self.value(project, run_id, "") != value:
            raise DsecError(
                ErrorCode.CONFLICT,
                f"the run {run_id} has another input: choose another id, or leave it out",
            )

    async def resume(self, project: str, run_id: str) -> RunRecord:
        """Return a run with what failed in it waiting again.

        Raises:
            DsecError: ``not_found``.
        """
        before = await self.run(project, run_id)

        def change(kept: RunRecord | None) -> RunRecord:
            return runs.resumed(kept or before)

        return await swap(self.runs, f"{project}.{run_id}", change, _pause)

    async def put_output(
        self, project: str, run_id: str, step: str, value: Any, version_ms: int
    ) -> None:
        """Keep what a step gave."""
        await self._values.put(f"{project}.{run_id}.{step}", _value(value, version_ms))

    async def value(self, project: str, run_id: str, step: str) -> Any:
        """Return what a step gave, or with an empty ``step`` the run's input.

        Raises:
            DsecError: ``not_found``.
        """
        key = f"{project}.{run_id}.{step or _INPUT}"
        return (await _found(self._values, key, "value")).decoded

    async def kept(self, project: str, run_id: str, step: str) -> ValueRecord | None:
        """Return the same as it is kept, or None."""
        try:
            return await _found(self._values, f"{project}.{run_id}.{step or _INPUT}", "value")
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return None


def _value(value: Any, version_ms: int = 0) -> ValueRecord:
    return ValueRecord(value=msgspec.json.encode(value), version_ms=version_ms)


async def _pause(attempt: int) -> None:
    await asyncio.sleep(0.01 * attempt)


async def _found(bucket: KeyValue[DocumentT], key: str, what: str) -> DocumentT:
    try:
        entry = await bucket.get(key)
    except DsecError as error:
        if error.code in {ErrorCode.NOT_FOUND, ErrorCode.INVALID}:
            raise not_found(f"this project has no {what}", what=what.split(" ", 1)[0]) from None
        raise
    assert entry.value is not None  # noqa: S101  an entry that was found has a value
    return entry.value
