from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable
from dsec_common.wire.dag import DagRetry, DagSpec, DagStep, RunState, StepState
from dsec_scheduler.dags import runs
from dsec_scheduler.dags.converters import Converter, Converters
from dsec_scheduler.dags.plans import AgentContract, Plan, plan
from dsec_scheduler.dags.schemas import check_schema, check_value, fits

TEXT = {"type": "string"}
NUMBER = {"type": "number"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": sorted(properties)}


def _step(needs: str = "", *, input: Any = TEXT, output: Any = TEXT, **given: Any) -> DagStep:  # noqa: A002  the field's name
    inputs = {"*": needs} if needs else {"*": "$"}
    plain = {"agent": "bot", "command": ("/bin/cat",), "inputs": inputs}
    return DagStep(**{**plain, "input": input, "output": output, **given})


def _plan(**steps: DagStep) -> Plan:
    spec = DagSpec(name="dag", input=TEXT, steps=steps)
    contracts = {name: AgentContract(version="1", contract={}) for name in steps}
    return plan(spec, contracts, Converters())


def test_steps_are_put_in_an_order_in_which_they_can_run() -> None:
    planned = _plan(c=_step("b"), b=_step("a"), a=_step())
    assert list(planned.steps) == ["a", "b", "c"]
    assert planned.steps["c"].needs == ("b",)


def test_a_circle_is_refused_with_its_steps() -> None:
    with pytest.raises(DsecError, match="circle") as caught:
        _plan(a=_step("c"), b=_step("a"), c=_step("b"), d=_step())
    assert all(f"{name}" in caught.value.message for name in "abc")


@pytest.mark.parametrize("reference", ["nobody", "a.", ".a", "$.missing", "a.missing", ""])
def test_an_input_from_nowhere_is_refused(reference: str) -> None:
    with pytest.raises(DsecError) as caught:
        _plan(a=_step(), b=_step(inputs={"*": reference}))
    assert caught.value.code is ErrorCode.INVALID


@pytest.mark.parametrize("which", ["input", "output"])
def test_a_missing_schema_is_refused_with_where_to_add_it(which: str) -> None:
    with pytest.raises(DsecError, match=f"no schema for its {which}"):
        _plan(a=_step(input=TEXT if which == "output" else None, output=None))


def test_the_agents_contract_gives_schemas_command_and_retries() -> None:
    contract = {
        "input": TEXT,
        "output": NUMBER,
        "command": ["/bin/agent"],
        "lifecycle": {"retry_policy": {"max_attempts": 3, "backoff": "fixed", "jitter": 0.5}},
    }
    spec = DagSpec(name="dag", input=TEXT, steps={"a": DagStep(agent="bot", inputs={"*": "$"})})
    step = plan(spec, {"a": AgentContract(version="2", contract=contract)}, Converters()).steps["a"]
    assert (step.version, step.command, step.output) == ("2", ("/bin/agent",), NUMBER)
    assert (step.retry.max_attempts, step.retry.factor, step.retry.jitter) == (3, 1.0, 0.5)


@pytest.mark.parametrize(
    ("own", "said", "meant"),
    [(None, None, 60), (None, "2min", 120), (5, "2min", 5), (500, "5s", 5)],
)
def test_an_attempt_takes_no_longer_than_its_step_and_its_contract_say(
    own: float | None, said: str | None, meant: float
) -> None:
    contract = {"lifecycle": {"timeout": said}}
    spec = DagSpec(name="dag", input=TEXT, steps={"a": _step(timeout_s=own)})
    planned = plan(spec, {"a": AgentContract(version="1", contract=contract)}, Converters())
    assert planned.steps["a"].timeout_s == meant


def test_a_contract_from_before_they_were_checked_is_taken_for_what_it_says_right() -> None:
    contract = {"command": ["/bin/agent"], "misspelt": 1}
    spec = DagSpec(name="dag", input=TEXT, steps={"a": _step(command=())})
    planned = plan(spec, {"a": AgentContract(version="1", contract=contract)}, Converters())
    assert planned.steps["a"].command == ("/bin/agent",)


def test_a_mismatch_is_found_before_anything_runs() -> None:
    with pytest.raises(DsecError, match="text_to_integer would lose") as caught:
        _plan(a=_step(), b=_step("a", input={"type": "integer"}))
    assert caught.value.details == {"step": "b", "input": "*"}


def test_a_lossless_converter_is_inserted() -> None:
    planned = _plan(a=_step(output=NUMBER), b=_step("a", input={"type": "array", "items": TEXT}))
    (conversion,) = planned.conversions
    assert (conversion.step, set(conversion.converters)) == ("b", {"number_to_text", "one_to_list"})
    assert Converters().convert(conversion.converters, 0.5) in (["0.5"], "[0.5]")


def test_fields_of_outputs_are_typed_one_by_one() -> None:
    made = _object(title=TEXT, pages={"type": "integer"})
    read = _object(name=TEXT, count=NUMBER)
    step = _step(input=read, inputs={"name": "a.title", "count": "a.pages"})
    assert _plan(a=_step(output=made), b=step).conversions == ()
    swapped = _step(input=read, inputs={"name": "a.pages", "count": "a.title"})
    with pytest.raises(DsecError, match="input count"):
        _plan(a=_step(output=made), b=swapped)
    with pytest.raises(DsecError, match="needs count"):
        _plan(a=_step(output=made), b=_step(input=read, inputs={"name": "a.title"}))


def test_an_optional_field_is_no_source() -> None:
    made = {"type": "object", "properties": {"title": TEXT}}
    with pytest.raises(DsecError, match="may not be there"):
        _plan(a=_step(output=made), b=_step(inputs={"*": "a.title"}))


@pytest.mark.parametrize("keyword", ["$ref", "pattern"])
def test_schemas_that_lead_elsewhere_or_cost_too_much_are_refused(keyword: str) -> None:
    with pytest.raises(DsecError, match="not supported") as caught:
        _plan(a=_step(input=_object(x={keyword: "(a+)+$"})))
    assert caught.value.code is ErrorCode.UNSUPPORTED


# --- Schemas --------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "ab", "abc"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2)
    ),
    max_leaves=4,
)
SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {},
            *({"type": one} for one in ("null", "boolean", "integer", "number", "string")),
            {"type": ["integer", "null"]},
            {"enum": ["a", 1, None]},
            {"const": 2},
            {"type": "integer", "minimum": 0},
            {"type": "integer", "minimum": 1, "maximum": 2},
            {"type": "string", "maxLength": 2},
            {"minLength": 1},
        ]
    ),
    lambda inner: (
        st.builds(lambda one: {"type": "array", "items": one}, inner)
        | st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner)
        | st.builds(
            lambda one, two, required, others: {
                "type": "object",
                "properties": {"x": one, "y": two},
                "required": required,
                "additionalProperties": others,
            },
            inner,
            inner,
            st.sampled_from([[], ["x"], ["x", "y"]]),
            st.booleans(),
        )
    ),
    max_leaves=4,
)


