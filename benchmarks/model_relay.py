"""A model call's way from a sandbox without a network to the trainer's inference server and back.

The harness is one program that asks for streams; it runs in a sandbox, and on the host against the
server itself, in turns: what differs is the relay alone. One call at a time, to the first token;
then 64 streams at once, of two sandboxes, from a server that has a token as soon as one is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from benchmarks.platform import Platform, running_parts
from benchmarks.report import Options, Reach, Report, median, percentile
from dsec import Sandbox
from dsec.model_relay import HttpEngine, ModelRelay
from dsec.rootfs import build_host_rootfs

STREAMS: Final = 64
TOKENS: Final = 1000
_SANDBOXES: Final = 2
#: With the streams between, no sandbox asks for more calls than it may.
_COUNT: Final = 60
_PORT: Final = 9176

#: Prints the seconds to each first token, then the tokens and seconds of streams at once.
HARNESS: Final = """
import asyncio, json, os, sys, time
port, calls, streams, tokens, tag = *map(int, sys.argv[1:5]), sys.argv[5]

async def call(reader, writer, name, tokens):
    asked = {"model": "m", "stream": True, "max_tokens": tokens,
             "messages": [{"role": "user", "content": tag + name}]}
    body = json.dumps(asked).encode()
    began = time.perf_counter()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: "
                 + str(len(body)).encode() + b"\\r\\n\\r\\n" + body)
    first, letters, rest = 0.0, 0, b""
    while True:
        read = await reader.read(1 << 16)
        *lines, rest = (rest + read).split(b"\\n")
        for line in lines:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    letters += len(choice["delta"].get("content") or "")
            if letters and not first:
                first = time.perf_counter() - began
        if b"data: [DONE]" in lines:
            return first, letters // 3
        if not read:
            raise SystemExit("the stream broke off: " + str(letters))

async def main():
    firsts = []
    if calls:
        opened = await asyncio.open_connection("127.0.0.1", port)
        for number in range(calls):
            firsts.append((await call(*opened, f"call {number}", 2))[0])
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(streams)]
    began = time.time()
    begun = [call(*one, f"stream {at}", tokens) for at, one in enumerate(opened)]
    told = sum([tokens for _, tokens in await asyncio.gather(*begun)])
    times = {"began": began, "ended": time.time()}
    print(json.dumps({"firsts": firsts, "tokens": told, **times}))

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def model_server() -> AsyncIterator[int]:
    """Run the inference server in a process of its own; yield its port."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks._model_server"), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield int(await process.stdout.readline())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def trained(platform: Platform, server_port: int) -> AsyncIterator[list[Sandbox]]:
    """Yield sandboxes that are trained in this process, each with a rollout of its own."""
    client = platform.client
    async with contextlib.AsyncExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="dsec-bench-"))
        base = Path(directory) / "base"
        await asyncio.to_thread(build_host_rootfs, base)
        await client.layers.import_directory(base, kind="base", name="python", version="1")
        engine = await opened.enter_async_context(
            HttpEngine(f"http://127.0.0.1:{server_port}/v1", model_version="1")
        )
        sandboxes, training = [], []
        for number in range(_SANDBOXES):
            rollout = await client.rollouts.open()
            journal = Path(directory) / f"{number}.jsonl"
            relay = await opened.enter_async_context(ModelRelay(rollout, engine, journal=journal))
            training.append(asyncio.create_task(relay.run()))
            sandbox = await client.create_sandbox("python@1", model_rollout_id=rollout.id)
            sandboxes.append(sandbox)
        try:
            yield sandboxes
        finally:
            for task in training:
                task.cancel()
            await asyncio.gather(*training, return_exceptions=True)


async def in_sandboxes(sandboxes: list[Sandbox], calls: int, tag: str) -> list[dict[str, Any]]:
    """Run the harness in each; the first one also makes single calls, before."""
    if calls:
        return [await _in_sandbox(sandboxes[0], calls, 0, tag)]
    streams = STREAMS // len(sandboxes)
    return await asyncio.gather(*(_in_sandbox(one, 0, streams, tag) for one in sandboxes))


async def _in_sandbox(sandbox: Sandbox, calls: int, streams: int, tag: str) -> dict[str, Any]:
    arguments = [str(it) for it in (_PORT, calls, streams, TOKENS, tag)]
    done = await sandbox.exec(["python3", "-c", HARNESS, *arguments], timeout_s=120, check=True)
    return dict(json.loads(done.stdout))


async def directly(port: int, calls: int, tag: str) -> list[dict[str, Any]]:
    """Do the same on the host, against the server itself."""
    if calls:
        return [await _on_host(port, calls, 0, tag)]
    streams = STREAMS // _SANDBOXES
    return await asyncio.gather(*(_on_host(port, 0, streams, tag) for _ in range(_SANDBOXES)))


async def _on_host(port: int, calls: int, streams: int, tag: str) -> dict[str, Any]:
    arguments = [str(it) for it in (port, calls, streams, TOKENS, tag)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HARNESS, *arguments), stdout=asyncio.subprocess.PIPE
    )
    told, _ = await process.communicate()
    return dict(json.loads(told))


def tokens_per_s(runs: list[dict[str, Any]]) -> float:
    """Return the rate of runs at the same time, from the first beginning to the last end."""
    seconds = max(it["ended"] for it in runs) - min(it["began"] for it in runs)
    told = sum(it["tokens"] for it in runs)
    if told != STREAMS * TOKENS:
        raise RuntimeError(f"{told} tokens came of {STREAMS * TOKENS}")
    return float(told / seconds)


async def run(options: Options) -> Report:
    """Measure both, in turns."""
    count = min(options.count or _COUNT, _COUNT)
    rounds = min(options.rounds, 4)
    relayed: list[float] = []
    direct: list[float] = []
    rates: list[float] = []
    direct_rates: list[float] = []
    async with (
        model_server() as port,
        running_parts() as platform,
        trained(platform, port) as sandboxes,
    ):
        await in_sandboxes(sandboxes, 20, "warm")
        await directly(port, 20, "warm")
        for number in range(rounds):
            tag = f"round {number}, "
            relayed += (await in_sandboxes(sandboxes, count, tag))[0]["firsts"]
            direct += (await directly(port, count, tag))[0]["firsts"]
            rates.append(tokens_per_s(await in_sandboxes(sandboxes, 0, tag)))
            direct_rates.append(tokens_per_s(await directly(port, 0, tag)))
    p50, direct_p50 = percentile(relayed, 0.5), percentile(direct, 0.5)
    added_ms = 1000 * (p50 - direct_p50)
    ratio = median([ours / peer for ours, peer in zip(rates, direct_rates, strict=True)])
    return Report(
        name="model_relay",
        figures={
            "first_token_p50_ms": 1000 * p50,
            "first_token_p99_ms": 1000 * percentile(relayed, 0.99),
            "direct_first_token_p50_ms": 1000 * direct_p50,
            "added_first_token_p50_ms": added_ms,
            "streams": STREAMS,
            "tokens_per_s": median(rates),
            "direct_tokens_per_s": median(direct_rates),
            "samples": len(relayed),
        },
        ratios={"tokens_to_direct": ratio},
        reach=(
            Reach.at_most("added_first_token_p50_ms", added_ms, 5.0),
            Reach.at_least("tokens_to_direct", ratio, 0.5),
        ),
    )
