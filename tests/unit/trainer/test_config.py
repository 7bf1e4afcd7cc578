"""The trainer's configuration: closed flag list, precedence, and one line for every mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import SECTIONS, config_hash
from trainer.errors import ConfigError
from trainer.flags import FLAGS, render_reference, resolve

CLOSED_LIST = [
    "--target-model",
    "--data-dir",
    "--output-dir",
    "--target-gpus",
    "--drafter-gpus",
    "--epochs",
    "--lr",
    "--warmup-ratio",
    "--weight-decay",
    "--grad-accum",
    "--grad-clip",
    "--token-budget",
    "--max-seq-len",
    "--max-batch-size",
    "--block-size",
    "--max-anchors",
    "--num-draft-layers",
    "--gamma",
    "--noise-start",
    "--noise-end",
    "--use-soft-labels",
    "--no-wandb-gpu-metrics",
    "--hs-min-ready",
    "--hs-max-depth",
    "--hs-max-bytes",
    "--soft-label-weight",
    "--seed",
    "--resume",
    "--eval-every",
    "--eval-prompts",
    "--checkpoint-every",
    "--keep-checkpoints",
    "--attention",
    "--compile",
    "--no-compile",
    "--wandb-project",
    "--wandb-mode",
]


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data").mkdir()
    return {
        "--target-model": str(tmp_path / "model"),
        "--data-dir": str(tmp_path / "data"),
        "--output-dir": str(tmp_path / "out"),
    }


def test_train_flags_are_exactly_the_closed_list():
    from trainer.__main__ import build_train_parser

    offered = {option for action in build_train_parser()._actions for option in action.option_strings}

    assert sorted(flag.name for flag in FLAGS) == sorted(CLOSED_LIST)
    assert offered == {*CLOSED_LIST, "--config", "--set", "-h", "--help"}


def test_reference_page_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "reference" / "trainer-settings.md"

    command = 'python -c "from trainer.flags import render_reference; print(render_reference(), end=str())"'
    assert page.read_text() == render_reference(), f"write {page} anew: {command}"


def test_every_flag_names_an_existing_key():
    for flag in FLAGS:
        table, key = flag.key.split(".")
        assert key in SECTIONS[table].__dataclass_fields__


SWITCHES = {flag.name: flag for flag in FLAGS if flag.constant is not None}


@pytest.mark.parametrize("flag", SWITCHES.values(), ids=SWITCHES)
def test_switch_on_the_command_line_sets_what_it_stands_for(folders, flag):
    from trainer.__main__ import build_train_parser

    words = [word for pair in folders.items() for word in pair]
    given = vars(build_train_parser().parse_args([*words, flag.name]))
    table, key = flag.key.split(".")
    opposite = json.dumps(not flag.constant if isinstance(flag.constant, bool) else 0.25)

    config = resolve(
        {name: value for name, value in given.items() if name.startswith("--")},
        overrides=[f"{flag.key}={opposite}"],
        environ={},
    ).config

    value = getattr(getattr(config, table), key)
    assert value == flag.constant
    assert type(value) is type(flag.constant)


def test_precedence_is_flag_environment_set_toml_default(folders, tmp_path):
    toml = tmp_path / "c.toml"
    toml.write_text("[optim]\nlr = 1e-5\nepochs = 2\nseed = 3\ngrad_accum = 9\n")

    config = resolve(
        folders | {"--lr": "0.5"},
        toml_path=str(toml),
        overrides=["optim.lr=0.1", "optim.epochs=4", "optim.seed=5"],
        environ={"DFLASH_LR": "0.2", "DFLASH_EPOCHS": "7"},
    ).config

    assert config.optim.lr == 0.5
    assert config.optim.epochs == 7
    assert config.optim.seed == 5
    assert config.optim.grad_accum == 9
    assert config.optim.weight_decay == 0.01


def test_sources_say_where_each_value_came_from(folders):
    resolved = resolve(folders | {"--lr": "0.5"}, overrides=["optim.epochs=4"], environ={"DFLASH_SEED": "3"})

    assert resolved.sources["optim.lr"] == "--lr"
    assert resolved.sources["optim.epochs"] == "--set"
    assert resolved.sources["optim.seed"] == "DFLASH_SEED"
    assert "optim.eps" not in resolved.sources


def test_documented_variables_are_read_and_unknown_ones_are_reported(folders):
    environ = {
        "DFLASH_PROFILE_INTERVAL": "7",
        "DFLASH_SPLIT_FC_LAYERS": "0",
        "DFLASH_EPOCH": "3",
        "DFLASH_RUN_TOKEN": "x",
    }

    resolved = resolve(folders, environ=environ)

    assert resolved.config.telemetry.profile_interval_s == 7.0
    assert resolved.notes == (
        "DFLASH_EPOCH is set but names no setting of the trainer; did you mean DFLASH_EPOCHS",
    )


def test_run_folder_comes_from_the_environment_or_lies_under_the_output(folders, tmp_path):
    own = resolve(folders, environ={})
    given = resolve(folders, environ={"DFLASH_RUN_DIR": str(tmp_path / "attempt")})

    assert (own.run_dir, own.is_own_run_dir) == (tmp_path / "out" / "run", True)
    assert (given.run_dir, given.is_own_run_dir) == (tmp_path / "attempt", False)


def test_switch_variables_work_both_ways(folders):
    assert not resolve(folders, environ={"DFLASH_NO_COMPILE": "1"}).config.loss.compile
    assert resolve(folders, environ={"DFLASH_NO_COMPILE": "0"}).config.loss.compile


def test_hash_follows_what_is_learnt_and_ignores_where_it_is_kept(folders, tmp_path):
    base = resolve(folders, environ={}).config
    moved = resolve(folders | {"--output-dir": str(tmp_path / "other")}, environ={}).config
    changed = resolve(folders | {"--lr": "0.5"}, environ={}).config

    assert config_hash(base) == config_hash(moved)
    assert config_hash(base) != config_hash(changed)


WRONG = {
    "lr zero": (["optim.lr=0"], "optim.lr must be above 0"),
    "lr text": (["optim.lr=fast"], "optim.lr takes a number"),
    "lr nan": (["optim.lr=nan"], "optim.lr must be a finite number"),
    "epochs zero": (["optim.epochs=0"], "optim.epochs must be at least 1"),
    "epochs fraction": (["optim.epochs=1.5"], "optim.epochs takes a whole number"),
    "warmup above one": (["optim.warmup_ratio=1.5"], "optim.warmup_ratio must be at most 1"),
    "negative decay": (["optim.weight_decay=-1"], "optim.weight_decay must be at least 0"),
    "no accumulation": (["optim.grad_accum=0"], "optim.grad_accum must be at least 1"),
    "clip zero": (["optim.grad_clip=0"], "optim.grad_clip must be above 0"),
    "negative seed": (["optim.seed=-1"], "optim.seed must be at least 0"),
    "unknown schedule": (["optim.schedule=step"], "optim.schedule must be one of cosine, constant, wsd"),
    "warm-up and decay overlap": (
        ["optim.schedule=wsd", "optim.warmup_ratio=0.5", "optim.decay_ratio=0.6"],
        "--warmup-ratio and optim.decay_ratio must not exceed 1 together",
    ),
    "block zero": (["drafter.block_size=0"], "drafter.block_size must be at least 2"),
    "no layers": (["drafter.num_layers=0"], "drafter.num_layers must be at least 1"),
    "gamma zero": (["loss.decay_gamma=0"], "loss.decay_gamma must be above 0"),
    "no anchors": (["loss.max_anchors=0"], "loss.max_anchors must be at least 1"),
    "noise rises": (
        ["loss.noise_start=0", "loss.noise_end=0.1"],
        "--noise-end must not exceed --noise-start",
    ),
    "negative noise": (["loss.noise_start=-1"], "loss.noise_start must be at least 0"),
    "unknown attention": (["loss.attention=fast"], "loss.attention must be one of"),
    "flex on cpu": (["loss.attention=flex"], "--attention flex has no backward pass on the CPU"),
    "flex uncompiled": (
        ["loss.attention=flex", "loss.compile=false", "devices.drafter_gpus=0"],
        "--attention flex needs compiled kernels",
    ),
    "soft labels": (["loss.soft_label_weight=1.5"], "loss.soft_label_weight must be at most 1"),
    "weighting": (["loss.weighting=linear"], "loss.weighting must be one of decay, dpace"),
    "dpace alpha": (["loss.dpace_alpha=-0.1"], "loss.dpace_alpha must be at least 0"),
    "split fc text": (["drafter.split_fc_layers=maybe"], "drafter.split_fc_layers takes true or false"),
    "sliding without window": (
        ["drafter.sliding_layers=[0]"],
        "drafter.sliding_layers needs drafter.sliding_window",
    ),
    "sliding behind the end": (
        ["drafter.sliding_layers=[0,5]", "drafter.sliding_window=2048"],
        "drafter.sliding_layers must be different and within 0..4",
    ),
    "min over max": (["queue.hs_min_ready=100"], "--hs-min-ready must not exceed --hs-max-depth"),
    "min ready zero": (["queue.hs_min_ready=0"], "queue.hs_min_ready must be at least 1"),
    "negative bytes": (["queue.hs_max_bytes=-1"], "queue.hs_max_bytes must be at least 0"),
    "budget below length": (["data.token_budget=100"], "--token-budget must hold one sample"),
    "edges descend": (["data.bucket_edges=[4,2]"], "data.bucket_edges must be positive and ascending"),
    "edges too short": (["data.bucket_edges=[4,8]"], "data.bucket_edges must reach --max-seq-len: 8 < 8192"),
    "edges text": (['data.bucket_edges="a"'], "data.bucket_edges takes a list of whole numbers"),
    "device text": (["devices.target_gpus=gpu"], "--target-gpus takes cpu or CUDA indices"),
    "device twice": (['devices.target_gpus="1,1"'], "--target-gpus names 1 twice"),
    "device mix": (['devices.drafter_gpus="cpu,1"'], "--drafter-gpus cannot mix cpu and CUDA"),
    "ordered with two targets": (
        ['devices.target_gpus="cpu,cpu"', "queue.ordered=true"],
        "queue.ordered needs exactly one target worker: --target-gpus names 2",
    ),
    "cache and order": (
        ["target.cache_features_bytes=1000", "queue.ordered=true"],
        "target.cache_features_bytes cannot go with queue.ordered",
    ),
    "eval without prompts": (["eval.every=5"], "--eval-every needs --eval-prompts"),
    "prompts missing": (["eval.prompts=/nonexistent"], "--eval-prompts does not exist"),
    "held-out missing": (["eval.held_out_data=/nonexistent"], "eval.held_out_data does not exist"),
    "held-out turn without data": (["eval.held_out_every=5"], "eval.held_out_every needs eval.held_out_data"),
    "thinking of another kind": (["eval.thinking=maybe"], "eval.thinking must be one of template, on, off"),
    "no gap is an alarm": (["eval.alarm_gap=0"], "eval.alarm_gap must be above 0"),
    "resume missing": (["checkpoint.resume=/nonexistent"], "--resume takes latest, scratch or an existing"),
    "keep zero": (["checkpoint.keep=0"], "checkpoint.keep must be at least 1"),
    "wandb mode": (["wandb.mode=dryrun"], "wandb.mode must be one of"),
    "unknown key": (["optim.learning_rate=1"], "unknown key from --set: optim.learning_rate"),
    "unknown table": (["optimizer.lr=1"], "unknown key from --set: optimizer.lr"),
    "no equals": (["optim.lr"], "--set needs table.key=value"),
    "model without config": (["paths.target_model=/nonexistent"], "--target-model holds no config.json"),
    "data missing": (["paths.data_dir=/nonexistent"], "--data-dir does not exist"),
    "output is a file": (["paths.output_dir=/dev/null"], "--output-dir is not a folder"),
}


@pytest.mark.parametrize(("overrides", "expected"), WRONG.values(), ids=WRONG.keys())
def test_wrong_setting_is_one_line_that_names_it(folders, overrides, expected):
    settings = [f"paths.{name[2:].replace('-', '_')}={value}" for name, value in folders.items()]

    with pytest.raises(ConfigError) as caught:
        resolve({}, overrides=[*settings, *overrides], environ={})

    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_folder_names_the_flag_and_the_key():
    with pytest.raises(ConfigError, match=r"--target-model is missing: .* paths\.target_model"):
        resolve({}, environ={})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[optim\n", "not valid TOML"), ("[optims]\nlr=1\n", "unknown table"), ("lr = 1\n", "unknown table")],
    ids=["broken", "unknown-table", "no-table"],
)
def test_wrong_toml_names_the_file(folders, tmp_path, text, expected):
    path = tmp_path / "c.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=expected) as caught:
        resolve(folders, toml_path=str(path), environ={})

    assert str(path) in str(caught.value)


def test_unreadable_toml_is_a_config_error(folders, tmp_path):
    with pytest.raises(ConfigError, match="--config cannot be read"):
        resolve(folders, toml_path=str(tmp_path / "none.toml"), environ={})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--lr", "0"], "optim.lr must be above 0: 0.0 (from --lr)"),
        (["train", "--learning-rate", "1"], "unrecognized arguments: --learning-rate 1"),
        (["trian"], "unknown command: trian"),
    ],
    ids=["range", "flag", "command"],
)
def test_mistake_ends_with_exit_2_before_torch_is_imported(words, expected):
    code = (
        "import sys; from trainer.__main__ import main\n"
        f"rc = main({words!r}); assert 'torch' not in sys.modules; sys.exit(rc)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 2, done.stderr
    output = done.stdout + done.stderr
    assert expected in output
    assert len(output.splitlines()) == 1
