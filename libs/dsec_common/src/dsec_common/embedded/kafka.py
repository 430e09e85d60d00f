"""Kafka for one machine: three providers behind one adapter.

``external`` is a cluster somebody else runs; ``apache`` is Apache Kafka itself, one KRaft node, its
jars fetched once through Maven; ``embedded`` is the broker from the ``noida-db`` wheel, which keeps
its records in memory and writes them out now and then: kill -9 of it may lose about a second, so it
is for development. A provider's process dies with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from dsec_common.embedded.kafka_jars import fetch_jars, jars_are_there, java_major
from dsec_common.embedded.process import Child, free_port
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.log_kafka import KafkaConfig, ensure_topics, is_ready
from dsec_common.topics import BEHAVIOR_LOGS, METERING, VERDICTS

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = structlog.get_logger(__name__)

PROVIDERS: Final = ("auto", "external", "apache", "embedded")
JAVA_MAJOR: Final = 17
_READY_TIMEOUT_S: Final = 60.0
_PROBE_TIMEOUT_S: Final = 2.0
_STOP_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.05
_PORT_ATTEMPTS: Final = 5
_EMBEDDED_RETENTION_S: Final = 3600
_CLUSTER_ID: Final = "ZHNlYy1zaW5nbGUtbm9kZQ"  # any 16 bytes; one node is the whole cluster


class KafkaProvider(Protocol):
    """A Kafka that can be started and stopped, as often as wanted, on one event loop or several."""

    name: str

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of the running broker; it stays the same over restarts."""
        ...

    async def start(self) -> None:
        """Start and return when requests are answered.

        Raises:
            DsecError: ``unavailable`` when it does not become ready, with where its log is;
                ``unsupported`` when a part it needs is not installed.
        """
        ...

    async def stop(self) -> None:
        """Stop in order and keep the data. May be called when it is not running."""
        ...

    def kill(self) -> None:
        """End it at once, as a crash would; for tests of loss."""
        ...


class ExternalKafka:
    """A Kafka that others run. Start waits until it answers; stop leaves it alone."""

    name = "external"

    def __init__(self, bootstrap_servers: str) -> None:
        self._config = KafkaConfig(bootstrap_servers=bootstrap_servers)

    @property
    def bootstrap_servers(self) -> str:
        """The address it was given."""
        return self._config.bootstrap_servers

    async def start(self) -> None:
        """Return when it answers; see :class:`KafkaProvider`."""
        await _wait_ready(self.bootstrap_servers, None)

    async def stop(self) -> None:
        """Do nothing: it is not ours."""

    def kill(self) -> None:
        """Refuse: it is not ours.

        Raises:
            DsecError: ``unsupported``.
        """
        raise DsecError(ErrorCode.UNSUPPORTED, "an external Kafka is not ours to kill")


class _LocalKafka(ABC):
    """What the two brokers that we start have in common: a port, a process, a log file."""

    name = "local"

    def __init__(self, data_directory: Path, port: int = 0) -> None:
        """Take a directory for data and log, and a port; 0 takes a free one at the first start."""
        self._directory = data_directory
        self._port = port
        self._port_is_given = port != 0
        self._child: Child | None = None

    @property
    def bootstrap_servers(self) -> str:
        """``127.0.0.1:<port>``; the port is known after the first start."""
        return f"127.0.0.1:{self._port}"

    @property
    def log_file(self) -> Path:
        """Where the broker's own output goes."""
        return self._directory / f"kafka-{self.name}.log"

    @property
    def pid(self) -> int:
        """The broker's process; 0 when it is not running."""
        return self._child.pid if self._child is not None else 0

    async def start(self) -> None:
        """Start and return when requests are answered; see :class:`KafkaProvider`."""
        if self._child is not None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(_PORT_ATTEMPTS):
            if not self._port:
                self._port = free_port()
            try:
                await self._start_once()
            except DsecError as error:
                await self.stop()
                # Between finding a port and binding it, another process may take it.
                again = "in use" in error.message and not self._port_is_given
                if not again or attempt == _PORT_ATTEMPTS - 1:
                    raise
                self._port = 0
            except BaseException:
                await self.stop()
                raise
            else:
                self._port_is_given = True
                _log.info("kafka_ready", provider=self.name, kafka=self.bootstrap_servers)
                return

    async def _start_once(self) -> None:
        command = await self._prepare()
        self._child = Child.start(command, log_file=self.log_file, cwd=self._directory)
        await _wait_ready(self.bootstrap_servers, self._child)
        await self._furnish()

    @abstractmethod
    async def _prepare(self) -> list[str]:
        """Lay out what the broker needs and return its command line."""

    async def _furnish(self) -> None:  # noqa: B027  a hook that one of the two needs
        """Set up what the broker needs once it answers."""

    async def stop(self) -> None:
        """Stop in order (SIGTERM, after 20 s SIGKILL) and keep the data."""
        child, self._child = self._child, None
        if child is not None:
            await child.stop(_STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()


class EmbeddedKafka(_LocalKafka):
    """The Kafka part of noida-db. Keeps records an hour, in memory; for development."""

    name = "embedded"

    async def _prepare(self) -> list[str]:
        program = embedded_program()
        if program is None:
            raise DsecError(
                ErrorCode.UNSUPPORTED,
                "the embedded Kafka is not installed: pip install 'dsec[embedded]'",
            )
        port = str(self._port)
        data = str(self._directory / "data")
        return [str(program), "start", "--data-dir", data, "--only", "kafka", "--kafka-port", port]

    async def _furnish(self) -> None:
        config = KafkaConfig(
            bootstrap_servers=self.bootstrap_servers, retention_s=_EMBEDDED_RETENTION_S
        )
        await ensure_topics(config, [BEHAVIOR_LOGS, VERDICTS, METERING])


class ApacheKafka(_LocalKafka):
    """Apache Kafka, one KRaft node that is broker and controller. Needs Java 17, at first Maven."""

    name = "apache"

    def __init__(self, data_directory: Path, port: int = 0, *, heap_mib: int = 256) -> None:
        """Take what :class:`KafkaProvider` does, and the most heap that the JVM may use."""
        super().__init__(data_directory, port)
        self._heap_mib = heap_mib

    async def _prepare(self) -> list[str]:
        jars = await fetch_jars()
        properties = self._directory / "server.properties"
        properties.write_text(self._properties(free_port()), encoding="utf-8")
        logging = self._directory / "log4j2.properties"
        logging.write_text(_LOG4J, encoding="utf-8")
        # The JVM leaves unpacked libraries behind when it is killed: not in everybody's folder.
        temporary = self._directory / "tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        java = [
            "java",
            f"-Djava.io.tmpdir={temporary}",
            "-XX:-UsePerfData",
            f"-Xmx{self._heap_mib}m",
            "-Xms64m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",  # starts in half the time; nobody measures this broker
            f"-Dlog4j2.configurationFile={logging}",
            "-cp",
            f"{jars}/*",
        ]
        if not (self._directory / "data" / "meta.properties").exists():
            await self._format([*java, "kafka.tools.StorageTool", "format"], properties)
        return [*java, "kafka.Kafka", str(properties)]

    async def _format(self, command: Sequence[str], properties: Path) -> None:
        child = Child.start(
            [*command, "-t", _CLUSTER_ID, "-c", str(properties)],
            log_file=self.log_file,
            cwd=self._directory,
        )
        try:
            status = await child.wait(_READY_TIMEOUT_S)
        finally:
            await child.stop(0)
        if status != 0:
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                f"formatting Kafka's storage in {self._directory} failed with status {status}; "
                f"see {self.log_file}: {child.last_lines()}",
            )

    def _properties(self, controller_port: int) -> str:
        broker = f"PLAINTEXT://127.0.0.1:{self._port}"
        controller = f"CONTROLLER://127.0.0.1:{controller_port}"
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"{broker},{controller}",
            "advertised.listeners": broker,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": self._directory / "data",
            "auto.create.topics.enable": "false",
            "offsets.topic.num.partitions": 4,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            # After a crash the node waits for its own old session to end before it serves again.
            "broker.session.timeout.ms": 3000,
            "broker.heartbeat.interval.ms": 1000,
            "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
        }
        return "".join(f"{name}={value}\n" for name, value in settings.items())


