"""What is sent into a node, packed so that equal content gives equal bytes: the shim and trainer releases.

Used by the deploy executor. The digest of an archive is its name on the node, so nothing that varies between
machines may enter it: no times, owners, compression levels or file order. Must not talk to any node.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import stat
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from supervisor.domain.errors import DeployError

SHIM_FOLDER = Path(__file__).resolve().parent.parent / "shim"
SHIM_PACKAGE = "dflash_shim"
_SHIM_START = f"""\
import sys

from {SHIM_PACKAGE}.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
"""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_SKIPPED_NAMES = frozenset({"__pycache__", "node_modules"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimArchive:
    """The zipapp that runs in the node as `dflash-shim.pyz`."""

    data: bytes
    digest: str
    """SHA-256 of `data`, hex: the folder name under `<root>/shim/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseArchive:
    """A trainer folder as tar.gz, with the manifest that proves it after unpacking."""

    data: bytes
    digest: str
    """SHA-256 over the manifest's file table, hex: the folder name under `<root>/releases/`."""
    manifest: Mapping[str, Any]
    """`{"v", "digest", "source_commit", "files": {path: {"sha256", "size", "mode"}}}`; in the archive."""


def build_shim(folder: Path = SHIM_FOLDER) -> ShimArchive:
    """Pack the shim's modules into one deterministic zipapp.

    Members are stored uncompressed: zlib's output differs between versions, and a node may lack zlib.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        _add_member(archive, "__main__.py", _SHIM_START.encode("ascii"))
        for path in sorted(folder.glob("*.py")):
            if path.name != "_run.py":
                _add_member(archive, f"{SHIM_PACKAGE}/{path.name}", path.read_bytes())
    data = buffer.getvalue()
    return ShimArchive(data=data, digest=hashlib.sha256(data).hexdigest())


def _add_member(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, date_time=_EPOCH)
    info.external_attr = 0o644 << 16
    info.create_system = 3
    archive.writestr(info, data)


def build_release(folder: Path, *, source_commit: str | None = None) -> ReleaseArchive:
    """Pack a trainer folder under its own name, with `manifest.json` beside it.

    Args:
        folder: an importable package; caches and hidden files are left out, symbolic links are refused.
        source_commit: recorded in the manifest; not part of the digest.

    Raises:
        DeployError: the folder is missing, empty, or holds something that is not a plain file.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise DeployError(
            f"trainer folder not found: {folder}",
            reason="SourceMissing",
            hint="give the path of a folder with the trainer package",
            path=str(folder),
        )
    contents = {f"{folder.name}/{path.relative_to(folder).as_posix()}": path for path in _files(folder)}
    if not contents:
        raise DeployError(f"trainer folder is empty: {folder}", reason="SourceEmpty", path=str(folder))
    payload = {name: path.read_bytes() for name, path in sorted(contents.items())}
    files = {
        name: {
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "mode": 0o755 if contents[name].stat().st_mode & stat.S_IXUSR else 0o644,
        }
        for name, data in payload.items()
    }
    table = json.dumps(files, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(table).hexdigest()
    manifest = {"v": 1, "digest": digest, "source_commit": source_commit, "files": files}
    payload["manifest.json"] = json.dumps(manifest, sort_keys=True, indent=1).encode()
    modes = {name: int(entry["mode"]) for name, entry in files.items()}
    return ReleaseArchive(data=_tar_gz(payload, modes), digest=digest, manifest=MappingProxyType(manifest))


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _SKIPPED_NAMES or path.suffix == ".pyc":
            continue
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise DeployError(
                f"not a plain file: {path}",
                reason="SourceNotPlain",
                hint="replace links and special files by plain files",
                path=str(path),
            )
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _tar_gz(payload: Mapping[str, bytes], modes: Mapping[str, int]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=6, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, data in sorted(payload.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mode = modes.get(name, 0o644)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
