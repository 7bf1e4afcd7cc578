"""How this project began, told in order over a real sshd and the stand-in pct, by the commands of a user.

A restart typed by hand that printed nothing and started nothing; a launch that failed unseen; GPU telemetry
that was off because a package was missing; the package added, and the run that had to see it. Each step
shows what was, or what the product makes of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import TOY_TRAINER, make_lock
from tests.support.origin import OLD_LAUNCH, OLD_RESTART, hand_launched, install_trainer, log_of, run_restart
from tests.support.pct_host import DEFAULT_VMID, PctHost
from tests.support.served import ServedDaemon

pytestmark = pytest.mark.sshd

LOG_DIR = "/workspace"
ENVS = "/srv/dflash/envs"
WITNESS = "/workspace/one-trainer-of-{name}"

RUN_FILE = """
name = "{name}"
node = "ct200"
source = "{source}"
[command]
{command}
[env]
DFLASH_PROFILE_INTERVAL = "60"
[capabilities]
nvml = "{nvml}"
wandb = "off"
flash_linear_attention = "off"
kernels = "off"
[log]
min_free_bytes = 1000
[restart]
policy = "never"
[drift]
debounce_s = 0
min_interval_s = 0
"""
TRAINER_ARGS = [
    *("--output-dir", "/workspace/checkpoints", "--checkpoint-every", "20", "--step-s", "0.05"),
    *("--need", "toylib"),
]

TOLD = (
    ("RunCreated", "created"),
    ("StartRequested", "start requested"),
    ("AttemptNumberSkipped", "a log exists already for attempt 1, 2, 3, 4"),
    ("AttemptStarted", "attempt 5 launching → started"),
    ("AttemptReady", "attempt 5"),
    ("RestartRequested", "restart requested"),
    ("StopStarted", "attempt 5 ready → stopping: restart requested"),
    ("AttemptStopped", "attempt 5 stopping → stopped: ended for the restart that was asked for"),
    ("AttemptStarted", "attempt 6"),
    ("OperationDone", "restart done"),
    ("StopRequested", "stop requested"),
    ("AttemptStopped", "attempt 6 stopping → stopped: ended after the stop that was asked for"),
    ("RunChanged", "generation 2 stored"),
    ("CapabilitiesOKFalse", "MissingDependency: nvml is required but not available"),
    ("LaunchFailed", "attempt 7 preflight → launch_failed: nvml is required but not available"),
    ("RunFailed", "a required check before launch failed"),
    ("OperationFailed", "No module named 'pynvml'"),
    ("RunChanged", "generation 3 stored"),
    ("AttemptReady", "attempt 8"),
    ("DriftFound", "nvidia-ml-py 13.1 is there now: GPU telemetry becomes available with the next start"),
    ("StopStarted", "attempt 8 ready → stopping: nvidia-ml-py 13.1 is there now"),
    ("AttemptStopped", "attempt 8 stopping → stopped: ended to take up a newer release or environment"),
    ("RestartScheduled", "DriftRestart"),
    ("AttemptPlanned", "attempt 9 was planned (drift, resume latest)"),
    ("AttemptStarted", "attempt 9"),
    ("AttemptReady", "attempt 9"),
    ("StopRequested", "end of the story"),
    ("AttemptStopped", "attempt 9"),
)
"""What the history says of the run, in order; there is more between the lines."""


@dataclass
class Story:
    """Who takes part, and the logs that must stay as they are."""

    daemon: ServedDaemon
    host: PctHost
    folder: Path
    finished_logs: dict[str, str] = field(default_factory=dict)

    def run_file(self, name: str, *, nvml: str = "off", argv: str | None = None, args: Any = ()) -> Path:
        """A run of the deployed trainer, or with `argv` of a program that lies in the container."""
        words = [*TRAINER_ARGS, "--witness", WITNESS.format(name=name), *args]
        command = f"args = {words}" if argv is None else f'argv = ["{argv}"]'
        source = str(TOY_TRAINER) if argv is None else "none"
        path = self.folder / f"{name}.toml"
        text = RUN_FILE.format(name=name, source=source, command=command, nvml=nvml)
        if argv is not None:
            text += '[environment]\npython = "/usr/bin/python3"\n[health]\nready_regex = "^training"\n'
        path.write_text(text, "utf-8")
        return path

    def newest(self, run: str) -> dict[str, Any]:
        """The newest attempt."""
        return self.daemon.attempts(run)[-1]

    def condition(self, run: str, kind: str, status: str) -> dict[str, Any]:
        """A condition of the run once it has this status."""

        def read() -> dict[str, Any] | None:
            found = self.daemon.get(f"/v1/runs/{run}")["conditions"]
            return next((c for c in found if (c["type"], c["status"]) == (kind, status)), None)

        return self.daemon.until(read, f"{kind} of {run} to become {status}")

    def log(self, attempt: dict[str, Any]) -> str:
        """An attempt's log as it lies in the container."""
        return self.host.ct_path(attempt["log_path"]).read_text("utf-8")

    def logs(self) -> dict[str, str]:
        """Digests of all logs, by name."""
        found = self.host.ct_path(LOG_DIR).glob("train_*.log")
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}

    def keep_finished(self, *, live: str = "") -> None:
        """From now on every log but that of the live attempt must stay as it is."""
        now = self.logs()
        assert {name: now.get(name) for name in self.finished_logs} == self.finished_logs
        self.finished_logs = {name: digest for name, digest in now.items() if name != Path(live).name}