_LOG4J: Final = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
"""


def embedded_program() -> Path | None:
    """Return the embedded broker's program; None when its wheel is not installed."""
    spec = importlib.util.find_spec("noida_db")
    if spec is None or spec.origin is None:
        return None
    program = Path(spec.origin).with_name("noida-db")
    return program if program.is_file() else None


def open_kafka(
    provider: str, data_directory: Path, *, bootstrap_servers: str = "", port: int = 0
) -> KafkaProvider:
    """Return a provider, not yet started.

    Args:
        provider: ``external``, ``apache``, ``embedded``, or ``auto``: the first of them that is
            there (an address was given; Java and Maven; the wheel).
        data_directory: where a local broker keeps its data and its log.
        bootstrap_servers: the external cluster's address.
        port: a local broker's; 0 takes a free one.

    Raises:
        DsecError: ``invalid`` for an unknown provider or one without its address; ``unsupported``
            when ``auto`` finds none.
    """
    if provider not in PROVIDERS:
        raise invalid(f"Kafka provider {provider!r} is none of {', '.join(PROVIDERS)}")
    if provider == "external" or (provider == "auto" and bootstrap_servers):
        if not bootstrap_servers:
            raise invalid("the external Kafka provider needs an address: kafka host:port")
        return ExternalKafka(bootstrap_servers)
    if provider == "apache" or (provider == "auto" and apache_is_there()):
        return ApacheKafka(data_directory, port)
    if provider == "embedded" or embedded_program() is not None:
        return EmbeddedKafka(data_directory, port)
    raise DsecError(
        ErrorCode.UNSUPPORTED,
        "no Kafka was found: give the address of one, install Java 17 and Maven, "
        "or pip install 'dsec[embedded]'",
    )


def apache_is_there() -> bool:
    """Whether Apache Kafka can be run here: Java new enough, and its jars or Maven to get them."""
    return java_major() >= JAVA_MAJOR and (jars_are_there() or shutil.which("mvn") is not None)


async def _wait_ready(address: str, child: Child | None) -> None:
    """Return when the broker answers with itself in its metadata.

    With a child, it must be the child that answers: another process may have taken the port.
    """
    config = KafkaConfig(bootstrap_servers=address, request_timeout_s=_PROBE_TIMEOUT_S)
    port = int(address.rpartition(":")[2])
    deadline = asyncio.get_running_loop().time() + _READY_TIMEOUT_S
    while True:
        if child is not None and child.exit_status() is not None:
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                f"Kafka ended with status {child.exit_status()} before it was ready; "
                f"see {child.log_file}: {child.last_lines()}",
            )
        if child is None or child.listens_on(port):
            with contextlib.suppress(OSError):
                if await is_ready(config):
                    return
        if asyncio.get_running_loop().time() > deadline:
            where = f"; see {child.log_file}" if child is not None else ""
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                f"Kafka at {address} did not answer within {_READY_TIMEOUT_S:.0f} s{where}",
            )
        await asyncio.sleep(_POLL_S)
