"""What a request to create a sandbox is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from dsec.contracts import Given, under_contract
from dsec.network import Policy, network_policy
from dsec_common import subjects
from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_common.errors import invalid
from dsec_common.wire.sandbox import (
    MAX_OUTPUT_BYTES,
    CpuClass,
    CreateSandbox,
    ExecCommand,
    IdleAction,
    Limits,
)
from dsec_common.wire.task import WarmUse

if TYPE_CHECKING:
    from dsec.snapshots import Snapshot


class CreateOptions(TypedDict, total=False):
    """What a sandbox may be given, as :meth:`~dsec.client.DSecClient.create_sandbox` takes it."""

    workspace: str
    toolkits: Iterable[str]
    limits: Limits | None
    cpus: float | None
    memory_bytes: int | None
    disk_bytes: int | None
    pids: int | None
    env: Mapping[str, str] | None
    labels: Mapping[str, str] | None
    agent: str
    agent_version: str
    rollout_id: str
    model_rollout_id: str
    ttl_s: float
    snapshot: Snapshot | str
    warm: WarmUse | str
    network: Policy | None
    setup_network: Policy | None
    idempotency_key: str
    gpu: GpuDemand | None
    service_class: ServiceClass | str
    priority: int
    contract: Given | None


def command_of(
    command: str | Sequence[str] | ExecCommand,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str = "",
    user: str = "",
    stdin: str | bytes = b"",
    timeout_s: float = 60.0,
    output_limit_bytes: int = MAX_OUTPUT_BYTES,
    merge_stderr: bool = False,
    action: str = "",
) -> ExecCommand:
    """Return the message for a command: a line for ``/bin/sh``, program and arguments, or itself.

    Raises:
        DsecError: ``invalid`` for what is none of these.
    """
    if isinstance(command, ExecCommand):
        return command
    argv = argv_of(command)
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise invalid(
            f"timeout_s={timeout_s!r} is no time: give seconds above 0, or start the command: then "
            "it may run for ever",
            field="timeout_s",
        )
    return ExecCommand(
        argv=argv,
        env=dict(env or {}),
        cwd=cwd,
        user=user,
        stdin=stdin.encode() if isinstance(stdin, str) else stdin,
        timeout_s=timeout_s,
        output_limit_bytes=output_limit_bytes,
        merge_stderr=merge_stderr,
        action=action,
    )


def argv_of(command: str | Sequence[str]) -> tuple[str, ...]:
    """Return program and arguments: of a line for ``/bin/sh``, or as they are.

    Raises:
        DsecError: ``invalid`` for what is neither.
    """
    if not isinstance(command, str | Sequence):
        raise invalid(f"a command is text or a list of texts, not {command!r}")
    argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
    if not all(isinstance(word, str) for word in argv):
        raise invalid(f"a command is text or a list of texts, not {command!r}")
    return argv


def idle_action_of(action: IdleAction | str) -> IdleAction:
    """Return what to do with an idle sandbox.

    Raises:
        DsecError: ``invalid`` for anything but ``end`` and ``pause``.
    """
    try:
        return IdleAction(action)
    except ValueError:
        raise invalid(f"idle_action is {action!r}: use end or pause", field="idle_action") from None


def limits_of(
    limits: Limits | None = None,
    *,
    cpus: float | None = None,
    memory_bytes: int | None = None,
    disk_bytes: int | None = None,
    pids: int | None = None,
    inodes: int | None = None,
    cu: float | None = None,
    cpu_class: CpuClass | None = None,
    core_scheduling: bool | None = None,
    oom_group: bool | None = None,
    cpu_quota: bool | None = None,
) -> Limits:
    """Return ``limits`` (by default the platform's) with what is given changed."""
    asked: dict[str, Any] = {
        "cpus": cpus,
        "memory_bytes": memory_bytes,
        "disk_bytes": disk_bytes,
        "pids": pids,
        "inodes": inodes,
        "cu": cu,
        "cpu_class": cpu_class,
        "core_scheduling": core_scheduling,
        "oom_group": oom_group,
        "cpu_quota": cpu_quota,
    }
    changes = {name: value for name, value in asked.items() if value is not None}
    return msgspec.structs.replace(limits or Limits(), **changes)


def cpu_class_named(name: str) -> CpuClass:
    """Return the CPU class of this name.

    Raises:
        DsecError: ``invalid``, naming those there are.
    """
    try:
        return CpuClass(name)
    except ValueError as error:
        known = " or ".join(CpuClass)
        raise invalid(f"{name!r} is no CPU class: use {known}") from error


def warm_use_of(warm: WarmUse | str) -> WarmUse:
    """Return whether a sandbox may be a warm one.

    Raises:
        DsecError: ``invalid`` for anything but ``prefer``, ``require`` and ``bypass``.
    """
    try:
        return WarmUse(warm)
    except ValueError:
        raise invalid(f"warm is {warm!r}: use prefer, require or bypass", field="warm") from None


def service_class_of(name: ServiceClass | str) -> ServiceClass:
    """Return the service class of this name.

    Raises:
        DsecError: ``invalid``, naming those there are.
    """
    try:
        return ServiceClass(name)
    except ValueError:
        known = ", ".join(ServiceClass)
        raise invalid(f"{name!r} is no service class: use one of {known}") from None


def create_request(
    base: str,
    *,
    limits: Limits,
    toolkits: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    request_id: str = "",
    service_class: ServiceClass | str = ServiceClass.STANDARD,
    contract: Given | None = None,
    **rest: Any,
) -> CreateSandbox:
    """Return the request; what it leaves open is as the contract has it.

    Raises:
        DsecError: ``invalid`` for toolkits that are no list, another word for ``warm`` or for the
            service class, or what is no contract; ``denied`` for more than the contract allows.
    """
    if request_id:
        rest["message_id"] = subjects.validate_local(request_id)
    if isinstance(toolkits, str):
        raise invalid(f"toolkits is a list of layers, not the text {toolkits!r}")
    for name in ("network", "setup_network"):
        rest[name] = network_policy(rest.get(name))
    snapshot = rest.get("snapshot", "")
    rest["snapshot"] = snapshot if isinstance(snapshot, str) else snapshot.id
    rest["warm"] = warm_use_of(rest.get("warm", WarmUse.PREFER))
    request = CreateSandbox(
        base=base,
        toolkits=tuple(toolkits),
        limits=limits,
        env=dict(env or {}),
        labels=dict(labels or {}),
        service_class=service_class_of(service_class),
        **rest,
    )
    return request if contract is None else under_contract(request, contract)
