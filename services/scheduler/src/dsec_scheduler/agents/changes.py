"""What each change makes of an agent's document. No I/O.

A change is computed again whenever another scheduler was faster, so it depends on nothing but the
document and what was asked. One that changes nothing returns the very same document.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from dsec_common.asdl.reading import checked, read_value
from dsec_common.asdl.terms import Terms, placing_terms, terms_of
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_common.wire.agent import (
    ACTIVE,
    PACKAGE_MAX_BYTES,
    AgentPolicy,
    AgentUpdate,
    RegisterAgent,
    VersionState,
    check_policy,
    validate_name,
    validate_version,
)
from dsec_common.wire.agent_node import AgentRules
from dsec_common.wire.base import new_id
from dsec_scheduler.agents.records import AgentRecord, Outcome, RolloutRecord, VersionRecord

VERSIONS_MAX: Final = 256
"""Versions of one agent."""

POLICIES_MAX: Final = 64
"""Policies of one agent that are in force somewhere: more than a person can tell apart."""

TOOLKITS_MAX: Final = 62
_DRAINING: Final = frozenset({VersionState.DRAINING, VersionState.FAILED})
_SHOWN_MAX: Final = 10


def as_contracted(request: RegisterAgent) -> tuple[RegisterAgent, Terms | None]:
    """Return a registration with what it leaves to its contract, and what follows from that.

    Raises:
        DsecError: ``invalid``, with every problem of the contract on a line of its own.
    """
    if not request.contract:
        return request, None
    contract = checked(read_value(request.contract, whole=False), "the contract")
    terms = terms_of(contract, request.permissions)
    request = msgspec.structs.replace(
        request,
        description=request.description or contract.description,
        permissions=tuple(dict.fromkeys((*contract.permissions, *request.permissions))),
        base=request.base or terms.base,
        workspace=request.workspace or terms.workspace,
        toolkits=request.toolkits or terms.toolkits,
    )
    return request, placing_terms(terms)


def registered(
    record: AgentRecord | None,
    project: str,
    request: RegisterAgent,
    contract_sha256: str,
    now: float,
    *,
    terms: Terms | None = None,
) -> AgentRecord:
    """Return the agent with another version.

    Args:
        record: the agent; None for a new one.
        project: whose it is.
        request: as :func:`as_contracted` returns it.
        contract_sha256: of its contract as it is kept.
        now: Unix time.
        terms: of its contract.

    Raises:
        DsecError: ``invalid``; ``unsupported`` for its policy; ``conflict`` when the version is
            registered with something else; ``exhausted`` for too many versions.
    """
    _check_registration(request)
    if record is None:
        record = AgentRecord(project=project, name=request.name)
    version = VersionRecord(
        version=request.version,
        state=VersionState.STANDBY if record.active else VersionState.ACTIVE,
        registered_at=now,
        permissions=request.permissions,
        base=request.base,
        workspace=request.workspace,
        toolkits=request.toolkits,
        package_sha256=request.package_sha256,
        package_bytes=request.package_bytes,
        contract_sha256=contract_sha256,
        policy=record.policy,
        terms=terms,
    )
    known = record.versions.get(request.version)
    if known is not None:
        if _as_registered(known) != _as_registered(version):
            raise DsecError(
                ErrorCode.CONFLICT,
                f"{request.name} {request.version} is registered with something else, and a "
                "version never changes: register another one",
                details={"agent": request.name, "version": request.version},
            )
        return record
    if len(record.versions) >= VERSIONS_MAX:
        raise DsecError(
            ErrorCode.EXHAUSTED,
            f"{request.name} has {VERSIONS_MAX} versions, which is the most",
            retryable=False,
        )
    policies, revision = record.policies, record.revision + 1
    if request.policy is not None:
        policies = {**policies, revision: request.policy}
        version = msgspec.structs.replace(version, policy=revision)
    return _changed(
        record,
        description=request.description or record.description,
        active=record.active or request.version,
        revision=revision,
        policies=_bounded(policies, request.name),
        versions={**record.versions, request.version: version},
    )


def _check_registration(request: RegisterAgent) -> None:
    validate_name(request.name)
    validate_version(request.version)
    if request.policy is not None:
        check_policy(request.policy)
    if len(request.toolkits) > TOOLKITS_MAX:
        raise invalid(f"{len(request.toolkits)} toolkits: use at most {TOOLKITS_MAX}")
    if not 0 <= request.package_bytes <= PACKAGE_MAX_BYTES:
        raise invalid(
            f"the package has {request.package_bytes} bytes: at most {PACKAGE_MAX_BYTES} are taken",
            field="package_bytes",
        )
    if bool(request.package_bytes) != bool(request.package_sha256):
        raise invalid("a package has both package_sha256 and package_bytes", field="package_sha256")


def _as_registered(version: VersionRecord) -> VersionRecord:
    # What follows from the same contract may be more in a later release.
    return msgspec.structs.replace(
        version, state=VersionState.STANDBY, registered_at=0.0, policy=0, terms=None
    )


# --- Removal --------------------------------------------------------------------------------------


def removed(
    record: AgentRecord, version: str, instances: Mapping[str, int], now: float
) -> AgentRecord:
    """Return the agent without a version, or without any.

    An agent without versions is none. Its document stays, and counts on when one of its name is
    registered again: nodes and other schedulers take the higher revision.

    Args:
        record: the agent.
        version: the one that goes; empty for all.
        instances: how many each version has.
        now: Unix time.

    Raises:
        DsecError: ``not_found`` for the version; ``conflict`` for one that has instances, that new
            work goes to, or may go back to.
    """
    gone = list(record.versions) if not version else [find(record, version).version]
    if len(gone) == len(record.versions):
        _check_unused(record, gone, instances)
        return _changed(
            AgentRecord(project=record.project, name=record.name), revision=record.revision + 1
        )
    _check_unused(record, gone, instances)
    (name,) = gone
    rollout = record.rollout
    if name == record.active:
        raise _kept(record, name, "new work goes to it: update to another version first")
    if rollout is not None and name in {rollout.from_version, rollout.to_version}:
        if rollout.state == "watching" and now < rollout.began_at + rollout.window_s:
            raise _kept(record, name, "new work goes back to it when too much of the update fails")
        rollout = None
    versions = {key: one for key, one in record.versions.items() if key != name}
    return _changed(record, revision=record.revision + 1, versions=versions, rollout=rollout)


def _check_unused(record: AgentRecord, gone: list[str], instances: Mapping[str, int]) -> None:
    for name in gone:
        if count := instances.get(name, 0):
            raise _kept(record, name, f"it has {count} instances: let them finish, or delete them")


def _kept(record: AgentRecord, version: str, why: str) -> DsecError:
    return DsecError(
        ErrorCode.CONFLICT,
        f"{record.name} {version} cannot be removed: {why}",
        details={"agent": record.name, "version": version},
    )


# --- Rolling updates ------------------------------------------------------------------------------


def updated(record: AgentRecord, update: AgentUpdate, before: Outcome, now: float) -> AgentRecord:
    """Return the agent with its new work going to another version; the one before drains.

    Args:
        record: the agent.
        update: with every value given.
        before: how instances of the new version have ended so far.
        now: Unix time.

    Raises:
        DsecError: ``not_found`` for the version; ``invalid`` for a number.
    """
    window_s, threshold = update.failure_window_s or 0.0, update.failure_threshold or 0.0
    for name, value, most in (
        ("drain_idle_s", update.drain_idle_s, math.inf),
        ("drain_timeout_s", update.drain_timeout_s, math.inf),
        ("failure_window_s", window_s, math.inf),
        ("failure_threshold", threshold, 1.0),
    ):
        if not (0 <= value <= most and value < math.inf):
            raise invalid(f"{name} is {value}: use 0 or more, and at most {most:g}", field=name)
    if update.drain_idle_s <= 0:
        raise invalid("drain_idle_s is 0: an instance would leave between two requests")
    find(record, update.version)
    if update.version == record.active:
        return record
    return _changed(
        record,
        active=update.version,
        revision=record.revision + 1,
        versions=_with_states(
            record,
            {
                record.active: VersionState.DRAINING,
                update.version: VersionState.ACTIVE,
            },
        ),
        drain_idle_s=update.drain_idle_s,
        drain_timeout_s=update.drain_timeout_s,
        rollout=RolloutRecord(
            from_version=record.active,
            to_version=update.version,
            began_at=now,
            window_s=window_s,
            threshold=threshold,
            minimum=max(update.failure_minimum or 1, 1),
            finished_before=before.finished,
            failed_before=before.failed,
        ),
    )


def is_watched(record: AgentRecord) -> bool:
    """Return whether the ends of instances of its new version are to be judged."""
    return record.rollout is not None and record.rollout.state == "watching"


def judged(record: AgentRecord, so_far: Outcome, now: float) -> AgentRecord:
    """Return the agent as it is after its new version was judged by how instances have ended.

    New work goes to the version before when within the window the share of ended instances that
    failed is above the threshold; the window over, the update is settled.
    """
    rollout = record.rollout
    if rollout is None or rollout.state != "watching":
        return record
    finished = so_far.finished - rollout.finished_before
    failed = so_far.failed - rollout.failed_before
    in_time = now < rollout.began_at + rollout.window_s
    if in_time and finished >= rollout.minimum and failed > rollout.threshold * finished:
        reason = (
            f"{failed} of {finished} instances of {rollout.to_version} failed, more than "
            f"{rollout.threshold:.0%}"
        )
        return _changed(
            record,
            active=rollout.from_version,
            revision=record.revision + 1,
            versions=_with_states(
                record,
                {
                    rollout.to_version: VersionState.FAILED,
                    rollout.from_version: VersionState.ACTIVE,
                },
            ),
            rollout=msgspec.structs.replace(rollout, state="rolled_back", reason=reason),
        )
    if in_time:
        return record
    return _changed(record, rollout=msgspec.structs.replace(rollout, state="settled"))


def _with_states(
    record: AgentRecord, states: Mapping[str, VersionState]
) -> dict[str, VersionRecord]:
    return record.versions | {
        version: msgspec.structs.replace(record.versions[version], state=state)
        for version, state in states.items()
    }


# --- Policies -------------------------------------------------------------------------------------


def pushed(record: AgentRecord, policy: AgentPolicy, version: str, *, single: bool) -> AgentRecord:
    """Return the agent with a policy under a new revision, which is the document's ``revision``.

    Args:
        record: the agent.
        policy: what is allowed from now on.
        version: whose instances it is for; empty for all.
        single: for chosen instances only, which the caller pins to the revision.

    Raises:
        DsecError: ``unsupported``; ``not_found`` for the version; ``exhausted`` for too many.
    """
    check_policy(policy)
    if version:
        find(record, version)
    revision = record.revision + 1
    if single:
        policies = _bounded({**record.policies, revision: policy}, record.name)
        return _changed(record, revision=revision, policies=policies)
    return _under(record, dict.fromkeys(_chosen(record, version), revision), {revision: policy})


def revoked(
    record: AgentRecord,
    permissions: Sequence[str],
    version: str,
    pins: Iterable[int],
    *,
    single: bool,
) -> tuple[AgentRecord, dict[int, int]]:
    """Return the agent with permissions taken away, and the new revision for each old one.

    Every policy that is concerned gets a successor that differs in nothing else.

    Args:
        record: the agent.
        permissions: what is taken away.
        version: from whose instances; empty for all.
        pins: revisions that chosen instances, or those with a policy of their own, are under.
        single: from these alone.

    Raises:
        DsecError: as :func:`pushed`; ``invalid`` for no permission.
    """
    if not permissions:
        raise invalid("name at least one permission", field="permissions")
    if version:
        find(record, version)
    concerned = set(pins)
    if not single:
        concerned |= {record.versions[name].policy for name in _chosen(record, version)}
        if not version:
            concerned.add(record.policy)
    successors: dict[int, int] = {}
    policies: dict[int, AgentPolicy] = {}
    for number, old in enumerate(sorted(concerned), start=record.revision + 1):
        policy = record.policies.get(old, AgentPolicy())
        taken = tuple(sorted({*policy.revoked, *permissions}))
        policies[number] = msgspec.structs.replace(policy, revoked=taken)
        check_policy(policies[number])
        successors[old] = number
    if single:
        revision = max(policies, default=record.revision)
        kept = _bounded({**record.policies, **policies}, record.name)
        return _changed(record, revision=revision, policies=kept), successors
    versions = {name: successors[record.versions[name].policy] for name in _chosen(record, version)}
    default = record.policy if version else successors[record.policy]
    return _under(record, versions, policies, default=default), successors


def _chosen(record: AgentRecord, version: str) -> list[str]:
    return [version] if version else list(record.versions)


def _under(
    record: AgentRecord,
    versions: Mapping[str, int],
    policies: Mapping[int, AgentPolicy],
    *,
    default: int | None = None,
) -> AgentRecord:
    """Return the agent with versions under new policies, and those after them if they are all."""
    revision = max(policies)
    whole = len(versions) == len(record.versions)
    if default is None:
        default = revision if whole else record.policy
    changed = record.versions | {
        name: msgspec.structs.replace(record.versions[name], policy=number)
        for name, number in versions.items()
    }
    # What holds is the highest revision: nothing is under an older one any more.
    kept = {} if whole else record.policies
    return _changed(
        record,
        revision=revision,
        policy=default,
        policies=_bounded({**kept, **policies}, record.name),
        versions=changed,
    )


def _bounded(policies: dict[int, AgentPolicy], name: str) -> dict[int, AgentPolicy]:
    if len(policies) > POLICIES_MAX:
        raise DsecError(
            ErrorCode.EXHAUSTED,
            f"{name} has {POLICIES_MAX} policies in force, which is the most: push one to all its "
            "instances, in place of those of single ones",
            retryable=False,
        )
    return policies


# --- Looking --------------------------------------------------------------------------------------


def takes_work(record: AgentRecord, version: str) -> bool:
    """Return whether a version is there and its instances do not leave."""
    found = record.versions.get(version)
    return found is not None and found.state not in _DRAINING


def no_agent(name: str) -> DsecError:
    """Return the error for an agent that the project has not registered."""
    return not_found(
        f"this project has no agent {name[:64]!r}; `dsec agent list` shows which there are",
        what="agent",
    )


def find(record: AgentRecord, version: str) -> VersionRecord:
    """Return a version of an agent.

    Raises:
        DsecError: ``not_found``, with those that there are.
    """
    wanted = record.active if version == ACTIVE else version
    found = record.versions.get(wanted)
    if found is None:
        known = ", ".join(list(record.versions)[-_SHOWN_MAX:])
        raise not_found(
            f"{record.name} has no version {version[:64]!r}; the latest are {known}",
            agent=record.name,
            version=version[:64],
        )
    return found


def has_own_policies(record: AgentRecord) -> bool:
    """Return whether a single instance may have a policy of its own that is in force."""
    shared = {record.policy, *(version.policy for version in record.versions.values())}
    return not record.policies.keys() <= shared


def rules_of(record: AgentRecord, pins: Mapping[str, int] | None = None) -> AgentRules:
    """Return what nodes have to know of an agent.

    Args:
        record: the agent.
        pins: the policies of single instances of that node, by local id.
    """
    pins = pins or {}
    versions = {name: version.policy for name, version in record.versions.items() if version.policy}
    used = {*versions.values(), *pins.values()}
    return AgentRules(
        project=record.project,
        name=record.name,
        revision=record.revision,
        policies={number: policy for number, policy in record.policies.items() if number in used},
        versions=versions,
        pinned=dict(pins),
        draining=tuple(
            name for name, version in record.versions.items() if version.state in _DRAINING
        ),
        drain_idle_s=record.drain_idle_s,
        drain_timeout_s=record.drain_timeout_s,
    )


def _changed(record: AgentRecord, **changes: object) -> AgentRecord:
    return msgspec.structs.replace(record, message_id=new_id(), **changes)
