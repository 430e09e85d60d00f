"""Fair sharing: who goes next, by weights and nested quotas."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_common.errors import DsecError
from dsec_scheduler.fair_share import FairShare, Quota, check_quotas

TREE = (
    Quota(
        name="research",
        weight=3.0,
        children=(Quota(name="alice", weight=2.0), Quota(name="bob", cu_max=50.0)),
    ),
    Quota(name="production", weight=1.0),
)


def served(
    share: FairShare, waiting: dict[str, list[float]], held: dict[str, float], units: float
) -> Counter[str]:
    """Return what each project gets of so many units."""
    asked = {name: [(name, cu) for cu in wants] for name, wants in waiting.items()}
    got: Counter[str] = Counter()
    for (name, cu), limit in share.order(asked, held, lambda item: item[1]):
        if limit:
            continue
        if got.total() + cu > units:
            break
        got[name] += int(cu)
    return got


def test_projects_that_no_quota_names_share_alike() -> None:
    got = served(FairShare(), {"a": [1.0] * 100, "b": [1.0] * 20, "c": [1.0] * 100}, {}, 120)
    assert got == {"a": 50, "b": 20, "c": 50}


def test_what_is_held_counts_before_anything_is_given() -> None:
    got = served(FairShare(), {"a": [1.0] * 100, "b": [1.0] * 100}, {"a": 30.0}, 50)
    assert got == {"a": 10, "b": 40}


def test_groups_share_by_weight_first_and_their_projects_within() -> None:
    waiting = {name: [1.0] * 1000 for name in ("alice", "bob", "production")}
    # Of 80: research 60, of which bob may have 50 at most and gets his third.
    assert served(FairShare(TREE), waiting, {}, 80) == {"alice": 40, "bob": 20, "production": 20}


def test_nobody_goes_over_a_quota_though_units_are_free_and_smaller_requests_pass() -> None:
    got = served(FairShare(TREE), {"bob": [40.0, 20.0, 10.0, 10.0]}, {}, 1000)
    assert got == {"bob": 50}


def test_the_quota_that_keeps_a_request_waiting_is_named() -> None:
    tree = (Quota(name="team", cu_max=10.0, children=(Quota(name="a"), Quota(name="b"))),)
    order = list(FairShare(tree).order({"a": [8.0], "b": [8.0]}, {}, lambda cu: cu))
    assert order == [(8.0, ""), (8.0, "team")]


def test_a_project_s_share_is_what_it_holds_over_what_it_is_entitled_to() -> None:
    shares = FairShare(TREE).shares(["alice", "other"], {"bob": 15.0, "alice": 40.0}, 200.0)
    # Active: research (3) and other (1); within research alice (2) and bob (1).
    assert shares == {"alice": pytest.approx(0.4), "other": 0.0}


def test_nothing_is_owed_of_a_cluster_without_units() -> None:
    assert FairShare().shares(["a"], {}, 0.0) == {"a": 1.0}


def test_the_tightest_limit_above_a_project_is_told() -> None:
    share = FairShare(TREE)
    assert share.limit_of("bob") == ("bob", 50.0)
    assert share.limit_of("stranger") == ("", math.inf)


@pytest.mark.parametrize(
    ("quotas", "said"),
    [
        ((Quota(name="a", weight=0.0),), "weight"),
        ((Quota(name="a", weight=math.nan),), "weight"),
        ((Quota(name="a", weight=-1.0),), "weight"),
        ((Quota(name="a", cu_max=math.inf),), "cu_max"),
        ((Quota(name="a", cu_max=-1.0),), "cu_max"),
        ((Quota(name="a"), Quota(name="g", children=(Quota(name="a"),))), "twice"),
        ((Quota(name="No Project"),), "project name"),
    ],
)
def test_quotas_that_make_no_tree_are_refused(quotas: tuple[Quota, ...], said: str) -> None:
    with pytest.raises((ValueError, DsecError), match=said):
        check_quotas(quotas)


def test_a_tree_that_never_ends_is_refused() -> None:
    quota = Quota(name="leaf")
    for depth in range(20):
        quota = Quota(name=f"g{depth}", children=(quota,))
    with pytest.raises(ValueError, match="nested"):
        check_quotas((quota,))


@given(
    st.dictionaries(
        st.sampled_from(["alice", "bob", "production", "x", "research"]),
        st.lists(st.integers(1, 60), max_size=12),
        max_size=5,
    ),
    st.dictionaries(st.sampled_from(["alice", "bob", "y"]), st.integers(0, 100)),
)
def test_all_that_waits_comes_once_and_each_project_s_in_its_own_order(
    wants: dict[str, list[int]], held: dict[str, int]
) -> None:
    waiting = {name: [(name, n, cu) for n, cu in enumerate(cus)] for name, cus in wants.items()}
    order = list(
        FairShare(TREE).order(
            waiting, {name: float(cu) for name, cu in held.items()}, lambda item: float(item[2])
        )
    )
    for name, asked in waiting.items():
        assert [item for item, _ in order if item[0] == name] == asked
    assert len(order) == sum(map(len, waiting.values()))
    bob = itertools.accumulate(
        (item[2] for item, limit in order if item[0] == "bob" and not limit),
        initial=held.get("bob", 0),
    )
    assert all(cu <= max(50, held.get("bob", 0)) for cu in bob)
