"""Checks before a launch: required refuses, wanted shows, unknown is said."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.domain.deploy import lock_digest
from supervisor.domain.errors import ConnectError, NotFoundError, ShimError
from supervisor.domain.layout import Layout
from supervisor.domain.spec import parse_run_dict
from supervisor.reconciler.act import LaunchPlan, render_argv, render_request
from supervisor.reconciler.drift import DriftWatch
from supervisor.reconciler.prepare import LaunchContext, choose_gpus, prepare_launch
from supervisor.reconciler.sampler import GpuView
from supervisor.store.tables import Attempt, Environment, Release, Run
from tests.support.domain_builders import FakeClock

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RELEASE = Release(
    digest="r" * 8, source="bundled", manifest={"files": {"trainer/__main__.py": {}}}, created_at=NOW
)
BUILT = Environment(digest="e" * 8, kind="built", python="/srv/d/envs/eeeeeeee/bin/python", created_at=NOW)
PRESENT = {"exists": True, "is_file": True, "executable": True, "disk": {"free": 1 << 40, "writable": True}}


ALL_OFF = {"wandb": "off", "flash_linear_attention": "off", "kernels": "off"}


def make_context(**changes: Any) -> LaunchContext:
    spec = {
        "name": "toy",
        "node": "n",
        "command": {"args": []},
        "capabilities": dict.fromkeys(("nvml", "wandb", "flash_linear_attention", "kernels"), "off"),
        **changes.pop("spec", {}),
    }
    fields: dict[str, Any] = {
        "run": Run(
            id="r", name="toy", node_id="n", spec_digest="d", desired_at=NOW, created_at=NOW, updated_at=NOW
        ),
        "attempt": Attempt(
            id="a",
            run_id="r",
            node_id="n",
            number=1,
            state="preflight",
            generation=1,
            created_at=NOW,
            updated_at=NOW,
            log_path="/logs/toy1.log",
            resume_from="latest",
        ),
        "spec": parse_run_dict(spec),
        "deployment": None,
        "release": RELEASE,
        "environment": BUILT,
        "capabilities": {},
        "gpu_view": None,
        "node_facts": {},
        "root": "/srv/d",
        "resolve_secrets": resolve,
        "monotonic_s": 100.0,
    }
    return LaunchContext(**{**fields, **changes})


async def resolve(names: Any) -> dict[str, str]:
    if "MISSING" in names:
        raise NotFoundError("no secret is called MISSING", hint="store it")
    return dict.fromkeys(names, "value")


class FakeConnection:
    """Answers `paths` from a table of what is there."""

    def __init__(self, **special: dict[str, Any]) -> None:
        self.address = SimpleNamespace(layout=Layout("/srv/d"), root="/srv/d")
        self.special = {key.replace("__", "/"): value for key, value in special.items()}
        self.is_down = False

    async def request(self, op: str, *, paths: list[str], deadline_s: float) -> dict[str, Any]:
        assert op == "paths"
        if self.is_down:
            raise ConnectError("link down")
        return {"paths": {path: {**PRESENT, **self.special.get(path, {})} for path in paths}}


async def failures(context: LaunchContext, connection: Any = None) -> dict[str, str]:
    prepared = await prepare_launch(connection or FakeConnection(), context)
    return {item.name: item.reason for item in prepared.report.failures()}


async def test_a_launch_with_everything_in_place_passes_and_knows_its_words() -> None:
    prepared = await prepare_launch(FakeConnection(), make_context())  # type: ignore[arg-type]

    assert prepared.report.is_passed
    assert prepared.argv == [BUILT.python, "-u", "-m", "trainer", "train", "--resume", "latest"]


async def test_a_node_that_cannot_be_asked_gives_no_answer() -> None:
    connection = FakeConnection()
    connection.is_down = True

    with pytest.raises(ConnectError):
        await prepare_launch(connection, make_context())  # type: ignore[arg-type]


async def test_an_environment_built_first_on_another_node_is_looked_for_below_this_ones_root() -> None:
    elsewhere = Environment(
        digest=BUILT.digest, kind="built", python="/other/envs/eeeeeeee/bin/python", created_at=NOW
    )

    prepared = await prepare_launch(FakeConnection(), make_context(environment=elsewhere))

    assert prepared.argv[0] == BUILT.python


async def test_a_lock_of_the_run_file_that_is_not_what_was_deployed_is_told(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("toylib==1.0 --hash=sha256:00\n")
    built = Environment(
        digest=BUILT.digest,
        kind="built",
        python=BUILT.python,
        lock_digest=lock_digest(lock.read_text()),
        created_at=NOW,
    )
    context = make_context(spec={"environment": {"lock": str(lock)}}, environment=built)

    async def told() -> list[tuple[str, str | None]]:
        report = (await prepare_launch(FakeConnection(), context)).report  # type: ignore[arg-type]
        return [(item.status, item.reason) for item in report.findings if item.name == "environment lock"]

    equal = await told()
    lock.write_text("toylib==2.0 --hash=sha256:00\n")
    changed = await told()
    lock.unlink()
    gone = await told()

    assert [equal[0][0], *changed, *gone] == ["ok", ("warn", "OtherLock"), ("warn", "LockNotFound")]


async def test_nothing_deployed_is_named_with_the_command_that_deploys() -> None:
    context = make_context(release=None, environment=None)

    prepared = await prepare_launch(FakeConnection(), context)  # type: ignore[arg-type]

    assert {item.name for item in prepared.report.failures()} == {"release", "environment"}
    assert "node deploy n" in prepared.report.summary()
    assert prepared.argv == []


@pytest.mark.parametrize(
    ("special", "reason"),
    [
        ({"/srv/d/releases/rrrrrrrr/manifest.json": {"exists": False}}, {"release": "ReleaseMissing"}),
        ({"/srv/d/envs/eeeeeeee/complete.json": {"exists": False}}, {"environment": "EnvironmentMissing"}),
        ({BUILT.python: {"executable": False}}, {"interpreter": "InterpreterMissing"}),
        ({"/logs": {"disk": {"free": 5, "writable": True}}}, {"log dir": "NoSpace"}),
        ({"/logs": {"disk": {"free": None, "writable": False}}}, {"log dir": "NotWritable"}),
    ],
    ids=["release", "environment", "interpreter", "space", "permission"],
)
async def test_what_is_not_on_the_node_refuses_with_its_reason(
    special: dict[str, Any], reason: dict[str, str]
) -> None:
    connection = FakeConnection()
    connection.special = special
    assert await failures(make_context(), connection) == reason


@pytest.mark.parametrize(
    ("command", "status"),
    [({"args": []}, "fail"), ({"argv": ["/opt/own"]}, "warn")],
    ids=["trainer", "program"],
)
async def test_an_external_interpreter_that_is_not_there_is_named_before_the_launch(
    command: dict[str, Any], status: str
) -> None:
    connection = FakeConnection()
    connection.special = {"/usr/bin/nopython": {"exists": False}}
    context = make_context(spec={"command": command, "environment": {"python": "/usr/bin/nopython"}})

    report = (await prepare_launch(connection, context)).report  # type: ignore[arg-type]

    found = next(item for item in report.findings if item.name == "interpreter")
    assert (found.status, found.reason) == (status, "InterpreterMissing")
    assert found.message == "/usr/bin/nopython does not exist on the node"
    assert 'correct [environment] python = "/usr/bin/nopython"' in found.remedy


class Prober:
    """Answers `probe` with what an interpreter has, or with the reason why it cannot be run."""

    def __init__(self, answer: dict[str, Any] | ShimError) -> None:
        self.address = SimpleNamespace(id="n1")
        self.answer = answer
        self.probes = 0

    async def request(self, op: str, **_: Any) -> dict[str, Any]:
        assert op == "probe"
        self.probes += 1
        if isinstance(self.answer, ShimError):
            raise self.answer
        return {"capabilities": {"nvml": self.answer}}


async def test_what_an_external_interpreter_lacks_is_installed_in_it_and_then_found() -> None:
    spec = make_context(spec={"capabilities": {"nvml": "required", **ALL_OFF}}).spec
    watch = DriftWatch(FakeClock(), lambda _: None)
    prober = Prober(ShimError("cannot run /opt/py", reason="InterpreterMissing"))

    async def asked() -> dict[str, Any]:
        return (await watch.external_capabilities(prober, "/opt/py", spec))["nvml"]  # type: ignore[arg-type]

    assert '"/opt/py"' in (await asked())["remedy"]
    prober.answer = {"available": False, "reason": "MissingDependency", "message": "no pynvml"}
    assert (await asked())["remedy"] == '/opt/py -m pip install nvidia-ml-py, or nvml = "off"'
    prober.answer = {"available": True}
    assert (await asked())["available"] is True
    assert ((await asked())["remedy"], prober.probes) == ("", 3)


async def test_a_model_path_that_does_not_exist_is_found_before_the_launch() -> None:
    connection = FakeConnection()
    connection.special = {"/models/none": {"exists": False}}
    context = make_context(spec={"command": {"args": ["--target-model", "/models/none"]}})

    assert await failures(context, connection) == {"--target-model": "PathMissing"}


@pytest.mark.parametrize(("need", "refused"), [("required", True), ("wanted", False)])
async def test_a_missing_capability_refuses_only_when_required(need: str, refused: bool) -> None:
    entry = {
        "available": False,
        "reason": "MissingDependency",
        "message": "no pynvml",
        "remedy": "add nvidia-ml-py",
    }
    context = make_context(
        spec={
            "capabilities": {"nvml": need, "wandb": "off", "flash_linear_attention": "off", "kernels": "off"}
        },
        capabilities={"nvml": entry},
    )

    prepared = await prepare_launch(FakeConnection(), context)  # type: ignore[arg-type]

    finding = next(item for item in prepared.report.findings if item.name == "capability nvml")
    assert prepared.report.is_passed is not refused
    assert (finding.reason, finding.remedy) == ("MissingDependency", "add nvidia-ml-py")


async def test_a_capability_that_was_never_probed_is_unknown_and_not_present() -> None:
    context = make_context(
        spec={
            "capabilities": {
                "nvml": "required",
                "wandb": "off",
                "flash_linear_attention": "off",
                "kernels": "off",
            }
        }
    )
    assert await failures(context) == {"capability nvml": "CapabilityUnknown"}


async def test_a_missing_secret_is_named_and_its_value_is_nowhere() -> None:
    context = make_context(spec={"secrets": ["MISSING"]})
    assert await failures(context) == {"secret MISSING": "SecretMissing"}


def test_gpus_are_taken_by_index_with_the_uuid_that_nvml_gave() -> None:
    sample = {"reason": None, "gpus": [{"index": i, "uuid": f"GPU-{i}"} for i in range(2)]}
    context = make_context(spec={"gpus": {"indices": [1]}}, gpu_view=GpuView(sample, 99.0))

    gpus, findings = choose_gpus(context)

    assert gpus == [{"index": 1, "uuid": "GPU-1"}]
    assert findings[0].status == "ok"


def test_a_gpu_that_does_not_exist_refuses_and_says_which_do() -> None:
    context = make_context(
        spec={"gpus": {"indices": [0, 9]}}, node_facts={"gpu_nodes": ["/dev/nvidia0", "/dev/nvidia1"]}
    )

    gpus, findings = choose_gpus(context)

    assert gpus == []
    assert findings[0].reason == "GpuNotFound"
    assert "GPU 9" in findings[0].message
    assert "present: 0, 1" in findings[0].message


def test_a_run_on_cpu_devices_leases_no_gpu() -> None:
    assert choose_gpus(make_context(spec={"command": {"args": ["--target-gpus", "cpu"]}})) == ([], [])


def test_a_resume_choice_of_the_attempt_wins_over_the_flags() -> None:
    spec = parse_run_dict({"name": "r", "node": "n", "command": {"args": ["--resume", "/ckpt"]}})

    kept = render_argv(spec, release=RELEASE, environment_python="/py", resume_from="latest")
    overridden = render_argv(spec, release=RELEASE, environment_python="/py", resume_from="scratch")

    assert kept[-2:] == ["--resume", "/ckpt"]
    assert overridden[-2:] == ["--resume", "scratch"]


def test_secrets_are_in_the_request_and_not_in_its_recorded_parts() -> None:
    context = make_context(spec={"secrets": ["TOKEN"], "env": {"A": "b"}})
    context.attempt.argv = ["/py"]
    plan = LaunchPlan(
        run=context.run,
        attempt=context.attempt,
        spec=context.spec,
        release=RELEASE,
        environment=BUILT,
        secrets={"TOKEN": "canary"},
    )

    request = render_request(plan, FakeConnection())  # type: ignore[arg-type]

    assert request["secrets"] == {"TOKEN": "canary"}
    assert "canary" not in str({key: value for key, value in request.items() if key != "secrets"})
    assert request["env"]["PYTHONPATH"] == "/srv/d/releases/rrrrrrrr"
    assert request["env"]["A"] == "b"
