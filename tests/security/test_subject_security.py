"""What a project's user can reach with a raw NATS client: its own subjects, and nothing else.

Each test plays an attacker who holds the credentials of project ``evil`` and beside whom project
``default`` works on, undisturbed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from dsec_common import subjects
from dsec_common.accounts_jwt import Identity, KeyKind, credentials_text, encode_claims
from dsec_common.accounts_permissions import OWNED_STREAMS
from dsec_common.bus import Bus, Request, StreamSpec
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.base import Message

VICTIM = ScopedId("node-1", "victim")
QUEUE = OWNED_STREAMS["scheduler"][0]


class Any(Message, frozen=True, kw_only=True):
    pass


class Platform:
    """The services as far as an attacker meets them, and a record of all that reached them."""

    def __init__(self, running: NatsForTests, scheduler: Bus, node: Bus, neighbour: Bus) -> None:
        self.running = running
        self.scheduler = scheduler
        self.node = node
        self.neighbour = neighbour
        self.deleted: list[str] = []
        self.placed: list[Request[Any]] = []
        self.created: list[Request[Any]] = []
        self.refusals: list[str] = []

    async def serve(self) -> None:
        async def delete(request: Request[Any]) -> Any:
            self.deleted.append(request.subject)
            return Any()

        async def place(request: Request[Any]) -> Any:
            self.placed.append(request)
            return Any()

        async def create(request: Request[Any]) -> Any:
            self.created.append(request)
            return Any()

        for verb in subjects.SANDBOX_VERBS:
            await self.node.serve(subjects.any_project_sandbox("node-1", verb), Any, delete)
        await self.node.serve(subjects.node_request("node-1", "place"), Any, place)
        await self.scheduler.serve(subjects.any_project("sandbox.create"), Any, create)
        await self.scheduler.serve(subjects.any_project("sandbox.list"), Any, create)
        await self.scheduler.ensure_stream(
            StreamSpec(
                name=QUEUE, subjects=("dsec.v1.*.queue.sandbox.create",), duplicate_window_s=0.1
            )
        )
        await self.neighbour.js_publish(subjects.queue_sandbox_create("default"), Any())
        await self.settle()

    async def settle(self) -> None:
        """Return when whatever was sent has arrived wherever it can."""
        for bus in (self.neighbour, self.scheduler, self.node):
            await bus.flush()

    async def assert_unharmed(self) -> None:
        """The victim lives, the stream holds what it held, and the neighbour is served."""
        await self.settle()
        assert self.deleted == []
        assert self.placed == []
        create = subjects.sandbox_create("default")
        assert await self.neighbour.request(create, Any(), Any)
        again = await self.neighbour.js_publish(subjects.queue_sandbox_create("default"), Any())
        assert again == 2, "the stream holds the neighbour's first message and nothing else"


@pytest.fixture
async def platform() -> AsyncIterator[Platform]:
    async with (
        nats_for_tests(projects=("evil",)) as running,
        running.service("scheduler") as scheduler,
        running.service("sandboxd", "node-1") as node,
        running.project("default") as neighbour,
    ):
        platform = Platform(running, scheduler, node, neighbour)
        await platform.serve()
        yield platform


@pytest.fixture
async def evil(platform: Platform) -> AsyncIterator[Client]:
    """Yield a raw client with the attacker's credentials; it may break every habit of ours."""
    client = Client()

    async def refused(error: Exception) -> None:
        platform.refusals.append(str(error))

    await client.connect(
        platform.running.server.url,
        user_credentials=str(platform.running.auth.project("evil")),
        error_cb=refused,
        skip_subject_validation=True,
    )
    try:
        yield client
    finally:
        await client.close()
        await asyncio.sleep(0)


async def heard(client: Client, subject: str) -> list[Msg]:
    """Subscribe to ``subject`` and return the list that fills with what is heard there."""
    messages: list[Msg] = []

    async def hear(message: Msg) -> None:
        messages.append(message)

    await client.subscribe(subject, cb=hear)
    await round_trip(client)
    return messages


