"""Renders the reference pages of the command line and of REST from the program itself.

`python -m tests.support.reference` writes both; a contract test compares them with what is committed.
"""

from __future__ import annotations

import inspect
import tempfile
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from supervisor import cli
from tests.support.api_app import build_api

FOLDER = Path(__file__).parents[2] / "docs" / "reference"

CLI_HEAD = """# Command line

Made from the program's own help by `python -m tests.support.reference`; a test compares the two.

Results go to stdout, everything for the person (progress, questions, hints, errors) to stderr. On a
terminal results are tables; in a pipe the same rows are tab-separated and untruncated; `-o json`
and `-o yaml` print one document, streams (`events -f`) one JSON document a line. Commands that act
wait for the end of their operation and show its phases; Ctrl-C detaches and never stops a run.
`RUN` and `NODE` are names, ids or unambiguous beginnings.

The daemon is found by `--url`, else `DFLASHCTL_URL`, else http://127.0.0.1:8420; the token is read
from `--token-file`, else the file named in `DFLASHCTL_TOKEN_FILE`, else `admin.token` in the
daemon's state folder.

| exit code | means |
|---|---|
| 0 | done |
| 1 | failed, or declined |
| 2 | wrong usage: command line, run file, settings, or a question without a terminal |
| 3 | not found |
| 4 | conflict, or refused by policy |
| 5 | node or daemon unreachable, or the outcome is not known |
| 6 | timed out; what was asked for goes on |
| 7 | not authorised |
| 130 | interrupted; not while following (`-f`, `-w`, `top`), where Ctrl-C is the ordinary end: 0 |
"""

API_HEAD = """# REST interface

Made from the OpenAPI document by `python -m tests.support.reference`; a test compares the two. The
document itself is at `/openapi.json` of every daemon.

- Every route needs `Authorization: Bearer <token>` or the cookie of a browser session, but for
  `/healthz`, the page's static files and `POST /v1/session`. Reading needs scope `read`, acting
  `operate`, tokens and secrets `admin`.
- JSON, snake_case, times in UTC by RFC 3339, durations in seconds as `*_s`. A value that is not
  known is null.
- Errors are `application/problem+json` (RFC 9457): `type` is stable for the class, `reason` for the
  case; `hint` says what to do, `retryable` whether the same request may succeed later, `instance`
  is the request's id.
- Lists take `limit` (at most 200) and `cursor`; `next_cursor` is null at the end.
- Objects carry a strong `ETag`; PATCH and DELETE of a run or node need it in `If-Match` (428
  without, 412 when stale).
- POST takes an `Idempotency-Key`, kept for 24 hours: a repeat has no second effect and gets the
  first answer; the same key with another request is 422.
- Actions answer 202 with an operation and its `Location`; `?dry_run=true` answers 200 with the plan
  instead.
- Streams are server-sent events: `id` is the event's id, `Last-Event-ID` (or `last_event_id` in the
  query) resumes behind it, `reset` says that a snapshot must be read first, `retry` is 3000 ms, a
  comment comes every 15 s. A client that does not read is dropped and resumes. At most 20 streams
  for a token.
- Logs are bytes: `X-Log-Offset` is where the answer begins, `X-Log-Size` how long the log was.
- Bodies are JSON of at most 1 MiB. Writes from another origin are refused, unknown host names too.
"""


def list_commands(root: Any, prefix: str = "") -> dict[str, Any]:
    """All commands by their full name, groups left out."""
    found: dict[str, Any] = {}
    for name, command in root.commands.items():
        full = f"{prefix}{name}"
        if hasattr(command, "commands"):
            found |= list_commands(command, f"{full} ")
        else:
            found[full] = command
    return found


def render_cli_page(commands: dict[str, Any]) -> str:
    """The page: one section for each command."""
    return "\n".join([CLI_HEAD, *(_section(name, command) for name, command in commands.items())])


