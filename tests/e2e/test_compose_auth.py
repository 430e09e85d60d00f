"""``dsec auth init``: a NATS of one's own obeys the same operator as that of ``dsec up``."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsec_common import health
from dsec_common.bus import Bus, BusConfig
from dsec_common.embedded.nats import find_nats_server
from dsec_common.embedded.process import Child, free_port
from dsec_common.errors import DsecError, ErrorCode


class OwnNats:
    """A state directory, and a NATS server that is started with what the command wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / "out/nats.conf"
        self.port, self.monitor_port = free_port(), free_port()
        self.monitor = f"http://127.0.0.1:{self.monitor_port}/healthz"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def dsec(self, *arguments: str, servers: str = "") -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "DSEC_HOME": str(self.directory / "home")}
        if servers:
            environment["DSEC_NATS_SERVERS"] = servers
        return subprocess.run(
            [sys.executable, "-m", "dsec.cli.main", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )

    def auth_init(self, *arguments: str) -> dict[str, Any]:
        done = self.dsec(
            *("auth", "init", "--json", f"--nats-config={self.config}"),
            f"--nats-listen=127.0.0.1:{self.port}",
            f"--nats-monitor=127.0.0.1:{self.monitor_port}",
            f"--nats-data={self.directory / 'data'}",
            *arguments,
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    async def start(self) -> Child:
        server = Child.start(
            [find_nats_server(), "--config", str(self.config)],
            log_file=self.directory / "nats.log",
            cwd=self.directory,
        )
        async with asyncio.timeout(20):
            while health.main([self.monitor]) != 0:
                assert server.exit_status() is None, server.last_lines()
                await asyncio.sleep(0.02)
        return server

    async def connect(self, credentials: str | Path) -> Bus:
        return await Bus.connect(
            BusConfig(servers=(self.url,), credentials_path=str(credentials), connect_timeout_s=5.0)
        )


@pytest.fixture
def own(tmp_path: Path) -> OwnNats:
    return OwnNats(tmp_path)


def _tree(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


async def test_a_server_with_the_written_configuration_knows_services_and_projects(
    own: OwnNats,
) -> None:
    said = own.auth_init("--node=n1", "--node=n2")
    assert set(said["services"]) == {
        *("broker", "scheduler", "chronus", "tracer", "sandboxd-n1", "sandboxd-n2")
    }
    server = await own.start()
    try:
        for credentials in (*said["services"].values(), said["projects"]["default"]):
            async with await own.connect(credentials) as bus:
                assert bus.connected
        with pytest.raises(DsecError) as caught:
            await own.connect("")
        assert caught.value.code is ErrorCode.DENIED
        assert (own.directory / "data/jetstream").is_dir()
    finally:
        await server.stop(10.0)


def test_doing_it_again_changes_nothing_and_a_new_node_leaves_the_others_alone(
    own: OwnNats,
) -> None:
    first = own.auth_init("--node=n1")
    assert first["nats_config_changed"]
    before = _tree(own.directory)
    again = own.auth_init("--node=n1")
    assert not again["nats_config_changed"]
    assert _tree(own.directory) == before
    own.auth_init("--node=n2")
    assert before.items() <= _tree(own.directory).items()


def test_copies_of_credentials_hold_no_key_of_the_operator(own: OwnNats, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    said = own.auth_init(f"--credentials={copies}", "--node=n1")
    assert {path.name for path in copies.iterdir()} == {
        *("broker.creds", "scheduler.creds", "chronus.creds", "tracer.creds", "sandboxd-n1.creds")
    }
    for path in copies.iterdir():
        assert path.stat().st_mode & 0o077 == 0
        assert str(path) in said["services"].values()
    seeds = [path.read_text().strip() for path in (own.directory / "home/auth").glob("*.nk")]
    assert seeds
    for path in (*copies.iterdir(), own.config):
        assert not any(seed in path.read_text() for seed in seeds)


async def test_a_running_server_of_ones_own_learns_of_a_new_project(own: OwnNats) -> None:
    own.auth_init()
    server = await own.start()
    try:
        made = own.dsec("project", "create", "blue", "--json", servers=own.url)
        assert made.returncode == 0, made.stderr
        async with await own.connect(json.loads(made.stdout)["credentials"]) as bus:
            assert bus.connected
    finally:
        await server.stop(10.0)
    # The next configuration tells of it, too.
    assert own.auth_init()["nats_config_changed"]


def test_without_json_it_shows_whose_credentials_are_where(own: OwnNats) -> None:
    done = own.dsec("auth", "init")
    assert done.returncode == 0
    assert "service scheduler" in done.stdout
    assert "project default" in done.stdout


def test_an_impossible_node_or_place_is_said_in_one_line(own: OwnNats, tmp_path: Path) -> None:
    bad = own.dsec("auth", "init", "--node=a.b")
    assert bad.returncode == 1
    assert "a.b" in bad.stderr
    (tmp_path / "file").write_text("")
    bad = own.dsec("auth", "init", f"--directory={tmp_path / 'file/auth'}")
    assert bad.returncode == 1
    assert str(tmp_path / "file") in bad.stderr
    assert "Traceback" not in bad.stderr
