"""A run as data: the run file, its models and the errors that name file, line, field and value.

`parse_run_file` reads what people write, `parse_run_dict` what the API receives; both end in the same frozen
`RunSpec`. `render_spec` and `spec_digest` turn it into stored JSON and its identity. No I/O, no clock.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import posixpath
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from supervisor.domain.environment import check_env_name, check_env_value, check_secret_name
from supervisor.domain.errors import ConfigError
from supervisor.domain.layout import NAME
from supervisor.domain.policy import (
    Capabilities,
    DriftPolicy,
    Flag,
    HealthPolicy,
    LogPolicy,
    RestartPolicy,
    StopPolicy,
    Table,
)
from supervisor.domain.toml_lines import line_of, locate_keys

MAX_ARGUMENT_BYTES = 131_071
"""Linux refuses a longer single argument."""
MAX_ARGUMENTS_BYTES = 1 << 20

EnvName = Annotated[str, AfterValidator(check_env_name)]
EnvValue = Annotated[str, BeforeValidator(check_env_value)]
SecretName = Annotated[str, AfterValidator(check_secret_name)]
GpuIndex = Annotated[int, Field(strict=True, ge=0, le=1023)]


def _check_text(value: str, *, what: str) -> str:
    if not value:
        raise ValueError(f"{what} must not be empty")
    if "\0" in value:
        raise ValueError(f"{what} must not contain NUL")
    return value


def _check_absolute(value: str) -> str:
    _check_text(value, what="path")
    if not value.startswith("/"):
        raise ValueError("must be an absolute path in the node")
    return value


class EnvironmentSpec(Table):
    """Interpreter and packages: a lock to build from, or an external interpreter that is only watched."""

    lock: str | None = None
    python: str | None = None

    @field_validator("python")
    @classmethod
    def _python(cls, value: str | None) -> str | None:
        return value if value is None else _check_absolute(value)

    @field_validator("lock")
    @classmethod
    def _lock(cls, value: str | None) -> str | None:
        return value if value is None else _check_text(value, what="lock")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.lock is not None and self.python is not None:
            raise ValueError("give either lock (built from it) or python (external interpreter), not both")
        return self

    @property
    def is_external(self) -> bool:
        """True when the interpreter is not ours to change."""
        return self.python is not None


class StageCopy(Table):
    """A tree copied inside the node before launch."""

    source: str = Field(alias="from")
    target: str = Field(alias="to")

    @field_validator("source", "target")
    @classmethod
    def _path(cls, value: str) -> str:
        return _check_absolute(value)


class StageSpec(Table):
    """What must be in place before launch."""

    copy_: tuple[StageCopy, ...] = Field(default=(), alias="copy")


class GpuSpec(Table):
    """Which GPUs the run leases."""

    indices: tuple[GpuIndex, ...] = ()
    share: Flag = False

    @field_validator("indices")
    @classmethod
    def _unique(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError("names a GPU twice")
        return value


class CommandSpec(Table):
    """Flags of the bundled trainer, or any program."""

    args: tuple[str, ...] | None = None
    argv: tuple[str, ...] | None = None

    @field_validator("args", "argv")
    @classmethod
    def _words(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for word in value or ():
            if "\0" in word:
                raise ValueError("an argument must not contain NUL")
            if len(word.encode()) > MAX_ARGUMENT_BYTES:
                raise ValueError(f"an argument is longer than {MAX_ARGUMENT_BYTES} bytes")
        if sum(len(word.encode()) + 1 for word in value or ()) > MAX_ARGUMENTS_BYTES:
            raise ValueError(f"arguments are longer than {MAX_ARGUMENTS_BYTES} bytes in all")
        return value

    @field_validator("argv")
    @classmethod
    def _program(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or not value[0].startswith("/")):
            raise ValueError("must begin with the absolute path of the program")
        return value

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.args is not None and self.argv is not None:
            raise ValueError("give either args (trainer flags) or argv (any program), not both")
        if self.args is None and self.argv is None:
            raise ValueError("needs args (trainer flags) or argv (any program)")
        return self

    @property
    def is_program(self) -> bool:
        """True for an argv of the user's, which knows nothing of our files."""
        return self.argv is not None


