"""Configuration: defaults, TOML, environment and flags, into one frozen struct, checked whole.

Later sources win: the struct's defaults, the file's ``[all]`` table, its table named after the
service, ``DSEC_<FIELD>``, ``DSEC_<SERVICE>_<FIELD>``, flags ``--field value``. An unknown name
anywhere is an error, since a typo must not become a default.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_origin, get_type_hints

import msgspec

from dsec_common.errors import DsecError, ErrorCode

C = TypeVar("C", bound="ServiceConfig")

_SECRET_WORDS = ("password", "secret", "token", "seed")


class ServiceConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=False
):
    """What every service is told.

    Attributes:
        nats_servers: addresses of the NATS cluster.
        nats_credentials: path of this service's credentials file; empty means none (tests only).
        kafka_bootstrap: ``host:port,…``; empty means that this service does without.
        state_directory: where the service keeps its RocksDB; made when missing.
        http_host: address of ``/healthz``, ``/readyz`` and ``/metrics``.
        http_port: its port; 0 takes a free one.
        runtime_file: when set, ``{"pid", "http_port", "state"}`` is kept there as JSON.
        connect_timeout_s: how long to wait for NATS at start; 0 waits for ever.
        drain_timeout_s: how long in-flight work may take at the end.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
    """

    nats_servers: tuple[str, ...] = ("nats://127.0.0.1:4222",)
    nats_credentials: str = ""
    kafka_bootstrap: str = ""
    state_directory: str = "/var/lib/dsec"
    http_host: str = "127.0.0.1"
    http_port: int = 0
    runtime_file: str = ""
    connect_timeout_s: float = 0.0
    drain_timeout_s: float = 10.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def completed(self) -> Self:
        """Return the settings with what a file that they name says; asked for once, at the start.

        Raises:
            DsecError: ``invalid``: that file makes no sense.
        """
        return self


def _refuse_unknown(names: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise DsecError(ErrorCode.INVALID, f"unknown setting {name!r} in {where}{hint}")


def _read_file(path: str, service: str, known: Sequence[str]) -> dict[str, Any]:
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DsecError(
            ErrorCode.INVALID, f"cannot read the configuration file {path}: {error.strerror}"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise DsecError(ErrorCode.INVALID, f"{path} is not valid TOML: {error}") from error
    settings: dict[str, Any] = {}
    for table in ("all", service):
        values = tables.get(table, {})
        if table == "all":
            # Shared settings may name fields that only other services have.
            values = {name: value for name, value in values.items() if name in known}
        _refuse_unknown(values, known, f"[{table}] of {path}")
        settings.update(values)
    return settings


def _from_text(kind: Any, text: str) -> Any:
    if get_origin(kind) is tuple:
        if text.lstrip().startswith("["):  # of tables, as JSON
            return _from_json(text)
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is bool:
        return text.strip().lower() in {"1", "true", "yes", "on"}
    if get_origin(kind) is dict:
        return dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair)
    return text


def _from_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise DsecError(ErrorCode.INVALID, f"{text[:60]!r} is not JSON: {error}") from error


def load_config(
    kind: type[C],
    service: str,
    argv: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> C:
    """Return the service's configuration from all sources.

    Raises:
        DsecError: ``invalid``, naming the setting, the source and what was expected.
    """
    environment = os.environ if environment is None else environment
    hints = get_type_hints(kind)
    known = list(kind.__struct_fields__)
    parser = argparse.ArgumentParser(
        prog=f"dsec-{service}", description=(kind.__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--config", default=environment.get("DSEC_CONFIG", ""), help="TOML file")
    defaults = dict(zip(known, kind.__struct_defaults__, strict=True))
    for name in known:
        parser.add_argument(
            "--" + name.replace("_", "-"), dest=name, help=f"default: {defaults[name]!r}"
        )
    flags = vars(parser.parse_args(argv))
    path = flags.pop("config")
    settings = _read_file(path, service, known) if path else {}
    for name in known:
        for variable in (f"DSEC_{name.upper()}", f"DSEC_{service.upper()}_{name.upper()}"):
            if variable in environment:
                settings[name] = _from_text(hints[name], environment[variable])
        if flags[name] is not None:
            settings[name] = _from_text(hints[name], flags[name])
    try:
        config = msgspec.convert(settings, kind, strict=False)
    except msgspec.ValidationError as error:
        raise DsecError(
            ErrorCode.INVALID, f"the configuration of {service} is not valid: {error}"
        ) from error
    return config.completed()


def describe(config: ServiceConfig) -> dict[str, Any]:
    """Return the settings for printing, with secrets hidden."""
    return {
        name: "***" if any(word in name for word in _SECRET_WORDS) else getattr(config, name)
        for name in config.__struct_fields__
    }
