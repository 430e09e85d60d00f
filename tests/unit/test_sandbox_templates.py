"""A sandbox made again, or branched, is like the one that was kept, in all that is kept of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chronus_world import ROLLOUT, World
from dsec_chronus.keys import branch_local
from dsec_chronus.records import ActionBegun, ActionKind, Child, Taken
from dsec_chronus.templates import has_model_rollout, in_its_place, kept_of, of_branch
from dsec_common.asdl.reading import checked, read_text
from dsec_common.asdl.terms import terms_of, under
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.action import ActionTerms
from dsec_common.wire.base import Message
from dsec_common.wire.layer import CommandDefaults
from dsec_common.wire.network import NetworkMode, NetworkPolicy
from dsec_common.wire.sandbox import CreateSandbox, IdleAction, Limits, SandboxInfo, SandboxState
from dsec_common.wire.tools import NodeTools
from dsec_sandboxd.model_environment import environment_of
from dsec_sandboxd.snapshot_tree import SnapshotRecord
from dsec_sandboxd.templates import template_of
from sandbox_records import record

KEPT: dict[str, Any] = {
    "labels": {"of": "test"},
    "agent": "bot",
    "agent_version": "1.2.0",
    "rollout_id": "s0.r1",
    "model_rollout_id": "s1.m1",
    "ttl_s": 100.0,
    "idle_ttl_s": 50.0,
    "idle_action": IdleAction.PAUSE,
    "deadline_s": 80.0,
    "tools": NodeTools(network=NetworkPolicy(mode=NetworkMode.OPEN)),
    "action_terms": ActionTerms(agent="bot", max_cu=2.0),
}
"""What a record has under the same name."""

KEPT_OTHERWISE = {
    "limits": Limits(cpus=0.25, cu=0.0),
    "cwd": "/work",
    "user": "1000:1000",
    "remade": True,
}

IN_FORCE = {"network", "setup_network"}
"""Asked of the node's networks: what was asked for at first may have been changed since."""

NOT_KEPT = {
    "base": "the snapshot says it, or the checkpoint names it",
    "workspace": "as the base",
    "toolkits": "as the base",
    "snapshot": "the checkpoint's",
    "env": "may hold secrets: taken from the snapshot on its node, nowhere else",
    "command": "it was run",
    "task": "it was read",
    "delete_after": "goes with the first command",
    "gpu": "a lease is of one sandbox",
    "service_class": "means something for a lease only",
    "priority": "as the service class",
    "warm": "says how it came, not what it is",
    "idempotency_key": "of the request",
    "timeout_s": "of the request",
}


class Networks:
    """What is in force on a node: its sandboxes are being set up."""

    def inherited(self, _local: str) -> tuple[NetworkPolicy | None, NetworkPolicy | None]:
        return NetworkPolicy(), NetworkPolicy(mode=NetworkMode.OPEN)


def template() -> CreateSandbox:
    made = record(
        **KEPT,
        limits=Limits(cpus=0.25, cu=3.0),
        defaults=CommandDefaults(cwd="/work", user="1000:1000"),
        env={"TOKEN": "secret"},
        lease_id="lease",
        has_command=True,
        delete_after=True,
    )
    return template_of(made, Networks())  # type: ignore[arg-type]


def test_every_field_of_a_request_is_kept_for_another_like_it_or_is_left_out_on_purpose() -> None:
    told = template()
    own = set(CreateSandbox.__struct_fields__) - set(Message.__struct_fields__)
    assert own == {*KEPT, *KEPT_OTHERWISE, *IN_FORCE, *NOT_KEPT}
    usual = CreateSandbox(base="")
    for name in own:
        value = getattr(told, name)
        if name in NOT_KEPT:
            assert value == getattr(usual, name), name
        elif name not in IN_FORCE:
            wanted = {**KEPT, **KEPT_OTHERWISE}[name]
            assert value == wanted != getattr(usual, name), name
    assert told.network is None
    assert told.setup_network == NetworkPolicy(mode=NetworkMode.OPEN)
    assert "secret" not in repr(told)


def info(**fields: Any) -> SandboxInfo:
    return SandboxInfo(
        sandbox_id="n1.s1",
        project="p",
        state=SandboxState.RUNNING,
        created_at=1000.0,
        sent_at=1030.0,
        **fields,
    )


def taken(**fields: Any) -> Taken:
    like = msgspec.structs.replace(template(), **fields)
    return Taken(
        snapshot_id="n1.snap", layers=("b@1",), template=kept_of(info(template=like)), at=5000.0
    )


def begun(at: float) -> ActionBegun:
    return ActionBegun(
        local="r1",
        at=at,
        number=2,
        kind=ActionKind.ROLLBACK,
        key="k",
        step=1,
        sandbox_id="n1.s1",
    )


