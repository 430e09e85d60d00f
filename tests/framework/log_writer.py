"""A process that writes a log until it is killed; arguments: KAFKA SPOOL NAME PROJECT.

It prints each number once the record with it is durable; what it printed must never be lost.
"""

from __future__ import annotations

import asyncio
import sys

from dsec_common.behavior import BehaviorLog
from dsec_common.log import KafkaConfig, LogConfig, LogProducer, SequenceCounter
from dsec_common.logging import configure_logging


async def main(kafka: str, spool: str, name: str, project: str) -> None:
    """Write until killed."""
    config = LogConfig(
        kafka=KafkaConfig(bootstrap_servers=kafka, partitions=3), spool_directory=spool
    )
    counter = SequenceCounter()
    async with LogProducer(config, name) as producer:
        while True:
            for _ in range(10):
                seq = counter.next("node-1.killed")
                producer.append(
                    BehaviorLog(sandbox_id="node-1.killed", project=project, seq=seq, action="step")
                )
            await producer.durable()
            sys.stdout.write(f"{seq}\n")
            sys.stdout.flush()
            await asyncio.sleep(0)


if __name__ == "__main__":
    configure_logging("log-writer")
    asyncio.run(main(*sys.argv[1:]))
