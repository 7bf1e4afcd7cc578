"""Archives for the node: equal content gives equal bytes, and the manifest proves what was sent."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from supervisor.domain.errors import DeployError
from supervisor.transport.bundle import build_release, build_shim


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "trainer"
    (folder / "data").mkdir(parents=True)
    (folder / "__main__.py").write_text("print('here')\n")
    (folder / "data" / "__init__.py").write_text("")
    (folder / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "tool.sh").chmod(0o755)
    return folder


def test_shim_is_the_same_bytes_each_time_and_named_by_them() -> None:
    first, second = build_shim(), build_shim()

    assert first.data == second.data
    assert first.digest == hashlib.sha256(first.data).hexdigest()


def test_shim_holds_no_time_and_needs_no_zlib() -> None:
    with zipfile.ZipFile(io.BytesIO(build_shim().data)) as archive:
        members = archive.infolist()

    assert members[0].filename == "__main__.py"
    assert {member.date_time for member in members} == {(1980, 1, 1, 0, 0, 0)}
    assert {member.compress_type for member in members} == {zipfile.ZIP_STORED}


def test_changed_shim_source_changes_the_digest(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = build_shim(tmp_path).digest
    (tmp_path / "a.py").write_text("x = 2\n")

    assert build_shim(tmp_path).digest != before


def test_release_is_deterministic_whatever_times_caches_and_order(source: Path, tmp_path: Path) -> None:
    first = build_release(source)
    copy = tmp_path / "elsewhere" / "trainer"
    (copy / "data").mkdir(parents=True)
    for name in ("tool.sh", "data/__init__.py", "__main__.py"):
        (copy / name).write_bytes((source / name).read_bytes())
        os.utime(copy / name, (1, 1))
    (copy / "tool.sh").chmod(0o700)
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"cache")
    (copy / ".git").mkdir()
    (copy / ".git" / "HEAD").write_text("ref")

    second = build_release(copy)

    assert second.data == first.data
    assert second.digest == first.digest


def test_manifest_lists_every_file_with_its_hash(source: Path) -> None:
    release = build_release(source, source_commit="abc")

    with tarfile.open(fileobj=io.BytesIO(release.data), mode="r:gz") as archive:
        contents = {member.name: archive.extractfile(member).read() for member in archive.getmembers()}
        modes = {member.name: member.mode for member in archive.getmembers()}
    manifest = json.loads(contents.pop("manifest.json"))
    assert manifest == dict(release.manifest)
    assert manifest["source_commit"] == "abc"
    assert {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()} == {
        name: entry["sha256"] for name, entry in manifest["files"].items()
    }
    assert modes["trainer/tool.sh"] == 0o755
    assert modes["trainer/__main__.py"] == 0o644


def test_digest_follows_content_and_executability_not_the_commit(source: Path) -> None:
    digest = build_release(source).digest
    assert build_release(source, source_commit="abc").digest == digest

    (source / "tool.sh").chmod(0o644)
    other_mode = build_release(source).digest
    (source / "__main__.py").write_text("print('there')\n")
    other_content = build_release(source).digest

    assert len({digest, other_mode, other_content}) == 3


def test_links_are_refused_by_name(source: Path) -> None:
    (source / "data" / "link.py").symlink_to("/etc/passwd")

    with pytest.raises(DeployError, match=r"link\.py") as failure:
        build_release(source)

    assert failure.value.reason == "SourceNotPlain"


def test_missing_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DeployError) as missing:
        build_release(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DeployError) as empty:
        build_release(tmp_path / "empty")

    assert (missing.value.reason, empty.value.reason) == ("SourceMissing", "SourceEmpty")