async def round_trip(client: Client) -> None:
    """Return when the server has dealt with all that ``client`` sent: the first may overtake it."""
    await client.flush()
    await client.flush()


# --- Another project's subjects -------------------------------------------------------------------


@pytest.mark.parametrize("verb", subjects.SANDBOX_VERBS)
async def test_no_verb_of_another_projects_sandbox_can_be_sent(
    platform: Platform, evil: Client, verb: str
) -> None:
    await evil.publish(subjects.sandbox("default", VICTIM, verb), b"{}")
    await round_trip(evil)
    await platform.assert_unharmed()
    assert any("publish" in refusal for refusal in platform.refusals)


@pytest.mark.parametrize(
    "subject",
    [
        "dsec.v1.*.sandbox.node-1.victim.delete",
        "dsec.v1.>",
        "dsec.v1.evil.sandbox.node-1.>",
        "dsec.v1.evil.sandbox.*.*.delete",
        "dsec.v1.evil.sandbox.node-1.*.delete",
        "dsec.v1.evil.sandbox..victim.delete",
        "dsec.v1.evil.sandbox.node-1.victim.delete.",
    ],
)
async def test_ids_with_wildcards_reach_no_sandbox_of_another_project(
    platform: Platform, evil: Client, subject: str
) -> None:
    await evil.publish(subject, b"{}")
    await round_trip(evil)
    await platform.settle()
    # A wildcard is a word like any other to the server: at most it names a sandbox of the
    # attacker's own that cannot exist, and the node refuses the word.
    assert all(subject.startswith("dsec.v1.evil.") for subject in platform.deleted)
    platform.deleted.clear()
    await platform.assert_unharmed()


async def test_a_new_line_in_a_subject_sends_no_second_command(
    platform: Platform, evil: Client
) -> None:
    inner = subjects.sandbox("default", VICTIM, "delete")
    await evil.publish(f"dsec.v1.evil.sandbox.list 0\r\n\r\nPUB {inner}", b"{}")
    await round_trip(evil)
    await platform.assert_unharmed()


# --- Reply subjects -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        subjects.sandbox("default", VICTIM, "delete"),
        subjects.node_request("node-1", "place"),
        f"$JS.API.STREAM.PURGE.{QUEUE}",
        f"$JS.API.STREAM.DELETE.{QUEUE}",
        subjects.sandbox_event("default", VICTIM, "ended"),
        "_INBOX.dsec.scheduler.x",
        "_R_.abcdef.ghijkl",
        "$SYS.REQ.SERVER.PING",
    ],
)
async def test_a_reply_subject_makes_no_service_send_anything_there(
    platform: Platform, evil: Client, reply: str
) -> None:
    events = await heard(evil, subjects.project_events("evil"))
    await evil.publish(subjects.sandbox_create("evil"), b"\x80", reply=reply)
    await evil.publish(subjects.queue_sandbox_create("evil"), b"\x80", reply=reply)
    await round_trip(evil)
    await platform.settle()
    assert events == []
    # The attacker's own queued message may have been taken in: it is the attacker's own.
    assert platform.deleted == []
    assert platform.placed == []
    before = await platform.neighbour.js_publish(subjects.queue_sandbox_create("default"), Any())
    assert before in {2, 3}, "nothing was purged"


@pytest.mark.parametrize("header", ["reply-to", "Reply-To", "REPLY-TO"])
async def test_a_reply_to_header_from_a_project_is_not_believed(
    platform: Platform, evil: Client, header: str
) -> None:
    target = subjects.sandbox("default", VICTIM, "delete")
    reply = await evil.request(
        subjects.sandbox_create("evil"), b"\x80", headers={header: target}, timeout=2
    )
    assert reply.headers is not None
    assert [
        request.caller.subject for request in platform.created if request.project == "evil"
    ] == [request.reply_to for request in platform.created if request.project == "evil"]
    assert all(request.caller.subject.startswith("_R_.") for request in platform.created)
    await platform.assert_unharmed()


