"""Metrics lines, sinks, NVML and the start-up report: watching never harms and never lies."""

import json
import sys
import threading
import types

import pytest

from tests.support.trainer_runs import await_until
from trainer.errors import DependencyError
from trainer.flags import resolve
from trainer.telemetry import capabilities
from trainer.telemetry.capabilities import Capability
from trainer.telemetry.metrics import (
    IntervalReport,
    bucket_entropy,
    build_line,
    empty_train,
    flatten,
    render_line,
)
from trainer.telemetry.reporter import Reporter, Sources, progress_text
from trainer.telemetry.sink import OFFLINE_START_S, JsonlSink, WandbSink


def make_line(**train):
    return build_line(
        t=1.5,
        report=IntervalReport(step=3, tokens=10, train=train),
        queue={"hs": 2, "buckets": [{"upto": 8, "depth": 2}]},
        profile={},
        workers=[{"name": "target-cpu", "tokens": 7}],
        gpu=[{"index": 4, "power_w": 90.0, "reason": None}],
        cuda=[],
        batch={},
        reasons={"cuda": "no device", "gpu": "must not be shown, there is one"},
        telemetry={},
    )


def test_nonfinite_values_become_null_and_are_named():
    line = json.loads(render_line(make_line(loss=float("nan"), lr=float("inf"), eal=2.0)))

    assert line["train"] == {"loss": None, "lr": None, "eal": 2.0}
    assert line["nonfinite"] == ["train.loss", "train.lr"]


def test_finite_line_has_no_flag():
    assert "nonfinite" not in json.loads(render_line(make_line(loss=1.0)))


def test_wandb_keys_are_the_paths_of_the_line():
    flat = flatten(make_line(loss=2.0, eal=None, skipped=0, bad=float("nan")))

    assert flat["train/loss"] == 2.0
    assert flat["train/skipped"] == 0
    assert make_line()["reasons"] == {"cuda": "no device"}
    assert flat["workers/target-cpu/tokens"] == 7
    assert flat["gpu/4/power_w"] == 90.0
    assert flat["queue/buckets/0/depth"] == 2
    assert "train/eal" not in flat
    assert "train/bad" not in flat


def test_bucket_entropy():
    assert bucket_entropy([]) is None
    assert bucket_entropy([0, 0]) is None
    assert bucket_entropy([5, 0]) == 0.0
    assert bucket_entropy([3, 3]) == pytest.approx(0.6931, abs=1e-4)


def test_jsonl_rotates_once_above_its_limit(tmp_path):
    sink = JsonlSink(tmp_path, max_bytes=4096)
    for step in range(200):
        sink.write({"step": step, "pad": "x" * 80})

    sizes = [entry.stat().st_size for entry in tmp_path.iterdir()]
    newest = [json.loads(line)["step"] for line in sink.path.read_text().splitlines()]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.ndjson", "metrics.ndjson.1"]
    assert max(sizes) <= 4096
    assert newest[-1] == 199


def test_unwritable_metrics_are_counted_and_said_once(tmp_path, caplog):
    sink = JsonlSink(tmp_path / "gone", max_bytes=4096)

    sink.write({"step": 1})
    sink.write({"step": 2})

    assert sink.lost == 2
    assert caplog.text.count("metrics cannot be written") == 1


class FakeWandb(types.ModuleType):
    """Records what W&B would get; `fail_modes` raise in init, `hold` blocks log."""

    def __init__(self, *, fail_modes=(), hold=None, busy=0):
        super().__init__("wandb")
        self.busy = busy
        self.fail_modes = fail_modes
        self.hold = hold
        self.modes, self.logged, self.finished = [], [], threading.Event()
        self.is_logging = threading.Event()

    def Settings(self, **values):  # noqa: N802 - the library's own name
        return values

    def init(self, *, mode, settings, **arguments):
        self.modes.append(mode)
        self.arguments, self.settings = arguments, settings
        if mode == "offline" and self.busy:
            self.busy -= 1
            raise RuntimeError(f"run ID {arguments['id']} is in use")
        if mode in self.fail_modes:
            raise ConnectionError("no route\nto host")
        return self

    def teardown(self):
        self.modes.append("teardown")

    def log(self, values, step):
        self.is_logging.set()
        if self.hold is not None:
            self.hold.wait(120)
        self.logged.append((step, values))

    def finish(self):
        self.finished.set()


