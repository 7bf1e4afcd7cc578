"""Wrong configurations: one line with value and way out, exit 2, no model loaded, nothing left behind."""

import json
import logging
import signal
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer.preflight import TargetShape, checkpoint_bytes, read_target_shape

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "vocab_size": 97,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}


@dataclass(frozen=True)
class Wrong:
    """One wrong call: words after the good ones, variables, a TOML file, changes on disk, what is said."""

    says: tuple[str, ...]
    words: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    toml: str = ""
    model: dict[str, object] = field(default_factory=dict)
    prepare: str = ""


def setting(*pairs: str) -> tuple[str, ...]:
    return tuple(word for pair in pairs for word in ("--set", pair))


SMALL = setting("drafter.num_layers=2")

WRONG = {
    # flags
    "unknown flag": Wrong(("unrecognized arguments: --learning-rate", "--help"), ("--learning-rate", "1")),
    "flag without value": Wrong(("--lr", "expected one argument"), ("--lr",)),
    "flag twice": Wrong(("--lr is given twice: 1e-3 and 1e-4", "keep one"), ("--lr", "1e-3", "--lr", "1e-4")),
    "switches that contradict": Wrong(
        ("--compile and --no-compile both set loss.compile", "keep one"), ("--compile", "--no-compile")
    ),
    "flags that contradict": Wrong(
        ("--use-soft-labels and --soft-label-weight both set", "keep one"),
        ("--use-soft-labels", "--soft-label-weight", "0.3"),
    ),
    "text for a number": Wrong(("optim.lr takes a number: 'fast'", "from --lr"), ("--lr", "fast")),
    "not a number": Wrong(("optim.lr must be a finite number: nan", "from --lr"), ("--lr", "nan")),
    "infinite": Wrong(("optim.grad_clip must be a finite number: inf",), ("--grad-clip", "inf")),
    "negative": Wrong(("optim.weight_decay must be at least 0: -1",), ("--weight-decay=-1",)),
    "fraction of an epoch": Wrong(("optim.epochs takes a whole number: 1.5",), ("--epochs", "1.5")),
    "share above one": Wrong(
        ("loss.soft_label_weight must be at most 1: 2.0",), ("--soft-label-weight", "2")
    ),
    "block of one": Wrong(("drafter.block_size must be at least 2: 1",), ("--block-size", "1")),
    # variables, --set, TOML
    "variable": Wrong(
        ("optim.seed must be at least 0: -3", "from DFLASH_SEED"), environ={"DFLASH_SEED": "-3"}
    ),
    "key that is nearly one": Wrong(
        ("unknown key from --set: optim.learning_rat",), setting("optim.learning_rat=1")
    ),
    "key with a near miss": Wrong(
        ("unknown key from --set: queue.hs_max_dept", "did you mean queue.hs_max_depth"),
        setting("queue.hs_max_dept=1"),
    ),
    "set without value": Wrong(("--set needs table.key=value: 'optim.lr'",), setting("optim.lr")),
    "broken TOML": Wrong(("--config is not valid TOML",), toml="[optim\n"),
    "same key twice": Wrong(("--config is not valid TOML", "line 3"), toml="[optim]\nlr=1.0\nlr=2.0\n"),
    "unknown table": Wrong(("unknown table", "[optims]", "did you mean optim"), toml="[optims]\nlr=1\n"),
    "unknown key in TOML": Wrong(
        ("unknown key from", "loss.max_anchor;", "did you mean loss.max_anchors"),
        toml="[loss]\nmax_anchor=5\n",
    ),
    "unreadable TOML": Wrong(
        ("--config cannot be read", "No such file"), ("--config", "/nonexistent/c.toml")
    ),
    # combinations
    "min ready above depth": Wrong(
        ("--hs-min-ready must not exceed --hs-max-depth: 9 > 4",),
        ("--hs-min-ready", "9", "--hs-max-depth", "4"),
    ),
    "ordered with two targets": Wrong(
        (
            "queue.ordered needs exactly one target worker",
            "--target-gpus names 2",
            "set queue.ordered to false",
        ),
        ("--target-gpus", "0,1", *setting("queue.ordered=true")),
    ),
    "device twice": Wrong(("--target-gpus names 1 twice: '1,1'",), ("--target-gpus", "1,1")),
    "device text": Wrong(("--drafter-gpus takes cpu or CUDA indices", "'gpu0'"), ("--drafter-gpus", "gpu0")),
    "edges unsorted": Wrong(
        ("data.bucket_edges must be positive and ascending: [64, 32]",), setting("data.bucket_edges=[64,32]")
    ),
    "edges too short": Wrong(
        ("data.bucket_edges must reach --max-seq-len: 64 < 128", "add an edge"),
        ("--max-seq-len", "128", *setting("data.bucket_edges=[32,64]")),
    ),
    "budget below a sample": Wrong(
        ("--token-budget must hold one sample of --max-seq-len: 100 < 8192",), ("--token-budget", "100")
    ),
    "noise that rises": Wrong(
        ("--noise-end must not exceed --noise-start: 0.2 > 0.1",),
        ("--noise-start", "0.1", "--noise-end", "0.2"),
    ),
    "flex on the CPU": Wrong(("--attention flex", "take sdpa"), ("--attention", "flex")),
    "evaluation without prompts": Wrong(("--eval-every needs --eval-prompts",), ("--eval-every", "5")),
    "prompts missing": Wrong(
        ("--eval-prompts does not exist: /nonexistent",), ("--eval-prompts", "/nonexistent")
    ),
    "W&B online without a key": Wrong(
        ("--wandb-mode online needs a key", "WANDB_API_KEY", "offline"), ("--wandb-mode", "online")
    ),
    # what lies on disk
    "target without config": Wrong(
        ("--target-model holds no config.json", "name a model folder"), prepare="no model config"
    ),
    "target config is no JSON": Wrong(
        ("config.json that cannot be read", "name the folder"), prepare="broken model config"
    ),
    "target is no language model": Wrong(("config.json without model_type",), model={"model_type": None}),
    "target without weights": Wrong(
        ("--target-model holds no weights", "name a complete model folder"), prepare="no weights"
    ),
    "evaluation without tokenizer": Wrong(
        ("--eval-every needs the target's tokenizer", "set --eval-every 0"),
        ("--eval-every", "5", "--eval-prompts", "PROMPTS"),
        prepare="no tokenizer",
    ),
    "prompts empty": Wrong(
        ("--eval-prompts cannot be used",),
        ("--eval-every", "5", "--eval-prompts", "PROMPTS"),
        prepare="empty prompts",
    ),
    "layer beyond the target": Wrong(
        ("names layer 12, a target of 8 layers can hand over 0 to 6",),
        setting("target.target_layer_ids=[1,12]"),
    ),
    "last layer": Wrong(("names layer 7",), setting("target.target_layer_ids=[1,7]")),
    "layer twice": Wrong(
        ("target.target_layer_ids names a layer twice: [1, 1]",), setting("target.target_layer_ids=[1,1]")
    ),
    "more draft layers than the target can serve": Wrong(
        ("--num-draft-layers", "which has 8: 7", "target.target_layer_ids"), ("--num-draft-layers", "7")
    ),
    "mask token outside": Wrong(
        ("target.mask_token_id is no row of the target's embedding: 97", "0 to 96"),
        (*SMALL, *setting("target.mask_token_id=97")),
    ),
    "heads not divisible": Wrong(
        ("must be a multiple of drafter.num_key_value_heads: 4 and 3",),
        (*SMALL, *setting("drafter.num_key_value_heads=3")),
    ),
    "odd head": Wrong(("drafter.head_dim must be even", "15"), (*SMALL, *setting("drafter.head_dim=15"))),
    "data folder missing": Wrong(
        ("--data-dir does not exist", "dflash-train prepare"), prepare="no data dir"
    ),
    "data folder empty": Wrong(
        ("--data-dir holds no .parquet", "dflash-train prepare"), SMALL, prepare="no data"
    ),
    "output is a file": Wrong(("--output-dir is not a folder",), prepare="output is a file"),
    "output below a file": Wrong(
        ("--output-dir cannot be made", "is a file", "name another"), (*SMALL, "--output-dir", "BELOW_A_FILE")
    ),
    "no room for a checkpoint": Wrong(
        ("--output-dir has no room for one checkpoint", "GiB needed", "take a smaller drafter"),
        (*SMALL, *setting("drafter.intermediate_size=10000000000000")),
    ),
    "queue smaller than a sample": Wrong(
        ("--hs-max-bytes must hold the hidden states of one sample", "1000 < 4194304", "raise the first"),
        (*SMALL, "--hs-max-bytes", "1000"),
    ),
    "resume from nowhere": Wrong(
        ("--resume takes latest, scratch or an existing state/step-* folder: /nonexistent",),
        ("--resume", "/nonexistent"),
    ),
    "resume from a folder that is none": Wrong(
        ("--resume names no checkpoint", "name a state/step-* folder"), (*SMALL, "--resume", "DATA")
    ),
}


