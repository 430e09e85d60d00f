"""Turns at packing snapshots: nobody's slow ones hold up everybody else's."""

from __future__ import annotations

import asyncio

from dsec_sandboxd.snapshot_turns import PackingTurns


class Yard:
    """Work that is begun in turns and ends when the test says so."""

    def __init__(self, *, at_once: int, per_project: int) -> None:
        self.turns = PackingTurns(at_once=at_once, per_project=per_project)
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str) -> None:
        """Ask for turns by names of project, sandbox and piece of work, as ``pa1``."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._work(name))
        await settle()

    async def _work(self, name: str) -> None:
        async with self.turns.turn(name[0], name[1]):
            self.begun.append(name)
            await self._ends[name].wait()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            await self._tasks.pop(name)
            await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait({self._tasks.pop(name)})
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_sandbox_has_one_turn_and_its_neighbour_the_next() -> None:
    yard = Yard(at_once=3, per_project=2)
    await yard.ask("pa1", "pa2", "pa3", "pb1")
    assert yard.begun == ["pa1", "pb1"]
    await yard.end("pb1", "pa1")
    assert yard.begun == ["pa1", "pb1", "pa2"]
    await yard.end("pa2", "pa3")


async def test_a_project_leaves_a_place_to_others_however_long_its_own_take() -> None:
    yard = Yard(at_once=3, per_project=2)
    await yard.ask("pa1", "pb1", "pc1", "qa1")
    assert yard.begun == ["pa1", "pb1", "qa1"]
    await yard.ask("qb1", "ra1")
    await yard.end("qa1")
    assert yard.begun[3:] == ["qb1"]
    await yard.end("qb1")
    assert yard.begun[4:] == ["ra1"]
    await yard.end("ra1", "pa1", "pb1", "pc1")


async def test_projects_and_within_them_sandboxes_take_turns() -> None:
    yard = Yard(at_once=1, per_project=1)
    await yard.ask("pa1", "pa2", "pa3", "pb1", "qa1", "qa2")
    for name in ["pa1", "pa2", "qa1", "pb1", "qa2", "pa3"]:
        assert yard.begun[-1] == name
        await yard.end(name)


async def test_who_gives_up_waiting_or_working_keeps_no_place() -> None:
    yard = Yard(at_once=1, per_project=1)
    await yard.ask("pa1", "pa2", "qa1", "ra1")
    await yard.cancel("qa1")
    await yard.cancel("pa1")
    assert yard.begun == ["pa1", "pa2"]
    await yard.cancel("pa2")
    assert yard.begun == ["pa1", "pa2", "ra1"]
    await yard.end("ra1")
    await yard.ask("qa2")
    assert yard.begun[-1] == "qa2"
    await yard.end("qa2")
