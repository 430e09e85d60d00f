"""``dsec agent``: versions, instances, what they may do, and what they depend on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dsec.cli import asdl
from dsec.cli.network import Allow, Deny, Network, PolicyFile, RuleSet, policy_of
from dsec.cli.options import Toolkits, Workspace
from dsec.cli.output import Json, Output, UsageError, age_text, pairs, run, size_text
from dsec.cli.pack import PublicKey, signer_demanded

app = typer.Typer(no_args_is_help=True, help="Agents: versions, instances, and what they may do.")
app.command()(asdl.lint)
app.command()(asdl.schema)

_HEADERS: Final = ("NAME", "VERSION", "STATUS", "VERSIONS", "PERMISSIONS", "DESCRIPTION")
_VERSION_HEADERS: Final = ("VERSION", "STATUS", "INSTANCES", "ENDED", "FAILED", "POLICY", "PACKAGE")
_INSTANCE_HEADERS: Final = ("SANDBOX", "VERSION", "AGE", "POLICY")

Name = Annotated[str, typer.Argument(help="The agent's name.")]
OneVersion = Annotated[str, typer.Option("--version", help="Only this version's instances.")]
DrainIdle = Annotated[
    float, typer.Option(help="Old instances leave when unused for so many seconds.")
]
DrainTimeout = Annotated[
    float, typer.Option(help="They leave after so many seconds in any case; 0: never.")
]
Instances = Annotated[
    list[str] | None, typer.Option("--instance", help="Only this sandbox; repeat for more.")
]


def _row(agent: Any) -> tuple[str, ...]:
    active = next((one for one in agent.versions if one.version == agent.active), None)
    permissions = ", ".join(active.permissions) if active else ""
    return (
        agent.name,
        agent.active,
        "Active" if active else "-",
        str(len(agent.versions)),
        permissions or "-",
        agent.description or "-",
    )


def _show_agent(output: Output, agent: Any) -> None:
    if output.json:
        output.document(agent)
    else:
        output.table(_HEADERS, [_row(agent)])


def _show_governed(output: Output, governed: Any) -> None:
    if output.json:
        output.document(governed)
        return
    output.text(
        f"{governed.name}: revision {governed.revision} is in force for {governed.instances} "
        f"instances on {governed.nodes} nodes"
    )
    for node in governed.silent_nodes:
        output.say(f"{node} did not answer; it learns of it when it is back")
    for refusal in governed.refused:
        output.say(f"{refusal.what}: {refusal.reason}")


@app.command()
def register(
    *,
    contract: Annotated[
        Path | None,
        typer.Option("--asdl", exists=True, dir_okay=False, help="The agent's contract (YAML)."),
    ] = None,
    package: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Its package, which holds the contract and the code."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Its name; else the contract's.")] = "",
    version: Annotated[str, typer.Option(help="Its version; else the contract's.")] = "",
    description: Annotated[str, typer.Option(help="For listings; else the contract's.")] = "",
    permission: Annotated[
        list[str] | None, typer.Option(help="What it needs, with the contract's; repeat.")
    ] = None,
    base: Annotated[str, typer.Option(help="Base layer of its instances.")] = "",
    workspace: Workspace = "",
    toolkit: Toolkits = None,
    public_key: PublicKey = "",
    json_output: Json = False,
) -> None:
    """Register a version of an agent; the first one is active at once."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick
        from dsec.contracts import Contract, read_contract  # noqa: PLC0415  likewise
        from dsec.pack.registering import register_package  # noqa: PLC0415  likewise

        if package is not None:
            if contract or name or version:
                raise UsageError("a package says its name, version and contract itself")
            async with client() as dsec:
                agent = await register_package(
                    dsec,
                    package,
                    public_key=signer_demanded(public_key),
                    description=description,
                    permissions=permission or (),
                    base=base,
                    workspace=workspace,
                    toolkits=toolkit or (),
                )
            _show_agent(output, agent)
            return
        written: dict[str, Any] = {}
        said = Contract()
        if contract is not None:
            # What the command line says, the contract need not.
            written, said = read_contract(contract, whole=not (name and version))
        async with client() as dsec:
            agent = await dsec.agents.register(
                name or said.name,
                version or said.version,
                description=description or said.description,
                contract=written,
                permissions=tuple(dict.fromkeys((*said.permissions, *(permission or ())))),
                base=base,
                workspace=workspace,
                toolkits=toolkit or (),
            )
        _show_agent(output, agent)

    run(work, json=json_output)


