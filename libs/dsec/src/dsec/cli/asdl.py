"""``dsec agent lint`` and ``dsec agent schema``: contracts without a platform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dsec.cli.output import EXIT_FAILURE, Json, Output, run

Files = Annotated[list[Path], typer.Argument(help="Contracts (YAML).")]


def lint(files: Files, *, json_output: Json = False) -> None:
    """Tell all that is wrong with contracts, as FILE:LINE:COLUMN; exit 1 if anything is.

    With --json also what follows from each one that is right.
    """

    async def work(output: Output) -> int:
        from dsec.contracts import lint_contract, terms_of  # noqa: PLC0415  --help stays quick
        from dsec_common.asdl.problems import Problem  # noqa: PLC0415  likewise
        from dsec_common.errors import DsecError  # noqa: PLC0415  likewise

        found: list[dict[str, Any]] = []
        lines: list[str] = []
        for file in files:
            try:
                contract, _, problems = lint_contract(file)
                lines += [problem.told(str(file)) for problem in problems]
            except DsecError as error:  # the others are looked at all the same
                contract, problems = None, (Problem(path="", message=error.message),)
                lines.append(error.message)
            one: dict[str, Any] = {"file": str(file), "problems": problems}
            if contract is not None and not problems:
                one["terms"] = terms_of(contract)
                lines.append(f"{file}: {contract.name} {contract.version} is a contract")
            found.append(one)
        if output.json:
            output.document(found)
        else:
            output.text("\n".join(lines))
        return EXIT_FAILURE if any(one["problems"] for one in found) else 0

    run(work, json=json_output)


def schema() -> None:
    """Print the JSON Schema of contracts, by which editors complete and check them."""

    async def work(output: Output) -> None:
        import json  # noqa: PLC0415  --help stays quick

        from dsec.contracts import json_schema  # noqa: PLC0415  likewise

        output.text(json.dumps(json_schema(), indent=2, ensure_ascii=False))

    run(work, json=False)
