from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId

HOSTILE = [
    "",
    "a.b",
    "*",
    ">",
    "a b",
    "a\tb",
    "a\n",
    "x" * 300,
    "$SYS",
    "_sys",
    "é",
    "a*",
    "-",
    "a\0",
]


@pytest.mark.parametrize("project", HOSTILE)
def test_a_project_name_that_could_name_something_else_is_refused(project: str) -> None:
    with pytest.raises(DsecError) as caught:
        subjects.sandbox_create(project)
    assert caught.value.code is ErrorCode.INVALID
    assert "project name" in caught.value.message


@pytest.mark.parametrize(
    "text",
    [*(bad for bad in HOSTILE if bad != "a.b"), "node", "a.b.c", ".b", "a.", "*.b", "a.>", "a.b c"],
)
def test_a_sandbox_id_that_could_name_something_else_is_refused(text: str) -> None:
    with pytest.raises(DsecError, match="not a valid sandbox id"):
        ScopedId.parse(text)


@pytest.mark.parametrize("token", HOSTILE)
def test_no_token_of_a_built_subject_can_hold_a_wildcard(token: str) -> None:
    builders: tuple[Callable[[], str], ...] = (
        lambda: subjects.sandbox("default", ScopedId(token, "x"), "exec"),
        lambda: subjects.sandbox("default", ScopedId("node", token), "exec"),
        lambda: subjects.sandbox("default", ScopedId("node", "x"), token),
        lambda: subjects.layer("default", token, "list"),
        lambda: subjects.heartbeat(token),
        lambda: subjects.request_event("default", token, "created"),
        lambda: subjects.rollout_journal(token),
        lambda: subjects.group("default", token, "next"),
        lambda: subjects.rollout_group("default", token),
        lambda: subjects.group_system("default", token, "open"),
        lambda: subjects.shard_taken(token),
    )
    for build in builders:
        with pytest.raises(DsecError) as caught:
            build()
        assert caught.value.code is ErrorCode.INVALID


@given(st.text())
def test_a_subject_always_has_the_tokens_it_was_built_from(text: str) -> None:
    try:
        subject = subjects.sandbox("default", ScopedId(text, "local"), "exec")
    except DsecError:
        return
    assert subject.split(".") == ["dsec", "v1", "default", "sandbox", text, "local", "exec"]


def test_ids_and_projects_are_read_back_from_subjects() -> None:
    sandbox_id = ScopedId("node-1", "01abc")
    subject = subjects.sandbox("team-a", sandbox_id, "delete")
    assert subjects.project_of(subject) == "team-a"
    assert subjects.scoped_id_of(subject) == sandbox_id
    assert ScopedId.parse(str(sandbox_id)) == sandbox_id
    system = subjects.rollout_system("team-a", ScopedId("s0", "r1"), "report")
    assert subjects.system_rollout_of(system) == ("team-a", ScopedId("s0", "r1"))
    assert subjects.system_group_of(subjects.group_system("team-a", "s0", "open")) == "team-a"


def test_a_services_own_subject_is_no_projects() -> None:
    with pytest.raises(DsecError, match="not a project's subject"):
        subjects.project_of(subjects.heartbeat("node-1"))


def test_every_subject_that_a_project_may_ask_is_exported() -> None:
    identity = ScopedId("node-1", "x1")
    asked = [
        subjects.sandbox_create("p"),
        subjects.sandbox_list("p"),
        subjects.queue_sandbox_create("p"),
        *(subjects.sandbox("p", identity, verb) for verb in subjects.SANDBOX_VERBS),
        *(subjects.layer("p", "node-1", verb) for verb in subjects.LAYER_VERBS),
        *(subjects.snapshot("p", "node-1", verb) for verb in subjects.SNAPSHOT_VERBS),
        *(subjects.pool("p", verb) for verb in subjects.POOL_VERBS),
        *(subjects.agent("p", verb) for verb in subjects.AGENT_VERBS),
        *(subjects.dag("p", verb) for verb in subjects.DAG_VERBS),
        subjects.function_call("p"),
        subjects.node("p", "list"),
        subjects.node("p", "inspect"),
        subjects.rollout_open("p"),
        *(subjects.rollout("p", identity, verb) for verb in subjects.ROLLOUT_VERBS),
        *(subjects.rollout_group("p", verb) for verb in ("take_group", "open_group")),
        *(subjects.group("p", "s0", verb) for verb in subjects.GROUP_VERBS),
        subjects.sandbox_create_gang("p"),
        *(subjects.sandbox_waiting("p", verb) for verb in ("explain", "cancel")),
        subjects.force_unlock("p"),
        subjects.trace("p", "cost"),
        subjects.trace("p", "get"),
    ]

    def matches(pattern: str, subject: str) -> bool:
        wanted, given_tokens = pattern.split("."), subject.split(".")
        return len(wanted) == len(given_tokens) and all(
            one in {"*", other} for one, other in zip(wanted, given_tokens, strict=True)
        )

    for subject in asked:
        assert any(matches(pattern, subject) for pattern in subjects.USER_SERVICES), subject
    assert len(asked) == len(subjects.USER_SERVICES)
