from __future__ import annotations

from pathlib import Path

import pytest

from dsec_common.config import ServiceConfig, describe, load_config
from dsec_common.errors import DsecError


class ExampleConfig(ServiceConfig, frozen=True, kw_only=True):
    """A service of these tests."""

    node: str = "node-1"
    ratio: float = 2.0
    greedy: bool = False
    auth_token: str = ""


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "dsec.toml"
    file.write_text('[all]\nlog_level = "debug"\n[example]\nnode = "from-file"\nratio = 3\n')
    environment = {"DSEC_CONFIG": str(file), "DSEC_RATIO": "4", "DSEC_EXAMPLE_GREEDY": "true"}
    config = load_config(ExampleConfig, "example", ["--ratio", "5"], environment)
    assert (config.log_level, config.node, config.ratio, config.greedy) == (
        "debug",
        "from-file",
        5.0,
        True,
    )


def test_lists_come_from_commas() -> None:
    config = load_config(ExampleConfig, "example", ["--nats-servers", "nats://a:1, nats://b:2"], {})
    assert config.nats_servers == ("nats://a:1", "nats://b:2")


def test_a_typo_in_the_file_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "dsec.toml"
    file.write_text('[example]\nnodee = "x"\n')
    with pytest.raises(DsecError, match=r"unknown setting 'nodee'.*did you mean 'node'"):
        load_config(ExampleConfig, "example", ["--config", str(file)], {})


def test_a_setting_of_another_service_in_the_shared_table_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "dsec.toml"
    file.write_text('[all]\nshards = 4\nnode = "n"\n')
    assert load_config(ExampleConfig, "example", ["--config", str(file)], {}).node == "n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ratio", "much"], "ratio"),
        (["--http-port", "eighty"], "http_port"),
        (["--log-level", "chatty"], "log_level"),
        (["--config", "/nonexistent.toml"], "cannot read the configuration file"),
    ],
)
def test_a_bad_value_names_the_setting(argv: list[str], message: str) -> None:
    with pytest.raises(DsecError, match=message):
        load_config(ExampleConfig, "example", argv, {})


def test_a_file_that_is_not_toml_says_where(tmp_path: Path) -> None:
    file = tmp_path / "dsec.toml"
    file.write_text("[example\n")
    with pytest.raises(DsecError, match="not valid TOML"):
        load_config(ExampleConfig, "example", ["--config", str(file)], {})


def test_secrets_are_hidden_when_printed() -> None:
    shown = describe(ExampleConfig(auth_token="hunter2"))
    assert shown["auth_token"] == "***"
    assert shown["node"] == "node-1"
