"""The run folder: the resolved configuration, code and package versions, beside status and metrics.

Called by `trainer.train` once at start-up. Everything is written whole, by rename. Holds no secret: the
configuration has none, and the environment is not copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from trainer.config import config_hash
from trainer.errors import CheckpointError, ConfigError, DataError, TrainerError
from trainer.flags import Resolved
from trainer.lifecycle.locks import MOST_TRIES, give_up, take_lock
from trainer.telemetry.capabilities import package_versions

_LOG = logging.getLogger(__name__)

RECORD_VERSION = 1
LOCK = ".trainer.lock"
OWN_RUN_DIR = "run"
"""Below the output folder, when nobody names another."""


def find_git_sha(start: Path) -> str | None:
    """Return the commit of the source tree that `start` lies in, read from `.git`; None outside of one."""
    for folder in (start, *start.parents):
        head = folder / ".git" / "HEAD"
        if not head.is_file():
            continue
        text = head.read_text(encoding="utf-8").strip()
        if not text.startswith("ref: "):
            return text
        name = text.removeprefix("ref: ")
        loose = folder / ".git" / name
        if loose.is_file():
            return loose.read_text(encoding="utf-8").strip()
        packed = folder / ".git" / "packed-refs"
        lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
        return next((line.split(" ")[0] for line in lines if line.endswith(f" {name}")), None)
    return None


def source_digest() -> str:
    """Return the SHA-256 over the trainer's own source files; tells versions apart where there is no git."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def describe_code() -> dict[str, Any]:
    """Return what identifies the code and the packages of this process."""
    sha = find_git_sha(Path(__file__).resolve().parent)
    return {
        "git_sha": sha,
        "git_sha_reason": None if sha else "the source is not inside a git work tree",
        "source_sha256": source_digest(),
        "python": platform.python_version(),
        "versions": package_versions(),
    }


class OutputHold:
    """The output folder of a running trainer, kept from others by its lock."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self.stream, self.is_new = _lock(output_dir)
        self._sign()

    def renew(self) -> None:
        """Take the folder again where somebody has removed it; called before something is written there.

        Raises:
            CheckpointError: another trainer has it by now, or it cannot be made.
        """
        try:
            if os.path.samestat(os.fstat(self.stream.fileno()), (self._output_dir / LOCK).stat()):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass  # removed: taken again below
        except OSError as error:
            raise CheckpointError(f"the output folder cannot be looked at: {error}") from error
        former = self.stream
        try:
            self.stream, _ = _lock(self._output_dir)
        except ConfigError as error:
            raise CheckpointError(
                f"the output folder was removed while this run used it, and cannot be taken again: {error}"
            ) from error
        former.close()
        self._sign()
        _LOG.warning(
            "the output folder was removed while this run used it, it is made anew: %s", self._output_dir
        )

    def _sign(self) -> None:
        try:
            os.ftruncate(self.stream.fileno(), 0)
            os.write(self.stream.fileno(), str(os.getpid()).encode())
        except OSError as error:
            _LOG.warning("the output is held, but its lock cannot say by which process: %s", error)


@contextlib.contextmanager
def hold_output(
    output_dir: Path, *, leaves_nothing_on: type[TrainerError] = DataError
) -> Iterator[OutputHold]:
    """Keep other trainers out of an output folder while this one uses it.

    Args:
        output_dir: made when missing.
        leaves_nothing_on: an error after which a folder that was made here is removed, unless it holds a
            checkpoint.

    Raises:
        ConfigError: the folder cannot be made, or another trainer holds it (its pid is named).
    """
    hold = OutputHold(output_dir)
    try:
        yield hold
    except leaves_nothing_on:
        if hold.is_new:
            _remove_traces(output_dir)
        raise
    finally:
        hold.stream.close()


@contextlib.contextmanager
def hold_run_folder(run_dir: Path) -> Iterator[None]:
    """Keep a trainer of another output folder from writing status and metrics between ours.

    Raises:
        ConfigError: it cannot be made, or another trainer holds it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"run folder cannot be made: {run_dir} ({error.strerror})") from error
    try:
        try:
            take_lock(descriptor, run_dir)
        except BlockingIOError as error:
            raise ConfigError(
                f"run folder is in use by another trainer: {run_dir}; "
                "name another by DFLASH_RUN_DIR, or unset it"
            ) from error
        yield
    finally:
        os.close(descriptor)


def _lock(output_dir: Path) -> tuple[TextIO, bool]:
    """Return the locked file, and whether the folder was made for it."""
    for _ in range(MOST_TRIES):
        is_new = not os.path.lexists(output_dir)
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            stream = (output_dir / LOCK).open("a+", encoding="utf-8")
        except FileNotFoundError:  # another trainer removed the folder that it had made
            continue
        except OSError as error:
            raise ConfigError(
                f"--output-dir cannot be used: {output_dir} ({error.strerror or error})"
            ) from error
        with contextlib.ExitStack() as stack:
            stack.enter_context(stream)
            try:
                has_it = take_lock(stream.fileno(), output_dir / LOCK)
            except BlockingIOError as error:
                stream.seek(0)
                holder = stream.read().strip() or "unknown"
                raise ConfigError(
                    f"--output-dir is in use by another trainer: {output_dir} (pid {holder}); "
                    "stop it or name another"
                ) from error
            if has_it:
                stack.pop_all()
                return stream, is_new
    raise give_up(output_dir)


def _remove_traces(output_dir: Path) -> None:
    """Remove what a run left in a folder that it made, when its data gave nothing to train on."""
    if any(output_dir.glob("lineage-*/*/*")):
        return
    with contextlib.suppress(OSError):
        for folder in (*output_dir.glob("lineage-*/*"), *output_dir.glob("lineage-*")):
            folder.rmdir()
        shutil.rmtree(output_dir / OWN_RUN_DIR, ignore_errors=True)
        (output_dir / LOCK).unlink()
        output_dir.rmdir()


def write_run_record(resolved: Resolved, code: Mapping[str, Any]) -> None:
    """Create the run folder and write `config.json` into it."""
    try:
        (resolved.run_dir / "control").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run folder cannot be made: {resolved.run_dir} ({error.strerror})") from error
    record = {
        "v": RECORD_VERSION,
        "config": resolved.config.as_dict(),
        "config_hash": config_hash(resolved.config),
        "sources": dict(resolved.sources),
        "argv": sys.argv[1:],
        "code": dict(code),
    }
    write_json(resolved.run_dir / "config.json", record)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Replace a JSON file of the run folder whole.

    Raises:
        ConfigError: the folder cannot be written (a full disk, say).
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(
            f"run folder cannot be written: {path} ({error.strerror or error}); free space or name another"
        ) from error
