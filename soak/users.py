"""Users: each does one random operation after the other and holds the answer against the model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from dsec import DSecClient, DsecError, ErrorCode, Limits, Sandbox, SandboxState
from dsec_common.wire.base import new_id
from dsec_common.wire.sandbox import EndCause
from soak.model import Known, Model, Taken, World

LABEL: Final = "soak"
SMALL: Final[dict[str, Any]] = {"cpus": 0.05, "memory_bytes": 64 << 20, "disk_bytes": 8 << 20}
#: No operation may take longer, whatever is killed meanwhile.
STUCK_AFTER_S: Final = 150.0
_PATHS: Final = 4
#: How often something is done that needs no sandbox of the user's.
_NEW_PART: Final = 0.15
_BIG_BYTES: Final = 300_000
_LOOK: Final = "for f in /soak/*; do [ -f $f ] && echo $f $(cat $f); done; true"
_COUNT: Final = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done"

Operation = Callable[["User", Any], Awaitable[None]]


class User:
    """Does random things to sandboxes of its own, one thing at a time."""

    def __init__(
        self, name: str, client: DSecClient, model: Model, *, seed: int, base: str, most: int
    ) -> None:
        self.name = name
        self.client = client
        self.model = model
        self.base = base
        self.most = most
        self.random = random.Random(f"{seed} {name}")  # noqa: S311  to be repeated
        self.mine: list[Known] = []

    async def run(self, over: asyncio.Event) -> None:
        """Go on until ``over``."""
        while not over.is_set():
            operation, known = self._choose()
            await self.attempt(operation, known)

    def _choose(self) -> tuple[Operation, Known | None]:
        self.mine = [known for known in self.mine if not known.over]
        pick = self.random.random()
        if not self.mine or (len(self.mine) < self.most and pick < _NEW_PART):
            return self.random.choice(_WITHOUT), None
        return self.random.choice(_WITH), self.random.choice(self.mine)

    async def attempt(self, operation: Operation, known: Known | None) -> None:
        """Do one operation within bounded time; whatever is not as it must be is noted."""
        since, name = time.monotonic(), operation.__name__
        sandbox_id = known.sandbox.id if known is not None else ""
        try:
            async with asyncio.timeout(STUCK_AFTER_S):
                await operation(self, known)
        except DsecError as error:
            await self._judge(error, name, since, known)
        except TimeoutError:
            self.model.violate(f"stuck for {STUCK_AFTER_S:g} s", name, sandbox_id)
        except AssertionError as error:
            self.model.violate(f"wrong: {str(error)[:500]}", name, sandbox_id)
        else:
            self.model.done[name] += 1

    async def _judge(self, error: DsecError, name: str, since: float, known: Known | None) -> None:
        if self._snapshot_is_lost(error, known):
            self.model.refused[f"{name}:snapshot_lost"] += 1
            return
        if known is not None and error.code in {ErrorCode.EXPIRED, ErrorCode.NOT_FOUND}:
            await self.see_end(known, f"{name}: {error.message}")
            self.model.refused[f"{name}:{error.code}"] += 1
            return
        self.model.excuse(error, name, since, known)

    def _snapshot_is_lost(self, error: DsecError, known: Known | None) -> bool:
        """Forget a snapshot that a killed daemon has lost: it was not durable yet."""
        if known is None or error.code is not ErrorCode.NOT_FOUND:
            return False
        gone = [taken for taken in known.snapshots if taken.snapshot.id in error.message]
        known.snapshots = [taken for taken in known.snapshots if taken not in gone]
        node = known.sandbox.node
        return any(self.model.daemon_kills(node) > taken.kills for taken in gone)

    async def see_end(self, known: Known, why: str) -> None:
        """Note that a sandbox is said to be over; that must have a cause which was expected."""
        known.over = True
        try:
            info = await known.sandbox.inspect()
        except DsecError as error:
            if not known.ends:
                said = f"lost: {error.code}: {error.message} ({why})"
                self.model.violate(said, "inspect", known.sandbox.id)
            return
        if info.state is not SandboxState.ENDED:
            known.over = False
            self.model.violate(f"not over and yet refused: {why}", "inspect", known.sandbox.id)
        elif info.end_cause not in known.ends:
            said = f"lost: {info.end_cause} {info.end_detail} ({why})"
            self.model.violate(said, "inspect", known.sandbox.id)

    def token(self) -> str:
        """Return fresh text."""
        return f"{self.random.getrandbits(64):016x}"

    def labels(self) -> dict[str, str]:
        """Return the labels of every sandbox of the soak."""
        return {LABEL: self.name}

    def keep(self, sandbox: Sandbox, worlds: list[World] | None = None) -> Known:
        """Take a sandbox as one of our own."""
        known = self.model.told(sandbox, worlds)
        self.mine.append(known)
        return known

    async def look(self, known: Known) -> None:
        """See which of the possible worlds is the one."""
        result = await known.sandbox.exec(_LOOK)
        assert result.exit_code == 0, result
        lines = result.stdout.decode().splitlines()
        world = dict(line.removeprefix("/soak/").split(" ", 1) for line in lines)
        if world not in known.worlds:
            said = f"files are {world}, and not any of {known.worlds}"
            known.worlds = [world]
            raise AssertionError(said)
        known.worlds = [world]


# --- Operations without a sandbox -----------------------------------------------------------------


async def create(user: User, _known: Known) -> None:
    """Create one; a lost answer is asked for again by the SDK."""
    user.keep(
        await user.client.create_sandbox(
            user.base,
            labels=user.labels(),
            idempotency_key=new_id(),
            warm=user.random.choice(["prefer", "prefer", "bypass"]),
            **SMALL,
        )
    )


async def create_with_command(user: User, _known: Known) -> None:
    """Create one with a command inside the request."""
    token = user.token()
    sandbox = await user.client.create_sandbox(
        user.base,
        labels=user.labels(),
        idempotency_key=new_id(),
        command=f"mkdir -p /soak; echo {token} > /soak/0; echo {token}",
        **SMALL,
    )
    known = user.keep(sandbox, [{"0": token}])
    try:
        result = sandbox.first_result
    except DsecError:
        known.worlds.append({})
        raise
    assert result is not None
    assert result.stdout == f"{token}\n".encode(), result


async def run(user: User, _known: Known) -> None:
    """Run one command in a sandbox of its own."""
    token = user.token()
    result = await user.client.run(user.base, ["echo", token], labels=user.labels(), **SMALL)
    assert result.stdout == f"{token}\n".encode(), result


async def call(user: User, _known: Known) -> None:
    """Call a function: its files in, its output and files out."""
    token = user.token()
    limits = Limits(**SMALL)
    called = await user.client.call(
        user.base,
        "cat /in > /out; cat /in",
        files={"/in": token},
        collect=["/out"],
        limits=limits,
        labels=user.labels(),
        request_id=new_id(),
    )
    if called.error is not None:
        raise called.error
    assert called.ok, called
    assert called.result is not None
    assert called.result.stdout == token.encode(), called
    assert called.files == {"/out": token.encode()}, called


async def expire(user: User, _known: Known) -> None:
    """Create one that ends by itself; it must, and say why."""
    sandbox = await user.client.create_sandbox(
        user.base, labels=user.labels(), idempotency_key=new_id(), ttl_s=1.0, **SMALL
    )
    known = user.model.told(sandbox)
    known.ends = {EndCause.EXPIRED}
    while True:
        info = await sandbox.inspect()
        if info.state is SandboxState.ENDED:
            break
        await asyncio.sleep(0.25)
    known.over = True
    assert info.end_cause is EndCause.EXPIRED, info


# --- Operations on a sandbox ----------------------------------------------------------------------


async def exec_once(user: User, known: Known) -> None:
    """Run one command."""
    token = user.token()
    result = await known.sandbox.exec("cat; echo done", stdin=token)
    assert result.stdout == f"{token}done\n".encode(), result


async def many_execs(user: User, known: Known) -> None:
    """Run several at once."""
    tokens = [user.token() for _ in range(8)]
    results = await asyncio.gather(
        *(known.sandbox.exec(["echo", token]) for token in tokens), return_exceptions=True
    )
    for token, result in zip(tokens, results, strict=True):
        if isinstance(result, BaseException):
            raise result
        assert result.stdout == f"{token}\n".encode(), result


async def stream(user: User, known: Known) -> None:
    """Read a command's output while it runs; every line must come, once and in order."""
    process = await known.sandbox.start("for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.1; done")
    text = b""
    async for event in process:
        text += event.data
    assert text.split() == [b"%d" % number for number in range(1, 9)], text
    assert not process.truncated


