"""T8: each optional package hidden in turn: what is off and why is said, and `required` refuses."""

import json

import pytest

from tests.support.tiny import tiny_samples, tiny_target, write_tiny_corpus
from tests.support.trainer_forks import trainer_forks
from tests.support.trainer_runs import read_status, settings_for

HIDE = """
import sys
from importlib.machinery import PathFinder

real = PathFinder.find_spec

def hide(name, path=None, target=None):
    return None if name.split(".")[0] == {package!r} else real(name, path, target)

for name in [name for name in sys.modules if name.split(".")[0] == {package!r}]:
    del sys.modules[name]
PathFinder.find_spec = staticmethod(hide)
"""

NO_MODEL = """
import trainer.data.pretrained, trainer.target.loader

def fail(*args, **options):
    raise AssertionError("a model was loaded")

trainer.data.pretrained.load_causal_lm = trainer.target.loader.load_causal_lm = fail
"""

OPTIONAL = {
    "pynvml": ("nvml", {}, {"telemetry__nvml": "required"}),
    "wandb": (
        "wandb",
        {"wandb__mode": "offline"},
        {"wandb__mode": "offline", "telemetry__wandb": "required"},
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


@pytest.fixture(scope="module")
def forks():
    with trainer_forks() as server:
        yield server


def capability(run_dir, name):
    entries = json.loads((run_dir / "startup.json").read_text())["capabilities"]
    return next(entry for entry in entries if entry["name"] == name)


def train(forks, tiny, tmp_path, package, plant="", **changes):
    settings = settings_for(*tiny, tmp_path / "out", optim__max_steps=1, **changes)
    process = forks.start(settings, tmp_path / "log", plant=HIDE.format(package=package) + plant)
    return process.wait(120), (tmp_path / "log").read_text()


@pytest.mark.parametrize(("package", "case"), OPTIONAL.items(), ids=OPTIONAL.keys())
def test_t8_hidden_package_is_reported_with_reason_and_remedy_and_the_run_goes_on(
    forks, tiny, tmp_path, package, case
):
    name, changes, _ = case

    code, log = train(forks, tiny, tmp_path, package, **changes)

    assert code == 0, log
    entry = capability(tmp_path / "out" / "run", name)
    assert not entry["is_on"]
    assert f"module {package} cannot be imported" in entry["reason"]
    assert "install" in entry["remedy"]
    assert f"capability {name}: OFF" in log
    assert package in read_status(tmp_path / "out" / "run")["degraded"][name]


@pytest.mark.parametrize(("package", "case"), OPTIONAL.items(), ids=OPTIONAL.keys())
def test_t8_required_package_that_is_hidden_ends_the_start_with_exit_8(forks, tiny, tmp_path, package, case):
    name, _, changes = case

    code, log = train(forks, tiny, tmp_path, package, NO_MODEL, **changes)

    assert code == 8, log
    last = log.splitlines()[-1]
    assert f"DependencyError: required but not available: {name}" in last
    assert package in last
    assert "install" in last


def test_t8_without_pyarrow_jsonl_still_trains_and_the_report_says_what_is_off(forks, tiny, tmp_path):
    code, log = train(forks, tiny, tmp_path, "pyarrow")

    assert code == 0, log
    entry = capability(tmp_path / "out" / "run", "parquet")
    assert (entry["is_on"], entry["level"]) == (False, "off")
    assert "module pyarrow cannot be imported" in entry["reason"]


def test_t8_without_pyarrow_parquet_is_refused_before_a_model_is_loaded(forks, tiny, tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "table").mkdir()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(tiny_samples()), tmp_path / "table" / "train.parquet"
    )

    code, log = train(forks, (tiny[0], tmp_path / "table"), tmp_path, "pyarrow", NO_MODEL)

    assert code == 8, log
    assert "train.parquet cannot be read" in log.splitlines()[-1]
    assert "dflash-supervisor[data]" in log.splitlines()[-1]


def test_t8_without_matplotlib_a_figure_is_refused_before_a_model_is_loaded(forks, tiny, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "say it"}\n')
    words = ["eval", "--target-model", str(tiny[0]), "--drafter", str(tmp_path / "drafter")]
    words += ["--prompts", str(tmp_path / "prompts.jsonl"), "--plot", str(tmp_path / "figure.png")]

    process = forks.start_words(words, tmp_path / "log", plant=HIDE.format(package="matplotlib") + NO_MODEL)

    assert process.wait(120) == 8, (tmp_path / "log").read_text()
    assert "--plot needs matplotlib, which is missing: pip install" in (tmp_path / "log").read_text()
