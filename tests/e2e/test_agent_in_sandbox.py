"""A packed agent in a sandbox without a network: its model and its work are the trainer's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.model_relay import ModelAnswer, ModelRelay, ModelRequest, Sampled
from stack import Stack

WITHIN_S = 90

PROGRAM = """\
from dsec import Agent


class Talker(Agent):
    async def execute(self, question: str) -> dict:
        llm = self.get_async_tool("llm")
        answer = await llm.invoke(question)
        self.context.state.put("answer", answer)
        streamed = [piece async for piece in llm.stream(answer)]
        try:
            self.get_tool("shell").run("id")
        except Exception as error:
            return {"text": "".join(streamed), "shell": error.code.value}


if __name__ == "__main__":
    Talker().serve()
"""

CONTRACT = """\
name: talker
version: "1"
capabilities:
  - tool: llm
    model: any
    max_tokens: 20
"""


async def sample(request: ModelRequest) -> Sampled:
    """Answer with what was said, once more."""
    text = f"{request.messages[-1]['content']}, and again"
    answer = ModelAnswer(id="1", created=1, content=text)
    return Sampled(
        answer=answer,
        prompt_ids=(1,),
        completion_ids=(2, 3),
        logprobs=(-0.1, -0.2),
        model_version="1",
    )


def packed(directory: Path) -> Path:
    """Return a directory with the agent and all that it imports."""
    (directory / "talker.py").write_text(PROGRAM, encoding="utf-8")
    (directory / "talker.yaml").write_text(CONTRACT, encoding="utf-8")
    program = str(Path(sys.executable).with_name("dsec-pack"))
    for command in (
        ["build", "talker.py", "-o", "talker.dsec"],
        ["unpack", "talker.dsec", "talker"],
    ):
        subprocess.run([program, *command], check=True, cwd=directory, timeout=WITHIN_S)
    return directory / "talker"


@pytest.mark.timeout(300)
async def test_an_agents_model_and_its_work_are_the_trainers(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    agent = packed(tmp_path)
    async with (
        asyncio.timeout(WITHIN_S),
        stack.client() as client,
    ):
        rollout, calls = await client.rollouts.open(), await client.rollouts.open()
        async with (
            ModelRelay(calls, sample, journal=tmp_path / "calls.jsonl") as relay,
            await client.create_sandbox(
                base, rollout_id=rollout.id, model_rollout_id=calls.id
            ) as sandbox,
        ):
            running = asyncio.create_task(relay.run())
            await sandbox.upload(agent, "/opt/talker")
            process = await sandbox.start(["/opt/talker/run"])
            stages = rollout.stages()
            ready = await anext(stages)
            assert (ready.name, ready.payload["agent"]) == ("ready", "talker")
            await ready.reply({"question": "Here?"})
            result = await anext(stages)
            assert result.payload == {
                "output": {"text": "Here?, and again, and again", "shell": "denied"}
            }
            # A step that failed for good is the trainer's to give again.
            await result.reply({"question": 5})
            failed = await anext(stages)
            assert (failed.name, failed.payload["error"]["code"]) == ("failed", "invalid")
            await failed.reply(done=True)
            assert (await process.wait()).exit_code == 0
            # What it remembers is a file of the sandbox.
            kept = await sandbox.exec(["ls", "/var/tmp/dsec-agent"])
            assert "talker.sqlite" in kept.stdout_text.split()
            await calls.close()
            await running
            assert [it.sampled_tokens for it in relay.trace().sequences] == [2, 2]
