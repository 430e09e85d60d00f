"""DAGs of agents: checked when they are registered, run step by step, resumed after failures."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.channel import ANSWER_PATIENCE_S, Channel
from dsec_common import subjects
from dsec_common.bus_types import ReplyT
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.base import Message, new_id
from dsec_common.wire.dag import (
    DagInfo,
    DagList,
    DagRemoved,
    DagRun,
    DagSpec,
    DagSummary,
    InspectDagRun,
    ListDags,
    RegisterDag,
    RemoveDag,
    ResumeDagRun,
    RunDag,
    RunState,
)

_TIMEOUT_S: Final = 15.0
_LOOK_S: Final = 0.2


class Dags:
    """The project's DAGs. All its methods may be repeated."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def register(self, spec: DagSpec | Mapping[str, Any] | str | Path) -> DagInfo:
        """Have a DAG checked and kept, in place of one of the same name.

        Args:
            spec: the DAG, the same as a mapping, or the path of a YAML file.

        Raises:
            DsecError: ``invalid``, naming the step: a cycle, a missing schema, types that do not
                fit; ``not_found`` for an agent or a version; ``exhausted`` when the project has as
                many DAGs as it may.
        """
        return await self._ask("register", RegisterDag(spec=dag_spec(spec)), DagInfo)

    async def list(self) -> builtins.list[DagSummary]:
        """Return the project's DAGs in the order of their names."""
        found: builtins.list[DagSummary] = []
        while True:
            after = found[-1].name if found else ""
            page = await self._ask("list", ListDags(after=after), DagList)
            found += page.dags
            if not page.more or not page.dags:
                return found

    async def remove(self, name: str) -> None:
        """Remove a DAG; runs of it go on as they began, and are kept.

        Raises:
            DsecError: ``not_found``.
        """
        there = any(one.name == name for one in await self.list())
        try:
            await self._ask("remove", RemoveDag(name=name), DagRemoved)
        except DsecError as error:
            # It was there: the answer to this very request may have been lost before.
            if error.code is not ErrorCode.NOT_FOUND or not there:
                raise

    async def run(self, name: str, value: Any = None, *, run_id: str = "") -> DagRun:
        """Begin a run; it goes on whoever waits for it.

        Args:
            name: the DAG.
            value: the run's input.
            run_id: the same id again is the same run.

        Raises:
            DsecError: ``not_found``; ``invalid`` for an input that does not fit; ``conflict`` for
                the id of a run of another DAG or with another input.
        """
        return await self._ask(
            "run", RunDag(name=name, input=value, run_id=run_id or new_id()), DagRun
        )

    async def inspect(self, run_id: str, *, step: str = "") -> DagRun:
        """Return how far a run is, with the outputs of its steps, or of one ``step``.

        Outputs of more than 512 KiB together are left out: ask for them step by step.

        Raises:
            DsecError: ``not_found``; ``invalid`` for the step.
        """
        return await self._ask("inspect", InspectDagRun(run_id=run_id, step=step), DagRun)

    async def resume(self, run_id: str) -> DagRun:
        """Have what failed in a run tried again; what is done stays done.

        Raises:
            DsecError: ``not_found``.
        """
        return await self._ask("resume", ResumeDagRun(run_id=run_id), DagRun)

    async def wait(self, run_id: str, *, timeout_s: float = 600.0) -> DagRun:
        """Return a run when it is over, whatever came of it.

        Raises:
            DsecError: ``timeout``; the run goes on.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            run = await self.inspect(run_id)
            if run.state is not RunState.RUNNING:
                return run
            if time.monotonic() > deadline:
                raise DsecError(
                    ErrorCode.TIMEOUT, f"the run {run_id} is not over after {timeout_s:g} s"
                )
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, verb: str, message: Message, reply_type: type[ReplyT]) -> ReplyT:
        return await self._channel.ask(
            subjects.dag(self._channel.project, verb),
            message,
            reply_type,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            patience_s=2 * ANSWER_PATIENCE_S,
        )


def dag_spec(spec: DagSpec | Mapping[str, Any] | str | Path) -> DagSpec:
    """Return a DAG as the platform takes it.

    Raises:
        DsecError: ``invalid`` for what is none, naming the field.
    """
    if isinstance(spec, DagSpec):
        return spec
    where = "the DAG"
    if isinstance(spec, str | Path):
        from dsec.recipes import read_yaml_file  # noqa: PLC0415  only for files

        spec, where = read_yaml_file(Path(spec), "a DAG"), str(spec)
    try:
        return msgspec.convert(spec, DagSpec)
    except msgspec.ValidationError as error:
        raise invalid(f"{where} is no DAG: {error}") from None
