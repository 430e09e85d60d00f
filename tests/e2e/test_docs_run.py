"""What the documents show is what happens: their examples run against a platform, in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from documents import Block, Page, pages
from stack import Stack

#: Its examples run inside a sandbox; the agent socket's own tests run them.
ELSEWHERE = {"docs/agent-protocol.md"}
RUNNERS = {"bash": ("bash", "-euo", "pipefail", "-c"), "python": (sys.executable, "-c")}
TIMEOUT_S = 100
#: Ids, times and sizes differ each time.
VARYING = (
    (re.compile(r"\b[\w-]+\.[0-9a-z]{26}\b"), "<id>"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z"), "<time>"),
    (re.compile(r"\b\d+(?:\.\d+)?(?:ms| ms|s)\b"), "<duration>"),
)

RUN = [
    pytest.param(page, id=page.name)
    for page in pages()
    if page.name not in ELSEWHERE and any(block.language in RUNNERS for block in page.blocks)
]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("base", "router")
@pytest.mark.parametrize("page", RUN)
def test_the_examples_of_a_page_run(page: Page, stack: Stack, tmp_path: Path) -> None:
    printed: str | None = None
    for block in page.blocks:
        if block.language in RUNNERS:
            printed = _run(block, page, _environment(stack), tmp_path)
        elif block.language == "text" and printed is not None:
            assert _normal(printed) == _normal(block.text), f"{page.name}:{block.line}"
        else:
            printed = None


def _run(block: Block, page: Page, environment: dict[str, str], directory: Path) -> str:
    done = subprocess.run(
        [*RUNNERS[block.language], block.text],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment,
        timeout=TIMEOUT_S,
    )
    where = f"{page.name}:{block.line}"
    assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _environment(stack: Stack) -> dict[str, str]:
    """Return what a user has set: the program on PATH, and where the platform is."""
    context = stack.context
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DSEC_")}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
        "DSEC_HOME": str(stack.directory),
        "DSEC_NATS_SERVERS": ",".join(context.nats_servers),
        "DSEC_NATS_CREDENTIALS": context.credentials,
        "DSEC_KAFKA_BOOTSTRAP": context.kafka_bootstrap,
    }


def _normal(text: str) -> str:
    for pattern, name in VARYING:
        text = pattern.sub(name, text)
    return text.rstrip()
