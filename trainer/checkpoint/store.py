"""Folders of verified checkpoints: written whole, checked by hash, pruned by age.

Layout: `<output-dir>/<lineage>/{state,export}/step-%08d/`, each with a `manifest.json` that lists every file
with size and SHA-256 and is written last. A folder under its final name is complete or it does not exist.
Called by `trainer.train`; what is inside a folder is known to `state` and `export` only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.errors import CheckpointError

_LOG = logging.getLogger(__name__)

Kind = Literal["state", "export"]
KINDS: tuple[Kind, ...] = ("state", "export")
MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
_STEP_NAME = re.compile(r"step-(\d{8,})")
_REPLACED_NAME = re.compile(r"step-(\d{8,})\.replaced-\d+")
_LINEAGE_NAME = re.compile(r"lineage-(\d{4,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest folder that verifies, and what was passed over with the reason of each."""

    path: Path | None
    step: int
    skipped: tuple[str, ...]


class CheckpointStore:
    """Saves and finds checkpoints of one lineage.

    Args:
        lineage_dir: `<output-dir>/<lineage>`.
    """

    def __init__(self, lineage_dir: Path) -> None:
        self.lineage_dir = lineage_dir

    def prepare(self) -> None:
        """Create the lineage and remove what an interrupted save left behind."""
        for kind in KINDS:
            folder = self.lineage_dir / kind
            if not folder.is_dir():
                folder.mkdir(parents=True)
                for parent in (folder, self.lineage_dir, self.lineage_dir.parent):
                    _sync(parent)
            # whatever is hidden here is of a save that never ended, or was on its way out
            for leftover in folder.glob(".*"):
                _LOG.info("removed an unfinished save: %s", leftover)
                shutil.rmtree(leftover, ignore_errors=True)

    def save(self, kind: Kind, step: int, fill: Callable[[Path], object]) -> Path:
        """Publish one checkpoint folder and return its final path; `fill` writes it to the path it is given.

        Raises:
            CheckpointError: the disk refused; the earlier checkpoints are untouched.
        """
        final = self.lineage_dir / kind / f"step-{step:08d}"
        temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            fill(temporary)
            self._write_manifest(temporary, step)
            _set_aside(final)
            temporary.rename(final)
            _sync(final.parent)
        except CheckpointError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint cannot be written: {final} ({error.strerror or error}); free space or name "
                "another --output-dir; earlier checkpoints are untouched"
            ) from error
        return final

    def steps(self, kind: Kind) -> list[int]:
        """Return the steps that exist under their final name, ascending; they are not verified here."""
        folder = self.lineage_dir / kind
        if not folder.is_dir():
            return []
        names = (_STEP_NAME.fullmatch(entry.name) for entry in folder.iterdir())
        return sorted(int(match.group(1)) for match in names if match)

    def path(self, kind: Kind, step: int) -> Path:
        """Return the final path of a step."""
        return self.lineage_dir / kind / f"step-{step:08d}"

    def find_newest(
        self, kind: Kind = "state", *, accept: Callable[[Path], object] = lambda _path: None
    ) -> Found:
        """Return the newest folder that verifies; damaged ones are named with their reason.

        Args:
            kind: states or exports.
            accept: looks at what is inside a folder that verifies; raises `CheckpointError` to pass it over.
        """
        skipped: list[str] = []
        for step in reversed(self.steps(kind)):
            path = self.path(kind, step)
            try:
                verify(path)
                accept(path)
            except CheckpointError as error:
                skipped.append(str(error))
                continue
            return Found(path=path, step=step, skipped=tuple(skipped))
        return Found(path=None, step=0, skipped=tuple(skipped))

    def prune(self, keep: int, *, protect: Collection[int] = (), verified: int | None = None) -> list[Path]:
        """Remove all but the newest `keep` steps of each kind; the newest that verifies always stays.

        What was set aside for a new save (`step-*.replaced-N`) goes with its step.

        Args:
            keep: how many of the newest stay.
            protect: steps that stay in any case: the best ones, and the one that a resume points to.
            verified: a step whose state has just been verified, so that it need not be read again.

        Returns:
            The folders that were removed.
        """
        removed: list[Path] = []
        for kind in KINDS:
            steps = self.steps(kind)
            surplus = [step for step in steps[:-keep] if step not in protect]
            if surplus and not (kind == "state" and verified in steps[-keep:]):
                newest = self.find_newest(kind)
                surplus = [step for step in surplus if newest.path is None or step != newest.step]
            gone = [self.path(kind, step) for step in surplus] + self._surplus_replaced(kind, steps, surplus)
            removed += [path for path in gone if _remove(path)]
        return removed

    def _surplus_replaced(self, kind: Kind, steps: list[int], surplus: Collection[int]) -> list[Path]:
        """Return the set-aside folders of steps that go, or that nothing replaced while newer ones exist."""
        folder = self.lineage_dir / kind
        matches = ((path, _REPLACED_NAME.fullmatch(path.name)) for path in sorted(folder.iterdir()))
        return [
            path
            for path, match in matches
            if match and (int(match.group(1)) in surplus or int(match.group(1)) < min(steps, default=0))
        ]

    def _write_manifest(self, folder: Path, step: int) -> None:
        files = {}
        for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
            files[path.relative_to(folder).as_posix()] = {
                "size": path.stat().st_size,
                "sha256": _sha256(path),
            }
            _sync(path)
        manifest = {"v": MANIFEST_VERSION, "step": step, "created_at": time.time(), "files": files}
        target = folder / MANIFEST
        target.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _sync(target)
        _sync(folder)


