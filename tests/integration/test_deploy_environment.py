"""Environments on a node: built by the real installer from a local wheelhouse, whole or absent."""

from __future__ import annotations

import hashlib
import socket
import subprocess
from pathlib import Path

import pytest

from supervisor.domain.errors import DeployError
from supervisor.domain.layout import Layout
from supervisor.reconciler.environments import EnvironmentBuilder, EnvironmentPlan, torch_requirement_for
from supervisor.transport.local import LocalTransport
from tests.support.wheelhouse import build_wheel, write_lock

PYTHON = "python3"


def make_plan(lock: Path, wheels: Path, *, torch: str | None = None) -> EnvironmentPlan:
    text = lock.read_text()
    return EnvironmentPlan(
        digest=hashlib.sha256(text.encode()).hexdigest(),
        lock_text=text,
        torch_requirement=torch,
        python=PYTHON,
        find_links=str(wheels),
        torch_index_url=None,
    )


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(str(tmp_path / "node"))


@pytest.fixture
def builder(layout: Layout) -> EnvironmentBuilder:
    Path(layout.root).mkdir()
    return EnvironmentBuilder(LocalTransport(), layout, python=PYTHON, report=lambda *_: None)


async def test_an_environment_is_built_from_a_lock_and_a_second_build_does_nothing(
    tmp_path: Path, layout: Layout, builder: EnvironmentBuilder
) -> None:
    wheels = tmp_path / "wheels"
    lock = write_lock(tmp_path / "lock.txt", [build_wheel(wheels, "toylib", "1.0")])
    plan = make_plan(lock, wheels)

    assert await builder.build(plan) is True
    await builder.complete(plan.digest, {"v": 1})
    assert await builder.build(plan) is False

    shown = subprocess.run(
        [layout.python(plan.digest), "-c", "import toylib; print(toylib.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "1.0\n"


async def test_an_interrupted_build_is_not_an_environment_and_is_replaced(
    tmp_path: Path, layout: Layout, builder: EnvironmentBuilder
) -> None:
    wheels = tmp_path / "wheels"
    plan = make_plan(write_lock(tmp_path / "lock.txt", [build_wheel(wheels, "toylib", "1.0")]), wheels)
    remains = Path(layout.environment(plan.digest)) / "lib" / "half"
    remains.mkdir(parents=True)

    assert await builder.build(plan) is True

    assert not remains.exists()
    assert Path(layout.python(plan.digest)).exists()


async def test_a_wheel_that_does_not_match_its_hash_is_refused_and_nothing_stays(
    tmp_path: Path, layout: Layout, builder: EnvironmentBuilder
) -> None:
    wheels = tmp_path / "wheels"
    lock = write_lock(tmp_path / "lock.txt", [build_wheel(wheels, "toylib", "1.0")])
    build_wheel(wheels, "toylib", "1.0", {"toylib.py": "print('not what was locked')\n"})

    plan = make_plan(lock, wheels)
    with pytest.raises(DeployError) as caught:
        await builder.build(plan)

    assert caught.value.reason == "HashMismatch"
    assert caught.value.hint
    assert not Path(layout.environment(plan.digest)).exists()


async def test_a_node_without_network_is_a_finding_with_both_ways_out_and_nothing_stays(
    layout: Layout, builder: EnvironmentBuilder
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        plan = EnvironmentPlan(
            digest="0" * 64,
            lock_text="",
            torch_requirement="torch==2.13.0",
            python=PYTHON,
            find_links=None,
            torch_index_url=f"http://127.0.0.1:{unused.getsockname()[1]}/simple",
        )
        with pytest.raises(DeployError) as caught:
            await builder.build(plan)

    assert caught.value.reason == "NoNetwork"
    assert "network access" in (caught.value.hint or "")
    assert "--find-links" in (caught.value.hint or "")
    assert not Path(layout.environment(plan.digest)).exists()


def test_which_torch_a_lock_gets() -> None:
    assert torch_requirement_for("click==8\n", is_bundled_source=True) == "torch==2.13.0"
    assert torch_requirement_for("click==8\n", is_bundled_source=False) is None
    assert torch_requirement_for("torch==2.11.0 --hash=sha256:00\n", is_bundled_source=True) is None
    assert torch_requirement_for("# torch: torch==2.11.0\n", is_bundled_source=False) == "torch==2.11.0"
    assert torch_requirement_for("torchvision==1\n", is_bundled_source=False) is None
