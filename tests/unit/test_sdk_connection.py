from __future__ import annotations

from pathlib import Path

import pytest

from dsec.connection import (
    Context,
    project_of_credentials,
    read_context,
    resolve_connection,
    state_directory,
    write_context,
)
from dsec_common.accounts import AuthDirectory
from dsec_common.errors import DsecError, ErrorCode


@pytest.fixture
def auth(tmp_path: Path) -> AuthDirectory:
    directory = AuthDirectory.create_or_open(tmp_path / "auth")
    directory.create_project("team-a")
    return directory


def test_without_any_source_the_error_says_how_to_get_a_platform(tmp_path: Path) -> None:
    with pytest.raises(DsecError, match="dsec up") as caught:
        resolve_connection(directory=tmp_path, environment={})
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert not caught.value.retryable
    assert str(tmp_path) in caught.value.message
    assert "DSEC_NATS_SERVERS" in caught.value.message


def test_a_running_platform_is_found_by_its_context(tmp_path: Path, auth: AuthDirectory) -> None:
    context = Context(
        nats_servers=("nats://127.0.0.1:1",),
        credentials=str(auth.project("default")),
        kafka_bootstrap="127.0.0.1:2",
    )
    write_context(tmp_path, context)
    assert resolve_connection(directory=tmp_path, environment={}) == context


def test_arguments_win_over_the_environment_which_wins_over_the_context(
    tmp_path: Path, auth: AuthDirectory
) -> None:
    write_context(tmp_path, Context(nats_servers=("nats://context:1",), kafka_bootstrap="c:1"))
    environment = {
        "DSEC_NATS_SERVERS": "nats://a:1, nats://b:1",
        "DSEC_NATS_CREDENTIALS": str(auth.project("team-a")),
        "DSEC_KAFKA_BOOTSTRAP": "env:1",
    }
    found = resolve_connection(directory=tmp_path, environment=environment)
    assert found.nats_servers == ("nats://a:1", "nats://b:1")
    assert found.project == "team-a"
    assert found.kafka_bootstrap == "env:1"
    named = resolve_connection(
        ["nats://x:1"],
        auth.project("default"),
        kafka_bootstrap="arg:1",
        directory=tmp_path,
        environment=environment,
    )
    assert named.nats_servers == ("nats://x:1",)
    assert named.project == "default"
    assert named.kafka_bootstrap == "arg:1"


def test_the_project_is_the_credentials_own_and_no_other_can_be_claimed(
    auth: AuthDirectory,
) -> None:
    credentials = auth.project("team-a")
    assert project_of_credentials(credentials) == "team-a"
    with pytest.raises(DsecError, match="belongs to project 'team-a', not 'default'"):
        resolve_connection("nats://x:1", credentials, project="default", environment={})


def test_a_services_credentials_are_not_a_projects(auth: AuthDirectory) -> None:
    for role in ("broker", "scheduler", "chronus", "tracer"):
        with pytest.raises(DsecError, match="not a project's"):
            project_of_credentials(auth.service_credentials(role))
    with pytest.raises(DsecError, match="not a project's"):
        project_of_credentials(auth.service_credentials("sandboxd", "node-1"))


@pytest.mark.parametrize(
    "text",
    ["", "no credentials", "-----BEGIN NATS USER JWT-----\nabc\n------END NATS USER JWT------\n"],
)
def test_a_file_that_holds_no_credentials_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.creds"
    path.write_text(text)
    with pytest.raises(DsecError, match="not a NATS credentials file"):
        project_of_credentials(path)
    with pytest.raises(DsecError, match="cannot read the credentials file"):
        project_of_credentials(tmp_path / "missing.creds")


def test_a_broken_context_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "context.json").write_text("{")
    with pytest.raises(DsecError, match=r"context\.json"):
        read_context(tmp_path)


def test_the_state_directory_follows_dsec_home_then_xdg_then_home() -> None:
    home = {"DSEC_HOME": "/srv/dsec", "XDG_STATE_HOME": "/x"}
    assert state_directory(home) == Path("/srv/dsec")
    assert state_directory({"XDG_STATE_HOME": "/x"}) == Path("/x/dsec")
    assert state_directory({}) == Path("~/.local/state/dsec").expanduser()
