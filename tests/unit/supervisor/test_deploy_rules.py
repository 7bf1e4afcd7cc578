"""Drift: what changed, what it means, how much it matters; and what a restart costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.domain.deploy import (
    DriftClass,
    PhaseTimes,
    advised_checkpoint_interval_s,
    break_even_s,
    changed_files,
    classify_changes,
    describe_changes,
    diff_distributions,
    diff_fingerprints,
    diff_locks,
    diff_releases,
    environment_digest,
    lock_digest,
    parse_lock,
    recommend,
    restart_cost,
)
from supervisor.domain.markers import compare_versions, marker_applies, marker_facts

LINUX = marker_facts("3.12.3", "linux-x86_64")


@pytest.mark.parametrize(
    ("name", "old", "new", "needs", "missing", "expected"),
    [
        ("torch", "2.11.0", "2.13.0", {}, (), DriftClass.CRITICAL),
        ("triton", "3.1", None, {}, (), DriftClass.CRITICAL),
        ("nvidia-nccl-cu13", "2.1", "2.2", {}, (), DriftClass.CRITICAL),
        ("nvidia-cuda-runtime", None, "13", {}, (), DriftClass.CRITICAL),
        ("nvidia-ml-py", None, "13.1", {}, ("nvml",), DriftClass.CAPABILITY),
        ("nvidia-ml-py", "13.1", None, {}, (), DriftClass.CAPABILITY),
        ("nvidia-ml-py", None, "13.1", {"nvml": "off"}, (), DriftClass.MINOR),
        ("nvidia-ml-py", "13.0", "13.1", {}, (), DriftClass.MINOR),
        ("nvidia-ml-py", "13.0", "13.1", {}, ("nvml",), DriftClass.CAPABILITY),
        ("wandb", None, "0.31", {"wandb": "wanted"}, (), DriftClass.CAPABILITY),
        ("numpy", "2.4", "2.5", {}, (), DriftClass.MINOR),
        ("pip", "24", "25", {}, (), DriftClass.IRRELEVANT),
    ],
)
def test_a_package_change_has_a_class(
    name: str, old: Any, new: Any, needs: Any, missing: Any, expected: DriftClass
) -> None:
    before = {name: old} if old else {}
    after = {name: new} if new else {}
    (change,) = diff_distributions(before, after, needs=needs, missing=missing)
    assert change.drift_class is expected
    assert name in change.meaning
    assert change.to_json()["class"] == expected.value


def test_the_meaning_is_told_in_words() -> None:
    (arrived,) = diff_distributions({}, {"nvidia-ml-py": "13.1"})
    assert (
        arrived.meaning
        == "nvidia-ml-py 13.1 is there now: GPU telemetry becomes available with the next start"
    )
    (gone,) = diff_distributions({"numpy": "2"}, {})
    assert "would fail" in gone.meaning


def test_the_class_that_matters_most_wins() -> None:
    changes = diff_distributions(
        {"numpy": "1", "pip": "1"}, {"numpy": "2", "pip": "2", "torch": "3", "wandb": "1"}
    )
    assert classify_changes(changes) is DriftClass.CRITICAL
    assert classify_changes([c for c in changes if c.name != "torch"]) is DriftClass.CAPABILITY
    assert classify_changes([c for c in changes if c.name == "pip"]) is None
    assert classify_changes([]) is None
    assert describe_changes(changes).startswith("torch 3 was added")
    assert "(and 2 more)" in describe_changes(changes)
    assert describe_changes([]) == "nothing that matters changed"


def test_release_comes_after_capability_and_before_minor() -> None:
    release = diff_releases("aa", "bb", files=["train.py"])
    assert classify_changes(release + diff_distributions({}, {"wandb": "1"})) is DriftClass.CAPABILITY
    assert classify_changes(release + diff_distributions({}, {"numpy": "1"})) is DriftClass.RELEASE
    assert "train.py" in release[0].meaning
    assert diff_releases("aa", "aa") == []
    assert diff_releases(None, "aa") == []


def test_fingerprints_differ_by_packages_python_driver_and_cuda() -> None:
    old = {
        "python": "3.12.3",
        "driver": "570",
        "torch_cuda": "13.0",
        "distributions": {"NumPy": "1", "my_pkg": "1"},
    }
    assert diff_fingerprints(old, old) == []
    same = {**old, "distributions": {"numpy": "1", "my-pkg": "1"}}
    assert diff_fingerprints(old, same) == []
    new = {**old, "python": "3.12.4", "driver": "580", "distributions": {"numpy": "2", "my-pkg": "1"}}
    assert {(c.kind, c.new) for c in diff_fingerprints(old, new)} == {
        ("python", "3.12.4"),
        ("driver", "580"),
        ("distribution", "2"),
    }


def test_what_is_not_known_is_no_difference() -> None:
    old = {"python": "3.12.3", "driver": None, "distributions": {"numpy": "1"}}
    assert diff_fingerprints(old, {"python": None, "driver": "580"}) == []


def test_a_package_from_elsewhere_is_a_change_although_its_version_is_equal() -> None:
    old = {"distributions": {"numpy": "1"}, "direct_urls": {}}
    new = {"distributions": {"numpy": "1"}, "direct_urls": {"numpy": {"url": "file:///tmp/numpy?token=x"}}}
    (change,) = diff_fingerprints(old, new)
    assert change.new == "1 from file:///tmp/numpy"


LOCK = """# a comment
numpy==2.4.6 ; python_full_version < '3.12' \\
    --hash=sha256:aa