def verify(folder: Path) -> None:
    """Compare a checkpoint folder with its manifest.

    Raises:
        CheckpointError: says what differs: no manifest, one of another step or of a newer format, a missing,
            short, long or altered file.
    """
    manifest, files = _read_manifest(folder)
    if manifest.get("v") != MANIFEST_VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST} has format version {manifest.get('v')}, this trainer reads "
            f"{MANIFEST_VERSION}; resume it with the trainer that wrote it"
        )
    name_match = _STEP_NAME.fullmatch(folder.name)
    if name_match and manifest.get("step") != int(name_match.group(1)):
        raise CheckpointError(
            f"{folder / MANIFEST} is of step {manifest.get('step')}: it belongs to another folder"
        )
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file() or path.is_symlink():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, the manifest says {size}")
        if _sha256(path) != digest:
            raise CheckpointError(f"{path} does not match its SHA-256 in the manifest")


def _read_manifest(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, str]]]:
    """Return a manifest, and of each file below its folder size and digest."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {
            str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()
        }
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: no checkpoint, or one that was never finished"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not files:
        raise CheckpointError(f"{folder / MANIFEST} lists no files")
    outside = [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise CheckpointError(f"{folder / MANIFEST} names a file outside of its folder: {outside[0]}")
    return manifest, files


def list_lineages(output_dir: Path) -> list[str]:
    """Return the lineages below the output folder, oldest first."""
    if not output_dir.is_dir():
        return []
    matches = (_LINEAGE_NAME.fullmatch(entry.name) for entry in output_dir.iterdir() if entry.is_dir())
    return [match.group(0) for match in sorted((m for m in matches if m), key=lambda m: int(m.group(1)))]


def new_lineage(output_dir: Path) -> str:
    """Return the next free lineage name; nothing is created or removed."""
    existing = list_lineages(output_dir)
    return f"lineage-{int(existing[-1].split('-')[1]) + 1 if existing else 0:04d}"


def _remove(folder: Path) -> bool:
    """Remove a surplus checkpoint; one that cannot go is reported and stays, it harms nobody."""
    # renamed first: a half-deleted folder must not look like a damaged checkpoint
    doomed = folder.with_name(f".tmp-pruned-{folder.name}")
    try:
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    except OSError as error:
        _LOG.warning("old checkpoint cannot be removed: %s (%s)", folder, error)
        return False
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def _set_aside(final: Path) -> None:
    """Keep a folder that stands in the way (a damaged one, passed over at resume) under another name."""
    if not final.exists():
        return
    number = 1
    while (aside := final.with_name(f"{final.name}.replaced-{number}")).exists():
        number += 1
    _LOG.warning("%s exists already (damaged or of an abandoned branch), kept as %s", final, aside.name)
    final.rename(aside)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