@pytest.fixture
def story(tmp_path: Path, pct_host: PctHost) -> Iterator[Story]:
    with ServedDaemon(tmp_path / "daemon") as daemon:
        yield Story(daemon, pct_host, tmp_path)


def test_the_story_of_the_restart_that_printed_nothing(story: Story) -> None:
    typed_by_hand_it_kills_its_own_shell(story)
    the_product_restarts_the_same_trainer(story)
    the_product_deploys_a_trainer_and_restarts_it(story)
    a_launch_that_fails_at_once_is_told_with_its_cause(story)
    telemetry_that_is_missing_is_refused_or_seen(story)
    the_lock_gains_it_and_the_run_restarts_by_itself(story)
    nothing_was_lost_and_all_of_it_is_told(story)


def typed_by_hand_it_kills_its_own_shell(story: Story) -> None:
    host = story.host
    install_trainer(host)
    for number in (1, 2, 3):
        host.ct_path(f"{LOG_DIR}/train_slammed{number}.log").write_text(f"of an earlier day: {number}\n")
    run_restart(host, OLD_LAUNCH)
    log = host.ct_path(f"{LOG_DIR}/train_slammed4.log")
    story.daemon.until(lambda: log.exists() and b"training" in log.read_bytes(), "the trainer's log")
    before = hand_launched(host)

    seen = run_restart(host, OLD_RESTART)

    assert len(before) == 1
    assert (seen.returncode, seen.stdout, seen.stderr) == (137, b"", b"")
    # the signal was sent; its end may take a busy machine a moment
    story.daemon.until(lambda: not hand_launched(host), "the old trainer to be gone, and no new one to come")
    assert not log_of(host).exists()
    story.keep_finished()


def the_product_restarts_the_same_trainer(story: Story) -> None:
    """The same /root/run.sh, as a run of the old kind: nothing is deployed."""
    daemon, host = story.daemon, story.host
    daemon.done(
        *("node", "add", "ct200", "--transport", "proxmox", "--host", "127.0.0.1", "--port", host.port),
        *("--user", "root", "--vmid", DEFAULT_VMID, "--root", "/srv/dflash", "--log-dir", LOG_DIR),
        *("--identity", host.identity, "--find-links", "/srv/wheels"),
        *("--fingerprint", host.host_fingerprint),
    )
    daemon.done("node", "check", "ct200")
    daemon.done("run", story.run_file("byhand", argv="/root/run.sh"), "--wait", "ready")

    daemon.done("restart", "byhand")

    first, second = daemon.attempts("byhand")
    assert (first["state"], first["exit_signal"]) == ("stopped", 15)
    assert second["is_live"]
    assert (first["log_path"], second["log_path"]) == tuple(f"{LOG_DIR}/train_byhand{n}.log" for n in (1, 2))
    assert story.log(first) == story.log(second) == "training\n"
    assert len(hand_launched(host)) == 1
    daemon.done("stop", "byhand")
    assert hand_launched(host) == []
    story.keep_finished()


def the_product_deploys_a_trainer_and_restarts_it(story: Story) -> None:
    daemon = story.daemon
    lock = make_lock(story.folder)
    bring_wheels(story)
    daemon.done("node", "deploy", "ct200", "--source", TOY_TRAINER, "--lock", lock)
    daemon.done("run", story.run_file("slammed"), "--wait", "ready")

    daemon.done("restart", "slammed")

    first, second = daemon.attempts("slammed")
    assert first["log_path"] == str(Path(LOG_DIR, log_of(story.host).name)), "the first number that is free"
    assert (first["state"], first["reason"], first["exit_code"]) == ("stopped", "RestartRequested", 9)
    assert second["is_live"]
    assert second["log_path"] == f"{LOG_DIR}/train_slammed6.log"
    saved = first["last_checkpoint"]["step"]
    assert f"resume latest from step {saved}," in story.log(second)
    story.keep_finished(live=second["log_path"])


def a_launch_that_fails_at_once_is_told_with_its_cause(story: Story) -> None:
    daemon = story.daemon
    script = story.host.ct_path("/root/forgotten.sh")
    script.write_text("#!/root/venv/bin/python\n")
    script.chmod(0o755)

    not_executable = daemon.ctl("run", story.run_file("forgotten", argv="/root/forgotten.sh"))
    dies = daemon.ctl("run", story.run_file("nodata", args=["--die-at-once"]))

    assert (not_executable.code, dies.code) == (1, 1)
    assert "No such file or directory" in not_executable.err
    assert story.newest("forgotten")["launch_error"]["errno"] == 2
    assert "exit code 7" in dies.err
    assert "toy trainer cannot start: no such data folder" in dies.err
    assert [item["state"] for item in daemon.attempts("nodata")] == ["failed"]
    assert story.newest("slammed")["is_live"], "the other run goes on"


