"""The environment factory on a real platform: what it lets through, refuses and leaves."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dsec import Sandbox
from dsec.factory import (
    EnvironmentRefused,
    Item,
    NotProven,
    build_environment,
    item_of,
    read_spec,
)
from dsec.factory.building import RUN_LABEL
from dsec_common.errors import DsecError, ErrorCode
from stack import Stack, environment

BROKEN = """
def total(numbers):
    result = 0
    for number in numbers:
        result -= number
    return result
"""
FIXED = BROKEN.replace("-=", "+=")
TESTS = textwrap.dedent(
    """
    import sys

    sys.path.insert(0, "/app")
    from sums import total

    assert total([2, 3, 5]) == 10, "the sum of the first primes"
    """
)
ENCODED = """python3 -c '
import base64
text = open("/app/sums.py").read().replace("-=", "+=").upper()
open("/app/y", "wb").write(base64.b64encode(text.encode()))
'
"""
SPEC = """
name: {name}
base: {base}
files: files
solution: solution
tests: tests
canaries: [{name}-canary-7f3a]
build:
  commands:
    - {command}
verify:
  command: ["python3", "/tests/check.py"]
"""


def write_task(
    directory: Path, name: str, base: str, command: str = "echo $SEED > /app/seed"
) -> Path:
    """Write a spec with what it names: a sum that is a difference."""
    for path, text in {
        "files/app/sums.py": BROKEN,
        "solution/app/sums.py": FIXED,
        "tests/tests/check.py": TESTS + f"# {name}-canary-7f3a\n",
    }.items():
        (directory / path).parent.mkdir(parents=True)
        (directory / path).write_text(text)
    spec = directory / "task.yaml"
    spec.write_text(SPEC.format(name=name, base=base, command=json.dumps(command)))
    return spec


async def item_from(spec: Path, scratch: Path, seed: int = 0) -> Item:
    wanted, directory = read_spec(spec)
    return await item_of(wanted, directory, seed, scratch)


async def left_behind(stack: Stack, name: str) -> list[Any]:
    """Return what of a build is still there besides published layers."""
    async with stack.client() as client:
        sandboxes = [it for it in await client.list_sandboxes() if RUN_LABEL in it.labels]
        snapshots = [
            it for it in await client.snapshots.list() if it.info and RUN_LABEL in it.info.labels
        ]
        layers = await client.layers.list(name=f"{name}*")
    unchecked = [layer.reference for layer in layers if "@unchecked" in layer.reference]
    return [*sandboxes, *snapshots, *unchecked]


async def test_an_environment_is_proven_and_holds_neither_its_tests_nor_what_builds_leave(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    dirty = (
        "mkdir -p /root/.ssh /app/.git/objects; echo key > /root/.ssh/id; echo l > /app/.git/HEAD; "
        "cd /app && python3 -c 'import sums'; cp sums.py /tmp/copy; echo ls > /root/.bash_history"
    )
    spec = write_task(tmp_path, "clean-sums", base, dirty)
    item = await item_from(spec, tmp_path / "scratch")
    async with stack.client() as client:
        made = await build_environment(client, item, tmp_path / "scratch")
        again = await build_environment(client, item, tmp_path / "scratch")
        async with await client.create_sandbox(base, workspace=made.environment) as sandbox:
            listed = (await sandbox.exec("find /app /root /tmp /tests 2>/dev/null")).stdout_text
            unsolved = await sandbox.exec(
                'python3 -B -c \'import sys; sys.path[0] = "/app"; '
                "import sums; print(sums.total([1]))'"
            )
        async with await client.create_sandbox(
            base, workspace=made.environment, toolkits=(made.tests, made.solution)
        ) as sandbox:
            solved = await sandbox.exec(["python3", "/tests/check.py"])
    assert made.made
    assert (again.made, again.digest) == (False, made.digest)
    assert sorted(listed.split()) == ["/app", "/app/sums.py", "/root", "/tmp"]
    assert unsolved.stdout_text == "-1\n"
    assert solved.ok, solved.stderr_text
    assert await left_behind(stack, "clean-sums") == []


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            (
                ENCODED,
                "solution",
                "/app/y",
            ),
            id="the solution, in capitals, encoded",
        ),
        pytest.param(("echo SUMS-CANARY-7F3A > /app/notes", "canary", "/app/notes"), id="a canary"),
        pytest.param(
            ("echo sums-canary-7f3a > /.dsec-factory", "canary", "/.dsec-factory"),
            id="where the platform's own mark is",
        ),
        pytest.param(
            (
                "echo 'token: ghp_a1B2c3D4e5F6a1B2c3D4e5F6a1B2c3D4e5F6' > /app/notes",
                "credential",
                "/app/notes",
            ),
            id="a credential",
        ),
    ],
)
async def test_an_environment_that_betrays_its_task_is_refused_by_file_and_reason(
    stack: Stack, base: str, tmp_path: Path, case: tuple[str, str, str]
) -> None:
    command, kind, path = case
    item = await item_from(write_task(tmp_path, "sums", base, command), tmp_path / "scratch")
    async with stack.client() as client:
        with pytest.raises(EnvironmentRefused, match=path) as caught:
            await build_environment(client, item, tmp_path / "scratch")
        assert {(found.kind, found.path) for found in caught.value.findings} == {(kind, path)}
        with pytest.raises(DsecError) as missing:
            await client.layers.inspect(f"{item.name}@{item.key}")
    assert missing.value.code is ErrorCode.NOT_FOUND
    assert await left_behind(stack, "sums") == []


@pytest.mark.parametrize(
    ("command", "what"),
    [
        pytest.param("sed -i s/-=/+=/ /app/sums.py", "all of", id="solved as by the solution"),
        pytest.param(
            "echo 'total = sum' > /app/sums.py",
            "pass without the solution",
            id="solved another way",
        ),
        pytest.param(
            "ln -s /nowhere /tests; rm /app/sums.py",
            "tests end with",
            id="the solution does not help",
        ),
    ],
)
async def test_an_environment_that_is_solved_or_cannot_be_is_refused(
    stack: Stack, base: str, tmp_path: Path, command: str, what: str
) -> None:
    spec = write_task(tmp_path, "proof", base, command)
    if what == "tests end with":
        (tmp_path / "solution/app/sums.py").write_text(FIXED.replace("+=", "*="))
    item = await item_from(spec, tmp_path / "scratch")
    async with stack.client() as client:
        with pytest.raises((EnvironmentRefused, NotProven), match=what):
            await build_environment(client, item, tmp_path / "scratch")
    assert await left_behind(stack, "proof") == []


async def test_an_agent_works_in_the_sandbox_by_a_hook(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    async def agent(sandbox: Sandbox, item: Item) -> None:
        for turn in range(2):
            before = (await sandbox.exec("cat /app/log 2>/dev/null")).stdout_text
            await sandbox.write_file("/app/log", f"{before}{item.seed}.{turn}\n")

    item = await item_from(write_task(tmp_path, "hooked", base), tmp_path / "scratch", seed=4)
    async with stack.client() as client:
        made = await build_environment(client, item, tmp_path / "scratch", hook=agent)
        async with await client.create_sandbox(base, workspace=made.environment) as sandbox:
            assert await sandbox.read_text("/app/log") == "4.0\n4.1\n"
            assert await sandbox.read_text("/app/seed") == "4\n"


@pytest.mark.parametrize("error", [KeyError("choices"), TimeoutError("no model")])
async def test_a_hook_that_fails_is_told_as_such(
    stack: Stack, base: str, tmp_path: Path, error: Exception
) -> None:
    async def agent(sandbox: Sandbox, item: Item) -> None:
        raise error

    item = await item_from(write_task(tmp_path, "torn", base), tmp_path / "scratch")
    async with stack.client() as client:
        with pytest.raises(DsecError, match=r"the hook failed: .*(choices|no model)") as caught:
            await build_environment(client, item, tmp_path / "scratch", hook=agent)
    assert caught.value.code is ErrorCode.INVALID
    assert await left_behind(stack, "torn") == []


def fix_and_reset(directory: Path) -> None:
    """Make a repository of a directory, commit the fix, and reset it away."""

    def git(*words: str) -> None:
        named = ("git", "-c", "user.name=n", "-c", "user.email=e@x", "-C", str(directory))
        subprocess.run([*named, *words], check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "begin")
    (directory / "sums.py").write_text(FIXED)
    git("commit", "-qam", "fix")
    git("reset", "-q", "--hard", "HEAD~1")


async def test_a_repository_with_the_fix_in_its_past_is_left_out_or_refused(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    spec = write_task(tmp_path, "repo", base)
    fix_and_reset(tmp_path / "files/app")
    text = spec.read_text()
    async with stack.client() as client:
        spec.write_text(text + "git: keep\n")
        item = await item_from(spec, tmp_path / "scratch")
        with pytest.raises(EnvironmentRefused, match=r"/app/\.git/objects/.*all of") as caught:
            await build_environment(client, item, tmp_path / "scratch")
        assert {finding.kind for finding in caught.value.findings} == {"solution"}
        spec.write_text(text)
        item = await item_from(spec, tmp_path / "scratch")
        made = await build_environment(client, item, tmp_path / "scratch")
        async with await client.create_sandbox(base, workspace=made.environment) as sandbox:
            names = [entry.path for entry in await sandbox.list_directory("/app")]
    assert names == ["seed", "sums.py"]


async def test_a_recipe_and_a_script_build_before_the_commands_do(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text(
        f'base = "{base}"\ncommands = ["mkdir /app && echo recipe $SEED > /app/log"]\n'
    )
    (tmp_path / "build.sh").write_text("echo script $MODE >> /app/log\n")
    (tmp_path / "task.yaml").write_text(
        f"name: steps\nbase: {base}\nbuild:\n  recipe: recipe.toml\n  script: build.sh\n"
        "  env: {MODE: quick}\n  commands: [[sh, -c, 'echo command >> log']]\n  cwd: /app\n"
    )
    item = await item_from(tmp_path / "task.yaml", tmp_path / "scratch", seed=3)
    async with stack.client() as client:
        made = await build_environment(client, item, tmp_path / "scratch")
        async with await client.create_sandbox(base, workspace=made.environment) as sandbox:
            assert await sandbox.read_text("/app/log") == "recipe 3\nscript quick\ncommand\n"
            assert (await sandbox.exec("ls -A /tmp")).stdout_text == ""
    assert (made.tests, made.solution) == ("", "")


async def test_what_an_agent_leaves_as_a_solution_and_in_a_comment_is_refused(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    spec = tmp_path / "task.yaml"
    write = "mkdir -p /app /out/app && echo 'print(\"the one answer\", 6 * 7)' > /out/app/a.py"
    copy = "cat /out/app/a.py - > /app/a.py"
    spec.write_text(
        f"name: commented\nbase: {base}\nbuild:\n  solution: /out\n  commands:\n"
        f"    - {json.dumps(write)}\n    - {json.dumps(copy)}\n"
        "    - \"sed -i 's/^/# /' /app/a.py || exit 1\"\n"
        "verify: {command: [python3, /app/a.py]}\n"
    )
    item = await item_from(spec, tmp_path / "scratch")
    async with stack.client() as client:
        with pytest.raises(EnvironmentRefused, match=r"every line of /app/a\.py of the solution"):
            await build_environment(client, item, tmp_path / "scratch")
    assert await left_behind(stack, "commented") == []


async def test_an_agent_may_leave_solution_and_tests_which_are_taken_out(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    for name, text in {"sums.py": BROKEN, "fixed.py": FIXED, "check.py": TESTS}.items():
        (tmp_path / "agent/opt").mkdir(parents=True, exist_ok=True)
        (tmp_path / "agent/opt" / name).write_text(text)
    stack.dsec(
        *("layer", "import", str(tmp_path / "agent"), "--kind", "toolkit"),
        *("--name", "author", "--version", "1", "--tag", "latest"),
    )
    spec = tmp_path / "task.yaml"
    spec.write_text(
        f"name: authored\nbase: {base}\nbuild:\n"
        "  toolkits: ['author:latest']\n"
        "  solution: /out/solution\n"
        "  tests: /out/tests\n"
        "  commands:\n"
        "    - mkdir -p /app /out/solution/app /out/tests/tests\n"
        "    - cp /opt/sums.py /app && cp /opt/fixed.py /out/solution/app/sums.py\n"
        "    - cp /opt/check.py /out/tests/tests\n"
        "verify: {command: [python3, /tests/check.py]}\n"
    )
    item = await item_from(spec, tmp_path / "scratch")
    async with stack.client() as client:
        made = await build_environment(client, item, tmp_path / "scratch")
        async with await client.create_sandbox(base, workspace=made.environment) as sandbox:
            listed = await sandbox.exec("find /app /out /opt -type f 2>/dev/null")
        assert listed.stdout_text == "/app/sums.py\n"
        assert (await client.layers.inspect(made.solution)).kind == "toolkit"
        # What the tag means is part of what it is made of.
        (tmp_path / "agent/opt/sums.py").write_text(BROKEN + "# another\n")
        stack.dsec(
            *("layer", "import", str(tmp_path / "agent"), "--kind", "toolkit"),
            *("--name", "author", "--version", "2", "--tag", "latest"),
        )
        other = await build_environment(client, item, tmp_path / "scratch")
    assert other.made
    assert other.key != made.key
    assert await left_behind(stack, "authored") == []


TEMPLATE = """
import os, pathlib, sys
seed, out = int(os.environ["SEED"]), pathlib.Path(os.environ["OUT"])
def write(path, text):
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    (out / path).write_text(text)
write("files/app/number.py", f"NUMBER = {seed}\\n")
answer = seed * 7919 + 12345
write("solution/app/answer.py", f"# the answer of the seed {seed}\\nANSWER = {answer}\\n")
write("tests/tests/check.py", f"import sys; sys.path[0] = '/app'\\n"
      f"from answer import ANSWER\\nassert ANSWER == {answer}, 'not the answer of {seed}'\\n")
