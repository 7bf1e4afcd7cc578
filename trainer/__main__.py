"""The command line of the trainer: `dflash-train` and `python -m trainer`.

Parses flags, calls one command, maps errors to exit codes. A command's module, and torch with it, is imported
only after the flags were read, so that help and mistakes answer at once. Must not hold any logic of a
command.

Exit codes: 0 finished, 9 stopped on request, others by class of error (see `trainer.errors`).
"""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, TextIO

from trainer.arguments import (
    add_eval_arguments,
    add_export_arguments,
    add_generate_arguments,
    add_import_arguments,
    add_plan_arguments,
    add_prepare_arguments,
)
from trainer.config import SECTIONS
from trainer.errors import EXIT_STOPPED, ConfigError, TrainerError
from trainer.flags import FLAGS, Flag, has_wandb_credentials, resolve, set_allocator_defaults
from trainer.lifecycle.exits import describe, exit_code, translate
from trainer.lifecycle.heartbeat import write_first_status
from trainer.lifecycle.interrupts import raising_on_stop
from trainer.lifecycle.signals import leave_on_stop_signals
from trainer.preflight import check_run

_LOG = logging.getLogger("trainer")

COMMANDS = {
    "train": "train a drafter",
    "prepare": "turn chats into tokenized, loss-masked training data",
    "generate": "let the target itself complete prompts",
    "eval": "measure acceptance length by real speculative decoding",
    "export": "write or check an exported drafter",
    "plan": "predict memory and throughput of a training run, and recommend how to divide the GPUs",
    "import": "take a published drafter as the beginning of a run",
}
"""Each command and what it does."""


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    _add_train_arguments(parser)
    add_plan_arguments(parser)


_MODULES = {
    "prepare": (add_prepare_arguments, "trainer.data.prepare"),
    "generate": (add_generate_arguments, "trainer.data.generate"),
    "eval": (add_eval_arguments, "trainer.eval.command"),
    "export": (add_export_arguments, "trainer.eval.export_command"),
    "plan": (_add_plan_arguments, "trainer.plan"),
    "import": (add_import_arguments, "trainer.eval.import_command"),
}
"""Where a command's flags are defined, and the module whose `run_<command>` carries it out."""

_RESUMABLE = ("generate", "prepare")
"""Commands whose output says how far they came."""


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as `ConfigError`, so that they end like every other wrong setting."""

    def error(self, message: str) -> Any:
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")


class _Once(argparse.Action):
    """Stores a value, or true for a switch; a flag that is given twice is a mistake, not an override."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = self.const if self.nargs == 0 else values
        if hasattr(namespace, self.dest):
            parser.error(
                f"{option_string} is given twice: {getattr(namespace, self.dest)} and {value}; keep one"
            )
        setattr(namespace, self.dest, value)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, or ends the process with it when `argv` is None."""
    if argv is None:
        _leave(_run_guarded(sys.argv[1:]))
    return _run_guarded(list(argv or ()))


def _run_guarded(words: list[str]) -> int:
    _open_log(sys.stdout if words[:1] == ["train"] else sys.stderr)
    try:
        return _run(words)
    except TrainerError as error:
        return _fail(error)
    except KeyboardInterrupt as error:
        return _stopped(words, error)
    except Exception as error:  # noqa: BLE001 - the process boundary: everything gets an exit code and a line
        _LOG.exception("unexpected error")
        return _fail(translate(error))


def build_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command other than `train`."""
    parser = _Parser(prog=f"dflash-train {command}", allow_abbrev=False, description=COMMANDS[command])
    add_arguments, _ = _MODULES[command]
    add_arguments(parser)
    return parser


