"""Settings: four sources in order, typos named, unsafe addresses refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from supervisor.domain.errors import ConfigError
from supervisor.settings import Settings, default_state_dir, is_loopback, load_settings, read_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("SUPERVISOR_"):
            monkeypatch.delenv(name)


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.toml").write_text(text)
    return tmp_path


def test_defaults(tmp_path: Path) -> None:
    settings = load_settings(state_dir=tmp_path)
    assert (settings.host, settings.port) == ("127.0.0.1", 8420)
    assert settings.database_target == str(tmp_path / "supervisor.db")
    assert settings.key_file == tmp_path / "secrets.key"
    assert settings.retention.idempotency_hours == 24


def test_arguments_win_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 'port = 1\nlog_level = "debug"\nreconcile_idle_s = 7\n[retention]\nevent_days = 9\n')
    monkeypatch.setenv("SUPERVISOR_PORT", "2")
    monkeypatch.setenv("SUPERVISOR_LOG_LEVEL", "error")
    settings = load_settings(state_dir=tmp_path, port=3, host=None)
    assert (settings.port, settings.log_level, settings.reconcile_idle_s) == (3, "error", 7)
    assert settings.retention.event_days == 9


def test_the_state_folder_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPERVISOR_STATE_DIR", str(write(tmp_path, "port = 5\n")))
    assert load_settings().port == 5


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot = 1", "prot: unknown setting"),
        ("port = 99999", "port: "),
        ('port = "x"', "port: "),
        ("[retention]\nevent_day = 3", "retention.event_day: unknown setting"),
        ('host = "0.0.0.0"', "can be reached by others"),
        ('tls_cert = "/x"', "go together"),
        ('database_url = "postgresql://u:changeme@h/d"', "placeholder"),
        ("port = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_told_by_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(state_dir=write(tmp_path, text))
    assert named in caught.value.message
    assert "changeme" not in caught.value.message


VARIABLES = {
    "host": "::1",
    "port": "9",
    "log_level": "debug",
    "log_format": "json",
    "allowed_hosts": '["a.example"]',
    "behind_proxy": "true",
    "database_url": "postgresql://u:p@h/d",
    "master_key_file": "/keys",
    "find_links": "/wheels",
    "torch_index_url": "https://example.invalid",
    "reconcile_active_s": "1",
    "reconcile_idle_s": "2",
    "gpu_interval_s": "3",
    "environment_interval_s": "4",
    "max_body_bytes": "2048",
}


@pytest.mark.parametrize(("name", "value"), VARIABLES.items())
def test_every_setting_has_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    default = getattr(load_settings(state_dir=tmp_path), name)
    monkeypatch.setenv(f"SUPERVISOR_{name.upper()}", value)
    assert getattr(load_settings(state_dir=tmp_path), name) != default


def test_no_setting_is_left_out_of_the_test_above() -> None:
    apart = {"state_dir", "tls_cert", "tls_key", "retention"}
    assert set(Settings.model_fields) - apart == set(VARIABLES)


def test_a_typo_in_the_environment_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERVISOR_PROT", "1")
    with pytest.raises(ConfigError, match="SUPERVISOR_PROT") as caught:
        load_settings(state_dir=tmp_path)
    assert caught.value.hint
    assert "SUPERVISOR_PORT" in caught.value.hint


@pytest.mark.parametrize("arguments", [{"behind_proxy": True}, {"tls_cert": "/c", "tls_key": "/k"}])
def test_an_open_address_needs_tls_or_a_proxy(tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert load_settings(state_dir=tmp_path, host="0.0.0.0", **arguments).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("x", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_state_folder_depends_on_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_state_dir() == Path("/var/lib/dflash-supervisor")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert default_state_dir() == Path("/x/dflash-supervisor")


def test_the_torch_index_comes_from_its_own_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_INDEX_URL", "https://example.invalid/whl")
    assert load_settings(state_dir=tmp_path).torch_index_url == "https://example.invalid/whl"
    assert read_environment("TORCH_INDEX_URL") == "https://example.invalid/whl"
