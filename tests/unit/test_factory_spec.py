"""A factory's spec is meant or refused; equal content is equal work; records are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dsec.factory import Environment, FactorySpec, Failure, Outcome, State, item_of, read_spec
from dsec_common.errors import DsecError, ErrorCode

LEAST = "name: sums\nbase: host@1\nbuild: {commands: [make]}\n"


def write(directory: Path, text: str) -> Path:
    path = directory / "task.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: sums\nbase: host@1\nbuild: {comands: [a]}\n", "3:9.*'comands'.*'commands'"),
        ("name: Sums\nbase: host@1\nbuild: {commands: [a]}\n", "1:"),
        ("name: sums\nbase: host@1\n", "nothing is built"),
        (LEAST + "git: cut\n", "4:"),
        (LEAST + "exclude: ['*.log']\n", "begin it with / or"),
        (LEAST + "solution: fix\n", "there is no verify"),
        (LEAST + "verify: {command: a}\n", "verify needs a solution"),
        (LEAST + "verify: {command: [], apply: b}\n", "4:"),
        ("name: sums\nbase: host@1\nbuild: {commands: [a], timeout_s: 0}\n", "3:"),
        ("name: [\n", "task.yaml:"),
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused_with_its_place(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(DsecError, match=said) as caught:
        read_spec(write(tmp_path, text))
    assert caught.value.code is ErrorCode.INVALID


async def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec, directory = read_spec(write(tmp_path, LEAST + "files: nowhere\n"))
    with pytest.raises(DsecError, match="files names 'nowhere'") as caught:
        await item_of(spec, directory, 0, tmp_path / "scratch")
    assert caught.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(DsecError, match="-1 is no seed"):
        await item_of(spec, directory, -1, tmp_path / "scratch")


async def test_equal_content_has_an_equal_key_and_any_change_another(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    content = tmp_path / "files/a"
    content.write_text("one")
    spec, directory = read_spec(write(tmp_path, LEAST + "files: files\n"))

    async def key(seed: int = 0, other: FactorySpec = spec) -> str:
        return (await item_of(other, directory, seed, tmp_path / "scratch")).key

    first = await key()
    os.utime(content, (1, 1))
    assert await key() == first
    found = {first, await key(1)}
    content.chmod(0o755)
    found.add(await key())
    content.write_text("two")
    found.add(await key())
    content.rename(tmp_path / "files/b")
    found.add(await key())
    changed, _ = read_spec(write(tmp_path, LEAST.replace("make", "make all") + "files: files\n"))
    found.add(await key(other=changed))
    assert len(found) == 6


async def test_a_template_writes_what_a_seed_is_made_of(tmp_path: Path) -> None:
    (tmp_path / "template.py").write_text(
        "import os, pathlib, sys\n"
        "seed = os.environ['SEED']\n"
        "if seed == '7': sys.exit('seven is not made')\n"
        "for name in ('files', 'solution'):\n"
        "    (pathlib.Path(os.environ['OUT']) / name).mkdir()\n"
        "    (pathlib.Path(os.environ['OUT']) / name / 'a').write_text(seed)\n"
    )
    text = (
        f"name: sums\nbase: host@1\ntemplate: ['{sys.executable}', template.py]\n"
        "verify: {command: a}\n"
    )
    spec, directory = read_spec(write(tmp_path, text))
    items = [await item_of(spec, directory, seed, tmp_path / "scratch") for seed in (1, 1, 2)]
    assert items[0].key == items[1].key != items[2].key
    assert items[2].files is not None
    assert (items[2].files / "a").read_text() == "2"
    assert items[2].tests is None
    with pytest.raises(DsecError, match=r"seed 7 with exit code 1.*seven is not made"):
        await item_of(spec, directory, 7, tmp_path / "scratch")


def test_records_are_whole_and_outlive_the_process(tmp_path: Path) -> None:
    made = Environment(
        environment="sums-1@k", digest="sha256:0", size_bytes=1, base="host@1", seed=1, key="k"
    )
    failure = Failure(code="unavailable", message="no node", retryable=True)
    with State(tmp_path / "state") as state:
        run = state.run
        state.record(Outcome(seed=1, key="k", environment=made))
        state.record(Outcome(seed=2, key="k", failure=failure))
        assert state.outcome(3) is None
        with pytest.raises(DsecError, match="another process") as caught, State(tmp_path / "state"):
            pass
        assert caught.value.code is ErrorCode.CONFLICT
    # What a crash in the middle of writing leaves is no record.
    (tmp_path / "state/items/.1.json.new").write_bytes(b'{"seed"')
    (tmp_path / "state/items/4.json").write_bytes(b"{}")
    with State(tmp_path / "state") as state:
        assert state.run == run
        first, second = state.outcome(1), state.outcome(2)
        assert first is not None
        assert first.environment == made
        assert second is not None
        assert not second.failed_for_good
        with pytest.raises(DsecError, match=r"4\.json is no record"):
            state.outcome(4)
