"""Layers through SDK and command line on a whole platform: images, tags, progress, recipes."""

from __future__ import annotations

import ensurepip
import json
import shutil
import zipfile
from pathlib import Path

import pytest

from dsec import CommandFailed, DsecError, ErrorCode, sync
from dsec.recipes import build_layer, read_recipe
from layer_builders import (
    docker_archive_bytes,
    docker_save_bytes,
    file_member,
    pack_directory,
    tar_bytes,
    write_oci_layout,
)
from stack import Stack


def test_one_image_of_an_archive_is_imported_tagged_and_moved_from_a_shell(
    stack: Stack, tmp_path: Path
) -> None:
    archive = tmp_path / "saved.tar"
    archive.write_bytes(
        docker_archive_bytes(
            {
                "app:1": [tar_bytes([file_member("said", b"one")])],
                "app:2": [tar_bytes([file_member("said", b"two")])],
            }
        )
    )
    named = ("--kind", "workspace", "--name", "cli-app", "--json")
    refused = stack.dsec(
        "layer", "import", str(archive), "--oci", "--version", "1", *named, check=False
    )
    assert refused.returncode == 1
    for version in ("1", "2"):
        done = stack.dsec(
            *("layer", "import", str(archive), "--image", f"app:{version}"),
            *("--version", version, "--tag", f"v{version}", "--tag", "latest", *named),
        )
        assert json.loads(done.stdout)["tags"] == ["latest", f"v{version}"]
        stages = [json.loads(line)["stage"] for line in done.stderr.splitlines()]
        assert stages[0] == "upload"
        assert stages[-1] == "publish"
    listed = stack.dsec_json("layer", "list", "--name", "cli-*", "--tag", "latest")
    assert [layer["reference"] for layer in listed] == ["cli-app@2"]
    assert stack.dsec_json("layer", "list", "--name", "cli-app", "--kind", "base") == []
    stack.dsec("layer", "tag", "cli-app@1", "latest")
    inspected = stack.dsec("layer", "inspect", "cli-app:latest").stdout
    assert "cli-app@1" in inspected
    assert "latest, v1" in inspected
    kept = stack.dsec("layer", "rm", "cli-app@1", check=False)
    assert kept.returncode == 1
    assert "cli-app:latest" in kept.stderr
    for name in ("cli-app:latest", "cli-app:v1", "cli-app:v2", "cli-app@1", "cli-app@2"):
        stack.dsec("layer", "rm", name)
    assert stack.dsec_json("layer", "list", "--name", "cli-app") == []


def test_an_image_is_imported_as_what_it_holds_without_being_told(
    stack: Stack, tmp_path: Path
) -> None:
    content = tar_bytes([file_member("said", b"one")])
    (tmp_path / "content.tar").write_bytes(content)
    (tmp_path / "saved.tar").write_bytes(docker_save_bytes([content]))
    write_oci_layout(tmp_path / "layout", [content])
    (tmp_path / "layout.tar").write_bytes(pack_directory(tmp_path / "layout"))
    named = ("--kind", "workspace", "--name", "seen")
    digests = {
        source: stack.dsec_json(
            "layer", "import", str(tmp_path / source), "--version", str(number), *named
        )["digest"]
        for number, source in enumerate(("content.tar", "saved.tar", "layout", "layout.tar"))
    }
    assert set(digests.values()) == {digests["content.tar"]}
    refused = stack.dsec(
        *("layer", "import", str(tmp_path / "content.tar"), "--oci", "--version", "9", *named),
        check=False,
    )
    assert refused.returncode == 1
    for number in range(4):
        stack.dsec("layer", "rm", f"seen@{number}")


