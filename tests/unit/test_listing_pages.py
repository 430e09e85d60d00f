"""A project's sandboxes are listed in pages: each of them once, whatever the nodes hold."""

from __future__ import annotations

import base64
import random
from typing import Any

import msgspec
import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import JSON, encode
from dsec_common.wire.node import ListNodeSandboxes, NodeSandboxes
from dsec_common.wire.sandbox import (
    LISTING_PAGE_BYTES,
    Limits,
    ListSandboxes,
    SandboxInfo,
    SandboxList,
    SandboxState,
    listing_order,
)
from dsec_sandboxd.listing import page_of
from dsec_sandboxd.records import SandboxRecord
from dsec_scheduler.listing import after_cursor, cursor, merge

NATS_MAX_PAYLOAD_BYTES = 1024 * 1024


def record(local: str, **changes: object) -> SandboxRecord:
    """Return the record of a running sandbox."""
    whole = SandboxRecord(
        local=local,
        project="p",
        state=SandboxState.RUNNING,
        created_at=1.0,
        placement_id="place",
        request_id="create",
        layer_references=("host@1",),
        layer_digests=("sha256:" + "0" * 64,),
        limits=Limits(),
    )
    return msgspec.structs.replace(whole, **changes)


def walk(
    nodes: dict[str, list[SandboxRecord]], page_bytes: int, limit: int = 0
) -> list[SandboxList]:
    """Return all pages that a client sees."""
    pages: list[SandboxList] = []
    after = ""
    while not pages or pages[-1].more:
        question = ListNodeSandboxes(project="p", after=after, page_bytes=page_bytes, limit=limit)
        answers = [page_of(node, records, question) for node, records in nodes.items()]
        found, more = merge(answers, limit)
        pages.append(SandboxList(sandboxes=found, more=more))
        assert found or not more, "a page before the last holds something"
        after = found[-1].sandbox_id if found else ""
    return pages


@pytest.mark.parametrize("seed", range(20))
def test_every_sandbox_is_listed_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  a test that repeats itself
    nodes = {
        f"n{number}": [
            record(f"{local:04d}", labels={"x": "y" * chance.randrange(200)})
            for local in chance.sample(range(500), chance.choice([0, 1, 40, 150]))
        ]
        for number in range(chance.randrange(1, 5))
    }
    expected = sorted(
        (f"{node}.{each.local}" for node, records in nodes.items() for each in records),
        key=listing_order,
    )
    limit = chance.choice([0, 1, 7, 1000])
    pages = walk(nodes, page_bytes=chance.choice([1, 2000, 20_000]), limit=limit)
    assert not limit or all(len(page.sandboxes) <= limit for page in pages)
    assert [info.sandbox_id for page in pages for info in page.sandboxes] == expected


def test_one_id_on_two_nodes_is_two_sandboxes() -> None:
    pages = walk({"n1": [record("a")], "n2": [record("a")]}, page_bytes=1)
    ids = [info.sandbox_id for page in pages for info in page.sandboxes]
    assert ids == ["n1.a", "n2.a"]


def test_the_worst_labels_fit_a_message_of_either_encoding() -> None:
    # JSON writes each of these characters as six.
    labels = {f"{number:02d}" + "\1" * 254: "\1" * 256 for number in range(64)}
    records = [record(f"{local:02d}", labels=labels) for local in range(20)]
    for page in walk({"n1": records}, page_bytes=LISTING_PAGE_BYTES):
        assert len(encode(page, JSON)) < NATS_MAX_PAYLOAD_BYTES
        answer = NodeSandboxes(sandboxes=page.sandboxes)
        assert len(encode(answer)) < NATS_MAX_PAYLOAD_BYTES


def test_a_node_gives_no_larger_page_than_a_message_takes() -> None:
    records = [record(f"{local:06d}") for local in range(5000)]
    page = page_of("n1", records, ListNodeSandboxes(project="p", page_bytes=2**40))
    assert page.more
    assert len(encode(page)) < NATS_MAX_PAYLOAD_BYTES


def test_labels_are_chosen_before_pages_are_made() -> None:
    records = [record(f"{n:03d}", labels={"run": str(n % 2)}) for n in range(100)]
    question = ListNodeSandboxes(project="p", labels={"run": "1"}, after="n1.050")
    found: tuple[SandboxInfo, ...] = page_of("n1", records, question).sandboxes
    assert [info.sandbox_id for info in found] == [f"n1.{n:03d}" for n in range(51, 100, 2)]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"states": (SandboxState.PAUSED,)}, ["b"]),
        ({"states": (SandboxState.PAUSED, SandboxState.ENDED)}, ["b", "c"]),
        ({"agent": "coder"}, ["a", "b"]),
        ({"rollout_id": "s0.r1"}, ["b"]),
        ({"created_after": 2.0}, ["b", "c"]),
        ({"created_before": 2.0}, ["a"]),
        ({"created_after": 2.0, "created_before": 3.0, "agent": "coder"}, ["b"]),
        ({"labels": {"run": "1"}, "agent": "coder"}, ["a"]),
        ({}, ["a", "b", "c"]),
    ],
)
def test_filters_hold_together(filters: dict[str, Any], expected: list[str]) -> None:
    records = [
        record("a", agent="coder", labels={"run": "1"}),
        record("b", agent="coder", created_at=2.0, rollout_id="s0.r1", state=SandboxState.PAUSED),
        record("c", created_at=3.0, state=SandboxState.ENDED),
    ]
    page = page_of("n1", records, ListNodeSandboxes(project="p", **filters))
    assert [info.sandbox_id for info in page.sandboxes] == [f"n1.{local}" for local in expected]


def test_a_cursor_leads_to_where_the_page_ended() -> None:
    asked = ListSandboxes(labels={"b": "2", "a": "1"}, limit=5)
    again = ListSandboxes(labels={"a": "1", "b": "2"}, cursor=cursor(asked, "n1.abc"))
    assert after_cursor(again) == "n1.abc"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "nonsense",
        "\N{SNOWMAN}",
        "AAAA",
        cursor(ListSandboxes(agent="other"), "n1.abc"),
        cursor(ListSandboxes(), "no id"),
        cursor(ListSandboxes(), "n1.abc")[:-3],
        base64.urlsafe_b64encode(msgspec.msgpack.encode((99, b"", "n1.abc"))).decode(),
    ],
)
def test_what_is_no_cursor_of_this_listing_is_invalid(bad: str) -> None:
    with pytest.raises(DsecError) as caught:
        after_cursor(ListSandboxes(cursor=bad))
    assert caught.value.code is ErrorCode.INVALID
