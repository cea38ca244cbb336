"""The options that share the cache out, from wherever they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from radixkv import cli
from radixkv.config import ServeConfig, load_config
from radixkv.errors import ConfigError


def test_tenant_quotas_come_from_text_and_from_an_array(tmp_path: Path) -> None:
    expected = (("a", 0.5), ("b=c", 0.25))
    environ = {"RADIXKV_TENANT_QUOTA": "a=0.5, b=c=0.25"}
    assert load_config({}, environ=environ).tenant_quota == expected
    file = tmp_path / "radixkv.toml"
    for text in ('tenant-quota = "a=0.5,b=c=0.25"', 'tenant-quota = ["a=0.5", "b=c=0.25"]'):
        file.write_text(text)
        assert load_config({}, config_file=str(file), environ={}).tenant_quota == expected
    assert load_config({}, environ={}).tenant_quota == ()


@pytest.mark.parametrize(
    "text", ["", "a", "a=", "=0.5", "a=0", "a=1.5", "a=nan", "a=x", "a=0.5,a=0.25", "a=0.5,"]
)
def test_a_quota_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tenant-quota must be NAME=SHARE"):
        load_config({"tenant_quota": text}, environ={})


def test_other_options_take_no_array(tmp_path: Path) -> None:
    file = tmp_path / "radixkv.toml"
    file.write_text("port = [1, 2]")
    with pytest.raises(ConfigError, match="port must be a text, a number or a truth value"):
        load_config({}, config_file=str(file), environ={})


@pytest.mark.parametrize(
    ("option", "bad"), [("pin_share", "1"), ("pin_share", "-0.1"), ("disk_save_timeout", "-1")]
)
def test_shares_and_times_out_of_range_are_refused(option: str, bad: str) -> None:
    with pytest.raises(ConfigError, match="--" + option.replace("_", "-")):
        load_config({option: bad}, environ={})
    assert (ServeConfig().pin_share, ServeConfig().disk_save_timeout) == (0.5, 20.0)


def test_an_option_may_be_repeated_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def stop(options: dict[str, Any], **_: Any) -> ServeConfig:
        seen.update(options)
        raise ConfigError("enough")

    monkeypatch.setattr(cli, "load_config", stop)
    for arguments, expected in (
        (["--tenant-quota", "a=0.5", "--tenant-quota", "b=0.1,c=0.1"], "a=0.5,b=0.1,c=0.1"),
        ([], None),
    ):
        result = CliRunner().invoke(cli.app, ["serve", *arguments])
        assert result.exit_code == 2
        assert seen["tenant_quota"] == expected
