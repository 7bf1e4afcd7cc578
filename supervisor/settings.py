"""The daemon's settings: the only reader of the environment and of `config.toml`.

Every field is `SUPERVISOR_<NAME>` in the environment, a key of `config.toml` in the state folder, and a flag
of `serve` where it has one. Arguments win over environment, environment over file; a typo is an error.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from supervisor.domain.errors import ConfigError

CONFIG_NAME = "config.toml"
PREFIX = "SUPERVISOR_"
PLACEHOLDERS = frozenset({"changeme", "change-me", "secret", "password", "placeholder", "xxx"})

Days = Annotated[float, Field(gt=0, le=3660)]


class Retention(BaseModel):
    """How long rows are kept. Attempt logs are never removed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    event_days: Days = 365
    metric_days: Days = 90
    gpu_raw_days: Days = 2
    gpu_days: Days = 30
    idempotency_hours: Annotated[float, Field(gt=0, le=8784)] = 24


class Settings(BaseSettings):
    """What the daemon runs with."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, env_ignore_empty=True
    )

    state_dir: Path = Field(default_factory=lambda: default_state_dir())
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8420
    database_url: SecretStr | None = None
    """None: SQLite in the state folder."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"
    allowed_hosts: tuple[str, ...] = ()
    """Names under which a browser may address the daemon, beside its own address and localhost."""
    behind_proxy: bool = False
    """A proxy in front ends TLS: allows an address that others can reach, and marks cookies Secure."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    master_key_file: Path | None = None
    """Key of the secrets; None: `secrets.key` in the state folder."""
    find_links: str | None = None
    torch_index_url: str | None = Field(default_factory=lambda: os.environ.get("TORCH_INDEX_URL") or None)
    """Handed to nodes that name none of their own."""
    reconcile_active_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    reconcile_idle_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    gpu_interval_s: Annotated[float, Field(ge=0.1, le=60)] = 1.0
    environment_interval_s: Annotated[float, Field(ge=0.1, le=3600)] = 30.0
    """How often the agent looks whether the packages of a run's environment changed."""
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 1 << 20
    retention: Retention = Retention()

    @field_validator("state_dir", "tls_cert", "tls_key", "master_key_file")
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return value if value is None else value.expanduser().absolute()

    @field_validator("database_url")
    @classmethod
    def _is_real(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and any(f":{word}@" in value.get_secret_value() for word in PLACEHOLDERS):
            raise ValueError("holds a placeholder password, put the real one there")
        return value

    @model_validator(mode="after")
    def _is_safe(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if not is_loopback(self.host) and self.tls_cert is None and not self.behind_proxy:
            raise ValueError(
                f"host {self.host} can be reached by others: give tls_cert and tls_key, or set "
                "behind_proxy = true when a proxy in front ends TLS"
            )
        return self

    @property
    def is_behind_proxy(self) -> bool:
        """Whether browsers reach us through TLS that a proxy ends."""
        return self.behind_proxy

    @property
    def database_target(self) -> str:
        """Path or URL for `Store`."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return str(self.state_dir / "supervisor.db")

    @property
    def key_file(self) -> Path:
        """Where the key of the secrets lies."""
        return self.master_key_file or self.state_dir / "secrets.key"

    @property
    def admin_token_file(self) -> Path:
        """Where the first start leaves the admin token."""
        return self.state_dir / "admin.token"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, environment, then `config.toml` of the state folder that these two name."""
        del dotenv_settings, file_secret_settings
        chosen = init_settings().get("state_dir") or env_settings().get("state_dir") or default_state_dir()
        file = Path(str(chosen)).expanduser() / CONFIG_NAME
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=file)


def load_settings(**arguments: Any) -> Settings:
    """Read all sources; arguments that are None count as not given.

    Raises:
        ConfigError: naming the key, its value (unless it may be secret) and the sources.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        settings = Settings(**given)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{CONFIG_NAME} is not valid TOML: {error}", file=CONFIG_NAME) from error
    except ValidationError as error:
        raise _explain(error) from error
    unknown = sorted(_unknown_variables())
    if unknown:
        raise ConfigError(
            f"unknown setting in the environment: {unknown[0]}",
            hint=f"known are {', '.join(PREFIX + name.upper() for name in _names())}",
            field=unknown[0],
        )
    return settings


def default_state_dir() -> Path:
    """`/var/lib/dflash-supervisor` as root, else below the XDG state folder."""
    if os.geteuid() == 0:
        return Path("/var/lib/dflash-supervisor")
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "dflash-supervisor"


def read_environment(name: str) -> str | None:
    """A variable of the daemon's own environment, for secrets kept by reference."""
    return os.environ.get(name)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names() -> list[str]:
    return [field.alias or name for name, field in Settings.model_fields.items()]


def _unknown_variables() -> set[str]:
    known = {PREFIX + name.upper() for name in _names()}
    return {
        name
        for name in os.environ
        if name.upper().startswith(PREFIX) and name.upper().split("__")[0] not in known
    }


def _explain(error: ValidationError) -> ConfigError:
    lines = []
    fields = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"]) or "settings"
        fields.append(field)
        what = (
            "unknown setting"
            if item["type"] == "extra_forbidden"
            else item["msg"].removeprefix("Value error, ")
        )
        shown = "" if field == "database_url" or isinstance(item["input"], dict) else f": {item['input']!r}"
        lines.append(f"{field}: {what[:1].lower()}{what[1:]}{shown}")
    return ConfigError(
        "\n".join(lines),
        hint=f"a setting is a flag of serve, {PREFIX}<NAME> in the environment or a key of {CONFIG_NAME}",
        field=fields[0],
    )
