"""Drives runs: begins steps, keeps what came of them, takes over from schedulers that are gone.

A run has one owner at a time, by a claim in its record that is renewed with each write; a write in
another's run fails. An attempt is a creation with a key of its own, so whoever takes over asks for
the same attempt and is told what came of it: it is not run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from dsec_common.bus import KeyValue, ReplyAddress
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.dag import RunState
from dsec_common.wire.sandbox import CreateSandbox, ExecCommand
from dsec_scheduler import admission
from dsec_scheduler.agents import changes
from dsec_scheduler.agents.registry import Registry
from dsec_scheduler.agents.resolving import Resolver
from dsec_scheduler.creation import Creation
from dsec_scheduler.dags import runs, schemas
from dsec_scheduler.dags.converters import Converters
from dsec_scheduler.dags.inputs import StepInput
from dsec_scheduler.dags.plans import AgentContract, PlannedStep, with_agent
from dsec_scheduler.dags.runs import RunRecord
from dsec_scheduler.dags.store import DagStore
from dsec_scheduler.idempotency import bucket_key
from dsec_scheduler.swapping import swap

_log: Final = structlog.get_logger(__name__)

_CLAIM_S: Final = 15.0
_RENEW_S: Final = 5.0
_LOOK_S: Final = 2.0
_CREATE_TIMEOUT_S: Final = 60.0
_STDERR_CHARACTERS: Final = 300


class RunLostError(Exception):
    """Another scheduler has the run now."""


class Done(NamedTuple):
    """A step that was run: where, and the version of what it gave."""

    sandbox_id: str
    version_ms: int


class DagRunner:
    """All runs that this scheduler is at work on."""

    def __init__(
        self,
        store: DagStore,
        creation: Creation,
        registry: Registry,
        converters: Converters,
        clock: Clock,
        *,
        randomness: random.Random,
        owner: str,
        clock_tolerance_ms: int,
    ) -> None:
        self._store = store
        self._creation = creation
        self._registry = registry
        self._agents = Resolver(registry)
        self._converters = converters
        self._clock = clock
        self._random = randomness
        self._owner = owner
        self._clock_tolerance_ms = clock_tolerance_ms
        self._driving: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._unfinished: dict[tuple[str, str], float] = {}

    # --- Which runs ---------------------------------------------------------------------------

    async def follow(self) -> None:
        """Know of unfinished runs, until cancelled."""
        while True:
            with contextlib.suppress(DsecError):
                async with contextlib.aclosing(self._store.runs.watch("*.*")) as entries:
                    async for entry in entries:
                        if entry is not None:
                            self._noted(entry.key, entry.value)
            await self._clock.sleep(_LOOK_S)

    def _noted(self, key: str, run: RunRecord | None) -> None:
        project, _, run_id = key.partition(".")
        if run is None or run.state is not RunState.RUNNING:
            self._unfinished.pop((project, run_id), None)
        else:
            self._unfinished[project, run_id] = run.owned_until

    async def run(self) -> None:
        """Take over runs whose owners are gone, until cancelled."""
        try:
            while True:
                await self._clock.sleep(_LOOK_S)
                now = self._clock.now()
                for (project, run_id), owned_until in list(self._unfinished.items()):
                    if owned_until < now:
                        self.start(project, run_id)
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        tasks = list(self._driving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start(self, project: str, run_id: str) -> None:
        """Drive a run in the background, unless that is being done here already."""
        key = (project, run_id)
        if key in self._driving:
            return
        task = asyncio.create_task(self._driven(project, run_id), name=f"run {run_id}")
        self._driving[key] = task
        task.add_done_callback(lambda _: self._driving.pop(key, None))

    async def _driven(self, project: str, run_id: str) -> None:
        try:
            await _Drive(self, project, run_id).to_its_end()
        except RunLostError:
            _log.info("run_taken_over", run=run_id)
        except DsecError as error:
            _log.warning("run_waits", run=run_id, error=str(error))

    # --- One attempt --------------------------------------------------------------------------

    async def attempt(self, project: str, run: RunRecord, name: str) -> Done:
        """Run a step once and keep its output.

        Raises:
            DsecError: why it failed; ``invalid`` for an input that no attempt can take.
        """
        record = run.steps[name]
        planned = await self._placeable(project, run.plan.steps[name])
        read = StepInput(
            self._store,
            self._converters,
            self._clock,
            project=project,
            run=run,
            name=name,
            planned=planned,
            clock_tolerance_ms=self._clock_tolerance_ms,
        )
        state_ms = await read.settle()
        value = read.value
        what = f"the input of the step {name}"
        await asyncio.to_thread(schemas.check_value, value, planned.input, what)
        request = CreateSandbox(
            base="",
            agent=planned.agent,
            agent_version=planned.version,
            labels={"dag": run.plan.name, "dag_run": run.run_id, "dag_step": name},
            command=ExecCommand(
                argv=planned.command,
                stdin=msgspec.json.encode(value),
                timeout_s=planned.timeout_s,
            ),
            delete_after=True,
            timeout_s=_CREATE_TIMEOUT_S,
        )
        admission.check(await self._agents.learn(project, request), _CREATE_TIMEOUT_S)
        key = bucket_key(project, "dag", f"{run.run_id} {name} {record.round} {record.attempts}")
        wait_s = _CREATE_TIMEOUT_S + planned.timeout_s
        succeeded = await self._creation.create(project, request, wait_s, ReplyAddress(), key)
        created = succeeded.created
        if created.error is not None:
            raise created.error.to_error()
        result = created.result
        if result is None or result.exit_code != 0:
            raise _failed(name, "it did not end by itself" if result is None else _why(result))
        if result.stdout_truncated:
            raise _failed(name, "its output is too long")
        try:
            output = msgspec.json.decode(result.stdout)
            what = f"the output of the step {name}"
            await asyncio.to_thread(schemas.check_value, output, planned.output, what)
        except (msgspec.DecodeError, DsecError) as error:
            raise _failed(name, f"it printed something else than its output: {error}") from None
        # Newer than all that it was made of, by whichever clocks those were kept.
        version_ms = max(int(self._clock.now() * 1000), state_ms)
        await self._store.put_output(project, run.run_id, name, output, version_ms)
        return Done(created.sandbox_id, version_ms)

    async def _placeable(self, project: str, planned: PlannedStep) -> PlannedStep:
        """Return a step with a version that takes new work: its own, or the one that follows it."""
        record = await self._registry.read(project, planned.agent)
        if changes.takes_work(record, planned.version):
            return planned
        version = changes.find(record, record.active)
        contract = await self._registry.contract(project, planned.agent, version.contract_sha256)
        return with_agent(planned, AgentContract(version=version.version, contract=contract))

    # --- The record ---------------------------------------------------------------------------

    async def write(self, project: str, run: RunRecord, kept: RunRecord) -> RunRecord:
        """Keep a run in place of what was kept last, and renew the claim.

        Raises:
            RunLostError: another scheduler has it, or had it meanwhile.
        """
        now = self._clock.now()
        run = runs.owned(run, self._owner, now + _CLAIM_S)

        def change(before: RunRecord | None) -> RunRecord:
            if before is None or before.message_id != kept.message_id:
                raise RunLostError
            if before.owner != self._owner and before.owned_until > now:
                raise RunLostError
            return run

        bucket: KeyValue[RunRecord] = self._store.runs
        return await swap(bucket, f"{project}.{run.run_id}", change, self._pause)

    async def _pause(self, attempt: int) -> None:
        await self._clock.sleep(min(0.01 * 2**attempt, 0.5) * self._random.random())

    async def read(self, project: str, run_id: str) -> RunRecord:
        """Return a run as it is kept."""
        return await self._store.run(project, run_id)

    def after(self, run: RunRecord, name: str, attempt: asyncio.Task[Done]) -> RunRecord:
        """Return the run after an attempt at a step."""
        if attempt.cancelled():
            raise RunLostError
        error = attempt.exception()
        if error is None:
            return runs.succeeded(run, name, *attempt.result())
        if not isinstance(error, DsecError):
            _log.error("step_failed", step=name, exc_info=error)
            error = DsecError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        return runs.failed(run, name, error, self._clock.now(), self._random)

    @property
    def now(self) -> float:
        """Unix time."""
        return self._clock.now()


class _Drive:
    """One run in our hands."""

    def __init__(self, runner: DagRunner, project: str, run_id: str) -> None:
        self._runner = runner
        self._project = project
        self._run_id = run_id
        self._attempts: dict[str, asyncio.Task[Done]] = {}
        self._kept: RunRecord

    async def to_its_end(self) -> None:
        """Go on until the run is over, or not ours any more."""
        runner = self._runner
        run = self._kept = await runner.read(self._project, self._run_id)
        if run.state is not RunState.RUNNING:
            return
        try:
            while run.state is RunState.RUNNING:
                run = await self._begin_ready(run)
                await self._next(run)
                for name, attempt in list(self._attempts.items()):
                    if attempt.done():
                        run = runner.after(run, name, self._attempts.pop(name))
            await self._keep(run)
        finally:
            for attempt in self._attempts.values():
                attempt.cancel()
            await asyncio.gather(*self._attempts.values(), return_exceptions=True)

    async def _begin_ready(self, run: RunRecord) -> RunRecord:
        names = [one for one in runs.ready(run, self._runner.now) if one not in self._attempts]
        # The intent first: who takes over asks for the very same attempts.
        run = await self._keep(functools.reduce(runs.started, names, run))
        for name in names:
            work = self._runner.attempt(self._project, run, name)
            self._attempts[name] = asyncio.create_task(work, name=f"step {name}")
        return run

    async def _keep(self, run: RunRecord) -> RunRecord:
        self._kept = await self._runner.write(self._project, run, self._kept)
        return self._kept

    async def _next(self, run: RunRecord) -> None:
        """Return when something has ended or is due, or the claim is to be renewed."""
        due_at = runs.due_at(run)
        wait_s = _RENEW_S if due_at is None else min(max(due_at - self._runner.now, 0), _RENEW_S)
        if self._attempts:
            await asyncio.wait(
                self._attempts.values(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
            )
        else:
            await asyncio.sleep(wait_s)


def _failed(name: str, why: str) -> DsecError:
    return DsecError(ErrorCode.INTERNAL, f"the step {name} failed: {why}")


def _why(result: Any) -> str:
    if result.timed_out:
        return "its time was over"
    if result.oom:
        return "its memory ran out"
    shown = result.stderr.decode(errors="replace").strip()[-_STDERR_CHARACTERS:]
    return f"exit code {result.exit_code}, signal {result.signal}: {shown}"