def telemetry_that_is_missing_is_refused_or_seen(story: Story) -> None:
    daemon = story.daemon
    daemon.done("stop", "slammed")
    story.keep_finished()

    refused = daemon.ctl("run", story.run_file("slammed", nvml="required"))
    attempt = story.newest("slammed")

    assert refused.code == 1
    assert "why: MissingDependency" in refused.err
    assert "do: add nvidia-ml-py (the module is pynvml) to the lock and deploy again" in refused.err
    assert (attempt["state"], attempt["started_at"]) == ("launch_failed", None)
    assert story.logs() == story.finished_logs, "a refused launch has no log"

    daemon.done("run", story.run_file("slammed", nvml="wanted"), "--wait", "ready")
    for kind in ("CapabilitiesOK", "TelemetryOK"):
        condition = story.condition("slammed", kind, "false")
        assert condition["reason"] == "MissingDependency"
        assert "pynvml" in condition["message"]
    assert "nvidia-ml-py" in daemon.done("show", "slammed").out


def the_lock_gains_it_and_the_run_restarts_by_itself(story: Story) -> None:
    daemon = story.daemon
    old = story.newest("slammed")
    old_files = files_of(story.host.ct_path(f"{ENVS}/{old['environment_digest']}"))
    lock = make_lock(story.folder, nvml=True)
    bring_wheels(story)

    daemon.done("node", "deploy", "ct200", "--source", TOY_TRAINER, "--lock", lock)

    new = daemon.until(
        lambda: (a := story.newest("slammed"))["number"] > old["number"] and a["state"] == "ready" and a,
        "the run to restart by itself",
    )
    ended = daemon.get(f"/v1/runs/slammed/attempts/{old['number']}")
    assert (ended["state"], ended["reason"], new["trigger"]) == ("stopped", "DriftRestart", "drift")
    assert new["number"] == old["number"] + 1
    assert new["log_path"] == f"{LOG_DIR}/train_slammed{new['number']}.log"
    assert f"resume latest from step {ended['last_checkpoint']['step']}," in story.log(new)
    environments = {path.name for path in story.host.ct_path(ENVS).iterdir()}
    assert environments == {old["environment_digest"], new["environment_digest"]}
    assert files_of(story.host.ct_path(f"{ENVS}/{old['environment_digest']}")) == old_files
    story.condition("slammed", "TelemetryOK", "true")
    story.condition("slammed", "CapabilitiesOK", "true")
    first = gpu_sample(story)
    daemon.until(lambda: gpu_sample(story)["t"] > first["t"], "the next sample")
    assert [gpu["util_ratio"] for gpu in first["gpus"]] == [0.5, 0.51]
    assert [gpu["power_w"] for gpu in first["gpus"]] == [300.0, 300.001]


def nothing_was_lost_and_all_of_it_is_told(story: Story) -> None:
    daemon = story.daemon
    daemon.done("stop", "slammed", "--reason", "end of the story")
    story.keep_finished()
    witness = story.host.ct_path(WITNESS.format(name="slammed"))
    assert witness.exists()
    assert not witness.with_name(f"{witness.name}.second").exists(), "two trainers lived at once"

    events = daemon.done("events", "--limit", "1000", "-o", "json").json()
    assert all(event["reason"] and event["message"] and event["actor"] for event in events)
    of_the_run = [event for event in events if event["subject"] == "run/slammed"]
    assert_told(of_the_run, TOLD)
    assert [event["reason"] for event in events if event["subject"] == "node/ct200"].count("Deployed") == 2
    by_itself = [event["reason"] for event in of_the_run if event["actor"] == "policy"]
    assert by_itself == ["RunFailed", "StopStarted", "RestartScheduled"]


def assert_told(events: list[dict[str, Any]], expected: tuple[tuple[str, str], ...]) -> None:
    """These reasons, each with its words, stand in the history in this order."""
    rest = iter(events)
    for reason, words in expected:
        assert any(event["reason"] == reason and words in event["message"] for event in rest), (
            f"{reason} ({words}) is missing or out of order: "
            f"{[(event['reason'], event['message']) for event in events]}"
        )


def bring_wheels(story: Story) -> None:
    """What the node's administrator does: put the wheels into its find-links folder."""
    for wheel in (story.folder / "wheels").iterdir():
        story.host.ct_path(f"/srv/wheels/{wheel.name}").write_bytes(wheel.read_bytes())


def gpu_sample(story: Story) -> dict[str, Any]:
    """The newest sample that has GPUs."""

    def read() -> dict[str, Any] | None:
        sample: dict[str, Any] = story.daemon.get("/v1/nodes/ct200/telemetry")
        return sample if sample["status"] == "ok" and sample["gpus"] else None

    return story.daemon.until(read, "a GPU sample")


def files_of(folder: Path) -> dict[str, str]:
    """Every file below a folder with the digest of its content, links as they are."""
    found = {}
    for place, _folders, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
            found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found
