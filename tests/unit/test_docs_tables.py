"""What the documents' tables say is what the code does."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import dsec_broker
import dsec_chronus
import dsec_common
import dsec_sandboxd
import dsec_scheduler
import dsec_tracer
from documents import ROOT, page, quantity
from dsec_broker.config import BrokerConfig
from dsec_chronus.config import ChronusConfig
from dsec_common.config import ServiceConfig
from dsec_common.errors import STATUS_OF, DsecError, ErrorCode
from dsec_sandboxd.config import SandboxdConfig
from dsec_scheduler.config import SchedulerConfig
from dsec_tracer.config import TracerConfig

CONFIGS: dict[str, type[ServiceConfig]] = {
    "broker": BrokerConfig,
    "scheduler": SchedulerConfig,
    "sandboxd": SandboxdConfig,
    "chronus": ChronusConfig,
    "tracer": TracerConfig,
}
PROTOCOL_HEADER = ROOT / "services/sandboxd/src/dsec_sandboxd/native/protocol.h"
PUBLIC_LIMIT = re.compile(r"[A-Z][A-Z0-9_]*_MAX|MAX_[A-Z0-9_]+|[A-Z][A-Z0-9_]*_MAX_(?:BYTES|S)")
NOT_FOR_USERS = {
    "dsec_sandboxd.kernel.protocol:DESCRIPTORS_MAX": "descriptors with one message inside",
    "dsec_sandboxd.kernel.protocol:INLINE_OUTPUT_MAX": "what is longer is told in pieces",
    "dsec_sandboxd.kernel.protocol:INLINE_PAYLOAD_MAX": "larger payloads take another way",
    "dsec_sandboxd.kernel.protocol:LAYERS_MAX": "the same as the kernel seam's",
}


def _settings(page_name: str) -> dict[str, float | str]:
    rows = page(page_name).table("setting", "default", "meaning")
    return {name.strip("`"): quantity(default) for name, default, _ in rows}


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return value or 0.0 if isinstance(value, int | float) else value or ""


def _defaults(config: type[ServiceConfig]) -> dict[str, Any]:
    return {name: _shown(getattr(config(), name)) for name in config.__struct_fields__}


def test_the_settings_of_every_service_are_in_the_operations_page() -> None:
    assert _settings("docs/operations.md") == _defaults(ServiceConfig)


@pytest.mark.parametrize("service", CONFIGS)
def test_the_settings_of_a_service_are_on_its_page(service: str) -> None:
    common = set(ServiceConfig.__struct_fields__)
    own = {name: value for name, value in _defaults(CONFIGS[service]).items() if name not in common}
    assert _settings(f"docs/services/{service}.md") == own


@pytest.mark.parametrize("service", CONFIGS)
def test_the_metrics_of_a_service_are_on_its_page(service: str) -> None:
    source = ROOT / f"services/{service}/src/dsec_{service}/metrics.py"
    made = set(re.findall(rf'"(dsec_{service}_\w+)"', source.read_text()))
    cells = [cell for cell, _ in page(f"docs/services/{service}.md").table("metric", "meaning")]
    assert set(re.findall(r"dsec_\w+", " ".join(cells))) == made


@pytest.mark.parametrize("service", CONFIGS)
def test_the_events_and_effects_of_a_service_are_on_its_page(service: str) -> None:
    rows = page(f"docs/services/{service}.md").table("event", "effect")
    for column, module_name in enumerate(("events", "effects")):
        module = importlib.import_module(f"dsec_{service}.{module_name}")
        members = _members(getattr(module, ("Event", "Effect")[column]))
        named = {name for row in rows for name in re.findall(r"`([A-Z]\w+)`", row[column])}
        assert named == members


def _members(union: Any) -> set[str]:
    parts = getattr(union, "__args__", ())
    return set().union(*map(_members, parts)) if parts else {union.__name__}


def _limits() -> dict[str, float | str]:
    specification = page("docs/specification.md")
    rows = specification.table("what", "limit", "where")
    rows += specification.table("default", "value", "where")
    return {where.strip("`"): quantity(limit) for _, limit, where in rows if where}


def _in_code(where: str) -> float:
    module_name, _, name = where.partition(":")
    if module_name == PROTOCOL_HEADER.name:
        defined = re.search(rf"#define {name} (\d+)", PROTOCOL_HEADER.read_text())
        assert defined, where
        return int(defined[1])
    owner, _, field = name.partition(".")
    found: Any = getattr(importlib.import_module(module_name), owner)
    if not field:
        return float(found)
    if issubclass(found, msgspec.Struct):
        return float(next(f.default for f in msgspec.structs.fields(found) if f.name == field))
    return float(getattr(found(), field))


@pytest.mark.parametrize("where", _limits())
def test_a_limit_in_the_specification_is_the_codes(where: str) -> None:
    assert _limits()[where] == _in_code(where)


def _modules(package: ModuleType) -> list[ModuleType]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    names = [module.name for module in found if not module.name.endswith(("__main__", "_pb2"))]
    return [importlib.import_module(name) for name in names]


def test_every_limit_in_the_code_is_in_the_specification() -> None:
    packages = (
        dsec_common,
        dsec_broker,
        dsec_scheduler,
        dsec_sandboxd,
        dsec_chronus,
        dsec_tracer,
    )
    defined = set()
    for module in (module for package in packages for module in _modules(package)):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        own = re.findall(r"^([A-Z]\w+): Final = ", source, re.MULTILINE)
        defined |= {f"{module.__name__}:{name}" for name in own if PUBLIC_LIMIT.fullmatch(name)}
    assert defined - set(NOT_FOR_USERS) - set(_limits()) == set()
    assert set(NOT_FOR_USERS) <= defined


def test_the_error_codes_are_the_closed_set() -> None:
    rows = page("docs/specification.md").table("code", "status", "retryable", "means")
    told = {code.strip("`"): (int(status), retry == "yes") for code, status, retry, _ in rows}
    assert told == {
        code.value: (STATUS_OF[code], DsecError(code, "").retryable) for code in ErrorCode
    }