# --- What would keep a scheduler busy -------------------------------------------------------------


@pytest.mark.parametrize(
    "contract",
    [
        {"command": 5},
        {"command": "echo hello"},
        {"command": ["sleep", True]},
        {"lifecycle": {"timeout": 120}},
        {"lifecycle": "long"},
        {"lifecycle": {"retry_policy": [3]}},
        {"lifecycle": {"retry_policy": {"max_attempts": "three"}}},
        {"lifecycle": {"retry_policy": {"max_attempts": 0}}},
        {"lifecycle": {"retry_policy": {"backoff": "sometimes"}}},
        {"lifecycle": {"retry_policy": {"jitter": "full"}}},
    ],
)
def test_a_contract_that_says_nonsense_is_refused_with_the_field(contract: dict[str, Any]) -> None:
    spec = DagSpec(name="dag", input=TEXT, steps={"a": _step(command=())})
    said = {"command": ["/bin/cat"], **contract}
    (field,) = contract
    with pytest.raises(DsecError, match=f"bot makes no sense .*{field}") as caught:
        plan(spec, {"a": AgentContract(version="1", contract=said)}, Converters())
    assert caught.value.code is ErrorCode.INVALID


def test_a_schema_nested_without_end_is_refused() -> None:
    deep: dict[str, Any] = TEXT
    for _ in range(900):
        deep = {"anyOf": [deep]}
    with pytest.raises(DsecError, match="nested deeper") as caught:
        _plan(a=_step(input=deep))
    assert caught.value.code is ErrorCode.INVALID


def test_schemas_that_take_long_to_compare_are_refused() -> None:
    arrays = [{"type": "array", "items": NUMBER, "title": str(i)} for i in range(700)]
    others = [{"type": "array", "items": TEXT} for _ in range(699)]
    with pytest.raises(DsecError, match="take too long to compare") as caught:
        _plan(
            a=_step(output={"anyOf": arrays}),
            b=_step("a", input={"anyOf": [*others, arrays[0] | {"title": "it"}]}),
        )
    assert caught.value.code is ErrorCode.INVALID


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"anyOf": [{"const": i} for i in range(1000)]}},
        {"type": "array", "contains": {"enum": [[i] for i in range(1000)]}},
    ],
)
def test_a_value_that_takes_long_to_check_is_refused(schema: dict[str, Any]) -> None:
    check_schema(schema, "it")
    with pytest.raises(DsecError, match="too much to check") as caught:
        check_value([999] * 100_000, schema, "it")
    assert caught.value.code is ErrorCode.INVALID


