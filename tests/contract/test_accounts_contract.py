"""What accounts promise: keys kept, files private and whole, projects added to a running server."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec_common import subjects
from dsec_common.accounts import AuthDirectory
from dsec_common.accounts_jwt import (
    Identity,
    KeyKind,
    decode_claims,
    encode_claims,
    read_credentials,
)
from dsec_common.bus import Bus, Request
from dsec_common.bus_admin import announce_project, retire_project
from dsec_common.embedded.nats import NatsServer
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.base import Message


class Ping(Message, frozen=True, kw_only=True):
    pass


@pytest.fixture
async def running() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


async def pong(request: Request[Ping]) -> Ping:
    return request.message


def tree(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


# --- Tokens ---------------------------------------------------------------------------------------


def test_claims_survive_signing_and_reading() -> None:
    issuer = Identity.new(KeyKind.OPERATOR)
    token = encode_claims("ASUBJECT", "name", {"type": "account", "version": 2}, issuer)
    claims = decode_claims(token, issuer.public_key)
    assert (claims["sub"], claims["name"]) == ("ASUBJECT", "name")
    assert claims["nats"] == {"type": "account", "version": 2}


def test_claims_changed_after_signing_are_refused() -> None:
    issuer = Identity.new(KeyKind.OPERATOR)
    header, body, signature = encode_claims("A", "n", {}, issuer).split(".")
    other = encode_claims("B", "n", {}, issuer).split(".")[1]
    for token in (f"{header}.{other}.{signature}", f"{header}.{body}.{'A' * 86}", "", "a.b", "..."):
        with pytest.raises(DsecError) as caught:
            decode_claims(token, issuer.public_key)
        assert caught.value.code is ErrorCode.INVALID


def test_claims_of_another_issuer_are_refused() -> None:
    issuer, stranger = Identity.new(KeyKind.OPERATOR), Identity.new(KeyKind.OPERATOR)
    with pytest.raises(DsecError) as caught:
        decode_claims(encode_claims("A", "n", {}, stranger), issuer.public_key)
    assert caught.value.code is ErrorCode.INVALID


@pytest.mark.parametrize("seed", ["", "S", "no key", "SOAAAA", "ä"])
def test_a_damaged_key_is_invalid(seed: str) -> None:
    with pytest.raises(DsecError) as caught:
        Identity(seed)
    assert caught.value.code is ErrorCode.INVALID


# --- The directory --------------------------------------------------------------------------------


def test_opening_again_changes_no_file(tmp_path: Path) -> None:
    auth = AuthDirectory.create_or_open(tmp_path)
    auth.create_project("alpha")
    auth.service_credentials("sandboxd", "node-1")
    before = tree(tmp_path)
    again = AuthDirectory.create_or_open(tmp_path)
    again.service_credentials("sandboxd", "node-1")
    assert tree(tmp_path) == before
    assert again.projects() == ["alpha", "default"]


def test_only_the_owner_can_read_any_of_it(tmp_path: Path) -> None:
    directory = tmp_path / "auth"
    AuthDirectory.create_or_open(directory)
    for path in (directory, *directory.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_claims_of_an_older_version_are_signed_again_with_the_same_keys(tmp_path: Path) -> None:
    auth = AuthDirectory.create_or_open(tmp_path)
    before = tree(tmp_path)
    operator = Identity((tmp_path / "operator.nk").read_text())
    old = encode_claims("A", "SERVICES", {"type": "account"}, operator)
    (tmp_path / "services.jwt").write_text(old)
    (tmp_path / "creds/broker.creds").write_text("damaged")
    AuthDirectory.create_or_open(tmp_path)
    after = tree(tmp_path)
    assert after["services.jwt"] != old.encode()
    assert read_credentials(auth.service_credentials("broker").read_text())
    keys = [name for name in before if name.endswith(".nk")]
    assert {name: before[name] for name in keys} == {name: after[name] for name in keys}


async def test_processes_that_open_it_at_once_agree_on_every_key(tmp_path: Path) -> None:
    program = (
        "import sys; from dsec_common.accounts import AuthDirectory;"
        "auth = AuthDirectory.create_or_open(sys.argv[1]);"
        "print(*sorted(path.read_text() for path in auth.path.rglob('*.nk')))"
    )
    directory = str(tmp_path / "auth")
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, directory, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(3)
    ]
    outputs = await asyncio.gather(*(process.communicate() for process in processes))
    # An early one may not yet see the keys that a later one makes, but never other ones.
    seen = {key for output, _ in outputs for key in output.split()}
    final = {body for name, body in tree(tmp_path / "auth").items() if name.endswith(".nk")}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert seen == final
    assert not list((tmp_path / "auth").rglob(".new-*"))


@pytest.mark.parametrize("name", ["", "a.b", "*", ">", "a b", "_sys", "A", "x" * 300, "../up", "ä"])
def test_an_impossible_project_name_is_invalid_and_makes_nothing(tmp_path: Path, name: str) -> None:
    auth = AuthDirectory.create_or_open(tmp_path)
    before = tree(tmp_path)
    for call in (auth.create_project, auth.project, auth.remove_project):
        with pytest.raises(DsecError) as caught:
            call(name)
        assert caught.value.code is ErrorCode.INVALID
    assert tree(tmp_path) == before


@pytest.mark.parametrize("node", ["", "a.b", "*", ">", "a/b", "x" * 300])
def test_an_impossible_node_name_is_invalid(tmp_path: Path, node: str) -> None:
    auth = AuthDirectory.create_or_open(tmp_path)
    with pytest.raises(DsecError) as caught:
        auth.service_credentials("sandboxd", node)
    assert caught.value.code is ErrorCode.INVALID


def test_a_project_exists_once_and_an_unknown_one_is_named_with_the_closest(
    tmp_path: Path,
) -> None:
    auth = AuthDirectory.create_or_open(tmp_path)
    auth.create_project("alpha")
    with pytest.raises(DsecError) as caught:
        auth.create_project("alpha")
    assert caught.value.code is ErrorCode.CONFLICT
    with pytest.raises(DsecError) as caught:
        auth.project("alhpa")
    assert caught.value.code is ErrorCode.NOT_FOUND
    assert "alpha" in caught.value.message


def test_only_the_services_account_has_jetstream(tmp_path: Path) -> None:
    auth = AuthDirectory.create_or_open(tmp_path)
    operator = Identity((tmp_path / "operator.nk").read_text()).public_key
    services = decode_claims((tmp_path / "services.jwt").read_text(), operator)
    project = decode_claims(auth.project_token("default"), operator)
    assert services["nats"]["limits"]["disk_storage"] == -1
    assert "disk_storage" not in project["nats"]["limits"]


# --- A running server -----------------------------------------------------------------------------


async def test_a_new_project_works_at_once_and_a_removed_one_no_longer(
    running: NatsForTests,
) -> None:
    servers = (running.server.url,)
    listing = subjects.sandbox_list("alpha")
    async with running.service("scheduler") as scheduler:
        await scheduler.serve(subjects.any_project("sandbox.list"), Ping, pong)
        await scheduler.flush()
        running.auth.create_project("alpha")
        await announce_project(running.auth, servers, "alpha")
        await announce_project(running.auth, servers, "alpha")
        project = await Bus.connect(running.project_config("alpha"))
        assert await project.request(listing, Ping(), Ping)
        lost = asyncio.Event()
        project.on_disconnect(lost.set)
        await retire_project(running.auth, servers, "alpha")
        async with asyncio.timeout(20):
            await lost.wait()
        await project.close()
    assert running.auth.projects() == ["default"]


async def test_projects_outlive_a_restart_of_the_server(running: NatsForTests) -> None:
    running.auth.create_project("alpha")
    await announce_project(running.auth, (running.server.url,), "alpha")
    await running.server.stop()
    await running.server.start()
    async with running.project("alpha") as alpha, running.project() as default:
        assert alpha.connected
        assert default.connected


async def test_a_project_of_the_same_name_made_anew_is_another_account(
    running: NatsForTests, tmp_path: Path
) -> None:
    servers = (running.server.url,)
    running.auth.create_project("alpha")
    await announce_project(running.auth, servers, "alpha")
    old = tmp_path / "old.creds"
    old.write_bytes(running.auth.project("alpha").read_bytes())
    await retire_project(running.auth, servers, "alpha")
    running.auth.create_project("alpha")
    await announce_project(running.auth, servers, "alpha")
    config = msgspec.structs.replace(
        running.project_config("alpha"), credentials_path=str(old), connect_timeout_s=2.5
    )
    with pytest.raises(DsecError) as caught:
        await Bus.connect(config)
    assert caught.value.code is ErrorCode.DENIED
    async with running.project("alpha") as alpha:
        assert alpha.connected


async def test_announcing_to_an_absent_server_is_unavailable(tmp_path: Path) -> None:
    auth = AuthDirectory.create_or_open(tmp_path)
    async with NatsServer(tmp_path / "nats") as server:
        url = server.url
    with pytest.raises(DsecError) as caught:
        await announce_project(auth, (url,), "default")
    assert caught.value.code is ErrorCode.UNAVAILABLE


# --- The embedded server --------------------------------------------------------------------------


async def test_a_server_keeps_its_port_over_a_restart_and_leaves_no_process(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    first, pid = server.url, server.pid
    await server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await server.start()
    assert server.url == first
    await server.kill()
    assert not server.running
    assert not list(tmp_path.glob("*.ports"))  # noqa: ASYNC240  a test may wait for a listing


async def test_a_server_ends_with_its_parent_even_when_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from dsec_common.embedded.nats import NatsServer\n"
        "async def main():\n"
        "    server = NatsServer(sys.argv[1]); await server.start()\n"
        "    print(server.pid, flush=True); await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    server = os.pidfd_open(int(await parent.stdout.readline()))
    try:
        parent.kill()
        await parent.wait()
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(server, ended.set)
        async with asyncio.timeout(10):
            await ended.wait()
        asyncio.get_running_loop().remove_reader(server)
    finally:
        os.close(server)


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "one") as one:
        taken = NatsServer(tmp_path / "two", port=one.port)
        with pytest.raises(DsecError) as caught:
            await taken.start()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert "address already in use" in caught.value.message
    assert not taken.running
