"""Values that nobody means, in settings, variables and what torchrun leaves: one short line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import MOST_SECONDS, SECTIONS
from trainer.errors import ConfigError
from trainer.flags import CONFIG_LIMIT_BYTES, find_world, resolve
from trainer.machines import exchange_limit_s

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
LONG = "9" * 5000


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return {
        "--target-model": str(tmp_path / "model"),
        "--data-dir": str(tmp_path / "data"),
        "--output-dir": str(tmp_path / "out"),
    }


ABSURD = {
    "digits without end": (f"optim.seed={LONG}", "optim.seed takes a whole number"),
    "more than a float holds": (f"optim.lr={'9' * 400}", "optim.lr takes a number"),
    "more than a float holds, whole": (f"optim.seed={'9' * 400}", "optim.seed must be at most"),
    "hexadecimal without end": (f"optim.seed=0x{'f' * 5000}", "a number of 20000 bits"),
    "a list of them": (f"data.bucket_edges=[0x{'f' * 5000}]", "takes a list of whole numbers"),
    "brackets without end": (f"optim.seed={'[' * 50_000}", "optim.seed takes a whole number"),
    "two lines": ("optim.lr=1e-3\nfoo = 2", "optim.lr takes a number"),
    "a key of length": (f"optim.{'x' * 5000}=1", "unknown key from --set"),
    "a long text without a sign": ("x" * 5000, "--set needs table.key=value"),
    "a superscript": ("devices.target_gpus=²", "--target-gpus takes cpu or CUDA indices"),
    "a device beyond all": (f"devices.drafter_gpus='{LONG}'", "--drafter-gpus takes cpu or CUDA indices"),
    "threads beyond all": ("devices.cpu_threads=9999999999", "devices.cpu_threads must be at most 4096"),
}


@pytest.mark.parametrize(("text", "expected"), ABSURD.values(), ids=ABSURD.keys())
def test_absurd_setting_is_one_short_line(folders, text, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(folders, overrides=[text], environ={})

    assert expected in str(caught.value)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["1\n[optim]", LONG, "[" * 60_000], ids=["lines", "digits", "brackets"])
def test_absurd_variable_is_refused_by_name(folders, value) -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr takes a number: .* \(from DFLASH_LR\)") as caught:
        resolve(folders, environ={"DFLASH_LR": value})

    assert len(str(caught.value)) < 200


def test_variables_that_contradict_each_other_are_refused(folders) -> None:
    switches = {"DFLASH_COMPILE": "1", "DFLASH_NO_COMPILE": "1"}

    with pytest.raises(ConfigError, match=r"DFLASH_COMPILE and DFLASH_NO_COMPILE both set loss\.compile"):
        resolve(folders, environ=switches)

    assert resolve(folders, environ=switches | {"DFLASH_COMPILE": "0"}).config.loss.compile is False


@pytest.mark.parametrize(
    "content", [f"[optim]\nseed = {LONG}\n", f"[optim]\nseed = {'[' * 50_000}\n"], ids=["digits", "brackets"]
)
def test_absurd_toml_names_the_file(folders, tmp_path, content) -> None:
    (tmp_path / "c.toml").write_text(content)

    with pytest.raises(ConfigError, match=r"--config is not valid TOML: .*c\.toml"):
        resolve(folders, toml_path=str(tmp_path / "c.toml"), environ={})


def test_a_settings_file_without_end_is_not_read_to_its_end(folders, tmp_path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("# settings\r\n" + "#" * (CONFIG_LIMIT_BYTES - 24) + "\r\n[optim]\r\n")
    resolve(folders, toml_path=str(file), environ={})

    with pytest.raises(ConfigError, match="--config has more than 1,048,576 bytes: /dev/zero"):
        resolve(folders, toml_path="/dev/zero", environ={})


def test_no_wait_is_longer_than_the_calls_that_wait_can_take(folders) -> None:
    waits = [
        f"{table}.{name}"
        for table, section in SECTIONS.items()
        for name in section.__dataclass_fields__
        if name.endswith("_s")
    ]
    assert "queue.stall_s" in waits

    for key in waits:
        with pytest.raises(ConfigError, match=f"{key} must be at most {MOST_SECONDS}: 1000"):
            resolve(folders, overrides=[f"{key}=1e12"], environ={})

    most = [f"{key}={MOST_SECONDS}" for key in waits]
    held_out = ["eval.held_out_every=1", f"eval.held_out_data='{folders['--data-dir']}'"]
    longest = resolve(folders, overrides=[*most, *held_out], environ={}).config
    assert exchange_limit_s(longest) <= 2 * MOST_SECONDS


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not: RANK=1"),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "1"}, "RANK must be below WORLD_SIZE: 1 of 1"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "RANK must be below WORLD_SIZE: 0 of 0"),
        (TORCHRUN | {"WORLD_SIZE": "²"}, "must all be set for several machines: WORLD_SIZE=²"),
        (TORCHRUN | {"RANK": LONG}, "must all be set for several machines: RANK=999"),
        (TORCHRUN | {"WORLD_SIZE": "1000000000000"}, "must all be set for several machines: WORLD_SIZE=1000"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT must be from 1 to 65535: 0"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT must be from 1 to 65535: 70000"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": LONG}, "torchrun started 999"),
    ],
    ids=[
        "rank without a world",
        "rank outside of a world of one",
        "empty world",
        "superscript",
        "long rank",
        "large world",
        "port nought",
        "port too high",
        "many on a machine",
    ],
)
def test_absurd_world_is_refused_before_anything_waits(variables, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        find_world(variables)

    assert expected in str(caught.value)
    assert "; " in str(caught.value) or ": use" in str(caught.value)
    assert len(str(caught.value)) < 300
