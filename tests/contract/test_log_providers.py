"""The three Kafkas behind one adapter: started, found, stopped, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_common.embedded import kafka_jars
from dsec_common.embedded.kafka import (
    ApacheKafka,
    EmbeddedKafka,
    ExternalKafka,
    apache_is_there,
    open_kafka,
)
from dsec_common.embedded.process import free_port
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.log import KafkaConfig
from dsec_common.log_kafka import is_ready


async def is_gone(pid: int) -> bool:
    """Whether a process that is not ours to reap has ended, within a few seconds."""
    for _ in range(100):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()  # noqa: ASYNC240  procfs does not block
        except FileNotFoundError:
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.mark.parametrize("kind", ["embedded", "apache"])
async def test_a_local_broker_starts_keeps_its_port_and_leaves_nothing(
    kind: str, tmp_path: Path
) -> None:
    kafka = open_kafka(kind, tmp_path)
    assert isinstance(kafka, EmbeddedKafka | ApacheKafka)
    await kafka.start()
    address, pid = kafka.bootstrap_servers, kafka.pid
    try:
        assert await is_ready(KafkaConfig(bootstrap_servers=address))
        await kafka.start()
        assert kafka.pid == pid
        external = open_kafka("auto", tmp_path, bootstrap_servers=address)
        assert isinstance(external, ExternalKafka)
        await external.start()
        await external.stop()
        assert kafka.log_file.exists()
    finally:
        await kafka.stop()
    await kafka.stop()
    assert await is_gone(pid)
    with pytest.raises(OSError, match="Connect call failed"):
        await is_ready(KafkaConfig(bootstrap_servers=address))
    assert kafka.bootstrap_servers == address


async def test_auto_takes_apache_where_java_is_and_the_embedded_broker_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert apache_is_there()
    assert isinstance(open_kafka("auto", tmp_path), ApacheKafka)
    monkeypatch.setattr("dsec_common.embedded.kafka.java_major", lambda: 11)
    assert isinstance(open_kafka("auto", tmp_path), EmbeddedKafka)


def test_an_unknown_provider_and_an_address_that_is_missing_are_refused(tmp_path: Path) -> None:
    for provider in ("rabbit", "external"):
        with pytest.raises(DsecError) as refused:
            open_kafka(provider, tmp_path)
        assert refused.value.code is ErrorCode.INVALID


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("kind", ["embedded", "apache"])
async def test_a_port_that_is_taken_is_an_error_that_shows_the_brokers_own_words(
    kind: str, taken_port: int, tmp_path: Path
) -> None:
    kafka = open_kafka(kind, tmp_path, port=taken_port)
    assert isinstance(kafka, EmbeddedKafka | ApacheKafka)
    with pytest.raises(DsecError, match="already in use") as refused:
        await kafka.start()
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert kafka.pid == 0


async def test_a_free_port_lost_to_another_process_is_replaced(
    taken_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([taken_port, free_port()])
    monkeypatch.setattr("dsec_common.embedded.kafka.free_port", lambda: next(ports))
    kafka = EmbeddedKafka(tmp_path)
    await kafka.start()
    await kafka.stop()
    assert kafka.bootstrap_servers != f"127.0.0.1:{taken_port}"


async def test_a_broker_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from dsec_common.embedded.kafka import EmbeddedKafka\n"
        "async def main():\n"
        "    kafka = EmbeddedKafka(pathlib.Path(sys.argv[1]))\n"
        "    await kafka.start()\n"
        "    print(kafka.pid, file=sys.stderr, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        str(tmp_path),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    pid = 0
    try:
        pid = int(await asyncio.wait_for(process.stderr.readline(), 30))
        process.kill()
        assert await is_gone(pid)
        pid = 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
        if pid:
            os.kill(pid, signal.SIGKILL)


async def test_jars_are_asked_for_only_when_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jars = await kafka_jars.fetch_jars()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await kafka_jars.fetch_jars() == jars
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DsecError, match="maven") as refused:
        await kafka_jars.fetch_jars()
    assert refused.value.code is ErrorCode.UNSUPPORTED
