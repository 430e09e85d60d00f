"""The verbs of DAGs: ``dsec.v1.<project>.dag.<verb>``."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.subjects import validate_local
from dsec_common.wire.base import encode, new_id
from dsec_common.wire.dag import (
    DagInfo,
    DagList,
    DagRemoved,
    DagRun,
    DagSpec,
    DagStepRun,
    DagSummary,
    InspectDagRun,
    ListDags,
    RegisterDag,
    RemoveDag,
    ResumeDagRun,
    RunDag,
    StepState,
)
from dsec_common.wire.sandbox import LISTING_PAGE_BYTES
from dsec_scheduler.agents import changes
from dsec_scheduler.agents.registry import Registry
from dsec_scheduler.dags import runs, schemas
from dsec_scheduler.dags.converters import Converters
from dsec_scheduler.dags.plans import AgentContract, Plan, plan
from dsec_scheduler.dags.runner import DagRunner
from dsec_scheduler.dags.runs import RunRecord
from dsec_scheduler.dags.store import RUN_BYTES_MAX, DagStore

#: Of outputs in one answer; others are asked for one by one.
_OUTPUTS_BYTES: Final = 512 * 1024


class DagDoor:
    """Answers what projects ask about their DAGs."""

    def __init__(
        self,
        store: DagStore,
        registry: Registry,
        converters: Converters,
        runner: DagRunner,
        project_max: int,
    ) -> None:
        self._project_max = project_max
        self._store = store
        self._registry = registry
        self._converters = converters
        self._runner = runner

    async def register(self, asked: Request[RegisterDag]) -> DagInfo:
        """Check a DAG against the contracts of its agents as they are now, and keep it.

        Raises:
            DsecError: ``invalid`` for a cycle, a missing schema, types that do not fit;
                ``not_found`` for an agent or a version; ``exhausted`` for too many DAGs of the
                project.
        """
        spec = asked.message.spec
        planned = await self._planned(asked.project, spec)
        await self._check_room(asked.project, spec.name)
        await self._store.keep(asked.project, spec)
        return DagInfo(
            cause_id=asked.message.message_id,
            name=spec.name,
            order=tuple(planned.steps),
            conversions=planned.conversions,
        )

    async def _check_room(self, project: str, name: str) -> None:
        if await self._store.find(project, name) is not None:
            return
        if len(await self._store.dags(project)) >= self._project_max:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"the project {project} has {self._project_max} DAGs, which is the most "
                "(dags_project_max); remove DAGs that nobody runs",
                retryable=False,
                details={"limit": self._project_max},
            )

    async def remove(self, asked: Request[RemoveDag]) -> DagRemoved:
        """Remove a DAG; runs of it go on by the plans that they began with, and are kept.

        Raises:
            DsecError: ``not_found``.
        """
        name = asked.message.name
        await self._store.remove(asked.project, name)
        return DagRemoved(cause_id=asked.message.message_id, name=name)

    async def list_dags(self, asked: Request[ListDags]) -> DagList:
        """Return a page of the project's DAGs."""
        page: list[DagSummary] = []
        left_bytes = LISTING_PAGE_BYTES
        for spec in await self._store.dags(asked.project):
            if spec.name <= asked.message.after:
                continue
            one = DagSummary(name=spec.name, steps=len(spec.steps), description=spec.description)
            left_bytes -= len(msgspec.json.encode(one))
            if page and left_bytes < 0:
                return DagList(dags=tuple(page), more=True)
            page.append(one)
        return DagList(dags=tuple(page))

    async def run(self, asked: Request[RunDag]) -> DagRun:
        """Begin a run; its steps' versions are those that are active now.

        Raises:
            DsecError: ``not_found``; ``invalid`` for an input that does not fit, or because agents
                have changed so that types do not; ``conflict`` for an id of another DAG's run.
        """
        request, project = asked.message, asked.project
        run_id = validate_local(request.run_id or new_id())
        try:
            spec = await self._store.dag(project, request.name)
        except DsecError as missing:
            # One that has begun is the same run whatever became of its DAG.
            run = await self._begun(project, run_id, request.input, missing)
        else:
            planned = await self._planned(project, spec)
            what = f"the input of {request.name}"
            await asyncio.to_thread(schemas.check_value, request.input, planned.input, what)
            run = await self._store.begin(project, runs.begun(run_id, planned), request.input)
        if run.plan.name != request.name:
            raise DsecError(
                ErrorCode.CONFLICT, f"the run {run_id} is one of the DAG {run.plan.name}"
            )
        self._runner.start(project, run_id)
        return await self._told(project, run, [])

    async def _begun(
        self, project: str, run_id: str, value: Any, otherwise: DsecError
    ) -> RunRecord:
        if otherwise.code is not ErrorCode.NOT_FOUND:
            raise otherwise
        try:
            return await self._store.begun(project, run_id, value)
        except DsecError as error:
            raise (otherwise if error.code is ErrorCode.NOT_FOUND else error) from None

    async def inspect(self, asked: Request[InspectDagRun]) -> DagRun:
        """Return how far a run is, and what its steps gave.

        Raises:
            DsecError: ``not_found`` for the run, ``invalid`` for the step.
        """
        request, project = asked.message, asked.project
        run = await self._store.run(project, request.run_id)
        if request.step and request.step not in run.steps:
            raise invalid(f"the run {run.run_id} has no step {request.step[:64]!r}", field="step")
        return await self._told(project, run, [request.step] if request.step else list(run.steps))

    async def resume(self, asked: Request[ResumeDagRun]) -> DagRun:
        """Have what failed tried again; a run in which nothing has is as it was.

        Raises:
            DsecError: ``not_found``.
        """
        project, run_id = asked.project, asked.message.run_id
        run = await self._store.resume(project, run_id)
        self._runner.start(project, run_id)
        return await self._told(project, run, [])

    async def _planned(self, project: str, spec: DagSpec) -> Plan:
        contracts: dict[str, AgentContract] = {}
        for name, step in spec.steps.items():
            record = await self._registry.read(project, step.agent)
            version = changes.find(record, step.version or record.active)
            contract = await self._registry.contract(project, step.agent, version.contract_sha256)
            contracts[name] = AgentContract(version=version.version, contract=contract)
        # Schemas are large where somebody wants them to be; everybody else goes on meanwhile.
        planned = await asyncio.to_thread(plan, spec, contracts, self._converters)
        if len(encode(runs.begun("", planned))) > RUN_BYTES_MAX // 2:
            raise invalid(f"the DAG {spec.name} is too large: use smaller schemas, or fewer steps")
        return planned

    async def _told(self, project: str, run: RunRecord, outputs: list[str]) -> DagRun:
        steps: dict[str, DagStepRun] = {}
        left = _OUTPUTS_BYTES
        for name, step in run.steps.items():
            output: Any = None
            if step.state is StepState.DONE and name in outputs:
                output = await self._store.value(project, run.run_id, name)
                left -= len(msgspec.json.encode(output))
            steps[name] = DagStepRun(
                state=step.state,
                attempts=step.attempts,
                error=step.error,
                sandbox_id=step.sandbox_id,
                output=output if left >= 0 else None,
            )
        return DagRun(run_id=run.run_id, name=run.plan.name, state=run.state, steps=steps)