def build_train_parser() -> argparse.ArgumentParser:
    """Return the parser of `train`; its flags are `flags.FLAGS` plus `--config` and `--set`."""
    parser = _Parser(
        prog="dflash-train train",
        allow_abbrev=False,
        description="Train a drafter. Further settings are keys of the TOML file (see --set).",
    )
    _add_train_arguments(parser)
    return parser


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE.toml", help="TOML file with any of the keys")
    parser.add_argument(
        "--set",
        metavar="TABLE.KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="set one key; may be given several times",
    )
    for flag in FLAGS:
        shape: dict[str, Any] = {"metavar": "VALUE"} if flag.constant is None else {"nargs": 0, "const": True}
        parser.add_argument(
            flag.name, dest=flag.name, default=argparse.SUPPRESS, help=_help_of(flag), action=_Once, **shape
        )


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0 if words else ConfigError.exit_code
    command = words[0]
    if command not in COMMANDS:
        raise ConfigError(f"unknown command: {command}; choose one of {', '.join(COMMANDS)}")
    if command == "train":
        return _train(words[1:])
    arguments = build_parser(command).parse_args(words[1:])
    if "torch" not in sys.modules:
        _LOG.info("%s: loading torch", command)
    with raising_on_stop():
        code: int = getattr(importlib.import_module(_MODULES[command][1]), f"run_{command}")(arguments)
    return code


def _train(words: list[str]) -> int:
    given = vars(build_train_parser().parse_args(words))
    toml_path, overrides = given.pop("config"), given.pop("overrides")
    resolved = resolve(given, toml_path=toml_path, overrides=overrides)
    for note in check_run(resolved.config, has_wandb_key=has_wandb_credentials()):
        _LOG.warning("%s", note)
    set_allocator_defaults()
    leave_on_stop_signals()
    _LOG.info("starting, pid %d; loading torch", os.getpid())
    if not resolved.is_own_run_dir:
        write_first_status(resolved.run_dir)
    trainer = importlib.import_module("trainer.train").Trainer(resolved)
    code: int = trainer.train()
    return code


def _stopped(words: list[str], error: KeyboardInterrupt) -> int:
    command = words[0] if words else ""
    way_on = "; the same command goes on where it stopped" if command in _RESUMABLE else ""
    _LOG.warning("stopped by %s%s", error or "SIGINT", way_on)
    return EXIT_STOPPED


def _fail(error: BaseException) -> int:
    _LOG.error("%s", describe(error))
    return exit_code(error)


def _help_of(flag: Flag) -> str:
    """Say what a flag does and what holds without it."""
    table, name = flag.key.split(".")
    field = SECTIONS[table].__dataclass_fields__[name]
    text = str(field.metadata["doc"]).replace("%", "%%")
    if flag.constant is not None:
        return f"same as {flag.key} = {str(flag.constant).lower()}: {text}"
    default = field.default
    return f"{text} (default {default})" if default not in ("", None, ()) else text


def _usage() -> str:
    lines = ["usage: dflash-train COMMAND [flags]", ""]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    lines += [
        "",
        "examples:",
        "  dflash-train train --target-model DIR --data-dir DIR --output-dir DIR",
        "  dflash-train eval --target-model DIR --drafter DIR --prompts FILE.jsonl",
        "  dflash-train plan --target-model DIR --data-dir DIR --output-dir DIR --gpus 8",
        "",
    ]
    return "\n".join(lines)


def _open_log(stream: TextIO) -> None:
    """Send readable lines to `stream`; `train` has its log there, the other commands print results."""
    if isinstance(stream, io.TextIOWrapper):  # what somebody gave may be no text at all
        stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(
        stream=stream,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(threadName)s %(message)s",
        force=True,
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(leave_tracebacks_to_bugs)
    for noisy in ("transformers", "wandb", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def leave_tracebacks_to_bugs(record: logging.LogRecord) -> bool:
    """Drop the traceback of an error that is raised on purpose: its line says all."""
    if record.exc_info and isinstance(record.exc_info[1], TrainerError):
        record.exc_info = None
    return True


def _leave(code: int) -> None:
    """End the process; threads that still run (an abandoned save, a hung worker) must not hold it up."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
