"""`dflashctl demo`: the whole product on this machine, from an empty folder to a measured speed-up.

Everything it shows is done by commands that a user has too; each is printed before it runs. It starts one
daemon of its own (ended by the process handle it holds), adds this machine as node `local`, deploys the
bundled trainer with an environment that lacks one package, trains a small drafter on a small real model,
and brings the missing package in the middle: the supervisor restarts the run by itself. Needs a clone of the
repository (model, prompts and completions are not in the wheel).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from supervisor.commands.output import duration
from supervisor.domain.errors import ConfigError, SupervisorError

if TYPE_CHECKING:
    from supervisor.client import Client

RUN = "demo"
NODE = "local"
LATE_PACKAGE = "nvidia-ml-py"
"""Left out of the first environment: the package whose silent absence this product exists to prevent."""
POLL_S = 1.0
SHOW_EVERY_S = 15.0
START_LIMIT_S = 60.0
ENDED = frozenset({"succeeded", "failed", "held", "stopped"})
CHANGE_AT = 0.35
"""Share of the steps after which the dependency change is made."""


class DemoError(SupervisorError):
    """A step of the demo failed; the output above says why."""

    reason = "DemoFailed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the demo reads and writes; everything it makes lies in `work` and `cache`."""

    repository: Path
    work: Path
    cache: Path
    started: str = field(default_factory=lambda: time.strftime("%Y%m%d-%H%M%S"))

    @property
    def target(self) -> Path:
        """Folder of the converted target model."""
        return self.cache / "SmolLM2-135M-Instruct"

    @property
    def output(self) -> Path:
        """Checkpoints of this demo; a new folder each time, so that it always begins untrained."""
        return self.work / "checkpoints" / self.started

    @property
    def state(self) -> Path:
        """State folder of the demo's daemon."""
        return self.work / "state"


def register(root: typer.Typer) -> None:
    """Add the command to the program."""
    root.command("demo")(demo)


def demo(
    is_exit: Annotated[bool, typer.Option("--exit", help="End when the run has finished.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 takes a free one.")] = 8420,
    folder: Annotated[Path, typer.Option(help="Where the demo keeps its files.")] = Path(".demo"),
) -> None:
    """Deploy the bundled trainer here, train a real drafter on a real model, and watch it.

    Examples:
      dflashctl demo

      dflashctl demo --exit --port 0
    """
    repository = Path(__file__).resolve().parents[2]
    if not (repository / "demo" / "target.py").exists():
        raise ConfigError(
            f"the demo's model and prompts are not here: {repository / 'demo'}",
            hint="run it from a clone of the repository: make demo",
        )
    places = Places(repository=repository, work=folder.resolve(), cache=repository / ".cache")
    _prepare(places)
    with _daemon(places, port) as (url, client):
        try:
            _deploy_and_run(places, url, client)
        except KeyboardInterrupt:
            _stop_run(client)
            raise
        before, after = _measure(places)
        _tell(speed_line(after))
        if not is_exit:
            _stay(url)
    _tell(f"acceptance length before: {before['acceptance_length']:.2f}")
    _tell(f"acceptance length after: {after['acceptance_length']:.2f}")


def _prepare(places: Places) -> None:
    _chapter("the target: a real language model, frozen")
    _call([sys.executable, str(places.repository / "demo" / "target.py"), str(places.target)])
    _chapter("the data: prompts completed by that target itself")
    completions = places.repository / "demo" / "completions.jsonl"
    data = places.work / "data"
    shutil.rmtree(data, ignore_errors=True)
    words = [
        "prepare",
        "--target-model",
        str(places.target),
        "--input",
        str(completions),
        "--output",
        str(data),
    ]
    _call([_script("dflash-train"), *words])


@contextmanager
def _daemon(places: Places, port: int) -> Iterator[tuple[str, Client]]:
    from supervisor.client import Client  # slow, so only once it is needed

    _chapter("the daemon")
    places.state.mkdir(parents=True, exist_ok=True)
    words = [_script("dflashctl"), "serve", "--state-dir", str(places.state), "--port", str(port)]
    log_path = places.work / "daemon.log"
    _tell(f"$ {' '.join(words)}   # its log: {log_path}")
    with log_path.open("ab") as log:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
    try:
        link = _first_line(process, log_path)
        url = link.partition("/#")[0]
        _tell(f"\n  the page: {link}\n")
        os.environ["DFLASHCTL_URL"] = url
        os.environ["DFLASHCTL_TOKEN_FILE"] = str(places.state / "admin.token")
        with Client(url, (places.state / "admin.token").read_text().strip()) as client:
            yield url, client
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _first_line(process: subprocess.Popen[bytes], log_path: Path) -> str:
    stdout: IO[bytes] | None = process.stdout
    line = stdout.readline().decode() if stdout else ""
    if "listening on " not in line:
        tail = log_path.read_text(errors="replace")[-2000:]
        raise DemoError(f"the daemon did not start: {tail or line}", hint="is the port taken? try --port 0")
    return line.partition("listening on ")[2].split()[0]