if seed == 2:
    write("files/app/more.txt", (out / "solution/app/answer.py").read_text())
"""


def kill_at(stack: Stack, words: tuple[str, ...], seed: int, stage: str) -> None:
    """Run a factory and kill it when a seed is at a stage."""
    with subprocess.Popen(
        stack.command("--json", *words),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said = json.loads(line)
            if (said["seed"], said["stage"]) == (seed, stage):
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL


async def test_a_run_that_is_killed_goes_on_and_makes_nothing_twice(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    (tmp_path / "template.py").write_text(TEMPLATE)
    (tmp_path / "bulk.yaml").write_text(
        f"name: bulk\nbase: {base}\ntemplate: [python3, template.py]\n"
        "verify: {command: [python3, /tests/check.py]}\n"
    )
    words = ("factory", "build", str(tmp_path / "bulk.yaml"), "-n", "4", "--parallel", "1")
    await asyncio.to_thread(kill_at, stack, words, 1, "unsolved")
    await asyncio.to_thread(kill_at, stack, words, 3, "publish")
    async with stack.client() as client:
        (first,) = [
            layer
            for layer in await client.layers.list(name="bulk-0")
            if "@un" not in layer.reference
        ]

    done = stack.dsec("--json", *words, check=False)
    outcomes = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert [outcome["environment"] and outcome["environment"]["made"] for outcome in outcomes][
        :3
    ] == [False, False, None]
    assert outcomes[3]["environment"]
    assert outcomes[0]["environment"]["digest"] == first.digest
    failure = outcomes[2]["failure"]
    assert failure["findings"][0]["path"] == "/app/more.txt"
    assert not failure["retryable"]
    assert await left_behind(stack, "bulk") == []
    async with stack.client() as client:
        layers = {layer.reference: layer for layer in await client.layers.list(name="bulk-*")}
    assert all(len(layer.history) == 0 for name, layer in layers.items() if name.count("-") == 1)


async def test_layers_and_directories_are_looked_through_at_the_command_line(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "opt").mkdir(parents=True)
    (tree / "opt/notes.txt").write_text(f"I think:\n{FIXED}")
    (tmp_path / "sums.py").write_text(FIXED)
    stack.dsec(
        *("layer", "import", str(tree), "--kind", "toolkit", "--name", "leaky", "--version", "1")
    )
    for target in ("leaky@1", str(tree)):
        done = stack.dsec(
            *("--json", "factory", "check", target, "--solution", str(tmp_path / "sums.py")),
            check=False,
        )
        assert done.returncode == 1, done.stderr
        (finding,) = json.loads(done.stdout)["findings"]
        assert (finding["path"], finding["kind"]) == ("/opt/notes.txt", "solution")
