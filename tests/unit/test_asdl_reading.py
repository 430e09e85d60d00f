"""Contracts are read whole, and what is wrong with one is told all at once, each in its place."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from contracts_shown import PDF_ANALYZER, WEATHER_FORECASTER
from documents import ROOT
from dsec_common.asdl.documents import DEPTH_MAX, NODES_MAX, TEXT_CHARACTERS_MAX
from dsec_common.asdl.model import CONTRACT, Capability, Contract
from dsec_common.asdl.problems import PROBLEMS_MAX
from dsec_common.asdl.reading import checked, json_schema, read_text, read_value
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.network import NetworkMode, NetworkPolicy
from dsec_common.wire.tools import Rate

LEAST = "name: a\nversion: 1\n"


def told(text: str) -> list[str]:
    """Return what is wrong with a contract that begins as it should."""
    return [one.told("a.yaml") for one in read_text(LEAST + text).problems]


def contract_of(text: str) -> Contract:
    return checked(read_text(text), "a.yaml")


# --- What is right --------------------------------------------------------------------------------


def test_the_weather_forecaster_is_read_as_it_is_shown() -> None:
    contract = contract_of(WEATHER_FORECASTER)
    assert (contract.name, contract.version) == ("weather_forecaster", "1.0")
    assert contract.capabilities == (
        Capability(
            tool="http_client",
            permissions=("network_access",),
            rate_limit=Rate(count=10, window_s=60),
        ),
        Capability(tool="llm_summarizer", model="deepseek-v2-7b", max_tokens=512, temperature=0.3),
    )
    resources, lifecycle = contract.resources, contract.lifecycle
    assert (resources.min_cu, resources.max_cu, resources.memory_mb) == (15, 45, 4096)
    assert (lifecycle.timeout, lifecycle.graceful_shutdown) == (120, True)
    retry = lifecycle.retry_policy
    assert (retry.max_attempts, retry.backoff, retry.jitter) == (2, "exponential", 0.1)


def test_the_pdf_analyzer_is_read_as_it_is_shown() -> None:
    contract = contract_of(PDF_ANALYZER)
    assert (contract.name, contract.version) == ("pdf_analyzer", "1.2")
    assert contract.permissions == ("read_file", "network_access")
    assert contract.lifecycle.timeout == 300


@pytest.mark.parametrize(
    "line",
    [
        "state_key_prefix: {agent_type}_{shard_id}",
        "state_key_prefix: {agent_type}_{shard_id}  # spreads hot keys",
        "state_key_prefix:   {agent_type}_{shard_id}\ndescription: more",
        "state_key_prefix: '{agent_type}_{shard_id}'",
        'state_key_prefix: "{agent_type}_{shard_id}"',
        "state_key_prefix: {agent_type}_{shard_id}\r",
    ],
)
def test_a_prefix_of_placeholders_needs_no_quotes(line: str) -> None:
    read = read_text(LEAST + line + "\n")
    assert checked(read, "a.yaml").state_key_prefix == "{agent_type}_{shard_id}"
    assert read.written["state_key_prefix"] == "{agent_type}_{shard_id}"


@pytest.mark.parametrize("prefix", ["{agent_type}", "{shard_id}/x", "plain", "a-{shard_id}"])
def test_a_prefix_may_be_any_mix_of_placeholders_and_text(prefix: str) -> None:
    assert contract_of(f"{LEAST}state_key_prefix: {prefix}\n").state_key_prefix == prefix
    within = f"{{name: a, version: 1, state_key_prefix: '{prefix}'}}"
    assert contract_of(within).state_key_prefix == prefix


def test_a_text_that_shows_a_prefix_stays_as_it_is() -> None:
    shown = "state_key_prefix: {agent_type}_{shard_id}"
    assert contract_of(f"{LEAST}description: |\n  {shown}\n").description == f"{shown}\n"


@pytest.mark.parametrize("version", ["1", "1.0", "2.30", "'1.10'", "0x10", "1e3", "2024-01-31"])
def test_a_version_is_text_letter_by_letter(version: str) -> None:
    read = read_text(f"name: a\nversion: {version}\n")
    assert checked(read, "a.yaml").version == version.strip("'")
    assert read.written["version"] == version.strip("'")


def test_descriptions_and_tools_may_be_in_any_language() -> None:
    text = LEAST + "description: 获取天气数据 ☀\ncapabilities: [{tool: wyszukiwarka_słów}]\n"
    contract = contract_of(text)
    assert contract.description == "获取天气数据 ☀"
    assert contract.capabilities == (Capability(tool="wyszukiwarka_słów"),)


def test_a_file_from_another_system_is_read_as_well() -> None:
    there = WEATHER_FORECASTER.replace("\n", "\r\n")
    assert contract_of(f"\ufeff{there}") == contract_of(WEATHER_FORECASTER)


def test_what_is_empty_says_nothing() -> None:
    contract = contract_of(LEAST + "capabilities:\ndescription:\nlifecycle: {timeout: null}\n")
    assert contract == contract_of(LEAST)
    assert contract.capabilities is None
    assert contract_of(LEAST + "capabilities: []\n").capabilities == ()


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("500ms", 0.5),
        ("120s", 120),
        ("2m", 120),
        ("5min", 300),
        ("1.5h", 5400),
        ("1d", 86400),
        ("3 s", 3),
    ],
)
def test_times_have_units(written: str, seconds: float) -> None:
    assert contract_of(f"{LEAST}lifecycle: {{timeout: {written}}}\n").lifecycle.timeout == seconds


@pytest.mark.parametrize(
    ("written", "per_s"),
    [("10req/min", 10 / 60), ("2/s", 2), ("1 req/hour", 1 / 3600), ("0.5req/d", 0.5 / 86400)],
)
def test_rates_have_units(written: str, per_s: float) -> None:
    text = f"{LEAST}capabilities: [{{tool: t, rate_limit: {written}}}]\n"
    (capability,) = contract_of(text).capabilities or ()
    assert capability.rate_limit is not None
    assert capability.rate_limit.per_s == pytest.approx(per_s)


@pytest.mark.parametrize(
    ("written", "share"), [("true", 0.1), ("false", 0), ("1", 1), ("1e-1", 0.1)]
)
def test_jitter_is_a_share_or_yes_or_no(written: str, share: float) -> None:
    text = f"{LEAST}lifecycle: {{retry_policy: {{jitter: {written}}}}}\n"
    assert contract_of(text).lifecycle.retry_policy.jitter == share


def test_a_network_is_written_as_everywhere_else() -> None:
    tools = "capabilities: [{tool: http_client, permissions: [network_access]}]\n"
    for written, meant in (
        ("open", NetworkPolicy(mode=NetworkMode.OPEN)),
        ("{pypi: true}", NetworkPolicy(mode=NetworkMode.ALLOW, rule_sets={"pypi": True})),
    ):
        assert contract_of(f"{LEAST}{tools}network: {written}\n").network == meant


def test_what_was_written_is_kept_as_plain_values_that_mean_the_same() -> None:
    for text in (WEATHER_FORECASTER, PDF_ANALYZER):
        read = read_text(text)
        stored = json.loads(msgspec.json.encode(read.written))
        assert read_value(stored).contract == read.contract
        assert read_value(stored).problems == ()


# --- What is wrong --------------------------------------------------------------------------------

WRONG = """\
name: Météo
version: 1.0
version: 1.1
capabilites: []
capabilities:
  - tool: http_client
    permissions: [netwrok_access]
    rate_limit: 10req/fortnight
  - tool: http_client
    max_tokens: -5
    temperature: -1
  - tol: x