class ResumeSpec(Table):
    """Where training begins."""

    start: str = Field(default="latest", alias="from")

    @field_validator("start")
    @classmethod
    def _start(cls, value: str) -> str:
        if value in ("latest", "scratch"):
            return value
        if not value.startswith("/") or "\0" in value:
            raise ValueError("must be latest, scratch or the absolute path of a checkpoint")
        return value


class RunSpec(Table):
    """Everything a run file may say."""

    name: str
    node: str
    secrets: tuple[SecretName, ...] = ()
    source: str = "bundled"
    environment: EnvironmentSpec = EnvironmentSpec()
    stage: StageSpec = StageSpec()
    gpus: GpuSpec = GpuSpec()
    command: CommandSpec
    env: Mapping[EnvName, EnvValue] = Field(default_factory=dict)
    capabilities: Capabilities = Capabilities()
    log: LogPolicy = LogPolicy()
    resume: ResumeSpec = ResumeSpec()
    restart: RestartPolicy = RestartPolicy()
    drift: DriftPolicy = DriftPolicy()
    health: HealthPolicy = HealthPolicy()
    stop: StopPolicy = StopPolicy()

    @field_validator("name", "node")
    @classmethod
    def _name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(
                f"must match {NAME.pattern}: lower case, digits, dot, dash, underscore, at most 64"
            )
        return value

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        return _check_text(value, what="source")

    @field_validator("command")
    @classmethod
    def _command(cls, value: CommandSpec, info: ValidationInfo) -> CommandSpec:
        if info.data.get("source") == "none" and not value.is_program:
            raise ValueError("source = none needs argv: without a release there is no trainer to take args")
        return value

    @field_validator("env")
    @classmethod
    def _env(cls, value: Mapping[str, str], info: ValidationInfo) -> Mapping[str, str]:
        both = sorted(set(info.data.get("secrets") or ()) & set(value))
        if both:
            raise ValueError(f"{both[0]} is both in secrets and in [env]")
        return value

    @property
    def has_release(self) -> bool:
        """False for programs that already lie on the node."""
        return self.source != "none"

    def gpu_indices(self) -> tuple[int, ...]:
        """GPUs to lease: as given, else from the two GPU flags; empty on CPU devices."""
        if self.gpus.indices:
            return self.gpus.indices
        words = self.command.args or self.command.argv or ()
        found: list[int] = []
        for flag in ("--target-gpus", "--drafter-gpus"):
            for item in (flag_value(words, flag) or "").split(","):
                if re.fullmatch(r"[0-9]{1,4}", item.strip()) and int(item) not in found:
                    found.append(int(item))
        return tuple(found)


def flag_value(words: Sequence[str], flag: str) -> str | None:
    """Last value of a long flag in an argument list, in either spelling."""
    value = None
    for position, word in enumerate(words):
        if word == flag and position + 1 < len(words):
            value = words[position + 1]
        elif word.startswith(f"{flag}="):
            value = word[len(flag) + 1 :]
    return value


def render_spec(spec: RunSpec) -> dict[str, Any]:
    """The spec as JSON with every default spelled out; `parse_run_dict` reads it back unchanged."""
    return spec.model_dump(mode="json", by_alias=True)


