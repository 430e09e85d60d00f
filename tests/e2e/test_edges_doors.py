"""What rude users send to every door, through a plain NATS client and JSON.

Every answer is a typed error that says what is wrong, and everything works on afterwards.
"""

from __future__ import annotations

import asyncio
import json
import math
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from dsec import DSecClient, DsecError, ErrorCode, Sandbox
from dsec_common import subjects
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import CONTENT_TYPE_HEADER, JSON
from layer_builders import file_member, link_member, member, tar_bytes
from stack import Stack

DEEP = b"[" * 50_000 + b"]" * 50_000
LONG = "x" * 300
#: What no name, id or reference may be.
BAD_TOKENS = ("a.b", "*", ">", "a b", "", LONG, "\0", "../../etc", "ü")


@pytest.fixture
async def raw(stack: Stack) -> AsyncIterator[Client]:
    client = await nats.connect(
        stack.context.nats_servers[0], user_credentials=stack.context.credentials
    )
    yield client
    await client.close()


@pytest.fixture
async def sandbox(stack: Stack, base: str) -> AsyncIterator[Sandbox]:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        yield sandbox


async def ask(raw: Client, subject: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
    """Send one request in JSON and return the answer's body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = await raw.request(subject, data, timeout=20, headers={CONTENT_TYPE_HEADER: JSON})
    answer: dict[str, Any] = json.loads(reply.data)
    return answer


async def refused(raw: Client, subject: str, body: dict[str, Any] | bytes, *codes: str) -> None:
    answer = await ask(raw, subject, body)
    told = f"{subject} {str(body)[:200]}: {answer}"
    assert answer["type"] == "ErrorReply", told
    assert answer["code"] in codes, told
    assert len(answer["message"]) > 20, told
    assert "Error" not in answer["message"], f"a Python name is no help: {told}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"base": null}',
        b'{"type": "DeleteSandbox", "base": "host@1"}',
        b'{"base": "host@1", "x": ' + DEEP + b"}",
        b'{"base": "host@1", "limits": {"pids": 1' + b"0" * 30 + b"}}",
        b'{"base": "host@1", "limits": {"cpus": 1' + b"0" * 400 + b"}}",
        b'{"base": "host@1", "limits": {"cpus": NaN}}',
        b'{"base": "host@1", "limits": {"cpus": -1}}',
        b'{"base": "host@1", "limits": {"pids": true}}',
        b'{"base": "host@1", "limits": {"disk_bytes": 0}}',
        b'{"base": "host@1", "limits": {"inodes": -5}}',
        b'{"base": "host@1", "limits": {"cu": -1}}',
        b'{"base": "host@1", "ttl_s": -1}',
        b'{"base": "host@1", "timeout_s": -1}',
        b'{"base": "host@1", "timeout_s": 0}',
        b'{"base": "host@1", "env": {"A": "a\\u0000b"}}',
        b'{"base": "host@1", "env": {"": "x"}}',
        b'{"base": "host@1", "labels": {"a": "\\ud800"}}',
        b'{"base": "host@1", "agent": "a\\nb"}',
        json.dumps({"base": "host@1", "idempotency_key": LONG}).encode(),
        json.dumps({"base": "host@1", "message_id": "m" * 500_000}).encode(),
        json.dumps({"base": "host@1", "toolkits": ["host@1"] * 1000}).encode(),
        json.dumps({"base": "host@1", "env": {f"A{n}": "x" for n in range(60_000)}}).encode(),
        json.dumps({"base": "host@1", "labels": {f"A{n}": "x" for n in range(60_000)}}).encode(),
    ],
    ids=lambda body: body[:60].decode(errors="replace"),
)
async def test_a_create_request_that_makes_no_sense_is_invalid(
    stack: Stack, base: str, raw: Client, body: bytes
) -> None:
    del stack, base
    await refused(raw, subjects.sandbox_create("default"), body, "invalid")


async def test_names_that_are_no_names_are_invalid_at_every_door(
    stack: Stack, base: str, raw: Client, sandbox: Sandbox
) -> None:
    node = stack.node_names[0]
    create = subjects.sandbox_create("default")
    own = ScopedId.parse(sandbox.id)
    for bad in BAD_TOKENS:
        # A layer's name and version may hold dots; no layer is called so.
        unknown = ("invalid", "not_found") if bad == "a.b" else ("invalid",)
        await refused(raw, create, {"base": bad}, *unknown)
        await refused(raw, create, {"base": f"host@{bad}"}, *unknown)
        if bad:
            await refused(raw, create, {"base": base, "workspace": bad}, *unknown)
        if bad not in {"", "a.b"}:
            await refused(raw, create, {"base": base, "rollout_id": bad}, "invalid")
            await refused(raw, subjects.trace("default", "get"), {"sandbox_id": bad}, "invalid")
        inspect = subjects.layer("default", node, "inspect")
        await refused(raw, inspect, {"reference": bad}, *unknown)
        await refused(raw, inspect, {"reference": f"sha256:{bad}"}, "invalid")
        await refused(raw, subjects.layer("default", node, "remove"), {"reference": bad}, *unknown)
        piece = {"upload_id": bad, "offset": 0, "data": ""}
        await refused(raw, subjects.layer("default", node, "upload"), piece, "invalid")
        file = {"path": "/f", "upload_id": bad, "data": ""}
        await refused(raw, subjects.sandbox("default", own, "write_file"), file, "invalid")
        await refused(
            raw, subjects.node("default", "inspect"), {"node": bad}, "invalid", "not_found"
        )
    async with stack.client() as client:
        for bad in BAD_TOKENS:
            for use in (client.sandbox, client.rollouts.get):
                with pytest.raises(DsecError) as caught:
                    use(f"{node}.{bad}")
                assert caught.value.code is ErrorCode.INVALID
            with pytest.raises(DsecError) as caught:
                await client.node(bad)
            assert caught.value.code is ErrorCode.INVALID
    assert (await sandbox.exec("echo well")).stdout == b"well\n"


@pytest.mark.parametrize(
    ("verb", "body", "codes"),
    [
        ("exec", {"argv": []}, {"invalid"}),
        ("exec", {"argv": [""]}, {"invalid"}),
        ("exec", {"argv": ["a\0b"]}, {"invalid"}),
        ("exec", {"argv": ["true"] * 5000}, {"invalid"}),
        ("exec", {"argv": ["true"], "timeout_s": -1}, {"invalid"}),
        ("exec", {"argv": ["true"], "timeout_s": 1e300}, {"invalid"}),
        ("exec", {"argv": ["true"], "output_limit_bytes": -1}, {"invalid"}),
        ("exec", {"argv": ["true"], "output_limit_bytes": 2**40}, {"invalid"}),
        ("exec", {"argv": ["true"], "stdin": "no base64!"}, {"invalid"}),
        ("exec", {"argv": ["true"], "env": {"A=B": "c"}}, {"invalid"}),
        ("exec", {"argv": ["true"], "env": {"A": "x" * 140_000}}, {"invalid"}),
        ("exec", {"argv": ["true"], "cwd": "relative"}, {"invalid"}),
        ("exec", {"argv": ["true"], "cwd": "/nowhere"}, {"not_found"}),
        ("exec", {"argv": ["true"], "user": "nobody-here"}, {"not_found"}),
        ("exec", {"argv": ["true"], "user": "70000:70000"}, {"invalid"}),
        ("exec", {"argv": ["true"], "user": "0:99999999999"}, {"invalid"}),
        ("exec", {"argv": ["/etc/passwd"]}, {"denied"}),
        ("exec", {"argv": ["true"], "cause_id": "c" * 900_000}, {"invalid"}),
        ("read_file", {"path": "relative"}, {"invalid"}),
        ("read_file", {"path": "/etc"}, {"invalid"}),
        ("read_file", {"path": "/dev/zero"}, {"invalid"}),
        ("read_file", {"path": "/etc/passwd\0"}, {"invalid"}),
        ("read_file", {"path": "/" + "a" * 5000}, {"invalid"}),
        ("read_file", {"path": "/etc/passwd", "offset": -1}, {"invalid"}),
        ("read_file", {"path": "/etc/passwd", "offset": 2**63 - 1}, {"invalid"}),
        ("read_file", {"path": "/etc/passwd", "offset": 2**64 - 1}, {"invalid"}),
        ("read_file", {"path": "/etc/passwd", "length": 0}, {"invalid"}),
        ("read_file", {"path": "/etc/passwd", "length": 2**40}, {"invalid"}),
        ("write_file", {"path": "/f", "upload_id": "a", "data": "", "mode": -1}, {"invalid"}),
        ("write_file", {"path": "/f", "upload_id": "a", "data": "", "mode": 0o4755}, {"invalid"}),
        ("write_file", {"path": "/f", "upload_id": "a", "data": "", "offset": -1}, {"invalid"}),
        ("write_file", {"path": "/f", "upload_id": "a", "size_bytes": -1}, {"invalid"}),
        ("write_file", {"path": "/f/", "upload_id": "a", "data": ""}, {"invalid"}),
        ("write_file", {"path": "/run/dsec/f", "upload_id": "a", "data": ""}, {"denied"}),
        ("list_directory", {"path": "/", "limit": -1}, {"invalid"}),
        ("make_directory", {"path": "/d", "mode": 0o7777}, {"invalid"}),
        ("stat_file", {"path": ""}, {"invalid"}),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else None,
)
async def test_a_request_to_a_sandbox_that_makes_no_sense_is_refused(
    raw: Client, sandbox: Sandbox, verb: str, body: dict[str, Any], codes: set[str]
) -> None:
    subject = subjects.sandbox("default", ScopedId.parse(sandbox.id), verb)
    await refused(raw, subject, body, *codes)
    assert (await sandbox.exec(["true"])).ok


async def test_a_body_nested_without_end_is_refused_at_every_door(
    stack: Stack, raw: Client, sandbox: Sandbox
) -> None:
    own, node = ScopedId.parse(sandbox.id), stack.node_names[0]
    rollout = (await ask(raw, subjects.rollout_open("default"), {}))["rollout_id"]
    doors = (
        *(subjects.sandbox("default", own, verb) for verb in subjects.SANDBOX_VERBS),
        *(subjects.layer("default", node, verb) for verb in subjects.LAYER_VERBS),
        *(
            subjects.rollout("default", ScopedId.parse(rollout), verb)
            for verb in subjects.ROLLOUT_VERBS
        ),
        *(subjects.group("default", "s0", verb) for verb in subjects.GROUP_VERBS),
        *(subjects.rollout_group("default", verb) for verb in ("take_group", "open_group")),
        *(subjects.node("default", verb) for verb in ("list", "inspect")),
        subjects.sandbox_create("default"),
        subjects.sandbox_list("default"),
        subjects.rollout_open("default"),
        subjects.trace("default", "get"),
    )
    for door in doors:
        await refused(raw, door, b'{"nested": ' + DEEP + b"}", "invalid")


async def test_a_poisonous_queued_request_does_not_stop_those_behind_it(
    stack: Stack, base: str, raw: Client
) -> None:
    headers = {CONTENT_TYPE_HEADER: JSON}
    for poison in (
        b'{"base": "host@1", "x": ' + DEEP + b"}",
        b'{"base": "host@1", "limits": {"memory_bytes": 1' + b"0" * 30 + b"}}",
        b'{"base": "host@1", "message_id": "a.*.>"}',
        b"\xff",
    ):
        for _ in range(20):
            queue = subjects.queue_sandbox_create("default")
            await raw.request(queue, poison, timeout=5, headers=headers)
    async with (
        stack.client() as client,
        await client.queue_sandbox(base, timeout_s=20) as sandbox,
    ):
        assert (await sandbox.exec("echo well")).stdout == b"well\n"


async def test_more_sandboxes_than_one_message_can_name_are_all_listed(
    stack: Stack, base: str
) -> None:
    # 40 KiB of labels each: a few dozen are more than NATS takes in one message.
    labels = {f"{number:02d}" + "k" * 250: "v" * 256 for number in range(64)}
    async with stack.client() as client:
        made = [
            await client.create_sandbox(
                base, cpus=0.01, memory_bytes=4 << 20, disk_bytes=1 << 20, labels=labels
            )
            for _ in range(40)
        ]
        try:
            listed = [info.sandbox_id for info in await client.list_sandboxes(labels=labels)]
            assert listed == [sandbox.id for sandbox in made]
        finally:
            for sandbox in made:
                await sandbox.delete()
        ended = await client.list_sandboxes(labels=labels, include_ended=True)
        assert [info.sandbox_id for info in ended] == listed


SDK_MISTAKES: dict[str, Callable[[DSecClient, Sandbox], Awaitable[object]]] = {
    "memory beyond 64 bits": lambda it, _: it.create_sandbox("host@1", memory_bytes=10**30),
    "env that is no text": lambda it, _: it.create_sandbox("host@1", env={"A": "\ud800"}),
    "key that is no text": lambda it, _: it.create_sandbox("host@1", idempotency_key="\ud800"),
    "base that is none": lambda it, _: it.create_sandbox(None),  # type: ignore[arg-type]
    "two mebibytes": lambda it, _: it.create_sandbox("host@1", env={"A": "x" * (2 << 20)}),
    "timeout nan": lambda it, _: it.create_sandbox("host@1", timeout_s=math.nan),
    "timeout endless": lambda it, _: it.create_sandbox("host@1", timeout_s=math.inf),
    "queue negative": lambda it, _: it.queue_sandbox("host@1", timeout_s=-1.0),
    "queue nan": lambda it, _: it.queue_sandbox("host@1", timeout_s=math.nan),
    "queue two mebibytes": lambda it, _: it.queue_sandbox("host@1", env={"A": "x" * (2 << 20)}),
    "command that is none": lambda _, it: it.exec(None),  # type: ignore[arg-type]
    "command that is no text": lambda _, it: it.exec("echo \udc80"),
    "command of two mebibytes": lambda _, it: it.exec("x" * (2 << 20)),
    "command negative": lambda _, it: it.exec("true", timeout_s=-100.0),
    "command nan": lambda _, it: it.exec("true", timeout_s=math.nan),
    "command endless": lambda _, it: it.exec("true", timeout_s=math.inf),
    "path that is no text": lambda _, it: it.read_file("/\udc80"),
    "mode beyond 64 bits": lambda _, it: it.write_file("/f", b"", mode=10**30),
    "labels that are no text": lambda it, _: it.list_sandboxes(labels={"\ud800": ""}),
    "layer that is no text": lambda it, _: it.layers.inspect("\ud800"),
    "layer of another kind": lambda it, _: it.layers.import_tar(
        __file__, kind="nope", name="a", version="1"
    ),
    "layer that is no archive": lambda it, _: it.layers.import_tar(
        __file__, kind="workspace", name="no-archive", version="1"
    ),
}


@pytest.mark.parametrize("mistake", SDK_MISTAKES.values(), ids=SDK_MISTAKES)
async def test_a_mistake_with_the_sdk_is_a_typed_error(
    stack: Stack,
    sandbox: Sandbox,
    mistake: Callable[[DSecClient, Sandbox], Awaitable[object]],
) -> None:
    async with stack.client() as client:
        with pytest.raises(DsecError) as caught:
            async with asyncio.timeout(10):
                await mistake(client, sandbox)
    assert caught.value.code in {ErrorCode.INVALID, ErrorCode.LAYER_ERROR}, caught.value


@pytest.mark.parametrize(
    "members",
    [
        [file_member("../escape", b"")],
        [file_member("/absolute", b"")],
        [link_member("link", "/etc"), file_member("link/passwd", b"root::0:0")],
        [(member("dev/sda", tarfile.BLKTYPE, devmajor=8, devminor=0), b"")],
    ],
    ids=["climbs", "absolute", "through a link", "a device"],
)
async def test_a_hostile_archive_makes_no_layer(
    stack: Stack, tmp_path: Path, members: list[Any]
) -> None:
    archive = tmp_path / "hostile.tar"
    archive.write_bytes(tar_bytes(members))
    async with stack.client() as client:
        with pytest.raises(DsecError) as caught:
            await client.layers.import_tar(archive, kind="workspace", name="hostile", version="1")
        assert caught.value.code is ErrorCode.LAYER_ERROR, caught.value
        assert "hostile@1" not in [layer.reference for layer in await client.layers.list()]


@pytest.mark.parametrize(
    "text",
    ["a\r\nNats-Service-Error-Code: 200\r\n\r\n", "a\nb", "\u2028", "é" * 3000, "a\x7f\x1b[2J"],
    ids=["header", "new line", "separator", "long", "terminal"],
)
async def test_a_users_text_in_an_error_is_only_text(
    raw: Client, sandbox: Sandbox, text: str
) -> None:
    own = ScopedId.parse(sandbox.id)
    headers = {CONTENT_TYPE_HEADER: JSON}
    for verb, body in (
        ("exec", {"argv": [text]}),
        ("exec", {"argv": ["true"], "cwd": f"/{text}"}),
        ("exec", {"argv": ["true"], "user": text}),
        ("read_file", {"path": f"/{text}"}),
        ("list_directory", {"path": f"/{text}"}),
    ):
        subject = subjects.sandbox("default", own, verb)
        reply = await raw.request(subject, json.dumps(body).encode(), timeout=20, headers=headers)
        answer = json.loads(reply.data)
        assert answer["code"] in {"invalid", "not_found"}, answer
        assert reply.headers is not None
        assert set(reply.headers) == {
            *(CONTENT_TYPE_HEADER, "traceparent"),
            *("Nats-Service-Error", "Nats-Service-Error-Code"),
        }
        assert reply.headers["Nats-Service-Error-Code"] in {"400", "404"}