TROUBLE: list[str] = []
PATHS = {"target-model": "model", "data-dir": "data", "output-dir": "out"}


def make_wandb(tmp_path, mode="online", finish_timeout_s=120.0):
    return WandbSink(
        run_dir=tmp_path,
        mode=mode,
        project="p",
        run_id="abc",
        config={"optim": {"lr": 1}},
        init_timeout_s=15.0,
        finish_timeout_s=finish_timeout_s,
        on_trouble=TROUBLE.append,
        retry_s=0.0,
    )


def test_wandb_gets_every_line_from_its_own_thread(monkeypatch, tmp_path):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = make_wandb(tmp_path)

    sink.write(make_line(loss=2.0))
    sink.close()

    assert fake.finished.is_set()
    assert fake.logged[0][0] == 3
    assert fake.logged[0][1]["train/loss"] == 2.0
    assert fake.settings == {"x_disable_stats": True, "console": "off", "init_timeout": 15.0}
    assert (fake.arguments["id"], fake.arguments["resume"]) == ("abc", "allow")


def test_wandb_that_is_still_starting_at_the_end_claims_no_files(monkeypatch, tmp_path, caplog):
    hold, is_starting = threading.Event(), threading.Event()
    fake = FakeWandb()

    def starts_slowly(**values):
        is_starting.set()
        hold.wait(120)
        return values

    monkeypatch.setattr(fake, "Settings", starts_slowly)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = make_wandb(tmp_path, finish_timeout_s=0.1)
    assert is_starting.wait(120)

    sink.write(make_line(loss=2.0))
    sink.close()
    hold.set()

    assert "it holds nothing of this run" in caplog.text
    assert "local files stay" not in caplog.text


def test_wandb_falls_back_to_offline_loudly(monkeypatch, tmp_path, caplog):
    fake = FakeWandb(fail_modes=("online",))
    monkeypatch.setitem(sys.modules, "wandb", fake)

    sink = make_wandb(tmp_path)
    sink.close()

    assert fake.modes == ["online", "teardown", "offline"]
    assert fake.settings["init_timeout"] == OFFLINE_START_S, "the limit of the service is not this machine's"
    assert sink.state == "offline (online failed)"
    assert TROUBLE[-1] == "offline (online failed)"
    assert "W&B ONLINE FAILED (ConnectionError: no route to host)" in caplog.text


@pytest.mark.parametrize(("busy", "run_id"), [(0, "abc"), (1, "abc-offline")], ids=["free", "held"])
def test_an_id_that_the_failed_start_still_holds_is_waited_for(monkeypatch, tmp_path, busy, run_id):
    fake = FakeWandb(fail_modes=("online",), busy=busy)
    monkeypatch.setitem(sys.modules, "wandb", fake)

    sink = make_wandb(tmp_path)
    sink.write(make_line(loss=2.0))
    sink.close()

    assert sink.state == "offline (online failed)"
    assert fake.arguments["id"] == run_id
    assert len(fake.logged) == 1


def test_wandb_that_cannot_start_is_off_and_swallows_lines(monkeypatch, tmp_path, caplog):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fail_modes=("online", "offline")))

    sink = make_wandb(tmp_path)
    sink.write(make_line(loss=2.0))
    sink.close()

    assert "W&B is off from here on" in caplog.text