async def test_even_a_service_that_is_fooled_sends_no_reply_to_another_subject(
    platform: Platform,
) -> None:
    target = subjects.sandbox("default", VICTIM, "delete")
    scheduler = platform.scheduler
    # Handed on with a caller's address that is no reply subject: the node ignores the address.
    await scheduler.request(
        subjects.node_request("node-1", "place"), Any(), Any, headers={"reply-to": target}
    )
    assert [request.caller.subject for request in platform.placed] == [""]
    platform.placed.clear()
    await platform.assert_unharmed()


# --- Listening ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        ">",
        "*.>",
        "dsec.>",
        "dsec.v1.*.evt.>",
        "dsec.v1.default.>",
        "dsec.v1.default.evt.>",
        "dsec.v1._sys.>",
        "_R_.>",
        "$JS.>",
        "$KV.>",
        "$SYS.>",
        "$SRV.>",
        "_INBOX.dsec.>",
        "_INBOX.>",
    ],
)
async def test_an_attacker_hears_nothing_of_others(
    platform: Platform, evil: Client, pattern: str
) -> None:
    messages = await heard(evil, pattern)
    await platform.neighbour.request(subjects.sandbox_create("default"), Any(), Any)
    await platform.neighbour.js_publish(subjects.queue_sandbox_create("default"), Any())
    await platform.node.publish(subjects.sandbox_event("default", VICTIM, "running"), Any())
    await platform.node.publish(subjects.heartbeat("node-1"), Any())
    await platform.settle()
    await round_trip(evil)
    assert messages == []


async def test_a_project_hears_its_own_events_and_no_others(
    platform: Platform, evil: Client
) -> None:
    messages = await heard(evil, subjects.project_events("evil"))
    mine = subjects.sandbox_event("evil", ScopedId("node-1", "mine"), "running")
    await platform.node.publish(subjects.sandbox_event("default", VICTIM, "running"), Any())
    await platform.node.publish(mine, Any())
    await platform.settle()
    await round_trip(evil)
    assert [message.subject for message in messages] == [mine]


async def test_an_attacker_answers_no_request_of_others(platform: Platform, evil: Client) -> None:
    asked = await heard(evil, subjects.sandbox_list("default"))
    asked += await heard(evil, "dsec.v1.*.sandbox.list")
    asked += await heard(evil, subjects.sandbox_list("evil"))
    await platform.neighbour.request(subjects.sandbox_list("default"), Any(), Any)
    await round_trip(evil)
    assert asked == []


# --- What only services may do --------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "INFO",
        "STREAM.NAMES",
        "STREAM.LIST",
        f"STREAM.INFO.{QUEUE}",
        f"STREAM.PURGE.{QUEUE}",
        f"STREAM.DELETE.{QUEUE}",
        f"STREAM.MSG.GET.{QUEUE}",
        "STREAM.CREATE.mine",
        f"CONSUMER.CREATE.{QUEUE}",
        f"CONSUMER.MSG.NEXT.{QUEUE}.worker",
        f"DIRECT.GET.{QUEUE}.x",
    ],
)
async def test_the_jetstream_api_is_out_of_reach(
    platform: Platform, evil: Client, call: str
) -> None:
    with pytest.raises(nats.errors.Error):
        await evil.request(f"$JS.API.{call}", b"{}", timeout=0.1)
    await platform.assert_unharmed()


@pytest.mark.parametrize(
    "subject",
    [
        subjects.heartbeat("node-1"),
        subjects.node_request("node-1", "place"),
        subjects.lease("grant"),
        subjects.rollout_journal("shard-1"),
        subjects.rollout_system("default", ScopedId("shard-1", "x"), "report"),
        "$KV.dsec-nodes.node-1",
        f"$JS.ACK.{QUEUE}.worker.1.1.1.1.1",
        "$SYS.REQ.CLAIMS.UPDATE",
        "$SYS.REQ.ACCOUNT.X.INFO",
        "$SRV.PING",
    ],
)
async def test_what_services_say_to_each_other_cannot_be_forged(
    platform: Platform, evil: Client, subject: str
) -> None:
    heartbeats: list[str] = []

    async def beat(request: Request[Any]) -> None:
        heartbeats.append(request.subject)

    await platform.scheduler.subscribe(subjects.HEARTBEATS, Any, beat)
    await platform.settle()
    await evil.publish(subject, b"\x80")
    await round_trip(evil)
    await platform.assert_unharmed()
    assert heartbeats == []
    assert any("publish" in refusal for refusal in platform.refusals)


