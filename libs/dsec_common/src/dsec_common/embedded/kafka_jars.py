"""Apache Kafka's jars, fetched once through Maven into the user's cache."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from dsec_common.embedded.process import Child
from dsec_common.errors import DsecError, ErrorCode

KAFKA_VERSION: Final = "4.1.1"
_SCALA: Final = "2.13"
_LOG4J_VERSION: Final = "2.24.3"
_FETCH_TIMEOUT_S: Final = 600.0
_LOCK_POLL_S: Final = 0.2

_POM: Final = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>dsec</groupId>
  <artifactId>kafka-runtime</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_{_SCALA}</artifactId>
      <version>{KAFKA_VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>{_LOG4J_VERSION}</version>
    </dependency>
  </dependencies>
</project>
"""


def jars_directory() -> Path:
    """Return where the jars of this version are kept."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache_home).expanduser() / "dsec" / f"kafka-{KAFKA_VERSION}"


def jars_are_there() -> bool:
    """Whether the jars have been fetched."""
    return (jars_directory() / f"kafka_{_SCALA}-{KAFKA_VERSION}.jar").is_file()


@cache
def java_major() -> int:
    """Return the major version of the Java on PATH; 0 when there is none."""
    if shutil.which("java") is None:
        return 0
    run = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)
    found = re.search(r'version "(\d+)', run.stderr)
    return int(found[1]) if found else 0


async def fetch_jars() -> Path:
    """Return the directory with the jars, fetched through Maven when they are missing.

    Several processes may ask at once: one fetches, the others wait. The directory appears whole.

    Raises:
        DsecError: ``unsupported`` without Java 17 or Maven; ``unavailable`` when Maven fails.
    """
    if java_major() < 17:  # noqa: PLR2004  what Kafka's broker needs
        raise DsecError(ErrorCode.UNSUPPORTED, "Apache Kafka needs Java 17 or newer on PATH")
    target = jars_directory()
    if jars_are_there():
        return target
    if shutil.which("mvn") is None:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            "Apache Kafka's jars are fetched through Maven, which is not on PATH: install `maven`",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "fetch.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_POLL_S)
        if not jars_are_there():
            await _fetch(target)
    return target


async def _fetch(target: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix="fetch-", dir=target.parent))
    try:
        (work / "pom.xml").write_text(_POM, encoding="utf-8")
        child = Child.start(
            [
                "mvn",
                "--batch-mode",
                "--no-transfer-progress",
                "dependency:copy-dependencies",
                "-DincludeScope=runtime",
                f"-DoutputDirectory={work / 'jars'}",
            ],
            log_file=work / "maven.log",
            cwd=work,
        )
        try:
            status = await child.wait(_FETCH_TIMEOUT_S)
        finally:
            await child.stop(1.0)
        if status != 0:
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                f"Maven could not fetch Kafka's jars (status {status}): {child.last_lines()}",
                retryable=True,
            )
        shutil.rmtree(target, ignore_errors=True)
        (work / "jars").rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