def test_slow_wandb_drops_lines_and_ends_in_bounded_time(monkeypatch, tmp_path, caplog):
    hold = threading.Event()
    fake = FakeWandb(hold=hold)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = make_wandb(tmp_path, finish_timeout_s=0.2)
    sink.write(make_line(loss=2.0))
    assert fake.is_logging.wait(120)

    for _ in range(600):
        sink.write(make_line(loss=2.0))
    sink.close()
    hold.set()

    assert sink.lost >= 300
    assert TROUBLE[-1] == "too slow, lines are dropped"
    assert caplog.text.count("W&B is too slow") == 1
    assert "W&B did not finish" in caplog.text


class ListSink:
    counter, lost = "jsonl_lost", 0

    def __init__(self, *, fails=False):
        self.lines, self.fails, self.arrived = [], fails, threading.Event()

    def write(self, line):
        if self.fails:
            raise RuntimeError("broken sink")
        self.lines.append(line)
        self.arrived.set()

    def close(self):
        pass


def make_reporter(sink, *, profile_interval_s=1e9, tick=lambda: None, sources=None):
    return Reporter(
        [sink],
        sources or Sources(),
        profile_interval_s=profile_interval_s,
        tick=tick,
        tick_interval_s=1e9,
    )


def test_reporter_writes_submitted_reports_in_order_and_ticks():
    sink, ticked = ListSink(), threading.Event()
    reporter = make_reporter(sink, tick=ticked.set)
    reporter.start()
    for step in range(5):
        reporter.submit(IntervalReport(step=step, tokens=step, train={"loss": 1.0}))
    reporter.close()

    assert [line["step"] for line in sink.lines] == [0, 1, 2, 3, 4]
    assert ticked.is_set()


def test_tokens_of_before_a_resume_are_not_throughput():
    sink = ListSink()
    reporter = make_reporter(sink, profile_interval_s=0.01, sources=Sources(tokens=lambda: 5_000_000))
    reporter.prime(IntervalReport(step=800, tokens=5_000_000, train={"loss": None}))
    reporter.start()
    await_until(lambda: bool(sink.lines))
    reporter.close()

    assert sink.lines[0]["train"]["tok_s"] == 0.0
    assert sink.lines[0]["tokens"] == 5_000_000


def test_reporter_writes_by_the_clock_with_throughput_of_that_time():
    sink = ListSink()
    reporter = make_reporter(sink, profile_interval_s=0.01, sources=Sources(tokens=lambda: 0))
    reporter.start()
    reporter.submit(IntervalReport(step=4, tokens=9, train={"loss": 1.0, "tok_s": 50.0}))
    await_until(lambda: len(sink.lines) > 1)
    reporter.close()

    assert sink.lines[0]["train"]["tok_s"] == 50.0
    assert sink.lines[1]["train"] == {"loss": 1.0, "tok_s": 0.0}
    assert sink.lines[1]["step"] == 4


def test_profile_lines_come_when_their_interval_has_passed_and_not_before():
    now_s = [100.0]
    sink = ListSink()
    reporter = Reporter(
        [sink],
        Sources(tokens=lambda: 600),
        profile_interval_s=60.0,
        tick=lambda: None,
        tick_interval_s=1e9,
        monotonic=lambda: now_s[0],
    )
    reporter.prime(IntervalReport(step=0, tokens=0, train=empty_train(9)))
    counts = []
    for seconds in (59.0, 1.0, 59.0, 1.0):
        now_s[0] += seconds
        reporter.turn(wait_s=0.001)
        counts.append(len(sink.lines))

    assert counts == [0, 1, 1, 2]
    assert [line["train"]["tok_s"] for line in sink.lines] == [10.0, 0.0]


