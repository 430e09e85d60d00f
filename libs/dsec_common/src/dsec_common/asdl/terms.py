"""What follows from a contract: what the platform gives an instance, and what it holds it to.

:func:`terms_of` is the one place where a contract becomes limits; each part of the platform takes
from it what that part enforces, and :func:`under` brings a request for a sandbox under them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from dsec_common.asdl.model import Contract
from dsec_common.compute.model import GpuDemand
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.action import ActionTerms
from dsec_common.wire.agent import NETWORK_ACCESS
from dsec_common.wire.dag import DagRetry
from dsec_common.wire.network import NetworkMode, NetworkPolicy
from dsec_common.wire.sandbox import MIB, CreateSandbox, ExecCommand, Limits
from dsec_common.wire.tools import NODE_TOOLS, NodeTools, ToolTerms

SHUTDOWN_GRACE_S: Final = 10.0
"""So long after its time an instance with ``graceful_shutdown`` is ended: meanwhile its command has
had its TERM, and what it printed can be told."""

USUAL_TIMEOUT_S: Final = ExecCommand(argv=()).timeout_s
"""Of a command that says nothing of its time."""

_OPEN: Final = NetworkPolicy(mode=NetworkMode.OPEN)
_USUAL_MEMORY_BYTES: Final = Limits().memory_bytes


class Terms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the platform gives an instance and holds it to. None: the contract says nothing of it.

    Attributes:
        memory_bytes: given to an instance whose request leaves it at the usual, and the most.
        gpu: Compute Units asked for when the request asks for none; its ``max_cu`` is the most.
        network_allowed: whether an instance may reach anything but itself.
        network: what an instance may reach, None is nothing; its request may ask for less, but for
            an own policy only where the contract leaves all open.
        timeout_s: of one execution.
        deadline_s: so long after its creation an instance is ended, whoever touches it.
        retry: of an execution that failed.
        base: layer of an instance whose request names none; so ``workspace`` and ``toolkits``.
        tools: what each tool may do.
        state_key_prefix: how keys of its state begin.
    """

    memory_bytes: int | None = None
    gpu: GpuDemand | None = None
    network_allowed: bool | None = None
    network: NetworkPolicy | None = None
    timeout_s: float | None = None
    deadline_s: float | None = None
    retry: DagRetry = DagRetry()
    base: str = ""
    workspace: str = ""
    toolkits: tuple[str, ...] = ()
    tools: dict[str, ToolTerms] = msgspec.field(default_factory=dict)
    state_key_prefix: str = ""


def terms_of(contract: Contract, permissions: Iterable[str] = ()) -> Terms:
    """Return what follows from a contract.

    Args:
        contract: checked.
        permissions: that the agent has beside those of its contract.
    """
    resources, lifecycle, layers = contract.resources, contract.lifecycle, contract.layers
    allowed, network = _network(contract, {*contract.permissions, *permissions})
    timeout_s = lifecycle.timeout
    grace_s = SHUTDOWN_GRACE_S if lifecycle.graceful_shutdown else 0.0
    retry = lifecycle.retry_policy
    least, most = resources.min_cu or resources.max_cu, resources.max_cu or resources.min_cu
    return Terms(
        memory_bytes=None if resources.memory_mb is None else resources.memory_mb * MIB,
        gpu=GpuDemand(min_cu=least, max_cu=most) if least and most else None,
        network_allowed=allowed,
        network=network,
        timeout_s=timeout_s,
        deadline_s=None if timeout_s is None else timeout_s + grace_s,
        retry=DagRetry(
            max_attempts=retry.max_attempts,
            factor=2.0 if retry.backoff == "exponential" else 1.0,
            jitter=retry.jitter,
        ),
        base=layers.base,
        workspace=layers.workspace,
        toolkits=layers.toolkits,
        tools={
            one.tool: ToolTerms(
                permissions=one.permissions,
                model=one.model,
                max_tokens=one.max_tokens,
                temperature=one.temperature,
                rate_limit=one.rate_limit,
            )
            for one in contract.capabilities or ()
        },
        state_key_prefix=contract.state_key_prefix,
    )


def _network(contract: Contract, permissions: set[str]) -> tuple[bool | None, NetworkPolicy | None]:
    if contract.network is not None:
        allowed = contract.network.mode is not NetworkMode.NONE
        return allowed, contract.network if allowed else None
    if contract.capabilities is None:
        return None, None
    allowed = NETWORK_ACCESS in permissions
    return allowed, _OPEN if allowed else None