@app.command("list")
def list_agents(
    *,
    prefix: Annotated[str, typer.Option(help="Only names that begin so.")] = "",
    permission: Annotated[str, typer.Option(help="Only agents that need this.")] = "",
    json_output: Json = False,
) -> None:
    """List the project's agents."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            agents = await dsec.agents.list(prefix=prefix, permission=permission)
        if output.json:
            output.document(agents)
        else:
            rows = [_row(agent) for agent in agents]
            output.table(_HEADERS, rows, empty="no agents; register one with `dsec agent register`")

    run(work, json=json_output)


@app.command()
def inspect(name: Name, *, json_output: Json = False) -> None:
    """Show an agent's versions, their instances, and their policies."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            agent = await dsec.agents.inspect(name)
        if output.json:
            output.document(agent)
            return
        facts = {"name": agent.name, "active": agent.active, "revision": str(agent.revision)}
        if agent.rollout is not None:
            rollout = agent.rollout
            reason = f" ({rollout.reason})" if rollout.reason else ""
            facts["update"] = (
                f"{rollout.from_version} to {rollout.to_version}: {rollout.state}{reason}"
            )
        output.facts(facts)
        rows = [
            (
                one.version,
                one.state.value,
                str(one.instances),
                str(one.finished),
                str(one.failed),
                str(one.policy_revision or "-"),
                size_text(one.package_bytes) if one.package_bytes else "-",
            )
            for one in agent.versions
        ]
        output.table(_VERSION_HEADERS, rows)

    run(work, json=json_output)


@app.command()
def instances(
    name: Name,
    *,
    version: OneVersion = "",
    node: Annotated[str, typer.Option(help="Only those on this node.")] = "",
    json_output: Json = False,
) -> None:
    """List an agent's instances, and under which policy each is."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            found = await dsec.agents.instances(name, version=version, node=node)
        if output.json:
            output.document(found)
        else:
            rows = [
                (
                    one.sandbox_id,
                    one.version,
                    age_text(one.started_at),
                    str(one.policy_revision or "-"),
                )
                for one in found
            ]
            output.table(_INSTANCE_HEADERS, rows, empty=f"{name} has no instances")

    run(work, json=json_output)


@app.command()
def update(
    *,
    name: Annotated[str, typer.Option(help="The agent.")],
    version: Annotated[str, typer.Option(help="The version that new work goes to.")],
    model_path: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Make it of the active one, with these weights."
        ),
    ] = None,
    drain_idle: DrainIdle = 5.0,
    drain_timeout: DrainTimeout = 3600.0,
    failure_window: Annotated[
        float | None, typer.Option(help="Seconds for which the new version is watched.")
    ] = None,
    failure_threshold: Annotated[
        float | None, typer.Option(help="The share of its instances that may fail, 0 to 1.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Roll out a version: new work goes to it, old instances finish and leave."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick
        from dsec.pack.registering import update_model  # noqa: PLC0415  likewise

        async with client() as dsec:
            rolling: dict[str, Any] = {
                "drain_idle_s": drain_idle,
                "drain_timeout_s": drain_timeout,
                "failure_window_s": failure_window,
                "failure_threshold": failure_threshold,
            }
            if model_path is None:
                governed = await dsec.agents.update(name, version, **rolling)
            else:
                governed = await update_model(dsec, name, version, model_path, **rolling)
        _show_governed(output, governed)

    run(work, json=json_output)


@app.command()
def rollback(
    name: Name,
    *,
    drain_idle: DrainIdle = 5.0,
    drain_timeout: DrainTimeout = 3600.0,
    json_output: Json = False,
) -> None:
    """Have new work go back to the version before the last update; once more undoes that."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            governed = await dsec.agents.rollback(
                name, drain_idle_s=drain_idle, drain_timeout_s=drain_timeout
            )
        _show_governed(output, governed)

    run(work, json=json_output)


@app.command()
def remove(
    name: Name,
    *,
    version: Annotated[str, typer.Option(help="Only this version; else all of the agent.")] = "",
    json_output: Json = False,
) -> None:
    """Remove a version that nobody uses, or an agent; its layers stay."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            versions = await dsec.agents.remove(name, version)
        if output.json:
            output.document({"name": name, "versions": versions})
        else:
            output.text(f"{name}: {', '.join(versions)} removed")

    run(work, json=json_output)


@app.command()
def revoke(
    name: Name,
    permissions: Annotated[list[str], typer.Argument(help="What is taken away.")],
    *,
    version: OneVersion = "",
    instance: Instances = None,
    json_output: Json = False,
) -> None:
    """Take permissions from instances; the rest of their policies stays."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            governed = await dsec.agents.revoke(
                name, permissions, version=version, instances=instance or ()
            )
        _show_governed(output, governed)

    run(work, json=json_output)