def test_what_costs_the_square_of_a_value_is_unsupported() -> None:
    with pytest.raises(DsecError, match="uniqueItems") as caught:
        check_schema({"type": "array", "uniqueItems": True}, "it")
    assert caught.value.code is ErrorCode.UNSUPPORTED


@given(SCHEMAS, SCHEMAS, st.lists(VALUES, min_size=5, max_size=20))
def test_what_fits_is_valid_for_every_value(
    written: dict[str, Any], read: dict[str, Any], values: list[Any]
) -> None:
    check_schema(written, "it")
    assert fits(written, written)
    if fits(written, read):
        writer, reader = Draft202012Validator(written), Draft202012Validator(read)
        for value in values:
            assert not writer.is_valid(value) or reader.is_valid(value), value


# --- Runs -----------------------------------------------------------------------------------------

STILL = random.Random(1)  # noqa: S311  a test's
DIAMOND = {
    "a": _step(),
    "b": _step("a"),
    "c": _step("a", retry=DagRetry(max_attempts=3, backoff_s=1.0, jitter=0.0)),
    "d": _step(input=_object(b=TEXT, c=TEXT), inputs={"b": "b", "c": "c"}),
}


def _done(run: runs.RunRecord, *names: str) -> runs.RunRecord:
    for name in names:
        run = runs.succeeded(runs.started(run, name), name, "n.1", 0)
    return run


def test_steps_begin_when_what_they_need_is_done() -> None:
    run = runs.begun("r", _plan(**DIAMOND))
    assert runs.ready(run, 0.0) == ["a"]
    run = _done(run, "a")
    assert set(runs.ready(run, 0.0)) == {"b", "c"}
    run = _done(run, "b", "c")
    assert runs.ready(run, 0.0) == ["d"]
    assert _done(run, "d").state is RunState.DONE


def test_a_failed_attempt_waits_longer_each_time_and_then_fails_for_good() -> None:
    run = _done(runs.begun("r", _plan(**DIAMOND)), "a")
    waits = []
    for _ in range(2):
        run = runs.failed(runs.started(run, "c"), "c", unavailable("away"), 100.0, STILL)
        due = run.steps["c"].begins_at
        waits.append(due - 100.0)
        assert "c" not in runs.ready(run, due - 0.01)
        assert "c" in runs.ready(run, due)
    assert waits == [1.0, 2.0]
    run = runs.failed(runs.started(run, "c"), "c", unavailable("away"), 100.0, STILL)
    assert run.steps["c"].state is StepState.FAILED
    assert run.steps["d"].state is StepState.BLOCKED
    assert run.state is RunState.RUNNING
    run = _done(run, "b")
    assert run.state is RunState.PARTIAL


def test_a_mistake_is_not_tried_again() -> None:
    run = _done(runs.begun("r", _plan(**DIAMOND)), "a")
    run = runs.failed(runs.started(run, "c"), "c", invalid("wrong"), 100.0, STILL)
    assert run.steps["c"].state is StepState.FAILED


def test_a_resumed_run_keeps_what_is_done() -> None:
    run = _done(runs.begun("r", _plan(**DIAMOND)), "a", "b")
    run = runs.failed(runs.started(run, "c"), "c", invalid("wrong"), 0.0, STILL)
    assert runs.resumed(_done(runs.begun("r", _plan(a=_step())), "a")).state is RunState.DONE
    again = runs.resumed(run)
    assert again.state is RunState.RUNNING
    assert runs.ready(again, 0.0) == ["c"]
    assert again.steps["c"].round == 1
    assert _done(again, "c", "d").state is RunState.DONE


@given(st.integers(1, 20), st.floats(0, 1), st.randoms())
def test_waits_stay_within_their_bounds(
    attempts: int, jitter: float, randomness: random.Random
) -> None:
    retry = DagRetry(max_attempts=50, backoff_s=1.0, factor=3.0, backoff_max_s=30.0, jitter=jitter)
    plain = min(3.0 ** (attempts - 1), 30.0)
    waited = runs.wait_s(retry, attempts, randomness)
    assert plain * (1 - jitter) <= waited <= plain * (1 + jitter)


def test_a_converter_that_raises_is_told_as_what_it_is() -> None:
    def broken(_: Any) -> Any:
        raise ZeroDivisionError("no")

    converters = Converters()
    converters.add(Converter("broken", NUMBER, lambda _: TEXT, broken))
    with pytest.raises(DsecError, match=r"broken cannot convert.*ZeroDivisionError") as caught:
        converters.convert(["broken"], 1)
    assert caught.value.code is ErrorCode.INVALID