def _section(name: str, command: Any) -> str:
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    options = [item for item in command.params if item.param_type_name == "option" and item.name != "help"]
    shown = " ".join(_argument(item) for item in arguments)
    text, _, examples = inspect.cleandoc(command.help).partition("Examples:")
    lines = [
        f"## dflashctl {name}\n",
        f"`dflashctl {' '.join([name, shown]).strip()}`\n",
        text.strip() + "\n",
    ]
    if options:
        lines += ["| option | does |", "|---|---|", *(_option(item) for item in options), ""]
    if examples.strip():
        block = "\n".join(line.strip() for line in examples.strip().splitlines() if line.strip())
        lines += [f"```sh\n{block}\n```\n"]
    return "\n".join(lines)


def _argument(item: Any) -> str:
    name = item.metavar or item.name.upper()
    return name if item.required or name.startswith("[") else f"[{name}]"


def _option(item: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*item.opts, *item.secondary_opts])
    default = getattr(item.default, "value", item.default)
    suffix = f" Default: `{default}`." if default not in (None, False, "") and not callable(default) else ""
    annotation = item.type_descriptor.annotation
    is_choice = isinstance(annotation, type) and issubclass(annotation, Enum)
    choices = [choice.value for choice in annotation] if is_choice else []
    values = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    text = (item.help or "").replace("|", "\\|")
    return f"| {names} | {text}{values}{suffix} |"


def render_api_page(document: dict[str, Any]) -> str:
    """The page: routes by tag, then the shapes of bodies and answers."""
    lines = [API_HEAD]
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    for tag, operations in by_tag.items():
        lines.append(f"## {tag}\n")
        for method, path, operation in operations:
            lines += _operation(method, path, operation)
    lines.append("## Shapes\n")
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += _schema(name, schema)
    return "\n".join(lines).rstrip() + "\n"


def _operation(method: str, path: str, operation: dict[str, Any]) -> list[str]:
    lines = [f"### {method} {path}\n", operation["description"].strip() + "\n"]
    parameters = [item for item in operation.get("parameters", []) if item["in"] != "cookie"]
    if parameters:
        lines += ["| parameter | in | does |", "|---|---|---|"]
        for item in parameters:
            required = " (required)" if item.get("required") else ""
            text = item.get("description") or item["schema"].get("title", "")
            lines.append(f"| `{item['name']}`{required} | {item['in']} | {text} |")
        lines.append("")
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        lines.append(f"Body: {_type(body)}\n")
    answers = [
        f"{status} {_answer(response)}".strip()
        for status, response in operation["responses"].items()
        if status != "default"
    ]
    lines.append(f"Answers: {'; '.join(answers)}\n")
    return lines


def _answer(response: dict[str, Any]) -> str:
    content = response.get("content", {})
    shown = [
        _type(described["schema"]) if media == "application/json" else f"`{media}`"
        for media, described in content.items()
        if media != "application/json" or described.get("schema")
    ]
    return " or ".join(shown)


def _schema(name: str, schema: dict[str, Any]) -> list[str]:
    lines = [f"### {name}\n"]
    if schema.get("description"):
        lines.append(inspect.cleandoc(schema["description"]) + "\n")
    properties = schema.get("properties", {})
    if properties:
        lines += ["| field | type |", "|---|---|"]
        required = set(schema.get("required", ()))
        for field, described in properties.items():
            mark = "" if field in required else " (optional)"
            lines.append(f"| `{field}`{mark} | {_type(described)} |")
        lines.append("")
    return lines


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(_type(item) for item in schema[key])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("format"):
        return f"{kind} ({schema['format']})"
    return str(kind)


def main() -> None:
    """Write both pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    commands = list_commands(typer.main.get_command(cli.app))
    (FOLDER / "cli.md").write_text(render_cli_page(commands))
    with tempfile.TemporaryDirectory() as folder:
        api = build_api(Path(folder))
        (FOLDER / "api.md").write_text(render_api_page(api.app.openapi()))
        api.state.store.close()


if __name__ == "__main__":
    main()
