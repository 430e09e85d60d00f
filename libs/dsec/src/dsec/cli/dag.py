"""``dsec dag``: register, list, remove, run, inspect, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dsec.cli.output import EXIT_FAILURE, Json, Output, UsageError, run

app = typer.Typer(no_args_is_help=True, help="DAGs of agents: typed, tried again, resumed.")

_HEADERS: Final = ("STEP", "STATE", "ATTEMPTS", "SANDBOX", "OUTPUT")
_SHOWN_CHARACTERS: Final = 60

RunId = Annotated[str, typer.Argument(help="The run's id.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is over; 1 if it is not done.")]


def _show(output: Output, dag_run: Any) -> int:
    if output.json:
        output.document(dag_run)
    else:
        output.facts({"run": dag_run.run_id, "dag": dag_run.name, "state": dag_run.state.value})
        rows = [
            (
                name,
                step.state.value,
                str(step.attempts),
                step.sandbox_id or "-",
                step.error or _short(step.output),
            )
            for name, step in dag_run.steps.items()
        ]
        output.table(_HEADERS, rows)
    return EXIT_FAILURE if dag_run.state.value in {"failed", "partial"} else 0


def _short(value: Any) -> str:
    text = "-" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


@app.command()
def register(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The DAG (YAML).")],
    *,
    json_output: Json = False,
) -> None:
    """Check a DAG, every type in it too, and keep it."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            info = await dsec.dags.register(file)
        if output.json:
            output.document(info)
            return
        output.text(f"{info.name}: {' '.join(info.order)}")
        for one in info.conversions:
            output.text(f"{one.step}.{one.input} is converted: {', '.join(one.converters)}")

    run(work, json=json_output)


@app.command("list")
def list_dags(*, json_output: Json = False) -> None:
    """List the project's DAGs."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            found = await dsec.dags.list()
        if output.json:
            output.document(found)
            return
        output.table(
            ("DAG", "STEPS", "DESCRIPTION"),
            ((one.name, str(one.steps), one.description or "-") for one in found),
            empty="no DAG is registered",
        )

    run(work, json=json_output)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="The DAG.")], *, json_output: Json = False
) -> None:
    """Remove a DAG; its runs go on, and are kept."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            await dsec.dags.remove(name)
        if output.json:
            output.document({"name": name})
        else:
            output.text(f"{name}: removed")

    run(work, json=json_output)


@app.command("run")
def run_dag(
    name: Annotated[str, typer.Argument(help="The DAG.")],
    *,
    value: Annotated[str, typer.Option("--input", help="The run's input, as JSON.")] = "null",
    run_id: Annotated[str, typer.Option(help="The same id again is the same run.")] = "",
    wait: Wait = False,
    json_output: Json = False,
) -> None:
    """Begin a run."""

    async def work(output: Output) -> int:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        try:
            given = json.loads(value)
        except ValueError as error:
            raise UsageError(f"--input is not JSON: {error}") from None
        async with client() as dsec:
            dag_run = await dsec.dags.run(name, given, run_id=run_id)
            if wait:
                dag_run = await dsec.dags.wait(dag_run.run_id)
        return _show(output, dag_run)

    run(work, json=json_output)


@app.command()
def inspect(
    run_id: RunId,
    *,
    step: Annotated[str, typer.Option(help="With the output of this step only.")] = "",
    json_output: Json = False,
) -> None:
    """Show how far a run is."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            _show(output, await dsec.dags.inspect(run_id, step=step))

    run(work, json=json_output)


@app.command()
def resume(run_id: RunId, *, wait: Wait = False, json_output: Json = False) -> None:
    """Try again what failed in a run, and go on from there."""

    async def work(output: Output) -> int:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            dag_run = await dsec.dags.resume(run_id)
            if wait:
                dag_run = await dsec.dags.wait(run_id)
        return _show(output, dag_run)

    run(work, json=json_output)
