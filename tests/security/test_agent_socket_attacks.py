"""The agent's socket, attacked from inside a sandbox while a neighbour speaks over its own."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator

import pytest

from agent_world import NODE, MemoryGateway, sandbox_record
from attack_world import AttackWorld
from dsec_sandboxd.agent_socket import AgentSocketServer
from dsec_sandboxd.step_log import PLATFORM_ACTIONS
from kernel_world import MIB, descriptors_of

ROLLOUTS = {"agent": "s0.01mine", "beside": "s0.01other"}
#: Speak over the socket, politely or not.
SPEAK = """
import array, json, os, socket, struct
def connect():
    to = socket.socket(socket.AF_UNIX); to.settimeout(20); to.connect('/run/dsec/agent.sock')
    return to
def exactly(of, size):
    data = b''
    while len(data) < size:
        more = of.recv(size - len(data))
        if not more: raise EOFError(len(data))
        data += more
    return data
def answer(of): return json.loads(exactly(of, struct.unpack('>I', exactly(of, 4))[0]))
def send(to, body): to.sendall(struct.pack('>I', len(body)) + body)
def ask(to, op, **more):
    send(to, json.dumps(dict(more, id=1, op=op)).encode()); return answer(to)
"""


class Sockets:
    """Sandboxes ``agent`` and ``beside`` in an arena, each with its socket of one server."""

    def __init__(self, arena: AttackWorld) -> None:
        self.arena = arena
        self.gateway = MemoryGateway()
        self.server = AgentSocketServer(self.gateway, NODE)

    async def begin(self) -> None:
        for local in ROLLOUTS:
            self.arena.directory.joinpath(local).mkdir()
            await self.arena.create(
                local, memory_bytes=64 * MIB, run_directory=self.arena.directory / local
            )
        await self.listen()

    async def listen(self) -> None:
        for local, rollout_id in ROLLOUTS.items():
            record = sandbox_record(local, rollout_id)
            await self.server.open(record, self.arena.directory / local)

    async def speak(self, code: str, local: str = "agent", user: str = "0") -> str:
        return await self.arena.python(SPEAK + code, local=local, user=user)

    async def check_beside(self) -> None:
        """Assert that the neighbour is served, and as itself."""
        said = await self.speak(
            "print(ask(connect(), 'hello')['result']['sandbox_id'])", local="beside"
        )
        assert said == f"{NODE}.beside"


@pytest.fixture
async def sockets(arena: AttackWorld) -> AsyncIterator[Sockets]:
    made = Sockets(arena)
    await made.begin()
    try:
        yield made
        await made.check_beside()
    finally:
        await made.server.aclose()


async def test_a_forged_message_speaks_for_nobody_else(sockets: Sockets) -> None:
    names = {
        "sandbox_id": f"{NODE}.beside",
        "rollout_id": ROLLOUTS["beside"],
        "local": "beside",
        "project": "other",
        "node": "other",
    }
    said = await sockets.speak(
        f"""
names, to = {names!r}, connect()
print(sorted(set(map(str, (ask(to, 'hello', **more)['result'][key]
      for more in ({{}}, names) for key in ('sandbox_id', 'rollout_id'))))))
print(ask(to, 'report', stage='tested', payload=1, **names)['result'])
print(ask(to, 'log', action='think', attributes=dict(names, seq='1'), **names)['result'])
print({{ask(to, 'log', action=action, **names)['error']['code'] for action in
       {sorted(PLATFORM_ACTIONS)!r}}})
print({{ask(to, op, seq=1, reward=1.0, done=True, payload=1, action='x', **names)['error']['code']
       for op in ('feedback', 'give', 'create', 'exec', 'delete', 'rollback', '', '*')}})
"""
    )
    mine, report, step, platforms, unknown = said.splitlines()
    assert mine == str(sorted((f"{NODE}.agent", ROLLOUTS["agent"])))
    assert "'seq': 1" in report
    assert step == "{}"
    assert platforms == "{'denied'}"
    assert unknown == "{'invalid'}"
    assert {step["local"] for step in sockets.gateway.steps} == {"agent"}
    assert sockets.gateway.reports == [("tested", 1)]
    assert sockets.gateway.feedback == {}


async def test_garbage_ends_at_worst_the_connection_that_sent_it(sockets: Sockets) -> None:
    said = await sockets.speak(
        """
