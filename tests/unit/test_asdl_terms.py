"""What follows from a contract, and how a request for a sandbox is brought under it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts_shown import PDF_ANALYZER, WEATHER_FORECASTER
from dsec_common.asdl.reading import checked, read_text
from dsec_common.asdl.terms import (
    SHUTDOWN_GRACE_S,
    Terms,
    placing_terms,
    terms_of,
    under,
)
from dsec_common.compute.model import GpuDemand
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.dag import DagRetry
from dsec_common.wire.network import NetworkMode, NetworkPolicy, NetworkRule
from dsec_common.wire.sandbox import MIB, CreateSandbox, ExecCommand, Limits
from dsec_common.wire.tools import NodeTools, Rate, ToolTerms

OPEN = NetworkPolicy(mode=NetworkMode.OPEN)
NONE = NetworkPolicy()
SOME = NetworkPolicy(mode=NetworkMode.ALLOW, allow=(NetworkRule(cidr="10.1.0.0/16"),))
TOOLS = "capabilities: [{tool: http_client, permissions: [network_access]}]\n"


def said(text: str) -> Terms:
    return terms_of(checked(read_text(text, whole=False), "a.yaml"))


def asked(terms: Terms, **fields: Any) -> CreateSandbox:
    return under(terms, CreateSandbox(base="b@1", **fields), "bot 1")


def test_all_that_the_weather_forecaster_says_is_enforced_by_somebody() -> None:
    assert said(WEATHER_FORECASTER) == Terms(
        memory_bytes=4096 * MIB,
        gpu=GpuDemand(min_cu=15, max_cu=45),
        network_allowed=True,
        network=OPEN,
        timeout_s=120,
        deadline_s=120 + SHUTDOWN_GRACE_S,
        retry=DagRetry(max_attempts=2, factor=2, jitter=0.1),
        tools={
            "http_client": ToolTerms(
                permissions=("network_access",), rate_limit=Rate(count=10, window_s=60)
            ),
            "llm_summarizer": ToolTerms(model="deepseek-v2-7b", max_tokens=512, temperature=0.3),
        },
    )


def test_the_pdf_analyzer_leaves_resources_to_its_request() -> None:
    terms = said(PDF_ANALYZER)
    assert (terms.memory_bytes, terms.gpu, terms.timeout_s) == (None, None, 300)
    assert terms.tools["pdf_parser"].permissions == ("read_file", "network_access")
    assert asked(terms, limits=Limits(memory_bytes=77 * MIB)).limits.memory_bytes == 77 * MIB


def test_a_contract_that_says_nothing_changes_nothing() -> None:
    request = CreateSandbox(base="b@1", network=SOME, ttl_s=5, command=ExecCommand(argv=("a",)))
    assert under(said("{}"), request, "bot 1") == request


def test_one_bound_of_compute_units_is_the_other_too() -> None:
    assert said("resources: {min_cu: 5}").gpu == GpuDemand(min_cu=5, max_cu=5)
    assert said("resources: {max_cu: 5}").gpu == GpuDemand(min_cu=5, max_cu=5)


def test_no_grace_ends_an_instance_with_its_time() -> None:
    assert said("lifecycle: {timeout: 9s, graceful_shutdown: false}").deadline_s == 9


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("{}", None),
        ("capabilities: []", None),
        ("network: none", None),
        ("capabilities: [{tool: files, permissions: [read_file]}]", None),
        (TOOLS, OPEN),
        (TOOLS + "network: {allow: [10.1.0.0/16]}", SOME),
        ("network: {allow: [10.1.0.0/16]}", SOME),
    ],
)
def test_the_network_follows_from_permissions(text: str, network: NetworkPolicy | None) -> None:
    assert asked(said(text)).network == network


def test_a_permission_beside_the_contract_counts() -> None:
    contract = checked(read_text("capabilities: []", whole=False), "a.yaml")
    assert terms_of(contract, ["network_access"]).network == OPEN


def test_a_request_may_ask_for_less() -> None:
    terms = said(
        TOOLS + "resources: {memory_mb: 512, min_cu: 5, max_cu: 9}\nlifecycle: {timeout: 60s}"
    )
    less = GpuDemand(min_cu=1, max_cu=2)
    meant = asked(
        terms,
        limits=Limits(memory_bytes=64 * MIB),
        gpu=less,
        network=NONE,
        ttl_s=7,
        command=ExecCommand(argv=("a",), timeout_s=3),
    )
    assert (meant.limits.memory_bytes, meant.gpu, meant.network) == (64 * MIB, less, NONE)
    assert meant.command is not None
    assert (meant.ttl_s, meant.command.timeout_s) == (7, 3)
    assert asked(terms, network=SOME).network == SOME


def test_what_a_request_leaves_open_is_the_contracts() -> None:
    terms = said("resources: {memory_mb: 64, max_cu: 9}\nlifecycle: {timeout: 10s}")
    meant = asked(terms, ttl_s=1000, command=ExecCommand(argv=("a",), timeout_s=1000))
    assert meant.limits == Limits(memory_bytes=64 * MIB)
    assert (meant.gpu, meant.ttl_s) == (terms.gpu, 10 + SHUTDOWN_GRACE_S)
    assert meant.command is not None
    assert meant.command.timeout_s == 10


@pytest.mark.parametrize(
    ("text", "fields", "field"),
    [
        (
            "resources: {memory_mb: 64}",
            {"limits": Limits(memory_bytes=65 * MIB)},
            "limits.memory_bytes",
        ),
        ("resources: {max_cu: 5}", {"gpu": GpuDemand(min_cu=5, max_cu=6)}, "gpu"),
        ("resources: {max_cu: 5}", {"limits": Limits(cu=6)}, "gpu"),
        ("capabilities: []", {"network": OPEN}, "network"),
        (TOOLS + "network: {allow: [10.1.0.0/16]}", {"network": OPEN}, "network"),
    ],
)
def test_a_request_for_more_is_denied_with_its_field(
    text: str, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(DsecError, match="contract of bot 1 does not allow") as caught:
        asked(said(text), **fields)
    assert caught.value.code is ErrorCode.DENIED
    assert caught.value.details["field"] == field


@settings(deadline=None)
@given(
    most_mb=st.integers(4, 4096),
    asked=st.builds(
        CreateSandbox,
        base=st.just("b@1"),
        limits=st.builds(
            Limits,
            memory_bytes=st.integers(4 * MIB, 4096 * MIB),
            cu=st.sampled_from([0.0, 1.0, 50.0]),
        ),
        network=st.sampled_from([None, OPEN, NONE, SOME]),
        ttl_s=st.floats(0, 1e4),
        command=st.builds(ExecCommand, argv=st.just(("a",)), timeout_s=st.floats(0.001, 1e4)),
    ),
)
def test_no_request_gets_more_than_its_contract_allows(most_mb: int, asked: CreateSandbox) -> None:
    text = f"resources: {{memory_mb: {most_mb}, max_cu: 9}}\nlifecycle: {{timeout: 60s}}"
    try:
        meant = under(said(f"capabilities: []\n{text}"), asked, "bot")
    except DsecError:
        return
    assert meant.limits.memory_bytes <= most_mb * MIB
    assert meant.gpu_demand is not None
    assert meant.gpu_demand.max_cu <= 9
    assert meant.network is None or meant.network.mode is NetworkMode.NONE
    assert 0 < meant.ttl_s <= 60 + SHUTDOWN_GRACE_S
    assert meant.command is not None
    assert meant.command.timeout_s <= 60


def test_the_set_up_is_its_callers_own() -> None:
    assert asked(said("capabilities: []"), setup_network=OPEN).setup_network == OPEN


def test_layers_are_for_requests_that_name_none() -> None:
    terms = said("layers: {base: c@1, workspace: w@1, toolkits: [t@1]}")
    bare = under(terms, CreateSandbox(base="", toolkits=("own@1",)), "bot")
    assert (bare.base, bare.workspace, bare.toolkits) == ("c@1", "w@1", ("own@1", "t@1"))
    based = asked(terms)
    assert (based.base, based.workspace, based.toolkits) == ("b@1", "", ("t@1",))
    forked = under(terms, CreateSandbox(base="", snapshot="n.s"), "bot")
    assert (forked.base, forked.workspace, forked.toolkits) == ("", "", ())


def test_bringing_a_request_under_its_terms_again_changes_nothing() -> None:
    terms = placing_terms(said(WEATHER_FORECASTER))
    once = asked(terms, command=ExecCommand(argv=("a",)))
    assert under(terms, once, "bot 1") == once
    assert once.deadline_s == 130
    assert terms.tools == {name: said(WEATHER_FORECASTER).tools[name] for name in terms.tools}
    assert terms.tools.keys() == {"http_client", "llm_summarizer"}
    assert once.tools == NodeTools(terms=terms.tools, network=OPEN)


def test_tools_that_no_node_runs_are_not_told_to_nodes() -> None:
    contract = """
    capabilities:
      - {tool: shell, permissions: [run_command]}
      - {tool: acme, permissions: [acme.shout]}
    """
    assert placing_terms(said(contract)).tools == {}
    assert asked(said(contract), tools=NodeTools(network=OPEN)).tools is None