@pytest.fixture
def process_state():
    """The command line takes log and signals over; here that must end with the test."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    for number, handler in signals.items():
        signal.signal(number, handler)


@pytest.fixture
def stage(tmp_path, monkeypatch, process_state):
    """A target, data and prompts that would do; no variable of this machine counts."""
    for name in ("WANDB_API_KEY", "DFLASH_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"never read")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "say it"}\n')
    return tmp_path


def spoil(stage: Path, what: str) -> None:
    """Change what lies on disk."""
    model = stage / "model"
    actions = {
        "": lambda: None,
        "no model config": lambda: (model / "config.json").unlink(),
        "broken model config": lambda: (model / "config.json").write_text("{"),
        "no weights": lambda: (model / "model.safetensors").unlink(),
        "no tokenizer": lambda: (model / "tokenizer.json").unlink(),
        "empty prompts": lambda: (stage / "prompts.jsonl").write_text("\n"),
        "no data dir": lambda: (stage / "data").rename(stage / "elsewhere"),
        "no data": lambda: (stage / "data" / "train.jsonl").rename(stage / "data" / "train.csv"),
        "output is a file": lambda: (stage / "out").write_text("mine"),
    }
    actions[what]()


def words_for(stage: Path, *extra: str) -> list[str]:
    """A call that would do, and what a case adds; names in capitals stand for places of the stage."""
    places = {
        "DATA": str(stage / "data"),
        "PROMPTS": str(stage / "prompts.jsonl"),
        "BELOW_A_FILE": str(stage / "prompts.jsonl" / "out"),
    }
    words = ["--target-model", str(stage / "model"), "--data-dir", str(stage / "data")]
    if "--output-dir" not in extra:
        words += ["--output-dir", str(stage / "out")]
    return ["train", *words, *(places.get(word, word) for word in extra)]


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def reached(monkeypatch):
    """Stands in for the module that brings torch and loads models; notes whether it was reached."""
    calls = []

    class Trainer:
        def __init__(self, resolved):
            calls.append(resolved)

        def train(self):
            return 0

    module = types.ModuleType("trainer.train")
    module.Trainer = Trainer
    monkeypatch.setitem(sys.modules, "trainer.train", module)
    return calls


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_wrong_configuration_is_one_line_and_exit_2_before_any_model(
    stage, reached, monkeypatch, capsys, wrong
):
    if wrong.model:
        (stage / "model" / "config.json").write_text(json.dumps(MODEL | wrong.model))
    spoil(stage, wrong.prepare)
    for name, value in wrong.environ.items():
        monkeypatch.setenv(name, value)
    extra = wrong.words
    if wrong.toml:
        (stage / "c.toml").write_text(wrong.toml)
        extra = (*extra, "--config", str(stage / "c.toml"))
    before = tree(stage)

    code = main(words_for(stage, *extra))

    lines = [line for text in capsys.readouterr() for line in text.splitlines()]
    assert code == 2, lines
    assert len(lines) == 1, lines
    for part in wrong.says:
        assert part in lines[0]
    assert "ConfigError: " in lines[0]
    assert reached == []
    assert tree(stage) == before


def test_there_are_more_than_thirty_wrong_configurations():
    assert len(WRONG) >= 50


def test_the_same_stage_without_a_mistake_reaches_the_trainer(stage, reached, capsys):
    extra = ("--eval-every", "5", "--eval-prompts", "PROMPTS", "--hs-max-bytes", "100000000")

    assert main(words_for(stage, *SMALL, *extra)) == 0

    assert len(reached) == 1
    assert reached[0].config.eval.every == 5


def test_little_room_is_said_and_accepted(stage, reached, capsys, monkeypatch):
    monkeypatch.setattr(
        "trainer.preflight.shutil.disk_usage", lambda _path: types.SimpleNamespace(free=3_000_000)
    )

    assert main(words_for(stage, *SMALL)) == 0

    assert "lower --keep-checkpoints or free space" in capsys.readouterr().out
    assert len(reached) == 1


def test_size_of_a_checkpoint_follows_the_published_parameter_count():
    """5 layers at the shape of an 8B target of 4096 with 12288 wide MLP: names and shapes give it."""
    shape = TargetShape(
        layers=36, hidden=4096, vocab=151_936, heads=32, key_value_heads=8, head_dim=128, mlp=12_288
    )
    config = types.SimpleNamespace(
        drafter=types.SimpleNamespace(
            num_layers=5, intermediate_size=0, head_dim=0, num_attention_heads=0, num_key_value_heads=0
        ),
        target=types.SimpleNamespace(target_layer_ids=()),
    )
    layer = 4096 * (32 + 2 * 8) * 128 + 4096 * 4096 + 3 * 4096 * 12_288 + 2 * 4096 + 2 * 128

    assert checkpoint_bytes(config, shape) == 14 * (5 * layer + 5 * 4096 * 4096 + 2 * 4096)


def test_shape_of_a_multimodal_target_is_that_of_its_text_part(tmp_path):
    raw = {"model_type": "some_vl", "text_config": MODEL | {"num_hidden_layers": 40}}
    (tmp_path / "config.json").write_text(json.dumps(raw))

    assert read_target_shape(tmp_path).layers == 40


def test_gpu_that_does_not_exist_is_refused_before_a_model_is_loaded(stage, monkeypatch, capsys):
    from trainer import assembly

    monkeypatch.setattr(assembly, "load_target", lambda *_a, **_k: pytest.fail("a model was loaded"))

    code = main(words_for(stage, *SMALL, "--target-gpus", "63"))

    assert code == 2
    assert "--target-gpus names 63, but torch sees" in capsys.readouterr().out
    assert not (stage / "out").exists()


def test_refusal_by_what_lies_on_disk_needs_no_torch(stage):
    words = words_for(stage, *setting("target.target_layer_ids=[1,12]"))
    code = (
        "import sys; from trainer.__main__ import main\n"
        f"rc = main({words!r}); assert 'torch' not in sys.modules; sys.exit(rc)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 2, done.stderr
    assert "names layer 12" in done.stdout