@pytest.mark.parametrize("project", ["default", "evil"])
async def test_a_forged_event_reaches_neither_services_nor_users(
    platform: Platform, evil: Client, project: str
) -> None:
    seen: list[str] = []

    async def see(request: Request[Any]) -> None:
        seen.append(request.subject)

    await platform.scheduler.subscribe(subjects.EVENT_PATTERN, Any, see)
    await platform.neighbour.subscribe(subjects.project_events("default"), Any, see)
    await platform.settle()
    own = await heard(evil, subjects.project_events("evil"))
    await evil.publish(subjects.sandbox_event(project, VICTIM, "ended"), b"\x80")
    await round_trip(evil)
    await platform.assert_unharmed()
    assert seen == []
    assert own == []


async def test_headers_of_jetstream_purge_nothing_and_suppress_nobody(
    platform: Platform, evil: Client
) -> None:
    queue = subjects.queue_sandbox_create("evil")
    for headers in (
        {"Nats-Rollup": "all"},
        {"Nats-Rollup": "sub"},
        {"Nats-TTL": "1"},
        {"Nats-Expected-Stream": "other"},
    ):
        await evil.request(queue, b"\x80", headers=headers, timeout=2)
    first = await platform.neighbour.js_publish(subjects.queue_sandbox_create("default"), Any())
    assert first == 2, "the neighbour's first message is still the only one before it"


async def test_without_any_permissions_the_account_alone_keeps_projects_apart(
    platform: Platform, tmp_path: Path
) -> None:
    auth = platform.running.auth
    account = Identity((auth.path / "projects/evil.nk").read_text(encoding="ascii"))
    user = Identity.new(KeyKind.USER)
    claims = {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1}
    token = encode_claims(user.public_key, "evil", claims, account)
    credentials = tmp_path / "unlimited.creds"
    credentials.write_text(credentials_text(token, user), encoding="ascii")
    async with await nats.connect(
        platform.running.server.url, user_credentials=str(credentials)
    ) as unlimited:
        messages = await heard(unlimited, ">")
        sent = [
            subjects.sandbox("default", VICTIM, "delete"),
            subjects.node_request("node-1", "place"),
            subjects.sandbox_create("default"),
            subjects.heartbeat("node-1"),
            f"$JS.API.STREAM.PURGE.{QUEUE}",
            "_INBOX.dsec.scheduler.x",
        ]
        for subject in sent:
            await unlimited.publish(subject, b"\x80")
        await round_trip(unlimited)
        await platform.assert_unharmed()
        await platform.node.publish(subjects.sandbox_event("default", VICTIM, "running"), Any())
        await platform.settle()
        await round_trip(unlimited)
    # Its own account delivers to itself, and the server reports to it what it asked of JetStream.
    heard_of = [message.subject for message in messages]
    assert [subject for subject in heard_of if not subject.startswith("$JS.EVENT.")] == sent


async def test_one_node_cannot_act_for_another(platform: Platform) -> None:
    running = platform.running
    heartbeats: list[str] = []

    async def beat(request: Request[Any]) -> None:
        heartbeats.append(request.subject)

    await platform.scheduler.subscribe(subjects.HEARTBEATS, Any, beat)
    await platform.settle()
    async with running.service("sandboxd", "node-2") as other:
        await other.publish(subjects.heartbeat("node-1"), Any())
        await other.publish(subjects.sandbox("default", VICTIM, "delete"), Any())
        await other.publish(f"$JS.API.STREAM.PURGE.{QUEUE}", Any())
        await other.publish(subjects.heartbeat("node-2"), Any())
        await other.flush()
        await platform.assert_unharmed()
    assert heartbeats == [subjects.heartbeat("node-2")]