def test_the_sync_twin_tags_and_filters_too(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    with sync.DSecClient(stack.context.nats_servers, stack.context.credentials) as client:
        client.layers.import_directory(
            tmp_path, kind="data", name="twin", version="1", tags=["latest"]
        )
        listed = client.layers.list(kind="data", name="twin")
        assert [layer.tags for layer in listed] == [("latest",)]
        assert client.layers.tag("twin@1", "best").tags == ("best", "latest")
        for reference in ("twin:best", "twin:latest", "twin@1"):
            client.layers.remove(reference)


def write_wheel(directory: Path) -> None:
    """Make the wheel of a package that pip can install, and put pip's own beside it."""
    directory.mkdir()
    with zipfile.ZipFile(directory / "greeter-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("greeter.py", "WORD = 'hello from a wheel'\n")
        wheel.writestr(
            "greeter-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n"
        )
        wheel.writestr(
            "greeter-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(
            "greeter-1.0.dist-info/RECORD",
            "greeter.py,,\ngreeter-1.0.dist-info/METADATA,,\ngreeter-1.0.dist-info/WHEEL,,\n"
            "greeter-1.0.dist-info/RECORD,,\n",
        )
    bundled = Path(ensurepip.__file__).parent / "_bundled"
    (pip,) = bundled.glob("pip-*.whl")
    shutil.copy(pip, directory)


def write_recipe(directory: Path, base: str, commands: str = "") -> Path:
    write_wheel(directory / "wheels")
    (directory / "conf").mkdir()
    (directory / "conf" / "a").write_text("from a directory\n")
    (directory / "b").write_text("from a file\n")
    recipe = directory / "recipe.toml"
    recipe.write_text(
        f'base = "{base}"\nkind = "toolkit"\nwheels = "wheels"\npip = ["greeter==1.0"]\n'
        f"commands = ['echo made > /opt/made'{commands}]\nexclude = ['/opt/left-out']\n"
        '[files]\n"/opt/conf" = "conf"\n"/opt/b" = "b"\n'
    )
    return recipe


async def test_a_recipe_of_wheels_files_and_commands_becomes_a_layer(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    recipe = read_recipe(write_recipe(tmp_path, base, ", 'echo x > /opt/left-out'"))
    steps: list[str] = []
    async with stack.client() as client:
        layer = await build_layer(
            client,
            recipe,
            name="greeter",
            version="1",
            tags=["latest"],
            progress=lambda step, *_: steps.append(step),
        )
        assert layer.tags == ("latest",)
        assert [step.split()[0] for step in steps] == [
            *("base", "file", "file", "pip", "command", "command", "snapshot", "pack", "done")
        ]
        async with await client.create_sandbox(base, toolkits=["greeter:latest"]) as sandbox:
            program = "import greeter; print(greeter.WORD)"
            said = await sandbox.exec(["python3", "-c", program], check=True)
            assert said.stdout == b"hello from a wheel\n"
            shown = await sandbox.exec("cat /opt/conf/a /opt/b /opt/made; ls /opt", check=True)
            assert shown.stdout_text.split("\n")[:3] == [
                *("from a directory", "from a file", "made")
            ]
            assert "left-out" not in shown.stdout_text
            assert (await sandbox.exec("ls /tmp/dsec-recipe")).exit_code != 0
        again = await build_layer(client, recipe, name="greeter", version="2")
        assert again.digest == layer.digest
        for reference in ("greeter:latest", "greeter@1", "greeter@2"):
            await client.layers.remove(reference)
        assert await client.list_sandboxes(labels={"dsec-recipe": "greeter"}) == []


async def test_a_recipe_whose_command_fails_leaves_nothing(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    recipe = read_recipe(write_recipe(tmp_path, base, ", 'echo so >&2; exit 3'"))
    async with stack.client() as client:
        with pytest.raises(CommandFailed, match="so"):
            await build_layer(client, recipe, name="failing", version="1")
        with pytest.raises(DsecError) as caught:
            await client.layers.inspect("failing@1")
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert await client.list_sandboxes(labels={"dsec-recipe": "failing"}) == []


def test_a_recipe_is_built_from_a_shell(stack: Stack, base: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, base)
    done = stack.dsec(
        *("layer", "build", str(recipe), "--name", "shell-greeter", "--version", "1", "--json")
    )
    assert json.loads(done.stdout)["reference"] == "shell-greeter@1"
    assert json.loads(done.stderr.splitlines()[-1])["stage"] == "done"
    stack.dsec("layer", "rm", "shell-greeter@1")