def spec_digest(spec: RunSpec) -> str:
    """SHA-256 over the canonical JSON."""
    text = json.dumps(render_spec(spec), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_run_file(text: str, filename: str, *, base_dir: str | None = None) -> RunSpec:
    """Read a run file.

    Args:
        text: the TOML.
        filename: for error messages.
        base_dir: folder against which relative `source` and `environment.lock` paths are taken.

    Raises:
        ConfigError: data holds `file`, `line`, `field`, `value`, `suggestion`, and all `problems`.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(error, text, filename) from error
    if base_dir is not None:
        _anchor_paths(data, base_dir)
    try:
        return RunSpec.model_validate(data)
    except ValidationError as error:
        raise _field_error(error, filename, locate_keys(text)) from error


def parse_run_dict(data: Mapping[str, Any], *, origin: str = "request") -> RunSpec:
    """Read a spec given as JSON; errors name the field, there is no line.

    Raises:
        ConfigError: as for a file, with `line` None.
    """
    try:
        return RunSpec.model_validate(dict(data))
    except ValidationError as error:
        raise _field_error(error, origin, {}) from error


def _anchor_paths(data: dict[str, Any], base_dir: str) -> None:
    source = data.get("source")
    if isinstance(source, str) and source and source not in ("bundled", "none"):
        data["source"] = posixpath.normpath(posixpath.join(base_dir, source))
    environment = data.get("environment")
    lock = environment.get("lock") if isinstance(environment, dict) else None
    if isinstance(environment, dict) and isinstance(lock, str) and lock and lock != "bundled":
        environment["lock"] = posixpath.normpath(posixpath.join(base_dir, lock))


def _syntax_error(error: tomllib.TOMLDecodeError, text: str, filename: str) -> ConfigError:
    place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
    line = int(place.group(1)) if place else len(text.split("\n"))
    what = re.sub(r"\s*\(at .*\)$", "", str(error))
    lines = text.split("\n")
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return ConfigError(
        f"{filename}:{line}: not valid TOML: {_lower_first(what)}: {source}",
        reason="InvalidToml",
        hint="text values need quotes; a table begins with [name] on a line of its own",
        file=filename,
        line=line,
        field=None,
        value=source,
        suggestion=None,
    )


_REFERENCE = "correct it there; docs/reference/run-file.md lists every field with its values"


def _field_error(error: ValidationError, filename: str, lines: Mapping[Any, int]) -> ConfigError:
    problems = [_describe(item, filename, lines) for item in error.errors(include_url=False)]
    first = problems[0]
    return ConfigError(
        "\n".join(problem["text"] for problem in problems),
        reason="InvalidRunFile",
        hint=_REFERENCE,  # what was meant stands in the text, beside its line
        file=filename,
        line=first["line"],
        field=first["field"],
        value=first["value"],
        suggestion=first["suggestion"],
        problems=[
            {key: problem[key] for key in ("line", "field", "value", "suggestion", "text")}
            for problem in problems
        ],
    )


def _describe(item: Any, filename: str, lines: Mapping[Any, int]) -> dict[str, Any]:
    location = tuple(part for part in item["loc"] if part != "[key]")
    field = _render_field(location)
    value = None if item["type"] == "missing" else item["input"]
    suggestion = None
    if item["type"] == "extra_forbidden":
        suggestion = _nearest_key(location)
        what = "unknown key"
    elif item["type"] == "missing":
        what = "is missing"
    else:
        what = item["msg"].removeprefix("Value error, ")
        what = _lower_first(what)
        suggestion = _nearest_value(item, value)
    line = line_of(lines, location)
    place = f"{filename}:{line}" if line is not None else filename
    text = f"{place}: {field}: {what}"
    if isinstance(value, str | int | float | bool | list):
        text += f": {_shorten(value)}"
    if suggestion:
        text += f", did you mean {suggestion}"
    return {"line": line, "field": field, "value": value, "suggestion": suggestion, "text": text}


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _render_field(location: Sequence[str | int]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "run file"


def _nearest_value(item: Any, value: object) -> str | None:
    expected = item.get("ctx", {}).get("expected") if item["type"] == "literal_error" else None
    if expected is None or not isinstance(value, str):
        return None
    choices = re.findall(r"'([^']*)'", expected)
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return near[0] if near else None


def _nearest_key(location: Sequence[str | int]) -> str | None:
    """Closest key of the same table, else the same key in another table."""
    key = str(location[-1])
    near = difflib.get_close_matches(key, _keys_of(_model_at(location[:-1])), n=1, cutoff=0.6)
    if near:
        return near[0]
    for table, model in _tables():
        close = difflib.get_close_matches(key, _keys_of(model), n=1, cutoff=0.85)
        if close:
            return f"[{table}] {close[0]}"
    return None


def _keys_of(model: type[BaseModel] | None) -> list[str]:
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _tables() -> list[tuple[str, type[BaseModel]]]:
    found = []
    for name, field in RunSpec.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found.append((field.alias or name, field.annotation))
    return found


def _model_at(location: Sequence[str | int]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = RunSpec
    for part in location:
        if isinstance(part, int) or model is None:
            continue
        field = next(
            (field for name, field in model.model_fields.items() if part in (name, field.alias)), None
        )
        model = _model_in(field.annotation) if field is not None else None
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        model = _model_in(inner)
        if model is not None:
            return model
    return None