async def cancel(user: User, known: Known) -> None:
    """Start a tree of processes and end it."""
    process = await known.sandbox.start("sleep 1000 & sleep 1000")
    info = await process.cancel(grace_s=0.2)
    assert info.ended_at, info


async def counter(user: User, known: Known) -> None:
    """Have one command run for as long as the sandbox does; no line of it may be lost."""
    if known.counter is None:
        known.counter, known.counted = await known.sandbox.start(_COUNT), 0
        return
    events = await known.counter.read(wait_s=1.0)
    lines = b"".join(event.data for event in events).split()
    if known.counter.truncated:
        known.counter.truncated = False
        return
    wanted = [b"%d" % (known.counted + 1 + index) for index in range(len(lines))]
    assert lines == wanted, f"after {known.counted}: {lines[:3]}…{lines[-3:]} {events[-1:]}"
    known.counted += len(lines)
    assert events or not known.ends


async def session(user: User, known: Known) -> None:
    """Use a shell that keeps what it is told."""
    token = user.token()
    async with await known.sandbox.session() as shell:
        await shell.run(f"cd /usr; kept={token}")
        result = await shell.run("pwd; echo $kept")
        assert result.stdout == f"/usr\n{token}\n".encode(), result


async def write(user: User, known: Known) -> None:
    """Write a file, whole or not at all."""
    path, token = str(user.random.randrange(_PATHS)), user.token()
    try:
        await known.sandbox.write_file(f"/soak/{path}", f"{token}\n")
    except DsecError:
        known.may_hold(path, token, certain=False)
        raise
    known.may_hold(path, token, certain=True)


