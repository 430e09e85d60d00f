"""A task for Inspect whose agent is a program in the sandbox that calls a model by HTTP."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.agent import Agent, AgentState, agent, sandbox_agent_bridge
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.util import sandbox

#: It knows nothing of Inspect: a conversation of two turns at an endpoint of OpenAI's.
HARNESS = """
import json, os, socket, time, urllib.error, urllib.request

# The bridge's proxy begins to listen a moment after it was started.
for _ in range(600):
    try:
        socket.create_connection(("127.0.0.1", int(os.environ["PORT"]))).close()
        break
    except ConnectionRefusedError:
        time.sleep(0.1)

def ask(messages):
    body = json.dumps({"model": "inspect", "messages": messages}).encode()
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
        {"content-type": "application/json", "authorization": "Bearer none"},
    )
    try:
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        raise SystemExit(error.read().decode())

messages = [{"role": "user", "content": "first"}]
messages.append({"role": "assistant", "content": ask(messages)})
messages.append({"role": "user", "content": "second"})
print(ask(messages))
"""


@agent
def harness() -> Agent:
    """Run the program; its model calls come here."""

    async def execute(state: AgentState) -> AgentState:
        async with sandbox_agent_bridge(state) as bridge:
            result = await sandbox().exec(
                ["python3", "-c", HARNESS],
                env={
                    "OPENAI_BASE_URL": f"http://127.0.0.1:{bridge.port}/v1",
                    "PORT": str(bridge.port),
                },
            )
            assert result.success, result.stderr
        return bridge.state

    return execute


@task
def bridged() -> Task:
    """One sample, whose answer the model gives when it is asked for the second time."""
    return Task(
        dataset=[Sample(input="first", target="gamma")], solver=harness(), scorer=includes()
    )