resources: {min_cu: 45, max_cu: 15, memory_mb: 3}
lifecycle:
  timeout: 0s
  graceful_shutdown: maybe
  retry_policy: {max_attempts: 0, backoff: exponentail, jitter: 2}
state_key_prefix: {agent}_{shard_id}
network: {allow: [nowhere!]}
command: python
input: {type: strng, properties: {a: {type: [integer, nul]}}}
"""


def test_all_that_is_wrong_is_told_at_once_with_its_place_and_what_was_meant() -> None:
    problems = [one.told("w.yaml") for one in read_text(WRONG).problems]
    assert [one.split(": ")[0:2] for one in problems] == [
        ["w.yaml:1:7", "name"],
        ["w.yaml:3:1", "version"],
        ["w.yaml:4:1", "capabilites"],
        ["w.yaml:7:19", "capabilities[0].permissions[0]"],
        ["w.yaml:8:17", "capabilities[0].rate_limit"],
        ["w.yaml:9:5", "capabilities[1].permissions"],
        ["w.yaml:9:11", "capabilities[1].tool"],
        ["w.yaml:10:17", "capabilities[1].max_tokens"],
        ["w.yaml:11:18", "capabilities[1].temperature"],
        ["w.yaml:12:5", "capabilities[2].tol"],
        ["w.yaml:12:5", "capabilities[2].tool"],
        ["w.yaml:13:21", "resources.min_cu"],
        ["w.yaml:13:48", "resources.memory_mb"],
        ["w.yaml:15:12", "lifecycle.timeout"],
        ["w.yaml:16:22", "lifecycle.graceful_shutdown"],
        ["w.yaml:17:32", "lifecycle.retry_policy.max_attempts"],
        ["w.yaml:17:44", "lifecycle.retry_policy.backoff"],
        ["w.yaml:17:65", "lifecycle.retry_policy.jitter"],
        ["w.yaml:18:19", "state_key_prefix"],
        ["w.yaml:19:10", "network"],
        ["w.yaml:20:10", "command"],
        ["w.yaml:21:15", "input.type"],
        ["w.yaml:21:45", "input.properties.a.type"],
    ]
    text = "\n".join(problems)
    for meant in (
        "meteo",
        "capabilities",
        "network_access",
        "tool",
        "exponential",
        "agent_type",
        "string",
        "null",
    ):
        assert f"did you mean {meant!r}?" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "lifecycle: {timeout: 120}",
            "a.yaml:3:22: lifecycle.timeout: 120 of what? Write it as 120s",
        ),
        ("lifecycle: {timeout: 5 parsecs}", "the unit 'parsecs' is not known"),
        ("lifecycle: {timeout: soon}", "'soon' is none: write it as 120s"),
        ("lifecycle: {timeout: 31d}", "at most 30d"),
        ("lifecycle: [timeout]", "a table of names, not a list"),
        ("resources: {memory_mb: 010}", "in decimal, not '010'"),
        ("resources: {memory_mb: 4.5}", "a whole number"),
        ("resources: {memory_mb: '64'}", "take it out of its quotes"),
        ("resources: {min_cu: .inf}", "a number in decimal"),
        ("resources: {min_cu: 0}", "more than 0"),
        ("capabilities: [{tool: t, temperature: 0.5}]", "add model"),
        ("capabilities: [{tool: t, model: m, max_tokens: 0}]", "at least 1"),
        ("capabilities: [{tool: t, rate_limit: 0req/s}]", "more than 0 calls"),
        ("capabilities: [{tool: t, permissions: network_access}]", "write [network_access]"),
        ("capabilities: [{tool: http_client}]", "can do nothing without it"),
        ("capabilities: [{tool: t}]\nnetwork: open", "no capability has the permission"),
        ("capabilities: [{tool: t, permissions: [network_access]}]\nnetwork: none", "take it away"),
        ("network: {pypi: 1}", "a set of rules is True or False"),
        ("command: []", "use 1 to 1024"),
        ("description: yes", "put it in quotes"),
        ("description: ' '", "it is empty"),
        ("input: [1]", "this is a table"),
        ("input: {const: .nan}", "put text in quotes"),
        ("input: {const: 1e400}", "put text in quotes"),
        ("input: {properties: {on: {type: string}}}", "a name is text, not 'on': put it in quotes"),
        ("state_key_prefix: {shard_id}{shard_id}", "once is enough"),
        ("state_key_prefix: a b", "letters, digits and ._:/- only"),
        ("layers: {bse: x@1}", "did you mean 'base'?"),
        ("a: &a [x]\nb: *a", "anchors and aliases are not taken"),
        ("description: !!python/name:os.system", "tags such as"),
        ("---\n", "another document"),
        ("a: {b\n", "this is not YAML"),
        ("\t- a", "this is not YAML"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(text: str, said: str) -> None:
    assert any(said in one for one in told(text + "\n")), told(text + "\n")


def test_name_and_version_have_to_be_there_unless_others_say_them() -> None:
    assert [one.path for one in read_text("{}").problems] == ["name", "version"]
    assert read_text("", whole=False).contract == Contract()
    assert read_value({}, whole=False).problems == ()


def test_an_error_tells_of_all_problems_and_where_the_first_is() -> None:
    with pytest.raises(DsecError) as caught:
        checked(read_text(WRONG), "w.yaml")
    error = caught.value
    assert error.code is ErrorCode.INVALID
    assert error.details == {"field": "name", "line": 1, "problems": 23}
    lines = error.message.splitlines()
    assert (len(lines), lines[-1]) == (21, "and 3 more")


# --- What is meant to do harm ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "x" * (TEXT_CHARACTERS_MAX + 1),
        "input: " + "[" * 100_000,
        "input: " + "{a: " * 30_000,
        "- " * 50 + "x",
        "input: [" + "a, " * 40_000 + "]",
        "\n".join(f"unknown{number}: v" for number in range(9000)),
        "a: &a [x,x,x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\n",
        "version: " + "1" * 130_000,
        "lifecycle: {timeout: " + "9" * 100_000 + "s}",
        "resources: {memory_mb: " + "9" * 100_000 + "}",
        "state_key_prefix: {" + "a" * 130_000,
        "\x00",
        "name: \ud800",
        "%YAML 1." + "1" * 5000 + "\n---\nname: a",
    ],
)
def test_what_is_built_to_be_large_is_refused_before_it_is_read_whole(text: str) -> None:
    problems = read_text(text).problems
    assert 1 <= len(problems) <= PROBLEMS_MAX
    assert all(one.line and one.column for one in problems)
    assert all(len(one.message) < 400 for one in problems)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (r'description: "\U00110000"', "a.yaml:3:17: this is not YAML: there is no character"),
        (r'description: "\UFFFFFFFF"', "there is no character"),
        (r'description: "\ud800"', "a.yaml:3:14: it holds NUL or half a character"),
        (r'command: ["a\0b"]', "a.yaml:3:11: it holds NUL"),
        (r'input: {"\udfff": 1}', "half a character"),
        (f"input: {{maximum: {2**64}}}", "at most 64 bits"),
        ("description: a\rinput: \x07", "a.yaml:4:8: this is not YAML: the character U+0007"),
        ("description: " + "x" * TEXT_CHARACTERS_MAX, "a.yaml:3:"),
    ],
)
def test_what_could_not_be_passed_on_is_no_part_of_a_contract(line: str, said: str) -> None:
    assert any(said in one for one in told(line + "\n")), told(line + "\n")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"input": {"maximum": 10**5000}}, "at most 64 bits"),
        ({"resources": {"memory_mb": 10**5000}}, "at most 64 bits"),
        ({10**5000: 1}, "a name is text"),
        ({"description": "\ud800"}, "half a character"),
        ({"\ud800": 1}, "a name is no text"),
        ({"command": ["a\0b"]}, "NUL"),
    ],
)
def test_values_that_could_not_be_passed_on_are_refused_as_well(part: Any, said: str) -> None:
    read = read_value({"name": "a", "version": "1", **part})
    assert any(said in one.message for one in read.problems), read.problems
    msgspec.msgpack.encode([one.told("a") for one in read.problems])


def test_plain_values_are_bounded_as_files_are() -> None:
    deep: dict[str, Any] = {}
    for _ in range(DEPTH_MAX + 1):
        deep = {"a": deep}
    for value, said in (
        ({"input": deep}, "deeper"),
        ({"input": {"enum": [0] * NODES_MAX}}, "more than"),
        ({"input": {"const": b""}}, "a bytes is no part"),
        ({"input": {1: 2}}, "a name is text"),
    ):
        assert any(said in one.message for one in read_value(value, whole=False).problems)


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*CONTRACT.kinds, "tool", "type"]) | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(_PLAIN)
@example({"state_key_prefix": {"agent_type": None}})
def test_whatever_is_written_is_a_contract_or_has_problems(value: Any) -> None:
    text = json.dumps(value)
    for read in (
        read_text(text),
        read_value(value if isinstance(value, dict) else {"input": value}),
    ):
        assert bool(read.problems) or read.contract is not None
        if not read.problems:
            assert read_value(read.written).contract == read.contract


def test_a_number_of_json_is_one_however_it_is_written() -> None:
    read = read_text(
        "name: a\nversion: 1e5\ninput: {maximum: 1e5, const: '1e5', enum: [-0.5E-3]}\n"
    )
    assert read.problems == ()
    assert read.written == {
        "name": "a",
        "version": "1e5",
        "input": {"maximum": 100_000.0, "const": "1e5", "enum": [-0.0005]},
    }
    assert read_value(read.written).written == read.written


@given(st.text(st.sampled_from("abc{}[]:,-_#&*!|>'\"%@`? \n\t"), max_size=60))
def test_no_text_makes_the_reader_fail(text: str) -> None:
    read = read_text(f"state_key_prefix: {text}")
    assert read.problems or read.contract


# --- The published schema -------------------------------------------------------------------------


def test_the_published_schema_is_the_codes() -> None:
    published = json.loads((ROOT / "docs" / "asdl.schema.json").read_text(encoding="utf-8"))
    assert published == json_schema(), "write it anew: dsec agent schema > docs/asdl.schema.json"


def test_the_schema_takes_what_the_reader_takes_and_knows_every_misspelling() -> None:
    Draft202012Validator.check_schema(json_schema())
    validator = Draft202012Validator(json_schema())
    for text in (WEATHER_FORECASTER, PDF_ANALYZER):
        assert list(validator.iter_errors(read_text(text).written)) == []
    for wrong in (
        {"name": "A", "version": "1"},
        {"name": "a"},
        {"name": "a", "version": "1", "capabilites": []},
        {"name": "a", "version": "1", "lifecycle": {"timeout": "5 parsecs"}},
        {"name": "a", "version": "1", "capabilities": [{"tool": "t", "permissions": ["netwrok"]}]},
        {"name": "a", "version": "1", "state_key_prefix": "{agent}"},
    ):
        assert list(validator.iter_errors(wrong)), wrong
