"""What may lie in the output folder of `prepare`: its own files, and nothing that it would remove or mix up.

Called by `data.staging` before a `prepare` touches anything. Files count as its own by their names and by the
report, or the work in progress, that only `prepare` leaves beside them. Must not write or remove anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trainer.data.sources import SUFFIXES
from trainer.errors import ConfigError

PARTIAL_DIR = "prepare.partial"
REPORT = "report.json"
HELD_OUT_DIR = "held_out"
PROMPTS = "prompts.jsonl"
OWN_FILE = re.compile(r"(train|held_out)-\d{5}\.parquet")
_OWN_WORK = re.compile(rf"((state\.json|{OWN_FILE.pattern})(\.tmp)?|digests\.bin|{re.escape(PROMPTS)})")
_REPORT_KEYS = ("source", "max_seq_len", "held_out_ratio", "rows", "kept", "train", "held_out", "dropped")


def check_folder(directory: Path, *, has_work: bool) -> None:
    """Refuse a folder in which `prepare` would remove something of others, or put its files beside theirs.

    Args:
        directory: the output folder, there already.
        has_work: whether a `prepare` was cut off there.

    Raises:
        ConfigError: names what stands in the way.
    """
    entries = list(directory.iterdir())
    _refuse(
        "--output holds data files that training would read too",
        directory,
        [path.name for path in entries if path.suffix in SUFFIXES and not OWN_FILE.fullmatch(path.name)],
    )
    partial = directory / PARTIAL_DIR
    _refuse("--output holds files that prepare did not write", directory, _foreign_work(partial))
    if has_work:
        return
    report = _read_report(directory / REPORT)
    found = [path.name for path in entries if OWN_FILE.fullmatch(path.name) or path.name == REPORT]
    held_out = _held_out_files(directory / HELD_OUT_DIR)
    doubtful = ([] if report else found) + ([] if report and report["held_out"] else held_out)
    _refuse("--output holds files that prepare did not write", directory, doubtful)


def refuse_inside(files: Collection[Path], directory: Path) -> None:
    """Refuse input that lies in the output folder: it would be replaced by what is made of it.

    Raises:
        ConfigError: names the first such file.
    """
    output = directory.resolve()
    inside = [file for file in files if output in file.resolve().parents]
    if inside:
        raise ConfigError(f"--input lies inside --output: {inside[0]}; name another --output")


def _foreign_work(partial: Path) -> list[str]:
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        return [PARTIAL_DIR]
    if not partial.is_dir():
        return []
    return [f"{PARTIAL_DIR}/{path.name}" for path in partial.iterdir() if not _OWN_WORK.fullmatch(path.name)]


def _held_out_files(folder: Path) -> list[str]:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return [HELD_OUT_DIR]
    if not folder.is_dir():
        return []
    own = [path.name for path in folder.iterdir() if OWN_FILE.fullmatch(path.name) or path.name == PROMPTS]
    return [f"{HELD_OUT_DIR}/{name}" for name in own]


def _read_report(path: Path) -> dict[str, Any] | None:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_own = isinstance(report, dict) and all(key in report for key in _REPORT_KEYS)
    return report if is_own else None


def _refuse(what: str, directory: Path, names: list[str]) -> None:
    if names:
        raise ConfigError(f"{what}: {directory}: {', '.join(sorted(names)[:5])}; name another --output")