def test_profile_interval_comes_from_its_variable(tmp_path):
    for name in ("model", "data", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    flags = {f"--{flag}": str(tmp_path / name) for flag, name in PATHS.items()}

    resolved = resolve(flags, environ={"DFLASH_PROFILE_INTERVAL": "7.5"})

    assert resolved.config.telemetry.profile_interval_s == 7.5


def test_what_telemetry_lost_stands_in_every_line():
    sink = ListSink()
    reporter = make_reporter(sink)
    sink.lost, reporter.dropped = 3, 2
    reporter.submit(IntervalReport(step=4, tokens=9, train={}))
    reporter.turn(wait_s=1.0)

    assert sink.lines[0]["telemetry"] == {
        "reports_dropped": 2,
        "lines_failed": 0,
        "jsonl_lost": 3,
        "wandb_dropped": None,
    }


def test_lines_that_an_error_loses_are_counted_in_the_next_line(caplog):
    sink, now_s = ListSink(fails=True), [100.0]
    reporter = Reporter(
        [sink],
        Sources(),
        profile_interval_s=60.0,
        tick=lambda: None,
        tick_interval_s=1e9,
        monotonic=lambda: now_s[0],
    )
    reporter.submit(IntervalReport(step=1, tokens=9, train={}))
    reporter.turn(wait_s=1.0)
    now_s[0] += 61.0
    reporter.turn(wait_s=0.001)
    sink.fails = False
    reporter.submit(IntervalReport(step=2, tokens=9, train={}))
    reporter.turn(wait_s=1.0)

    assert [line["telemetry"]["lines_failed"] for line in sink.lines] == [2]
    assert caplog.text.count("a metrics line was lost") == 2


def test_lines_by_the_clock_before_the_first_step_know_nothing_and_say_so():
    sink = ListSink()
    reporter = make_reporter(sink, profile_interval_s=0.01)
    reporter.prime(IntervalReport(step=0, tokens=0, train=empty_train(9)))
    reporter.start()
    assert sink.arrived.wait(120)
    reporter.close()

    train = sink.lines[0]["train"]
    assert (train["loss"], train["eal"], train["skipped"], train["total_steps"]) == (None, None, 0, 9)


def test_evaluation_line_repeats_the_latest_training_values():
    sink = ListSink()
    reporter = make_reporter(sink)
    reporter.start()
    reporter.submit(IntervalReport(step=4, tokens=9, train={"loss": 1.0}))
    reporter.submit(IntervalReport(step=5, tokens=9, train={}, evaluation={"acceptance_length": 1.5}))
    reporter.close()

    assert (sink.lines[1]["train"], sink.lines[1]["eval"]) == ({"loss": 1.0}, {"acceptance_length": 1.5})


def test_broken_sink_never_reaches_the_worker(caplog):
    reporter = make_reporter(ListSink(fails=True))
    reporter.start()
    reporter.submit(IntervalReport(step=1, tokens=1, train={}))
    reporter.submit(IntervalReport(step=2, tokens=1, train={}))
    reporter.close()

    assert caplog.text.count("a metrics line was lost") == 2


def test_progress_line_is_readable_and_shows_unknown_as_dash():
    text = progress_text(make_line(loss=None, eal=3.14159, tok_s=14480.2, total_steps=9, lr=6e-4, skipped=0))

    assert text == ("step 3/9 epoch - loss - eal 3.142 tok/s 14480 lr 6.00e-04 skipped 0 q_hs=2 q_hsb=[2]")


def test_required_capability_that_is_off_ends_the_start_with_its_remedy():
    entries = [
        Capability(name="nvml", level="required", is_on=False, reason="no module", remedy="install it"),
        Capability(name="wandb", level="wanted", is_on=False, reason="none", remedy=""),
    ]

    with pytest.raises(DependencyError, match=r"nvml \(no module; install it\)"):
        capabilities.require(entries)
    capabilities.require(entries[1:])


def test_report_says_what_is_off_and_why(caplog):
    caplog.set_level("INFO")

    records = capabilities.report(
        [Capability(name="nvml", level="wanted", is_on=False, reason="no driver", remedy="add one")]
    )

    assert "capability nvml: OFF, no driver; remedy: add one" in caplog.text
    assert records[0]["reason"] == "no driver"