def _deploy_and_run(places: Places, url: str, client: Client) -> None:
    _chapter("the node: this machine, and a trainer deployed to it")
    ctl = _script("dflashctl")
    if not _exists(client, f"/v1/nodes/{NODE}"):
        _call(
            [
                ctl,
                "node",
                "add",
                NODE,
                "--transport",
                "local",
                "--root",
                str(places.work / "node"),
                *_torch_source(places),
            ]
        )
    full_lock = places.repository / "requirements" / "trainer.txt"
    first_lock = places.work / "trainer-first.txt"
    first_lock.write_text(without_package(full_lock.read_text(), LATE_PACKAGE))
    _tell(f"the first environment lacks {LATE_PACKAGE} on purpose")
    _call([ctl, "node", "deploy", NODE, "--lock", str(first_lock)])
    _chapter("the run")
    run_file = places.work / "demo.toml"
    run_file.write_text(render_run(places))
    _call([ctl, "run", str(run_file)])
    _follow(client, url, full_lock)


def _follow(client: Client, url: str, full_lock: Path) -> None:
    is_changed = False
    first_attempt: int | None = None
    shown_at, pace = 0.0, Pace()
    while True:
        run = client.get(f"/v1/runs/{RUN}")
        attempt = run.get("attempt") or {}
        first_attempt = attempt.get("number") if first_attempt is None else first_attempt
        status = attempt.get("status") or {}
        step, total = status.get("step"), status.get("total_steps")
        if time.monotonic() - shown_at >= SHOW_EVERY_S:
            shown_at = time.monotonic()
            now_s = time.monotonic()
            _tell(progress_line(run, elapsed_s=pace.elapsed_s(now_s), left_s=pace.left_s(run, now_s)))
        if not is_changed and step and total and step >= CHANGE_AT * total:
            is_changed = True
            _chapter("a dependency changes: the lock gains the missing package")
            _call([_script("dflashctl"), "node", "deploy", NODE, "--lock", str(full_lock)])
            _tell("nothing else is asked: the supervisor plans the restart by itself")
        if run["phase"] in ENDED:
            break
        time.sleep(POLL_S)
    _chapter("what happened")
    _call([_script("dflashctl"), "show", RUN])
    if run["phase"] != "succeeded":
        raise DemoError(f"the run ended as {run['phase']}", hint=f"see its log and events at {url}")
    if is_changed and attempt.get("number") == first_attempt:
        raise DemoError("the dependency change did not restart the run", hint=f"see dflashctl drift {RUN}")


class Pace:
    """How long the run has been watched, and how long it will still train at the pace of this attempt."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._first: tuple[int | None, int, float] | None = None
        """attempt, step and time of the first step that was seen of it"""

    def elapsed_s(self, now_s: float) -> float:
        """Seconds since the first call."""
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        return now_s - self._begun_s

    def left_s(self, run: dict[str, Any], now_s: float) -> float | None:
        """Seconds to the last step; None until the attempt has moved."""
        attempt = run.get("attempt") or {}
        status = attempt.get("status") or {}
        step, total = status.get("step"), status.get("total_steps")
        if not step or not total:
            return None
        if self._first is None or self._first[0] != attempt.get("number"):
            self._first = (attempt.get("number"), step, now_s)
        moved = step - self._first[1]
        return (total - step) * (now_s - self._first[2]) / moved if moved > 0 else None


def progress_line(run: dict[str, Any], *, elapsed_s: float, left_s: float | None) -> str:
    """One line about a live run: times, attempt, phase, step, loss, acceptance, tokens/s, queue."""
    attempt = run.get("attempt") or {}
    status = attempt.get("status") or {}
    metrics = run.get("metrics") or {}
    train, queue = metrics.get("train") or {}, metrics.get("queue") or {}
    buckets = [bucket.get("depth") for bucket in queue.get("buckets") or []]
    left = f"about {duration(left_s)} left" if left_s is not None else "time left unknown"
    return (
        f"  {duration(elapsed_s):>7}, {left:<19} "
        f"attempt {attempt.get('number')} {status.get('phase') or run['phase']:<13} "
        f"step {_shown(status.get('step'))}/{_shown(status.get('total_steps'))}  "
        f"loss {_shown(train.get('loss'), 3)}  expected acceptance length {_shown(train.get('eal'), 2)}  "
        f"{_shown(train.get('tok_s'), 0)} tok/s  q_hs={_shown(queue.get('hs'))} q_hsb={buckets}"
    )


def _shown(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return "–"
    return str(value) if digits is None else f"{value:.{digits}f}"


def _measure(places: Places) -> tuple[dict[str, Any], dict[str, Any]]:
    _chapter("real speculative decoding on held-out prompts, before and after training")
    exports = sorted(places.output.glob("*/export/step-*"))
    if not exports:
        raise DemoError(f"no exported drafter under {places.output}")
    untrained = places.work / "untrained"
    config = str(places.repository / "demo" / "train.toml")
    words = [sys.executable, str(places.repository / "demo" / "untrained.py"), "--config", config]
    _call([*words, "--target-model", str(places.target), "--output", str(untrained)])
    # as trained, and one smaller, which costs less to verify
    size = int(tomllib.loads(Path(config).read_text())["drafter"]["block_size"])
    # an untrained drafter's speed is of no interest, and measuring it would take as long again
    before = _evaluate(places, untrained, "before", "--no-speed")
    return before, _evaluate(places, exports[-1], "after", "--block-size", f"{size},{size - 1}")


def _evaluate(places: Places, drafter: Path, name: str, *flags: str) -> dict[str, Any]:
    report = places.work / f"eval-{name}.json"
    prompts = places.repository / "demo" / "prompts" / "held_out.jsonl"
    words = [
        "eval",
        "--target-model",
        str(places.target),
        "--drafter",
        str(drafter),
        "--prompts",
        str(prompts),
    ]
    words += ["--max-new-tokens", "48", "--dtype", "fast", "--json", str(report), *flags]
    _call([_script("dflash-train"), *words])
    record: dict[str, Any] = json.loads(report.read_text())
    return record


def speed_line(record: dict[str, Any]) -> str:
    """One line about the block size with which decoding is fastest, whichever way that comes out."""
    speeds = {block["block_size"]: block["speed"] for block in record["block_sizes"]}
    measured = {size: speed for size, speed in speeds.items() if speed and speed["speedup"]}
    if not measured:
        return "decoding: no speed was measured"
    size, best = max(measured.items(), key=lambda item: float(item[1]["speedup"]))
    return (
        f"decoding: {best['plain_ms_per_token']:.1f} ms a token without the drafter, "
        f"{best['speculative_ms_per_token']:.1f} with it in blocks of {size}: {best['speedup']:.2f} x as fast"
    )


def _stay(url: str) -> None:
    _tell(f"\nthe page stays at {url} until Ctrl-C")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        _tell("")


def render_run(places: Places) -> str:
    """The run file of the demo; JSON strings are valid TOML strings."""
    args = ["--target-model", str(places.target), "--data-dir", str(places.work / "data")]
    args += ["--output-dir", str(places.output), "--config", str(places.repository / "demo" / "train.toml")]
    args += ["--target-gpus", "cpu", "--drafter-gpus", "cpu"]
    return f"""# written by `dflashctl demo`