def placing_terms(terms: Terms) -> Terms:
    """Return the part that requests for instances are brought under, but for its layers."""
    return Terms(
        memory_bytes=terms.memory_bytes,
        gpu=terms.gpu,
        network_allowed=terms.network_allowed,
        network=terms.network,
        timeout_s=terms.timeout_s,
        deadline_s=terms.deadline_s,
        tools=_node_terms(terms),
    )


def _node_terms(terms: Terms) -> dict[str, ToolTerms]:
    return {name: terms.tools[name] for name in sorted(NODE_TOOLS & terms.tools.keys())}


def under(terms: Terms, request: CreateSandbox, agent: str) -> CreateSandbox:
    """Return a request for a sandbox with what it leaves open as the terms have it.

    The policy of the set-up phase is left to who creates the sandbox: the agent is not in it yet.

    Args:
        terms: of the sandbox's agent.
        request: as it was asked.
        agent: for errors.

    Raises:
        DsecError: ``denied``, naming the field, for more than the terms allow.
    """
    own = not request.base and not request.snapshot
    is_whole = request.remade or bool(request.snapshot)
    named = _node_terms(terms)
    return msgspec.structs.replace(
        request,
        base=terms.base if own else request.base,
        workspace=terms.workspace if own and not request.workspace else request.workspace,
        toolkits=request.toolkits if is_whole else (*request.toolkits, *terms.toolkits),
        limits=_limits(terms, request.limits, agent),
        gpu=_gpu(terms, request, agent),
        network=_reach(terms, request.network, agent),
        ttl_s=_shorter(request.ttl_s, terms.deadline_s),
        deadline_s=_shorter(request.deadline_s, terms.deadline_s),
        command=_command(terms, request.command),
        tools=NodeTools(terms=named, network=terms.network) if named else None,
        action_terms=_action_terms(terms, agent),
    )


def _action_terms(terms: Terms, agent: str) -> ActionTerms | None:
    if terms.gpu is None and terms.network_allowed is None:
        return None
    return ActionTerms(
        agent=agent,
        max_cu=terms.gpu.max_cu if terms.gpu else None,
        network_allowed=terms.network_allowed,
        network=terms.network,
    )


def _limits(terms: Terms, limits: Limits, agent: str) -> Limits:
    most = terms.memory_bytes
    if most is None:
        return limits
    if limits.memory_bytes == _USUAL_MEMORY_BYTES:
        return msgspec.structs.replace(limits, memory_bytes=most)
    if limits.memory_bytes > most:
        raise _denied(
            agent, "limits.memory_bytes", f"{limits.memory_bytes} bytes of memory, not {most}"
        )
    return limits


def _gpu(terms: Terms, request: CreateSandbox, agent: str) -> GpuDemand | None:
    asked = request.gpu_demand
    if terms.gpu is None:
        return request.gpu
    if asked is None:
        return terms.gpu
    if asked.max_cu > terms.gpu.max_cu:
        most = f"{asked.max_cu:g} Compute Units, not max_cu {terms.gpu.max_cu:g}"
        raise _denied(agent, "gpu", most)
    return request.gpu


def _reach(terms: Terms, asked: NetworkPolicy | None, agent: str) -> NetworkPolicy | None:
    if asked is None:
        return terms.network
    if terms.network_allowed is None or asked.mode is NetworkMode.NONE or asked == terms.network:
        return asked
    if not terms.network_allowed:
        raise _denied(agent, "network", f"a network without the permission {NETWORK_ACCESS}")
    if terms.network != _OPEN:
        raise _denied(agent, "network", "another network policy than its own, or none")
    return asked


def _command(terms: Terms, command: ExecCommand | None) -> ExecCommand | None:
    if command is None or terms.timeout_s is None:
        return command
    shorter = min(command.timeout_s, terms.timeout_s)
    return msgspec.structs.replace(command, timeout_s=shorter)


def _shorter(asked_s: float, most_s: float | None) -> float:
    """Return the earlier end; 0 is none."""
    if most_s is None:
        return asked_s
    return min(asked_s, most_s) if asked_s else most_s


def _denied(agent: str, field: str, what: str) -> DsecError:
    return DsecError(
        ErrorCode.DENIED,
        f"the contract of {agent} does not allow {what}: ask for less, or change the contract",
        details={"field": field, "agent": agent},
    )
