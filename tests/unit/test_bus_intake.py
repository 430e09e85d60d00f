"""One project's flood at a served subject leaves the others places, turns and memory."""

from __future__ import annotations

import pytest

from dsec_common.bus_intake import PROJECT_BYTES_MAX, Held, Intake
from dsec_common.subjects import SYSTEM


def _flooded(concurrency: int, max_pending: int) -> tuple[Intake[int], int, int]:
    """Return an intake of which project ``evil`` has all it can get, and how much that is."""
    intake: Intake[int] = Intake(concurrency, max_pending)
    working = waiting = 0
    while intake.begin("evil"):
        working += 1
    while intake.wait("evil", waiting):
        waiting += 1
    return intake, working, waiting


def test_a_project_that_takes_all_it_can_leaves_an_eighth() -> None:
    intake, working, waiting = _flooded(64, 1024)
    assert (working, waiting) == (56, 896)
    assert [intake.begin("good") for _ in range(9)] == [True] * 8 + [False]
    assert intake.wait("good", 0)


@pytest.mark.parametrize(("concurrency", "max_pending"), [(1, 0), (1, 1), (4, 7), (7, 7)])
def test_few_places_are_whoever_comes_first(concurrency: int, max_pending: int) -> None:
    assert _flooded(concurrency, max_pending)[1:] == (concurrency, max_pending)


def test_services_among_themselves_have_all() -> None:
    intake: Intake[int] = Intake(64, 64)
    assert all(intake.begin(SYSTEM) for _ in range(64))
    assert all(intake.wait(SYSTEM, number) for number in range(64))
    assert not intake.wait(SYSTEM, 64)


def test_projects_take_turns_and_each_keeps_its_order() -> None:
    intake: Intake[int] = Intake(1, 100)
    assert intake.begin("evil")
    for number in range(4):
        assert intake.wait("evil", number)
    assert intake.wait("good", 10)
    assert intake.wait("good", 11)
    assert intake.wait("third", 20)
    order, project = [], "evil"
    while True:
        intake.end(project)
        following = intake.next()
        if following is None:
            break
        project, number = following
        order.append(number)
    assert order == [0, 10, 20, 1, 11, 2, 3]
    assert intake.waiting == 0


def test_who_has_its_part_waits_for_an_end_of_its_own() -> None:
    intake, _, _ = _flooded(16, 4)
    assert intake.begin("good")
    intake.end("good")
    assert intake.next() is None
    intake.end("evil")
    assert intake.next() == ("evil", 0)


def test_large_requests_of_one_project_are_bounded_by_their_bytes() -> None:
    held = Held()
    size = 1 << 20
    assert sum(held.take("evil", size) for _ in range(2000)) == PROJECT_BYTES_MAX // size
    assert held.take("good", size)
    assert held.take("evil", 100), "small ones are bounded by their number"
    held.give_back("evil", 100)
    held.give_back("evil", size)
    assert held.take("evil", size)
    assert not held.take("evil", size)