numpy==2.5.5 ; python_full_version >= '3.12' \\
    --hash=sha256:bb
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:cc
My_Package[extra]==1.0 \\
    --hash=sha256:dd
"""


def test_a_lock_is_read_after_its_markers() -> None:
    assert parse_lock(LOCK, LINUX) == {"numpy": "2.5.5", "my-package": "1.0"}
    assert parse_lock(LOCK, marker_facts("3.11.7", "linux-x86_64"))["numpy"] == "2.4.6"


def test_lines_that_do_not_apply_are_no_difference() -> None:
    other = LOCK.replace("0.4.6", "0.4.7").replace("2.4.6", "2.4.7")
    assert diff_locks(LOCK, other, facts=LINUX) == []
    (change,) = diff_locks(LOCK, LOCK.replace("2.5.5", "2.5.6"), facts=LINUX)
    assert (change.name, change.old, change.new) == ("numpy", "2.5.5", "2.5.6")


def test_the_bundled_lock_can_be_read() -> None:
    text = (Path(__file__).parents[3] / "requirements" / "trainer.txt").read_text()
    found = parse_lock(text, LINUX)
    assert {"transformers", "safetensors", "nvidia-ml-py"} <= set(found)
    assert len(found) >= text.count("--hash") / 200


def test_comments_do_not_change_a_digest_and_everything_else_does() -> None:
    assert lock_digest(LOCK) == lock_digest(LOCK.replace("# a comment", "# another\n"))
    assert lock_digest(LOCK) != lock_digest(LOCK.replace("aa", "ab"))
    base = {"torch_requirement": "torch==2.13.0", "python": "3.12.3", "platform": "linux-x86_64"}
    digests = {environment_digest(LOCK, **base)}
    for key in base:
        digests.add(environment_digest(LOCK, **{**base, key: "other"}))
    assert len(digests) == 4


def test_changed_files_of_a_release_are_named() -> None:
    old = {"files": {"a.py": "1", "b.py": "2"}}
    assert changed_files(old, {"files": {"a.py": "1", "b.py": "3", "c.py": "4"}}) == ["b.py", "c.py"]


@pytest.mark.parametrize(
    ("marker", "applies"),
    [
        ("python_full_version >= '3.12'", True),
        ("python_version < '3.12'", False),
        ("python_version == '3.12'", True),
        ("python_full_version == '3.12.*'", True),
        ("python_full_version != '3.12.*'", False),
        ("sys_platform == 'win32' or platform_machine == 'x86_64'", True),
        ("sys_platform == 'linux' and platform_machine == 'aarch64'", False),
        ("(sys_platform == 'win32' or sys_platform == 'linux') and python_version > '3.9'", True),
        ("sys_platform == 'win32' and sys_platform == 'linux' or python_version > '3.9'", True),
        ("'linux' in sys_platform", True),
        ("sys_platform not in 'win32 darwin'", True),
        ("extra == 'x'", True),
        ("what is this", True),
        ("", True),
    ],
)
def test_markers(marker: str, applies: bool) -> None:
    assert marker_applies(marker, LINUX) is applies


@pytest.mark.parametrize(
    ("left", "right", "sign"),
    [("3.9", "3.10", -1), ("3.10", "3.10.0", 0), ("3.12.1", "3.12", 1), ("x", "1", -1)],
)
def test_versions_compare_by_numbers(left: str, right: str, sign: int) -> None:
    assert compare_versions(left, right) == sign


TIMES = PhaseTimes(stop_s=20, launch_s=10, ready_s=390)


def test_cost_now_and_at_the_next_checkpoint() -> None:
    cost = restart_cost(
        gpus=8, times=TIMES, since_checkpoint_s=600, checkpoint_interval_s=1800, elapsed_s=6000
    )
    assert cost.now_gpu_s == 8 * (600 + 420)
    assert cost.next_checkpoint_gpu_s == 8 * 420
    assert (cost.wait_s, cost.share_of_elapsed, cost.unknown) == (1200, 0.1, ())
    assert recommend(cost)[0] == "next_checkpoint"
    fresh = restart_cost(gpus=8, times=TIMES, since_checkpoint_s=5, checkpoint_interval_s=None, elapsed_s=600)
    assert (recommend(fresh)[0], fresh.wait_s) == ("now", None)
    assert recommend(cost)[1] == "waiting for the next checkpoint saves 4800 GPU-seconds of work"
    assert (
        "saves 600 seconds" in recommend(replace(cost, gpus=0, now_gpu_s=1020, next_checkpoint_gpu_s=420))[1]
    )


def test_an_unknown_cost_is_not_zero() -> None:
    cost = restart_cost(
        gpus=0, times=PhaseTimes(), since_checkpoint_s=None, checkpoint_interval_s=None, elapsed_s=None
    )
    assert (cost.now_gpu_s, cost.next_checkpoint_gpu_s, cost.overhead_s) == (None, None, None)
    assert set(cost.unknown) == {"stop", "launch", "warm-up", "time since the last checkpoint"}
    assert recommend(cost)[0] == "unknown"
    assert break_even_s(cost.now_gpu_s, value_per_s=1) is None


def test_medians_and_advice() -> None:
    times = PhaseTimes.from_samples({"stop": [1, 2, 9], "launch": [], "ready": [4], "save": [2]})
    assert (times.stop_s, times.launch_s, times.ready_s) == (2, None, 4)
    assert break_even_s(100, value_per_s=4) == 25
    assert break_even_s(100, value_per_s=0) is None
    assert advised_checkpoint_interval_s(50, 10_000) == 1000
