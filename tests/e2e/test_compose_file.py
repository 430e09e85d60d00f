"""``compose.yaml`` holds together: with itself, the Dockerfile, the services' settings and us."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import tomllib
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml

from docker_compose import COMPOSE_FILE, REPOSITORY, SERVICES, read_compose, run_options
from dsec_common.config import ServiceConfig, load_config
from dsec_common.embedded.kafka_jars import KAFKA_VERSION
from dsec_common.embedded.nats import find_nats_server

COMPOSE = read_compose()
ALL: dict[str, dict[str, Any]] = COMPOSE["services"]
SCRIPTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
CONFIG_TYPES: dict[str, type[ServiceConfig]] = {
    name: getattr(importlib.import_module(f"dsec_{name}.config"), f"{name.title()}Config")
    for name in SERVICES
}


def _config(name: str) -> ServiceConfig:
    """Return the configuration that the file gives a service; a word it does not know fails."""
    service = ALL[name]
    program, *flags = service["command"]
    assert program == f"dsec-{name}"
    return load_config(CONFIG_TYPES[name], name, flags, service["environment"])


def _compose_is_here() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(["docker", "compose", "version"], check=False, capture_output=True)
    return asked.returncode == 0


def _mounts(name: str) -> dict[str, str]:
    """Return what is mounted in a service, by its place there: a volume's or a host path."""
    mounts = {}
    for volume in ALL[name].get("volumes", []):
        source, _, rest = volume.rpartition(":") if volume.count(":") == 1 else ("", "", volume)
        if volume.count(":") == 2:
            source, rest, mode = volume.split(":")
            assert mode == "ro"
        mounts[rest] = source
    return mounts


def test_it_holds_the_five_services_and_all_that_they_stand_on() -> None:
    assert set(ALL) == {"auth", "nats", "kafka", *SERVICES}
    for name in (*SERVICES, "auth"):
        assert ALL[name]["image"] == "dsec:latest"
        assert ALL[name]["command"][0] in SCRIPTS
    if _compose_is_here():
        checked = subprocess.run(
            ["docker", "compose", "--file", str(COMPOSE_FILE), "config", "--quiet"],
            check=False,
            capture_output=True,
            text=True,
        )
        assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_every_flag_and_variable_of_a_service_is_a_setting_that_it_knows(name: str) -> None:
    config = _config(name)
    known = {f"DSEC_{field.upper()}" for field in config.__struct_fields__}
    assert set(ALL[name]["environment"]) <= known
    assert config.nats_servers == ("nats://nats:4222",)
    assert config.kafka_bootstrap == "kafka:9092"
    # Compose waits for the drain, and the health check asks where the service listens.
    assert float(ALL[name]["stop_grace_period"].removesuffix("s")) > config.drain_timeout_s
    assert ALL[name]["healthcheck"]["test"][-1] == f"http://127.0.0.1:{config.http_port}/readyz"
    assert ALL[name]["healthcheck"]["test"][-2] == "dsec_common.health"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_waits_for_nats_and_kafka_and_can_be_scaled_by_itself(name: str) -> None:
    service = ALL[name]
    assert service["depends_on"] == {
        "nats": {"condition": "service_healthy"},
        "kafka": {"condition": "service_healthy"},
    }
    # What would make two containers of a service collide.
    assert not {"container_name", "ports", "hostname"} & set(service)
    named = [source for source in _mounts(name).values() if source and source != "config"]
    assert named == [] or name == "sandboxd"


def test_keys_are_made_where_only_their_maker_sees_them_and_credentials_where_all_read() -> None:
    flags = dict(word.removeprefix("--").split("=") for word in ALL["auth"]["command"][3:])
    mounts = _mounts("auth")
    assert mounts[flags["directory"]] == "operator"
    assert flags["directory"] == f"{ALL['auth']['environment']['DSEC_HOME']}/auth"
    config_directory = PurePosixPath(flags["nats-config"]).parent
    assert mounts[str(config_directory)] == "config"
    for name in (*SERVICES, "nats", "kafka"):
        assert "operator" not in _mounts(name).values()
    for name in (*SERVICES, "nats"):
        assert f"config:{config_directory}:ro" in ALL[name]["volumes"]
    for name in SERVICES:
        given = PurePosixPath(_config(name).nats_credentials)
        assert str(given.parent) == flags["credentials"]
        user = f"{name}-{flags['node']}" if name == "sandboxd" else name
        assert given.name == f"{user}.creds"