name = "{RUN}"
node = "{NODE}"
source = "bundled"

[command]
args = {json.dumps(args)}

[env]
DFLASH_PROFILE_INTERVAL = "10"
HF_HUB_OFFLINE = "1"

[capabilities]
nvml = "wanted"
wandb = "off"
flash_linear_attention = "off"
kernels = "off"

[drift]
release = "at_next_checkpoint"
capability = "at_next_checkpoint"
critical = "at_next_checkpoint"
minor = "at_next_checkpoint"
debounce_s = 2

[log]
min_free_bytes = 500_000_000
"""


def without_package(lock: str, package: str) -> str:
    """A hashed lock without one package; its hashes go with it.

    Raises:
        DemoError: the lock does not hold that package.
    """
    kept: list[str] = []
    is_dropping = False
    for line in lock.splitlines(keepends=True):
        if not line.startswith((" ", "\t")):
            is_dropping = line.startswith(f"{package}==")
        if not is_dropping:
            kept.append(line)
    text = "".join(kept)
    if text == lock:
        raise DemoError(f"the lock does not hold {package}")
    return text


def _torch_source(places: Places) -> list[str]:
    """Where the node finds torch: TORCH_INDEX_URL, pip's folder, or wheels that pip fetches now."""
    if index := os.environ.get("TORCH_INDEX_URL"):
        return ["--torch-index-url", index]
    pip = [sys.executable, "-m", "pip"]
    asked = [*pip, "config", "get", "global.find-links"]
    folder = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if folder and any(Path(folder).glob("torch-*.whl")):
        return ["--find-links", folder]
    requirement = (places.repository / "requirements" / "torch.txt").read_text().strip()
    wheels = places.cache / "wheels"
    if not any(wheels.glob("torch-*.whl")):
        _call(
            [*pip, "download", "--quiet", "--disable-pip-version-check", "--dest", str(wheels), requirement]
        )
    return ["--find-links", str(wheels)]


def _stop_run(client: Client) -> None:
    # A run outlives its daemon on purpose; after a demo nobody would look for it.
    if _exists(client, f"/v1/runs/{RUN}"):
        _chapter("interrupted: stopping the run with a checkpoint")
        _call([_script("dflashctl"), "stop", RUN])


def _exists(client: Client, path: str) -> bool:
    from supervisor.client import ApiError

    try:
        client.get(path)
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    return True


def _script(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _call(words: Sequence[str]) -> None:
    _tell(f"$ {' '.join([Path(words[0]).name, *words[1:]])}")
    result = subprocess.run(words, check=False)
    if result.returncode != 0:
        raise DemoError(f"{Path(words[0]).name} {' '.join(words[1:3])} ended with {result.returncode}")


def _chapter(title: str) -> None:
    _tell(f"\n── {title}")


def _tell(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()