polite = connect()
for body in (b'', b'{}', b'null', b'\\xff\\xfe', b'[' * 9000, b'{"id":1,"op":"hello"}' * 2,
             b'{"id":1e999,"op":[]}', b'{"id":1,"op":"log","action":' + b'"x' * 999 + b'}'):
    rude = connect()
    send(rude, body)
    assert answer(rude)['error']['code'] == 'invalid', body
for header in (b'\\xff' * 4, b'GET / HTTP/1.1\\r\\n\\r\\n', struct.pack('>I', 1 << 31)):
    rude = connect()
    rude.sendall(header)
    try:
        assert answer(rude)['error']['code'] in ('invalid', 'exhausted')
        while rude.recv(4096): pass
    except (EOFError, ConnectionError): pass
unfinished = [connect() for _ in range(4)]
for one in unfinished: one.sendall(struct.pack('>I', 1000) + b'{')
print(ask(polite, 'hello')['result']['sandbox_id'])
"""
    )
    assert said == f"{NODE}.agent"
    assert sockets.gateway.steps == []
    assert sockets.gateway.reports == []


# A descriptor of a pipe's end that somebody still has shows in the other one: it does not end.
DESCRIPTORS = """
import select
def is_dead(end): return bool(select.select([end], [], [], 10)[0]) and os.read(end, 1) == b''
rude, ends, refused, body = connect(), [], 0, b'{"id":1,"op":"hello"}'
for _ in range(20):
    mine, given = os.pipe()
    rights = array.array('i', [given] * 200)
    try:
        rude.sendmsg([struct.pack('>I', len(body)) + body],
                     [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    except PermissionError:
        refused += 1
        send(rude, body)
    os.close(given)
    assert 'result' in answer(rude)
    ends.append(mine)
print(refused, all(map(is_dead, ends)))
"""


def _kernel_can_refuse_descriptors() -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.getsockopt(socket.SOL_SOCKET, 83)  # SO_PASSRIGHTS
        except OSError:
            return False
    return True


async def test_descriptors_that_are_sent_stay_with_nobody(sockets: Sockets) -> None:
    before = len(descriptors_of())
    refused, dead = (await sockets.speak(DESCRIPTORS)).split()
    assert refused == ("20" if _kernel_can_refuse_descriptors() else "0")
    assert dead == "True"
    assert len(descriptors_of()) <= before + 2


async def test_the_socket_is_alive_after_it_was_made_anew_and_nothing_takes_its_place(
    sockets: Sockets,
) -> None:
    running = await sockets.arena.exec_until_output(
        sockets.arena.command(
            "python3",
            "-c",
            SPEAK
            + """
first = connect(); ask(first, 'hello'); print('connected', flush=True)
while first.recv(1): pass
for replace in (lambda: os.unlink('/run/dsec/agent.sock'),
                lambda: os.rename('/run/dsec/agent.sock', '/run/dsec/x'),
                lambda: os.rename('/run/dsec', '/run/other'),
                lambda: os.symlink('/tmp/x', '/run/dsec/x'),
                lambda: os.chmod('/run/dsec/agent.sock', 0),
                lambda: socket.socket(socket.AF_UNIX).bind('/run/dsec/mine.sock')):
    try: replace(); print('replaced')
    except OSError: pass
print('tried', flush=True)
while True:
    try: print(ask(connect(), 'hello')['result']['sandbox_id']); break
    except (ConnectionRefusedError, FileNotFoundError): pass
""",
        ),
        local="agent",
    )
    await sockets.server.aclose()
    await sockets.listen()
    said = await running
    assert said.stdout.decode().split() == ["connected", "tried", f"{NODE}.agent"], said
    assert os.listdir(sockets.arena.directory / "agent") == ["agent.sock"]  # noqa: PTH208  names