def test_nats_reads_the_configuration_and_keeps_its_data_where_auth_says() -> None:
    flags = dict(word.removeprefix("--").split("=") for word in ALL["auth"]["command"][3:])
    assert ALL["nats"]["command"] == ["--config", flags["nats-config"]]
    assert _mounts("nats")[flags["nats-data"]] == "nats"
    assert ALL["nats"]["depends_on"]["auth"] == {"condition": "service_completed_successfully"}


def test_what_a_node_keeps_lies_in_volumes() -> None:
    node = _config("sandboxd")
    mounts = _mounts("sandboxd")
    assert mounts[node.state_directory] == "sandboxd"
    assert mounts[getattr(node, "layers_directory")] == "layers"  # noqa: B009  the type is generic
    [(temporary, _)] = [place.split(":") for place in ALL["sandboxd"]["tmpfs"]]
    assert PurePosixPath(temporary) in PurePosixPath(getattr(node, "run_directory")).parents  # noqa: B009  as above
    assert mounts.get(_config("tracer").state_directory) != ""
    assert _mounts("tracer")[_config("tracer").state_directory] == ""


def test_only_sandboxd_is_privileged_and_only_the_cgroup_tree_is_the_hosts() -> None:
    privileged = {name for name, service in ALL.items() if service.get("privileged")}
    assert privileged == {"sandboxd"}
    assert ALL["sandboxd"]["cgroup"] == "host"
    host_paths = {
        source for name in ALL for source in _mounts(name).values() if source.startswith(("/", "."))
    }
    assert host_paths == {"/sys/fs/cgroup"}
    for service in ALL.values():
        assert not {"network_mode", "pid", "ipc", "devices", "cap_add"} & set(service)
        for published in service.get("ports", []):
            assert published.startswith("127.0.0.1:")


def test_every_volume_is_declared_and_used() -> None:
    used = {
        source
        for name in ALL
        for source in _mounts(name).values()
        if source and not source.startswith("/")
    }
    assert used == set(COMPOSE["volumes"])


def test_nats_and_kafka_are_the_versions_that_everything_else_is_tested_with() -> None:
    version = subprocess.run(
        [find_nats_server(), "--version"], capture_output=True, check=True, text=True
    ).stdout
    found = re.search(r"v(\d+\.\d+)\.", version)
    assert found is not None
    assert ALL["nats"]["image"] == f"nats:{found[1]}-alpine"
    assert ALL["kafka"]["image"] == f"apache/kafka:{KAFKA_VERSION}"


def test_kafka_listens_where_it_says_that_it_does() -> None:
    settings = ALL["kafka"]["environment"]

    def listeners(text: str) -> dict[str, str]:
        return dict(part.split("://") for part in text.split(","))

    listens = listeners(settings["KAFKA_LISTENERS"])
    for name, address in listeners(settings["KAFKA_ADVERTISED_LISTENERS"]).items():
        assert address.rpartition(":")[2] == listens[name].removeprefix(":")
    protocols = dict(
        part.split(":") for part in settings["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")
    )
    assert set(protocols) == set(listens)
    assert settings["KAFKA_LOG_DIRS"] in _mounts("kafka")
    advertised = listeners(settings["KAFKA_ADVERTISED_LISTENERS"])["EXTERNAL"]
    assert f"{advertised}:{advertised.rpartition(':')[2]}" in ALL["kafka"]["ports"]


def test_tests_of_containers_understand_every_word_of_a_service() -> None:
    for name in (*SERVICES, "auth"):
        assert run_options(ALL[name], {})


def test_the_image_is_made_of_the_source_alone() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    # Any hidden file: the repository's history, environments, caches, keys of a running stack.
    assert ".*" in ignored
    for needed in ("libs", "services", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        assert needed not in ignored
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    extras = re.search(r"services = \(([^)]*)\)", dockerfile)
    assert extras is not None
    assert set(re.findall(r"'(\w+)'", extras[1])) == set(SERVICES)
    assert yaml.safe_load(COMPOSE_FILE.read_text())["x-service"]["build"] == "."
