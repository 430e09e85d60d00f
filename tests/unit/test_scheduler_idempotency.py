from __future__ import annotations

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import ErrorReply
from dsec_common.wire.sandbox import CreateSandbox, ExecCommand, Limits, SandboxCreated
from dsec_scheduler.idempotency import (
    AskNode,
    Begin,
    GiveUp,
    Replay,
    RequestRecord,
    RequestState,
    Wait,
    arguments_digest,
    bucket_key,
    decide,
)

NOW = 1000.0
CREATED = SandboxCreated(
    sandbox_id="node-1.x", node="node-1", created_at=1.0, layers=(), limits=Limits()
)
ERROR = ErrorReply(code=ErrorCode.LAYER_ERROR, message="damaged")


def record(state: RequestState, digest: str = "d", deadline: float = NOW) -> RequestRecord:
    return RequestRecord(
        digest=digest,
        state=state,
        owner="test",
        deadline=deadline,
        created=CREATED if state is RequestState.CREATED else None,
        error=ERROR if state is RequestState.FAILED else None,
    )


def test_a_fresh_key_begins() -> None:
    assert decide(None, "d", NOW, waited=False) == Begin()


def test_an_answer_is_given_again() -> None:
    assert decide(record(RequestState.CREATED), "d", NOW, waited=False) == Replay((CREATED,))


def test_a_claim_stands_until_its_deadline() -> None:
    claim = record(RequestState.PENDING, deadline=NOW + 1)
    assert decide(claim, "d", NOW, waited=False) == Wait(NOW + 1)
    assert decide(claim, "d", NOW + 1, waited=True) == AskNode(claim)


def test_a_failure_is_told_to_those_who_waited_and_tried_again_by_others() -> None:
    failed = record(RequestState.FAILED)
    assert decide(failed, "d", NOW, waited=True) == GiveUp(ERROR)
    assert decide(failed, "d", NOW, waited=False) == Begin()


@pytest.mark.parametrize("state", list(RequestState))
def test_other_arguments_are_a_conflict_in_every_state(state: RequestState) -> None:
    with pytest.raises(DsecError) as error:
        decide(record(state, digest="other"), "d", NOW, waited=False)
    assert error.value.code is ErrorCode.CONFLICT


def test_only_what_is_asked_for_makes_the_digest() -> None:
    one = CreateSandbox(base="debian@12", env={"a": "1", "b": "2"}, idempotency_key="k")
    same = CreateSandbox(
        base="debian@12", env={"b": "2", "a": "1"}, timeout_s=99.0, cause_id="elsewhere"
    )
    assert arguments_digest(one) == arguments_digest(same)
    for other in (
        CreateSandbox(base="debian@11", env=one.env),
        CreateSandbox(base="debian@12", env={"a": "1"}),
        CreateSandbox(base="debian@12", env=one.env, toolkits=("agent@1",)),
        CreateSandbox(base="debian@12", env=one.env, limits=Limits(cpus=2.0)),
    ):
        assert arguments_digest(one) != arguments_digest(other)


def test_a_first_command_is_part_of_what_is_asked_for_but_not_its_own_envelope() -> None:
    one = CreateSandbox(base="debian@12", command=ExecCommand(argv=("true",)))
    same = CreateSandbox(base="debian@12", command=ExecCommand(argv=("true",), cause_id="retry"))
    assert one.command != same.command
    assert arguments_digest(one) == arguments_digest(same)
    for other in (
        CreateSandbox(base="debian@12"),
        CreateSandbox(base="debian@12", command=ExecCommand(argv=("false",))),
        CreateSandbox(base="debian@12", command=one.command, delete_after=True),
        CreateSandbox(base="debian@12", command=one.command, idle_ttl_s=1.0),
    ):
        assert arguments_digest(one) != arguments_digest(other)


def test_keys_of_any_characters_are_told_apart() -> None:
    keys = ("", "a", "a.b", "a b", "*", ">", "\ud800", "ü" * 256, "a\0b")
    found = {
        bucket_key(project, kind, key)
        for project in ("p", "q")
        for kind in ("caller", "queue")
        for key in keys
    }
    assert len(found) == 4 * len(keys)
    assert all(len(key) == 64 and key.isalnum() for key in found)
