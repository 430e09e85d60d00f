"""``dsec factory``: build environments of a spec, check layers for what betrays a task."""

from __future__ import annotations

import asyncio
import json as json_text
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.cli.output import EXIT_FAILURE, Json, Output, UsageError, run, size_text

if TYPE_CHECKING:
    from dsec.factory.leaks import Finding
    from dsec.factory.state import Outcome

app = typer.Typer(
    no_args_is_help=True, help="Environments in bulk: built, looked through, proven, published."
)


class _Progress:
    """How far a run is: a bar on a terminal, JSON lines with --json, else a line for each seed."""

    def __init__(self, stack: ExitStack, output: Output, total: int) -> None:
        self._output = output
        self._total = total
        self._done = self._failed = 0
        self._bar: Any = None
        if not output.json and sys.stderr.isatty():
            from rich.console import Console  # noqa: PLC0415  only builds pay for it
            from rich.progress import (  # noqa: PLC0415  as above
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = stack.enter_context(
                Progress(
                    TextColumn("{task.description:<32}"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TimeRemainingColumn(),
                    console=Console(stderr=True),
                    transient=True,
                )
            )
            self._task = self._bar.add_task("", total=total)

    def step(self, seed: int, name: str) -> None:
        """Say what begins."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"seed {seed}: {name}"[:32])
        elif self._output.json:
            self._line({"seed": seed, "stage": name})

    def done(self, outcome: Outcome) -> None:
        """Say what became of one."""
        self._done += 1
        self._failed += outcome.failure is not None
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        if self._output.json:
            self._line({"seed": outcome.seed, "stage": _word(outcome)})
        elif self._bar is not None and outcome.failure is not None:
            self._bar.console.print(f"seed {outcome.seed}: {outcome.failure.message}", markup=False)
        elif outcome.failure is not None:
            self._output.say(f"[{self._done}/{self._total}] {outcome.failure.message}")
        elif self._bar is None:
            self._output.say(f"[{self._done}/{self._total}] seed {outcome.seed} {_word(outcome)}")

    def _line(self, said: dict[str, Any]) -> None:
        line = said | {"done": self._done, "failed": self._failed, "total": self._total}
        print(json_text.dumps(line), file=sys.stderr, flush=True)


def _word(outcome: Outcome) -> str:
    if outcome.environment is None:
        return "failed"
    return "made" if outcome.environment.made else "was there"


@app.command()
def build(
    spec: Annotated[Path, typer.Argument(help="A YAML file; see docs/factory.md.")],
    *,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many seeds.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    parallel: Annotated[int, typer.Option(min=1, max=256, help="How many at once.")] = 4,
    state: Annotated[
        Path | None,
        typer.Option(help="What was done is kept there; else SPEC.factory beside the spec."),
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Also seeds that failed for good before.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Make an environment for each seed: build, pack, look through, prove, publish.

    The same command goes on after a kill and makes nothing twice. Exit code 1 when one failed.
    """

    async def work(output: Output) -> int:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick
        from dsec.factory.bulk import build_many  # noqa: PLC0415  as above
        from dsec.factory.spec import read_spec  # noqa: PLC0415  as above
        from dsec.factory.state import State  # noqa: PLC0415  as above

        wanted, directory = read_spec(spec)
        place = state or spec.with_name(f"{spec.stem}.factory")
        with ExitStack() as stack:
            records = stack.enter_context(State(place))
            progress = _Progress(stack, output, count)
            async with client() as dsec:
                outcomes = await build_many(
                    dsec,
                    wanted,
                    directory,
                    range(seed, seed + count),
                    records,
                    parallel=parallel,
                    retry=retry,
                    step=progress.step,
                    done=progress.done,
                )
        if output.json:
            output.document(outcomes)
        else:
            for outcome in outcomes:
                if made := outcome.environment:
                    output.text(f"{made.environment}  {made.digest}  {size_text(made.size_bytes)}")
        return EXIT_FAILURE if any(outcome.failure for outcome in outcomes) else 0

    run(work, json=json_output)


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="A layer (name@version), or a directory.")],
    *,
    solution: Annotated[
        list[Path] | None, typer.Option(help="A file or directory of the solution; repeat.")
    ] = None,
    tests: Annotated[
        list[Path] | None, typer.Option(help="A file or directory of hidden tests; repeat.")
    ] = None,
    public: Annotated[
        list[Path] | None, typer.Option(help="What anybody may know of them; repeat.")
    ] = None,
    canary: Annotated[
        list[str] | None, typer.Option(help="A text that stands nowhere else; repeat.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="Paths that are not looked into; repeat.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Look through a layer or a directory; exit code 1, with file and reason, if it is refused."""

    async def work(output: Output) -> int:
        from dsec.factory.checking import check_layer, contents  # noqa: PLC0415  --help stays quick
        from dsec.factory.credentials import FILES  # noqa: PLC0415  as above
        from dsec.factory.evidence import evidence_of, read_secrets  # noqa: PLC0415  as above
        from dsec.factory.leaks import look_through  # noqa: PLC0415  as above

        if not (solution or tests or canary):
            raise UsageError("name what must not be there: --solution, --tests or --canary")
        secrets = [
            secret
            for what, paths in (("solution", solution), ("tests", tests))
            for path in paths or ()
            for secret in read_secrets(what, path)
        ]
        evidence = evidence_of(secrets, canary or ()).without({}, contents(public or ()))
        passed = tuple(allow or ())
        if Path(target).is_dir():  # noqa: ASYNC240  one stat before it is all read
            findings = await asyncio.to_thread(
                look_through, Path(target), evidence, residue=FILES, allow=passed
            )
        else:
            from dsec.cli.connect import client  # noqa: PLC0415  only layers need it

            with tempfile.TemporaryDirectory(prefix="dsec-factory-") as scratch:
                async with client() as dsec:
                    findings = await check_layer(
                        dsec, target, evidence, Path(scratch), allow=passed
                    )
        _tell(output, target, findings)
        return EXIT_FAILURE if findings else 0

    run(work, json=json_output)


def _tell(output: Output, target: str, findings: list[Finding]) -> None:
    if output.json:
        output.document({"target": target, "findings": findings})
        return
    for finding in findings:
        output.text(str(finding))
    if not findings:
        output.text(f"{target}: nothing was found")
