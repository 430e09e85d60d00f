"""A DAG checked as a whole: names, cycles, types, and the conversions between them. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import msgspec

from dsec_common.asdl.model import ATTEMPTS_MAX
from dsec_common.asdl.reading import read_value
from dsec_common.asdl.terms import USUAL_TIMEOUT_S, terms_of
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.subjects import validate_local
from dsec_common.wire.dag import STEPS_MAX, WHOLE, DagConversion, DagRetry, DagSpec, DagStep
from dsec_scheduler.dags import schemas
from dsec_scheduler.dags.converters import Converters, kinds

_OWN: Final = "$"


class AgentContract(msgspec.Struct, frozen=True, kw_only=True):
    """What a DAG has to know of the agent of a step."""

    version: str
    contract: dict[str, Any]


class _Said(msgspec.Struct, frozen=True):
    """What of a contract a DAG goes by beside its schemas."""

    command: tuple[str, ...]
    retry: DagRetry
    timeout_s: float | None


def _said(step: str, agent: str, contract: Mapping[str, Any]) -> _Said:
    """Return what a contract says. One from before contracts were checked may be wrong elsewhere.

    Raises:
        DsecError: ``invalid``, naming the field.
    """
    read = read_value(contract, whole=False)
    wrong = [one for one in read.problems if one.path.startswith(("command", "lifecycle"))]
    if wrong or read.contract is None:
        told = "; ".join(f"{one.path}: {one.message}" for one in wrong or read.problems)
        raise invalid(
            f"the contract of {agent} makes no sense for the step {step}: {told}", step=step
        )
    terms = terms_of(read.contract)
    return _Said(command=read.contract.command, retry=terms.retry, timeout_s=terms.timeout_s)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where an input comes from: a step's output, or (``step`` empty) the run's own input."""

    step: str
    fields: tuple[str, ...] = ()
    converters: tuple[str, ...] = ()


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step with everything that a run needs; ``own_command``: not the agent's, but its own."""

    agent: str
    version: str
    command: tuple[str, ...]
    sources: dict[str, Source]
    needs: tuple[str, ...]
    input: dict[str, Any]
    output: dict[str, Any]
    retry: DagRetry
    timeout_s: float
    own_command: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A DAG that was checked; ``steps`` are in an order in which they can be run."""

    name: str
    input: dict[str, Any]
    steps: dict[str, PlannedStep]

    @property
    def conversions(self) -> tuple[DagConversion, ...]:
        """What is converted on its way."""
        return tuple(
            DagConversion(step=name, input=wanted, converters=source.converters)
            for name, step in self.steps.items()
            for wanted, source in step.sources.items()
            if source.converters
        )


@schemas.bounded_effort()
def plan(spec: DagSpec, contracts: Mapping[str, AgentContract], converters: Converters) -> Plan:
    """Return the plan of a DAG.

    Args:
        spec: as its author wrote it.
        contracts: of each step's agent, by step.
        converters: that may be inserted.

    Raises:
        DsecError: ``invalid``, naming the step and what to do: a cycle, an unknown step, a missing
            schema, an output that does not fit an input.
    """
    validate_local(spec.name)
    if not 1 <= len(spec.steps) <= STEPS_MAX:
        raise invalid(f"{len(spec.steps)} steps: a DAG has 1 to {STEPS_MAX}")
    schemas.check_schema(spec.input, "the DAG's input")
    for name in spec.steps:
        validate_local(name)
    order = _ordered(spec)
    outputs: dict[str, schemas.Schema] = {"": spec.input}
    steps = {}
    for name in order:
        step = steps[name] = _planned(name, spec.steps[name], contracts[name], outputs, converters)
        outputs[name] = step.output
    return Plan(name=spec.name, input=spec.input, steps=steps)


def _ordered(spec: DagSpec) -> list[str]:
    needs: dict[str, list[str]] = {}
    for name, step in sorted(spec.steps.items()):
        needs[name] = sorted({_parsed(name, one).step for one in step.inputs.values()} - {""})
        for needed in needs[name]:
            if needed not in spec.steps:
                raise invalid(
                    f"the step {name} takes its input from {needed!r}, and there is no such step; "
                    f"there are {', '.join(sorted(spec.steps)[:10])}",
                    step=name,
                )
    try:
        return list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        circle = " needs ".join(reversed(error.args[1]))
        raise invalid(f"the steps go round in a circle: {circle}; leave one of these out") from None


def _parsed(step: str, reference: str) -> Source:
    first, *fields = reference.split(".")
    if not first or not all(fields):
        raise invalid(
            f"the step {step} takes an input from {reference!r}: write step, step.field, $ or "
            "$.field",
            step=step,
        )
    return Source(step="" if first == _OWN else first, fields=tuple(fields))


def _planned(
    name: str,
    step: DagStep,
    agent: AgentContract,
    outputs: Mapping[str, schemas.Schema],
    converters: Converters,
) -> PlannedStep:
    wanted = _schema(name, step, agent, "input", step.input)
    given = _schema(name, step, agent, "output", step.output)
    said = _said(name, step.agent, agent.contract)
    command = step.command or said.command
    if not command:
        raise invalid(
            f"the step {name} says no command, nor does the contract of {step.agent}", step=name
        )
    timeout_s = step.timeout_s or said.timeout_s or USUAL_TIMEOUT_S
    if step.timeout_s is not None and not 0 < step.timeout_s < math.inf:
        raise invalid(f"timeout_s of the step {name} is {step.timeout_s}: use seconds above 0")
    sources = {}
    for of, reference in step.inputs.items():
        source = _parsed(name, reference)
        written = _written(name, of, source, outputs)
        chain = _chain(name, of, written, _read(name, of, wanted), converters)
        sources[of] = msgspec.structs.replace(source, converters=chain)
    _check_all_given(name, step, wanted)
    return PlannedStep(
        agent=step.agent,
        version=agent.version,
        command=command,
        sources=sources,
        needs=tuple(sorted({source.step for source in sources.values()} - {""})),
        input=wanted,
        output=given,
        retry=_retry(name, step, said),
        timeout_s=min(timeout_s, said.timeout_s or math.inf),
        own_command=bool(step.command),
    )


@schemas.bounded_effort()
def with_agent(step: PlannedStep, agent: AgentContract) -> PlannedStep:
    """Return a step with another version of its agent, which has to take and give no less.

    Raises:
        DsecError: ``conflict`` when the other version's contract does not fit in its place.
    """
    contract = agent.contract
    takes = schemas.fits(step.input, contract.get("input", step.input))
    gives = schemas.fits(contract.get("output", step.output), step.output)
    if not (takes and gives):
        raise DsecError(
            ErrorCode.CONFLICT,
            f"{step.agent} {step.version} takes no new work, and the contract of {agent.version} "
            "does not fit in its place; begin a new run",
            details={"agent": step.agent, "version": agent.version},
        )
    said = _said("that needs it", step.agent, contract)
    command = step.command if step.own_command else said.command or step.command
    return msgspec.structs.replace(step, version=agent.version, command=command)


def _schema(
    name: str, step: DagStep, agent: AgentContract, which: str, own: dict[str, Any] | None
) -> dict[str, Any]:
    schema = own if own is not None else agent.contract.get(which)
    if not isinstance(schema, dict):
        raise invalid(
            f"the step {name} has no schema for its {which}: add one to it, or {which!r} to the "
            f"contract of {step.agent} {agent.version}",
            step=name,
        )
    schemas.check_schema(schema, f"the {which} of the step {name}")
    return schema


def _written(
    name: str, of: str, source: Source, outputs: Mapping[str, schemas.Schema]
) -> schemas.Schema:
    written = schemas.at(outputs[source.step], source.fields)
    if written is None:
        reference = ".".join((source.step or _OWN, *source.fields))
        raise invalid(
            f"{reference} (for {of} of the step {name}) may not be there: make it a required "
            "property of an object in that schema",
            step=name,
        )
    return written


def _read(name: str, of: str, wanted: schemas.Schema) -> schemas.Schema:
    read = wanted if of == WHOLE else wanted.get("properties", {}).get(of)
    if read is None:
        raise invalid(f"the step {name} knows no input {of!r}; see its schema", step=name)
    return schemas.as_mapping(read)


def _chain(
    name: str, of: str, written: schemas.Schema, read: schemas.Schema, converters: Converters
) -> tuple[str, ...]:
    chain = converters.chain(written, read)
    if chain is None:
        lossy = converters.lossy(written, read)
        hint = f"; {lossy} would lose something: make it a step of its own" if lossy else ""
        raise DsecError(
            ErrorCode.INVALID,
            f"the step {name} cannot take its input {of}: that is {kinds(read)}, what comes is "
            f"{kinds(written)} and does not fit, and no lossless converter leads there{hint}",
            details={"step": name, "input": of},
        )
    return chain


def _check_all_given(name: str, step: DagStep, wanted: schemas.Schema) -> None:
    if WHOLE in step.inputs:
        if len(step.inputs) > 1:
            raise invalid(f"the step {name} has a whole input (*) and others beside it", step=name)
        return
    missing = [one for one in wanted.get("required", ()) if one not in step.inputs]
    if missing:
        raise invalid(f"the step {name} needs {', '.join(missing)} and is not given it", step=name)


def _retry(name: str, step: DagStep, said: _Said) -> DagRetry:
    retry = step.retry or said.retry
    sensible = (
        1 <= retry.max_attempts <= ATTEMPTS_MAX
        and 0 <= retry.backoff_s < math.inf
        and 1 <= retry.factor < math.inf
        and 0 <= retry.backoff_max_s < math.inf
        and 0 <= retry.jitter <= 1
    )
    if not sensible:
        raise invalid(
            f"the retries of the step {name} cannot be meant: 1 to {ATTEMPTS_MAX} attempts, waits "
            "of 0 or more seconds, a factor of 1 or more, a jitter from 0 to 1",
            step=name,
        )
    return retry
