"""Places are shared by turns of projects: much work of one keeps no other waiting for all of it."""

from __future__ import annotations

import asyncio

from dsec_common.fair_places import FairPlaces


class Work:
    """Work that holds a place for as long as it is told to."""

    def __init__(self, places: FairPlaces, project: str, began: list[Work]) -> None:
        self.done = asyncio.Event()
        self._places, self.project, self._began = places, project, began
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._places.place(self.project):
            self._began.append(self)
            await self.done.wait()

    async def finish(self) -> None:
        self.done.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_place_goes_to_the_project_whose_turn_it_is() -> None:
    places, began = FairPlaces(2), list[Work]()
    for project in "aaaaa":
        Work(places, project, began)
    await settle()
    for project in "bbc":
        Work(places, project, began)
    await settle()
    assert [work.project for work in began] == ["a", "a"]
    for nth in range(8):
        await began[nth].finish()
        await settle()
    assert "".join(work.project for work in began) == "aaabcaba"


async def test_who_gives_up_takes_no_place_and_loses_none() -> None:
    places, began = FairPlaces(1), list[Work]()
    first = Work(places, "a", began)
    await settle()
    waiting, given = Work(places, "b", began), Work(places, "b", began)
    await settle()
    waiting.task.cancel()
    await settle()
    first.done.set()
    while first.task in asyncio.all_tasks():
        await asyncio.sleep(0)
    given.task.cancel()  # it has the place by now, and may not know
    await asyncio.wait({waiting.task, given.task})
    last = Work(places, "c", began)
    await settle()
    assert began[-1] is last
    await last.finish()