def _rates(words: list[str]) -> dict[str, float]:
    rates = {}
    for name, value in pairs(words, "--rate-limit").items():
        try:
            rates[name] = float(value)
        except ValueError:
            raise UsageError(
                f"--rate-limit: {value!r} is no number of requests a second; write {name}=10"
            ) from None
    return rates


@app.command()
def policy(
    name: Name,
    *,
    revoke: Annotated[
        list[str] | None, typer.Option("--revoke", help="A permission taken away; repeat.")
    ] = None,
    network: Network = "",
    allow: Allow = None,
    deny: Deny = None,
    rule_set: RuleSet = None,
    network_file: PolicyFile = None,
    rate_limit: Annotated[
        list[str] | None, typer.Option(help="NAME=REQUESTS a second, such as agent_socket=10.")
    ] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Instances stand still.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="No policy: all that was said before is lifted.")
    ] = False,
    version: OneVersion = "",
    instance: Instances = None,
    json_output: Json = False,
) -> None:
    """Put instances under a policy, in place of all that an earlier one said."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        rates = _rates(rate_limit or [])
        wanted = policy_of(network, allow, deny, rule_set, network_file)
        # Who forgets the options, or means to look, must not lift what is in force.
        if clear == bool(revoke or rates or pause or wanted is not None):
            raise UsageError(
                "say what the policy says (--revoke, --network, --rate-limit, --pause), or --clear "
                "alone to lift the one in force; `dsec agent inspect` shows which there is"
            )
        async with client() as dsec:
            governed = await dsec.agents.push_policy(
                name,
                revoked=revoke or (),
                network=wanted,
                rate_limits=rates,
                paused=pause,
                version=version,
                instances=instance or (),
            )
        _show_governed(output, governed)

    run(work, json=json_output)


_DEPENDENCY_HEADERS: Final = ("DEPENDENCY", "VERSION", "CHANGED")


def _show_dependencies(output: Output, versions: dict[str, int]) -> None:
    if output.json:
        output.document(versions)
        return
    rows = [(name, str(at), age_text(at / 1000)) for name, at in sorted(versions.items())]
    output.table(
        _DEPENDENCY_HEADERS, rows, empty="no dependencies; see `dsec agent changed --help`"
    )


def _versions(words: list[str], now_ms: int) -> dict[str, int]:
    versions = {}
    for word in words:
        name, given, value = word.partition("=")
        try:
            versions[name] = int(value) if given else now_ms
        except ValueError:
            raise UsageError(
                f"{value!r} is no version: write {name}=1700000000000, the Unix time in "
                f"milliseconds of its last change, or {name} alone for now"
            ) from None
    return versions


@app.command()
def changed(
    dependencies: Annotated[
        list[str] | None,
        typer.Argument(help="NAME for now, or NAME=UNIX_MILLISECONDS."),
    ] = None,
    *,
    forget: Annotated[
        list[str] | None, typer.Option("--forget", help="A dependency that is none; repeat.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Say that what agents depend on has changed: a database, an API, another agent's output."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        if not dependencies and not forget:
            raise UsageError("name what has changed, such as `dsec agent changed orders-db`")
        versions = _versions(dependencies or [], time.time_ns() // 1_000_000)
        async with client() as dsec:
            known = await dsec.agents.report_dependencies(versions, forget=forget or ())
        _show_dependencies(output, known)

    run(work, json=json_output)


@app.command("dependencies")
def list_dependencies(*, json_output: Json = False) -> None:
    """List what agents depend on, and how new it is."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            known = await dsec.agents.dependencies()
        _show_dependencies(output, known)

    run(work, json=json_output)


@app.command()
def synchronise(
    name: Name,
    instances: Annotated[list[str], typer.Argument(help="Sandboxes, at most 32.")],
    *,
    json_output: Json = False,
) -> None:
    """Have instances that are behind synchronised now, those that failed at it too."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            states = await dsec.agents.synchronise(name, instances)
        if output.json:
            output.document(states)
            return
        rows = [(one.sandbox_id, str(one.version_ms), one.error or "-") for one in states]
        output.table(("SANDBOX", "VERSION", "ERROR"), rows)

    run(work, json=json_output)