def test_another_in_its_place_has_what_is_left_of_its_time() -> None:
    kept = taken()
    assert kept.template.deadline_s == 50.0
    assert in_its_place(begun(5020.0), kept, "s0.r1").deadline_s == 30.0
    assert in_its_place(begun(9000.0), taken(deadline_s=0.0), "s0.r1").deadline_s == 0.0
    with pytest.raises(DsecError, match="is over") as refusal:
        in_its_place(begun(5050.0), kept, "s0.r1")
    assert refusal.value.code is ErrorCode.EXPIRED
    assert of_branch(kept, "s0.r1", "s0.b1", "").deadline_s == 50.0


def test_a_sandbox_that_is_lost_when_its_time_is_over_is_not_made_again() -> None:
    world = World()
    world.open()
    world.report(1, sandbox_id="n1.s1")
    world.settle()
    world.act(ActionKind.CHECKPOINT, "one", durable=True)
    world.settle()
    (it,) = world.performing()
    kept = msgspec.structs.replace(taken(), layer="checkpoint@1", at=world.now)
    world.done(it, taken=kept)
    world.settle()
    world.now += 60.0
    late = world.act(ActionKind.ROLLBACK, "lost", lost=True)
    assert world.refusals[late].code is ErrorCode.EXPIRED
    assert world.to_write == []


def test_a_node_that_does_not_tell_is_no_place_for_a_checkpoint() -> None:
    with pytest.raises(DsecError, match="update sandboxd") as refusal:
        kept_of(info())
    assert refusal.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("agent", "model", "in_place", "branch"),
    [
        ("s0.r1", "", ("s0.r1", ""), ("s0.b1", "")),
        ("", "", ("s0.r1", ""), ("s0.b1", "")),
        ("s0.r1", "s1.m1", ("s0.r1", "s1.m1"), ("s0.b1", "s0.m2")),
        ("", "s0.r1", ("", "s0.r1"), ("", "s0.b1")),
        ("s1.other", "s0.r1", ("s1.other", "s0.r1"), ("", "s0.b1")),
    ],
)
def test_model_calls_go_on_where_they_went_and_those_of_branches_to_rollouts_of_their_own(
    agent: str, model: str, in_place: tuple[str, str], branch: tuple[str, str]
) -> None:
    kept = taken(rollout_id=agent, model_rollout_id=model)
    again = in_its_place(begun(5001.0), kept, "s0.r1")
    assert (again.rollout_id, again.model_rollout_id) == in_place
    model_id = "s0.m2" if has_model_rollout(kept, "s0.r1") else ""
    made = of_branch(kept, "s0.r1", "s0.b1", model_id)
    assert (made.rollout_id, made.model_rollout_id) == branch


def test_variables_come_from_the_snapshot_for_another_like_it_alone() -> None:
    restored = SnapshotRecord(
        local="snap",
        project="p",
        sandbox="s1",
        created_at=1.0,
        layer_references=("b@1",),
        layer_digests=("sha256:00",),
        chain=("snap",),
        limits=Limits(),
        env={"TOKEN": "secret", "OPENAI_API_KEY": "own"},
    )
    asked = CreateSandbox(base="", snapshot="n1.snap", env={"A": "1"})
    assert environment_of(asked, restored) == {"A": "1"}
    again = msgspec.structs.replace(asked, remade=True, model_rollout_id="s0.r1")
    env = environment_of(again, restored)
    assert (env["TOKEN"], env["A"], env["OPENAI_API_KEY"]) == ("secret", "1", "own")
    assert env["OPENAI_BASE_URL"].startswith("http://127.0.0.1")
    assert "TOKEN" not in environment_of(again, None)


def test_layers_of_an_agent_are_not_put_over_those_of_a_checkpoint() -> None:
    terms = terms_of(checked(read_text("layers: {toolkits: [tools@1]}", whole=False), "a.yaml"))
    asked = CreateSandbox(base="b@1", toolkits=("tools@1", "checkpoint@1"), remade=True)
    assert under(terms, asked, "bot 1").toolkits == ("tools@1", "checkpoint@1")
    fresh = CreateSandbox(base="b@1")
    assert under(terms, fresh, "bot 1").toolkits == ("tools@1",)


def test_a_branch_begins_with_a_rollout_for_its_model_calls() -> None:
    world = World()
    world.open(labels={"task": "tree"})
    world.report(1)
    world.settle()
    first = world.act(ActionKind.CHECKPOINT, "one")
    world.settle()
    (it,) = world.performing()
    world.done(it, taken=taken(model_rollout_id="s1.m1"))
    world.settle()
    assert first in world.answers
    request = world.act(ActionKind.BRANCH, "tree", count=1)
    world.settle()
    (it,) = world.performing()
    model = branch_local("s0.b1", 0, 0)
    world.done(it, children=(Child(local="b1", sandbox_id="n1.s2", model_local=model),))
    world.settle()
    (branch,) = world.answers[request].branches  # type: ignore[attr-defined]
    assert branch.model_rollout_id == f"s0.{model}"
    opened = world.answers[world.inspect(model)]
    assert (opened.parent, opened.labels) == ("s1.m1", {"task": "tree"})  # type: ignore[attr-defined]
    assert world.answers[world.inspect("b1")].parent == f"s0.{ROLLOUT}"  # type: ignore[attr-defined]
