"""Traces of real clusters, and our own, as work.

==============  ====================================================================================
format          what it is
==============  ====================================================================================
``events``      our own: JSON lines, each a :class:`~dsec.simulation.work.Work`
``openb``       Alibaba's cluster-trace-gpu-v2023, ``openb_pod_list_*.csv``: thousandths of a card
``philly``      one job a line as CSV: ``job_id``, ``vc`` or ``user``, ``submit_time``, ``duration``
                (s), ``gpu_num``, as Microsoft's Philly and SenseTime's Helios traces are passed on
``azure``       Azure's public VM trace, ``vmtable.csv`` without a header: cores as units
``kubernetes``  what ``kubectl get pods -A -o json`` prints
==============  ====================================================================================
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from dsec.simulation.work import Positive, Units, Work
from dsec_common.compute.model import GpuDemand, ServiceClass


class TraceFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trace to be read.

    Attributes:
        file: its path, from the directory of the file that names it.
        format: one of :data:`FORMATS`.
        cu_per_gpu: what one GPU of the trace's own cluster is worth; its models are not ours.
        cu_per_core: what a core of a virtual machine is worth (``azure``).
        limit: at most so many of its first lines; 0 for all.
        speed: time goes so many times faster: arrivals that much denser.
    """

    file: str
    format: str
    cu_per_gpu: Units = 65.0
    cu_per_core: Units = 1.0
    limit: Annotated[int, msgspec.Meta(ge=0)] = 0
    speed: Positive = 1.0


class TraceError(ValueError):
    """A trace that cannot be read: which line of which file, and why."""


def read_trace(trace: TraceFile, directory: Path) -> list[Work]:
    """Return the trace's work in the order of time, from 0 on. Lines without GPUs are left out.

    Raises:
        TraceError: the file is not there, or not of its format.
    """
    reader = FORMATS.get(trace.format)
    if reader is None:
        raise TraceError(f"no format {trace.format!r}: use one of {', '.join(FORMATS)}")
    path = directory / trace.file
    found: list[Work] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for work in reader(file, trace):
                timely = math.isfinite(work.at_s) and 0 < work.duration_s < math.inf
                if timely and not work.demand.flaw:
                    found.append(work)
                    if trace.limit and len(found) == trace.limit:
                        break
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise TraceError(f"{path} is no {trace.format} trace: nested too deeply") from None
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        csv.Error,
    ) as error:
        what = f"no column {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path} is no {trace.format} trace: {what}") from error
    start = min((work.at_s for work in found), default=0.0)
    found.sort(key=lambda work: (work.at_s, work.name))
    return [
        msgspec.structs.replace(
            work, name=f"{n}-{work.name}", at_s=(work.at_s - start) / trace.speed
        )
        for n, work in enumerate(found)
    ]


def _events(file: Any, _: TraceFile) -> Iterator[Work]:
    decoder = msgspec.json.Decoder(Work)
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"line {number}: {error}") from None


_QOS: Final = {"LS": ServiceClass.STANDARD, "Guaranteed": ServiceClass.STANDARD}


def _openb(file: Any, trace: TraceFile) -> Iterator[Work]:
    for row in csv.DictReader(file):
        count = int(row["num_gpu"] or 0)
        if not count or not row["deletion_time"]:
            continue
        part = int(row["gpu_milli"] or 1000) / 1000
        cu = count * part * trace.cu_per_gpu
        at_s = float(row["creation_time"])
        yield Work(
            name=row["name"],
            at_s=at_s,
            duration_s=float(row["deletion_time"]) - float(row["scheduled_time"] or at_s),
            demand=GpuDemand(min_cu=cu, max_cu=cu, count=count if count > 1 else 0),
            service_class=_QOS.get(row["qos"], ServiceClass.BATCH),
        )


def _philly(file: Any, trace: TraceFile) -> Iterator[Work]:
    for row in csv.DictReader(file):
        count = int(float(row["gpu_num"] or 0))
        if not count:
            continue
        cu = count * trace.cu_per_gpu
        yield Work(
            name=row["job_id"],
            at_s=_moment(row["submit_time"]),
            duration_s=float(row["duration"]),
            demand=GpuDemand(min_cu=cu, max_cu=cu, count=count if count > 1 else 0),
            project=row.get("vc") or row.get("user") or "default",
            service_class=ServiceClass.BATCH,
        )


_AZURE_CLASSES: Final = {
    "Interactive": ServiceClass.STANDARD,
    "Delay-insensitive": ServiceClass.BATCH,
}


def _azure(file: Any, trace: TraceFile) -> Iterator[Work]:
    for row in csv.reader(file):
        name, project, _, created, deleted, *_, category, cores, _ = row
        cu = float(cores.lstrip(">")) * trace.cu_per_core
        yield Work(
            name=name[:12],
            at_s=float(created),
            duration_s=float(deleted) - float(created),
            demand=GpuDemand(min_cu=cu, max_cu=cu),
            project=project[:12],
            service_class=_AZURE_CLASSES.get(category, ServiceClass.STANDARD),
        )


def _kubernetes(file: Any, trace: TraceFile) -> Iterator[Work]:
    for pod in json.load(file)["items"]:
        count = sum(_gpus(container) for container in pod["spec"]["containers"])
        spans = [_span(status) for status in pod.get("status", {}).get("containerStatuses", ())]
        known = [span for span in spans if span is not None]
        if not count or not known:
            continue
        cu = count * trace.cu_per_gpu
        meta = pod["metadata"]
        yield Work(
            name=meta["name"],
            at_s=_moment(meta["creationTimestamp"]),
            duration_s=max(end for _, end in known) - min(start for start, _ in known),
            demand=GpuDemand(min_cu=cu, max_cu=cu, count=count if count > 1 else 0),
            project=meta.get("namespace", "default"),
            priority=max(-16, min(16, int(pod["spec"].get("priority", 0)))),
        )


def _gpus(container: Mapping[str, Any]) -> int:
    return int(container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))


def _span(status: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return from when until when a container ran; None for one that has not ended."""
    ended = status.get("state", {}).get("terminated")
    if not ended:
        return None
    return _moment(ended["startedAt"]), _moment(ended["finishedAt"])


def _moment(text: str) -> float:
    """Return seconds: a number as it is, a date as Unix time."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


FORMATS: Final[Mapping[str, Callable[[Any, TraceFile], Iterator[Work]]]] = {
    "events": _events,
    "openb": _openb,
    "philly": _philly,
    "azure": _azure,
    "kubernetes": _kubernetes,
}
"""The readers of trace files."""
