"""``dsec cost``: what was held and used."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.output import SETTINGS, Json, Output, UsageError, run
from dsec_common.metering import MICRO

if TYPE_CHECKING:
    from dsec.client import DSecClient
    from dsec_common.wire.cost import Amounts, CostRow

_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([mhd])")
_SECONDS: Final = {"m": 60.0, "h": 3600.0, "d": 86_400.0}
_KEYS: Final = frozenset({"project", "agent"})
_GIB: Final = 1 << 30
_HOUR_MS: Final = 3_600_000


def cost(
    *,
    by: Annotated[
        str,
        typer.Option(help="agent, or project, or project,agent: the operator's view of all."),
    ] = "agent",
    since: Annotated[str, typer.Option(help="So long ago, such as 90m, 24h or 7d.")] = "",
    json_output: Json = False,
) -> None:
    """Add up what sandboxes and leases held and used, by project and kind of agent.

    With `project` in --by every project has its rows; that is for the operator, who has the state
    directory. Sums are exact; those of what goes on are a few minutes old.
    """

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        keys = {word.strip() for word in by.split(",")}
        if not keys <= _KEYS:
            raise UsageError(f"--by is project, agent or project,agent, not {by!r}")
        earliest = _moment(since)
        rows: list[CostRow] = []
        missing = 0
        clients = _of_all_projects() if "project" in keys else [client()]
        for each in clients:
            async with each as dsec:
                found = await dsec.cost(since=earliest, by_agent="agent" in keys)
            rows += found.rows
            missing = max(missing, found.missing)
        if output.json:
            output.document({"rows": rows, "missing": missing})
            return
        output.table(
            (
                *("PROJECT", "AGENT", "SANDBOXES", "TIME", "CPU", "MEMORY", "GPU MEMORY"),
                *("CU HELD", "CU USED", "COST", "EXECS", "TOKENS"),
            ),
            ((row.project, row.agent or "-", *_cells(row.amounts)) for row in rows),
            empty="nothing was held or used",
        )
        if missing:
            output.say(f"{missing} segments were not read (yet)")

    run(work, json=json_output)


def _of_all_projects() -> list[DSecClient]:
    from dsec.cli.project import operator  # noqa: PLC0415  --help stays quick
    from dsec.client import DSecClient  # noqa: PLC0415  as above

    auth, servers = operator()
    return [
        DSecClient(servers, str(auth.project(name)), state_directory=SETTINGS.state_directory)
        for name in auth.projects()
    ]


def _moment(ago: str) -> float:
    if not ago:
        return 0.0
    match = _AGO.fullmatch(ago)
    if match is None:
        raise UsageError(f"--since is a number with m, h or d after it, such as 24h, not {ago!r}")
    return max(time.time() - float(match[1]) * _SECONDS[match[2]], 0.0)


def _cells(amounts: Amounts) -> tuple[str, ...]:
    return (
        str(amounts.sandboxes),
        f"{amounts.sandbox_ms / 1000:.3f} s",
        f"{amounts.cpu_us / 1e6:.3f} s",
        f"{amounts.memory_byte_ms / _GIB / _HOUR_MS:.3f} GiB h",
        _known(amounts.gpu_memory_byte_ms, _GIB, "GiB h", amounts.gpu_memory_unknown_ms),
        f"{amounts.cu_micro_ms / MICRO / _HOUR_MS:.3f} CU h",
        _known(amounts.cu_used_micro_ms, MICRO, "CU h", amounts.cu_used_unknown_ms),
        f"{amounts.cost_nano / 1e9:.4f}",
        str(amounts.execs),
        f"{amounts.tokens_in}+{amounts.tokens_out}",
    )


def _known(total: int | None, one: int, unit: str, unknown_ms: int) -> str:
    """Say what is known of an amount over time, and for how long it is not."""
    unknown = f"{unknown_ms / 1000:.3f} s unknown" if unknown_ms else ""
    if total is None:
        return unknown or "-"
    known = f"{total / one / _HOUR_MS:.3f} {unit}"
    return f"{known}, {unknown}" if unknown else known
