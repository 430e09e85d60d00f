from __future__ import annotations

from pathlib import Path

import pytest

from dsec.recipes import read_recipe
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import LayerKind


def write(directory: Path, text: str) -> Path:
    path = directory / "recipe.toml"
    path.write_text(text)
    return path


def test_a_recipe_is_read_with_its_paths_below_its_own_directory(tmp_path: Path) -> None:
    (tmp_path / "app.conf").write_text("x")
    (tmp_path / "wheels").mkdir()
    recipe = read_recipe(
        write(
            tmp_path,
            'base = "python:3.11"\nkind = "toolkit"\nwheels = "wheels"\npip = ["a==1"]\n'
            'commands = ["true"]\n[files]\n"/etc/app.conf" = "app.conf"\n[env]\nA = "b"\n',
        )
    )
    assert (recipe.base, recipe.kind, recipe.pip) == ("python:3.11", LayerKind.TOOLKIT, ("a==1",))
    assert recipe.local("app.conf") == tmp_path / "app.conf"
    assert recipe.env == {"A": "b"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base = ", "cannot be read as TOML"),
        ('commands = ["true"]', "base"),
        ('base = "a@1"', "does nothing"),
        ('base = "a@1"\ncommand = ["true"]', "command"),
        ('base = "a@1"\nkind = "data"\ncommands = ["true"]', "workspace or a toolkit"),
        ('base = "a@1"\nkind = "x"\ncommands = ["true"]', "not a recipe"),
        ('base = "a@1"\npip = ["a"]', "needs the network"),
        ('base = "a@1"\napt = ["a"]\nnetwork = "none"', "needs the network"),
        ('base = "a@1"\npip = ["--index-url=x"]\nnetwork = "open"', "not a package"),
        ('base = "a@1"\n[files]\n"etc/x" = "x"', "not an absolute path"),
    ],
)
def test_what_cannot_be_meant_is_invalid_before_anything_is_built(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(DsecError) as caught:
        read_recipe(write(tmp_path, text))
    assert caught.value.code is ErrorCode.INVALID
    assert said in caught.value.message


@pytest.mark.parametrize("text", ['wheels = "no"\npip = ["a"]', '[files]\n"/x" = "no"'])
def test_a_local_path_that_is_not_there_is_not_found(tmp_path: Path, text: str) -> None:
    with pytest.raises(DsecError) as caught:
        read_recipe(write(tmp_path, f'base = "a@1"\n{text}'))
    assert caught.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(DsecError) as caught:
        read_recipe(tmp_path / "none.toml")
    assert caught.value.code is ErrorCode.NOT_FOUND


def test_a_recipe_may_be_yaml(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("base: python@3.11\nkind: toolkit\npip: [a==1]\nnetwork: {pypi: true}\n")
    recipe = read_recipe(path)
    assert (recipe.kind, recipe.pip) == (LayerKind.TOOLKIT, ("a==1",))
    assert recipe.network == {"pypi": True}


@pytest.mark.parametrize(
    "text", ["- a", "1", "", "1: a", "a: [", "base: !!python/object:os.system x", "base: [a]"]
)
def test_yaml_that_is_no_recipe_is_invalid(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yml"
    path.write_text(text)
    with pytest.raises(DsecError) as caught:
        read_recipe(path)
    assert caught.value.code is ErrorCode.INVALID
