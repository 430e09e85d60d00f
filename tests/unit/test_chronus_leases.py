"""Shards are shared among processes, and each shard has one owner."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_chronus.config import ChronusConfig
from dsec_chronus.keys import rollout_id_of
from dsec_chronus.leases import plan

SHARDS = ChronusConfig().shard_names


def test_one_process_takes_all() -> None:
    assert plan("a", ["a"], dict.fromkeys(SHARDS, "")) == (SHARDS, ())


def test_a_second_process_is_given_its_half() -> None:
    owners = dict.fromkeys(SHARDS, "a")
    assert plan("b", ["a", "b"], owners) == ((), ())
    given_up = plan("a", ["a", "b"], owners).give
    assert len(given_up) == len(SHARDS) // 2
    owners |= dict.fromkeys(given_up, "")
    assert plan("b", ["a", "b"], owners).take == given_up


@given(st.integers(1, 12), st.integers(1, 5), st.randoms())
def test_the_shares_become_even_from_any_start(shards: int, count: int, random: object) -> None:
    choose = getattr(random, "choice")  # noqa: B009  hypothesis's own random has no public type
    processes = [f"p{number}" for number in range(count)]
    owners = {f"s{number}": choose(["", *processes]) for number in range(shards)}
    for _ in range(2):
        for process in processes:
            todo = plan(process, processes, owners)
            owners |= dict.fromkeys(todo.give, "") | dict.fromkeys(todo.take, process)
    shares = Counter(owners.values())
    assert not shares[""]
    assert max(shares.values()) == -(-shards // count)
    assert all(plan(process, processes, owners) == ((), ()) for process in processes)


def test_the_same_key_of_the_same_project_names_the_same_rollout() -> None:
    assert rollout_id_of("default", "key", 8) == rollout_id_of("default", "key", 8)
    assert rollout_id_of("default", "key", 8) != rollout_id_of("other", "key", 8)
    owners = Counter(rollout_id_of("default", str(number), 8).owner for number in range(800))
    assert sorted(owners) == sorted(SHARDS)
    assert min(owners.values()) > 50


@pytest.mark.parametrize(
    "setting",
    [{"shards": 0}, {"lease_ttl_s": 0.5}, {"poll_max_s": float("nan")}, {"closed_keep_s": 0.0}],
)
def test_settings_that_cannot_work_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        ChronusConfig(**setting)  # type: ignore[arg-type]
