"""Whatever a document names exists: pages, sections, targets, subjects, commands, flags."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from documents import ROOT, Page, pages
from dsec.cli.init import app as init_app
from dsec.cli.main import app as dsec_app
from dsec.cli.pack import app as pack_app
from dsec_broker.config import BrokerConfig
from dsec_chronus.config import ChronusConfig
from dsec_common import subjects
from dsec_common.subjects import ScopedId
from dsec_sandboxd.config import SandboxdConfig
from dsec_scheduler.config import SchedulerConfig
from dsec_tracer.config import TracerConfig

PAGES = [pytest.param(page, id=page.name) for page in pages()]
SERVICES = {
    "dsec-broker": BrokerConfig,
    "dsec-scheduler": SchedulerConfig,
    "dsec-sandboxd": SandboxdConfig,
    "dsec-chronus": ChronusConfig,
    "dsec-tracer": TracerConfig,
}
APPS = {"dsec": dsec_app, "dsec-cli": dsec_app, "dsec-init": init_app, "dsec-pack": pack_app}
ANY = ScopedId("any", "any")
NODE_VERBS = (
    *("place", "list", "pools", "govern", "synchronise", "revoke", "resize", "retire"),
    "stream",
)
SYSTEM_SUBJECTS = (
    subjects.heartbeat("any"),
    *(subjects.node_request("any", verb) for verb in NODE_VERBS),
    *(subjects.lease(verb) for verb in ("grant", "renew", "release")),
    *(subjects.node_lease("any", verb) for verb in ("grant", "release")),
    *(
        subjects.rollout_system("any", ANY, verb)
        for verb in (*subjects.ROLLOUT_SYSTEM_VERBS, "open")
    ),
    subjects.rollout_journal("any"),
    *(subjects.group_system("any", "any", verb) for verb in ("take", "open")),
    subjects.shard_taken("any"),
    subjects.instance_report("any"),
    subjects.agent_event("any", "any", "rolled_back"),
    *(
        subjects.sandbox_event("any", ANY, what)
        for what in ("running", "paused", "resumed", "resized", "ended")
    ),
    *(subjects.request_event("any", "any", what) for what in ("created", "refused")),
    subjects.layer_event("any", "any", "progress"),
    subjects.project_events("any"),
    subjects.lease("list"),
    subjects.lease("transfer"),
    subjects.rollout_event("any", subjects.ScopedId("any", "any"), "put_back"),
    subjects.lease_event("any", "any", "unlocked"),
    subjects.node_alarm("any", "conservation_broken"),
    subjects.FIND_WAITING,
    subjects.WAITING_REPORTS,
)
PATTERNS = [
    *(pattern.split(".") for pattern in subjects.USER_SERVICES),
    *(
        ["*" if token == "any" else token for token in subject.split(".")]
        for subject in SYSTEM_SUBJECTS
    ),
]
COMMAND = re.compile(r"(?:^|[|;&(]\s*|\bsudo )(dsec(?:-[a-z]+)? [^|;&)#\n]*)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page: Page) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.path.parent / path).resolve() if path else page.path
        assert there.exists(), target
        if anchor:
            assert anchor in Page(there).anchors, target


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_exists(page: Page) -> None:
    targets = set(re.findall(r"^([a-z0-9_-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    blocks = "\n".join(block.text for block in page.blocks)
    named = re.findall(r"^make ([a-z0-9_-]+)", blocks, re.MULTILINE)
    named += re.findall(r"`make ([a-z0-9_-]+)`", page.prose)
    assert set(named) <= targets


@pytest.mark.parametrize("page", PAGES)
def test_every_subject_is_one_of_the_platforms(page: Page) -> None:
    for subject in re.findall(r"dsec\.v1\.[\w<>*.{}-]+", page.text):
        tokens = subject.rstrip(".").split(".")
        assert any(_matches(tokens, pattern) for pattern in PATTERNS), subject


def test_every_subject_is_described() -> None:
    told = set()
    for page in pages():
        for subject in re.findall(r"dsec\.v1\.[\w<>*.-]+", page.text):
            told.add(tuple(re.sub(r"<\w+>", "*", subject).split(".")))
    assert [pattern for pattern in PATTERNS if tuple(pattern) not in told] == []


def _matches(tokens: list[str], pattern: list[str]) -> bool:
    """Return whether a subject as documents write it fits, or is the beginning of one."""
    return len(tokens) <= len(pattern) and all(
        wanted in {"*", token} or token.startswith("<")
        for token, wanted in zip(tokens, pattern, strict=False)
    )


def _command_lines(page: Page) -> list[str]:
    shell = [block.text for block in page.blocks if block.language in {"bash", "console"}]
    inline = re.findall(r"`(dsec(?:-[a-z]+)? [^`]+)`", page.prose)
    return [
        line for text in (*shell, *inline) for line in COMMAND.findall(text.replace("\\\n", " "))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_flag_exists(page: Page) -> None:
    for line in _command_lines(page):
        words = shlex.split(line)
        if words[0] in APPS:
            _check_command(APPS[words[0]], words[1:], line)
        else:
            fields = {"config", *SERVICES[words[0]].__struct_fields__}
            flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
            assert {flag.replace("-", "_") for flag in flags} <= fields, line


def _check_command(app: typer.Typer, words: list[str], line: str) -> None:
    command: Any = typer.main.get_command(app)
    while words:
        word, *words = words
        if word.startswith("-"):
            option = word.partition("=")[0]
            found = next((it for it in command.params if option in it.opts), None)
            assert found is not None, f"{line}: {command.name} has no {option}"
            takes_value = not getattr(found, "is_flag", False) and "=" not in word
            words = words[1:] if takes_value else words
        elif isinstance(command, typer.core.TyperGroup):
            assert word in command.commands, f"{line}: there is no {word}"
            command = command.commands[word]
        elif not command.context_settings.get("allow_interspersed_args", True):
            return
