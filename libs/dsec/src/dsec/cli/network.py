"""``dsec network`` and ``dsec sandbox forward``: what a sandbox may reach, and its ports."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dsec.cli.output import Json, Output, UsageError, run
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.sandbox import SandboxInfo, SandboxState

if TYPE_CHECKING:
    from dsec.sandbox import Sandbox

_LOOK_EVERY_S: Final = 2.0

app = typer.Typer(no_args_is_help=True, help="Networks of sandboxes: what they may reach.")

Network = Annotated[str, typer.Option("--network", help="none, allow or open.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(help="What is reachable, DESTINATION[:PORTS][/PROTOCOL]; repeat for more."),
]
Deny = Annotated[
    list[str] | None, typer.Option(help="What is not, whatever else allows it; repeat for more.")
]
RuleSet = Annotated[
    list[str] | None, typer.Option(help="A set of rules of the node, such as pypi; repeat.")
]
PolicyFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A policy as JSON.")
]


def policy_of(
    mode: str,
    allow: list[str] | None,
    deny: list[str] | None,
    rule_set: list[str] | None,
    file: Path | None,
) -> Any:
    """Return the policy that the options mean; None when none was given."""
    import json  # noqa: PLC0415  --help stays quick

    if file is not None:
        if mode or allow or deny or rule_set:
            raise UsageError(f"{file} is the whole policy: leave the other options out")
        try:
            return json.loads(file.read_text())
        except ValueError as error:
            raise UsageError(f"{file} is not JSON: {error}") from None
    if not (mode or allow or deny or rule_set):
        return None
    given = {
        "mode": mode,
        "allow": allow,
        "deny": deny,
        "rule_sets": dict.fromkeys(rule_set or (), True),
    }
    return {name: value for name, value in given.items() if value}


@app.command("inspect")
def inspect_network(sandbox_id: str, *, json_output: Json = False) -> None:
    """Show the policy in force, and how much was refused."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            _show(output, await dsec.sandbox(sandbox_id).network.inspect())

    run(work, json=json_output)


@app.command("set")
def set_network(
    sandbox_id: str,
    *,
    mode: Annotated[str, typer.Option(help="none, allow or open.")] = "",
    allow: Allow = None,
    deny: Deny = None,
    rule_set: RuleSet = None,
    policy: PolicyFile = None,
    json_output: Json = False,
) -> None:
    """Put a sandbox under another policy, now; what it denies is cut."""
    wanted = policy_of(mode, allow, deny, rule_set, policy)

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        if wanted is None:
            raise UsageError("say which: --mode, --allow, --deny, --rule-set or --policy")
        async with client() as dsec:
            _show(output, await dsec.sandbox(sandbox_id).network.set(wanted))

    run(work, json=json_output)


@app.command("agent-phase")
def agent_phase(sandbox_id: str, *, json_output: Json = False) -> None:
    """Go from the policy for setting up to the one for the agent, for good."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            _show(output, await dsec.sandbox(sandbox_id).network.enter_agent_phase())

    run(work, json=json_output)


@app.command("forward")
def forward(
    sandbox_id: str,
    port: Annotated[int, typer.Argument(min=1, max=65535, help="The TCP port inside the sandbox.")],
    *,
    host: Annotated[str, typer.Option(help="Where it listens inside.")] = "127.0.0.1",
    local_host: Annotated[str, typer.Option(help="Where to listen here.")] = "127.0.0.1",
    local_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 0,
    json_output: Json = False,
) -> None:
    """Listen here and connect each caller to a port inside, until stopped or the sandbox ends."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with client() as dsec:
            sandbox = dsec.sandbox(sandbox_id)
            _need_alive(await sandbox.inspect())
            tunnel = await sandbox.forward(
                port, host=host, local_host=local_host, local_port=local_port
            )
            async with tunnel:
                facts = {"local": f"{tunnel.local_host}:{tunnel.local_port}", "port": port}
                if output.json:
                    output.document(facts)
                else:
                    output.text(f"{facts['local']} leads to port {port} of {sandbox_id}")
                with contextlib.suppress(asyncio.CancelledError):
                    await _until_stopped(stop, sandbox)

    run(work, json=json_output)


async def _until_stopped(stop: asyncio.Event, sandbox: Sandbox) -> None:
    """Return when stopped; raise when the sandbox is over. Its node may be away meanwhile."""
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_EVERY_S):
                await stop.wait()
                return
        try:
            info = await sandbox.inspect()
        except DsecError as error:
            if not error.retryable:
                raise
        else:
            _need_alive(info)


def _need_alive(info: SandboxInfo) -> None:
    if info.state is SandboxState.ENDED:
        raise DsecError(
            ErrorCode.EXPIRED,
            f"sandbox {info.sandbox_id} has ended ({info.end_cause}): nothing leads there any more",
            details={"end_cause": info.end_cause},
        )


def _show(output: Output, info: Any) -> None:
    if output.json:
        output.document(info)
        return
    policy = info.policy
    output.facts(
        {
            "sandbox": info.sandbox_id,
            "phase": str(info.phase),
            "mode": str(policy.mode),
            "rule sets": ", ".join(name for name, wanted in policy.rule_sets.items() if wanted),
            "allow": ", ".join(map(_rule_text, policy.allow)),
            "deny": ", ".join(map(_rule_text, policy.deny)),
            "addresses": ", ".join(info.addresses),
            "denied packets": info.denied_packets,
            "outside": f"not reachable: {info.outside_missing}"
            if info.outside_missing
            else "reachable as the policy says",
        }
    )


def _rule_text(rule: Any) -> str:
    destination = rule.cidr or rule.host or "*"
    ports = f":{rule.ports}" if rule.ports else ""
    protocol = f"/{rule.protocol}" if rule.protocol else ""
    return f"{destination}{ports}{protocol}"
