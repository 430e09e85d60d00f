"""Kafka away at a node's start, there, and away again: the node works and says what it lacks."""

from __future__ import annotations

from pathlib import Path

from control_plane import until
from dsec_common.log import LogConsumer, StartAt
from dsec_common.testing.kafka import kafka_for_tests
from dsec_common.wire.sandbox import DeleteSandbox, SandboxDeleted
from sandboxd_node import node_for_tests

WAIT_S = 30.0


async def test_a_node_works_without_kafka_is_not_ready_and_loses_no_step(
    tmp_path: Path, layers: Path
) -> None:
    async with kafka_for_tests("embedded") as kafka:
        await kafka.provider.stop()
        async with node_for_tests(
            tmp_path, layers, kafka_bootstrap=kafka.bootstrap_servers
        ) as node:
            assert "Kafka is not connected" in node.service.not_ready_reason()
            created = await node.place()
            assert (await node.exec(created.sandbox_id, "true")).exit_code == 0
            await kafka.provider.start()
            await until(lambda: node.service.not_ready_reason() == "", WAIT_S)
            await kafka.provider.stop()
            await until(lambda: "Kafka" in node.service.not_ready_reason(), WAIT_S)
            assert (await node.exec(created.sandbox_id, "true")).exit_code == 0
            await kafka.provider.start()
            await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
            steps: list[str] = []
            async with LogConsumer(kafka.config, start_at=StartAt.EARLIEST) as consumer:
                async for record in consumer:
                    steps.append(record.action)
                    if record.action == "delete":
                        break
    assert steps == ["create", "exec", "exec", "delete"]