async def look(user: User, known: Known) -> None:
    """Read all files."""
    await user.look(known)


async def big_file(user: User, known: Known) -> None:
    """Write and read more than a message holds."""
    data = user.random.randbytes(_BIG_BYTES)
    await known.sandbox.write_file("/big", data)
    assert await known.sandbox.read_file("/big") == data, "a file came back otherwise"
    await known.sandbox.remove("/big")


async def snapshot(user: User, known: Known) -> None:
    """Keep what it has."""
    worlds = [dict(world) for world in known.worlds]
    kills = user.model.daemon_kills(known.sandbox.node)
    taken = await known.sandbox.snapshot(labels=user.labels())
    known.snapshots.append(Taken(taken, worlds, kills))


async def roll_back(user: User, known: Known) -> None:
    """Put it back."""
    if not known.snapshots:
        return
    taken = user.random.choice(known.snapshots)
    try:
        await known.sandbox.roll_back(taken.snapshot)
    except DsecError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            known.counter = None
            known.may_be_as(taken.worlds, certain=False)
            known.ends.add(EndCause.ROLLBACK_FAILED)
        raise
    known.counter = None
    known.may_be_as(taken.worlds, certain=True)
    await user.look(known)


async def create_from_snapshot(user: User, known: Known) -> None:
    """Make another of what was kept."""
    if not known.snapshots:
        return
    taken = user.random.choice(known.snapshots)
    made = await user.client.create_sandbox(
        snapshot=taken.snapshot, labels=user.labels(), idempotency_key=new_id(), **SMALL
    )
    await user.look(user.keep(made, taken.worlds))


async def drop_snapshot(user: User, known: Known) -> None:
    """Delete what was kept."""
    if known.snapshots:
        taken = known.snapshots.pop(user.random.randrange(len(known.snapshots)))
        await taken.snapshot.delete()


async def fork(user: User, known: Known) -> None:
    """Make children."""
    worlds = [dict(world) for world in known.worlds]
    since = time.monotonic()
    for child in await known.sandbox.fork(user.random.randint(1, 3), labels=user.labels()):
        if isinstance(child, DsecError):
            user.model.excuse(child, "fork", since, known)
        else:
            await user.look(user.keep(child, worlds))


async def pause(user: User, known: Known) -> None:
    """Have it stand still; the next request wakes it."""
    info = await known.sandbox.pause()
    assert info.state is SandboxState.PAUSED, info


async def pause_and_resume(user: User, known: Known) -> None:
    """Have it stand still and go on."""
    await known.sandbox.pause()
    info = await known.sandbox.resume()
    assert info.state is SandboxState.RUNNING, info


async def touch(user: User, known: Known) -> None:
    """Keep it for longer, and label it."""
    token = user.token()
    await known.sandbox.touch(600.0)
    info = await known.sandbox.set_labels({"token": token})
    assert info.labels.get("token") == token, info
    assert info.labels.get(LABEL) == user.name, info


async def network(user: User, known: Known) -> None:
    """Change what it may reach."""
    wanted = user.random.choice(["none", "open", "allow"])
    allowed = {"allow": ["203.0.113.0/24:443/tcp"]}
    info = await known.sandbox.network.set(allowed if wanted == "allow" else wanted)
    assert info.policy.mode == wanted, info


async def delete(user: User, known: Known) -> None:
    """End it; from now on it may be gone."""
    known.ends |= {EndCause.DELETED}
    cause = await known.sandbox.delete()
    known.over = True
    assert cause in known.ends, cause


_WITHOUT: Final[tuple[Operation, ...]] = (
    create,
    create,
    create_with_command,
    run,
    call,
    call,
    expire,
)
_WITH: Final[tuple[Operation, ...]] = (
    *(exec_once, many_execs, stream, cancel, counter, counter, session),
    *(write, write, look, big_file),
    *(snapshot, roll_back, create_from_snapshot, drop_snapshot, fork),
    *(pause, pause_and_resume, touch, network),
    *(delete, delete),
)
