"""The run file: what it accepts, and errors that name file, line, field, value and the nearest key."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.domain.errors import ConfigError
from supervisor.domain.spec import parse_run_dict, parse_run_file, render_spec, spec_digest
from supervisor.domain.toml_lines import line_of, locate_keys

FULL = """
name = "slammed"
node = "ct200"
secrets = ["WANDB_API_KEY"]
source = "bundled"
[environment]
lock = "bundled"
[stage]
copy = [{ from = "/models/Qwen3.6-27B", to = "/dev/shm/Qwen3.6-27B" }]
[gpus]
indices = []
share = false
[command]
args = ["--target-model", "/dev/shm/Qwen3.6-27B", "--target-gpus", "0,1,2,3,4", "--drafter-gpus", "5,6,7"]
[env]
DFLASH_PROFILE_INTERVAL = "60"
DFLASH_SPLIT_FC_LAYERS = "0"
[capabilities]
nvml = "required"
wandb = "wanted"
flash_linear_attention = "wanted"
kernels = "wanted"
gpu_direct = "off"
[log]
pattern = "{log_dir}/train_{name}{attempt}.log"
warn_bytes = 10_000_000_000
min_free_bytes = 5_000_000_000
action = "notify"
[resume]
from = "latest"
[restart]
policy = "on-failure"
rules = [{ exit_codes = [7], action = "hold" }]
success_exit_codes = [0]
base_s = 10
factor = 2
cap_s = 300
healthy_s = 600
burst = 5
interval_s = 3600
max_restarts = 20
no_progress = 3
uncounted_per_day = 10
[drift]
release = "notify"
capability = "at_next_checkpoint"
critical = "notify"
minor = "notify"
debounce_s = 60
min_interval_s = 21600
auto_revert = true
[health]
ready_timeout_s = 1800
ready_regex = ""
progress_regex = ""
progress = { factor = 5, floor_s = 60, action = "log_only" }
quality = { nan = "log_only", throughput_drop = 0.3, action = "log_only", period_s = 10 }
[stop]
signal = "SIGTERM"
grace_s = 120
extend_max_s = 900
term_s = 30
kill_s = 10
verify_s = 60
gpu_wait_s = 50
gpu_free_bytes = 536_870_912
orphan_after_s = 0
"""

SHORT = """name = "slammed"
node = "local"
{top}
[command]
args = ["--target-gpus", "cpu"]
{more}
"""


def short(top: str = "", more: str = "") -> str:
    return SHORT.format(top=top, more=more)


def refusal(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_run_file(text, "run.toml")
    return caught.value


def test_a_full_file_is_read_and_its_defaults_are_those_of_a_short_one() -> None:
    full = parse_run_file(FULL, "run.toml")
    least = parse_run_file(short(), "run.toml")
    assert full.gpu_indices() == (0, 1, 2, 3, 4, 5, 6, 7)
    assert least.gpu_indices() == ()
    assert full.restart.model_copy(update={"rules": ()}) == least.restart
    assert (full.drift, full.stop, full.log, full.resume) == (
        least.drift,
        least.stop,
        least.log,
        least.resume,
    )
    assert full.stage.copy_[0].source == "/models/Qwen3.6-27B"
    assert full.env == {"DFLASH_PROFILE_INTERVAL": "60", "DFLASH_SPLIT_FC_LAYERS": "0"}


def test_every_key_of_a_full_file_is_a_key_of_the_rendered_spec() -> None:
    rendered = render_spec(parse_run_file(FULL, "run.toml"))

    def covered(given_: Any, stored: Any, path: str) -> None:
        for key, value in given_.items():
            assert key in stored, f"{path}.{key}"
            if isinstance(value, dict):
                covered(value, stored[key], f"{path}.{key}")

    covered(tomllib.loads(FULL), rendered, "")


def test_rendering_and_parsing_are_a_pair() -> None:
    spec = parse_run_file(FULL, "run.toml")
    assert parse_run_dict(render_spec(spec)) == spec
    assert spec_digest(parse_run_dict(render_spec(spec))) == spec_digest(spec)
    assert spec_digest(parse_run_file(short(), "x")) != spec_digest(spec)


@pytest.mark.parametrize(
    ("text", "line", "field", "suggestion"),
    [
        pytest.param(short('soruce = "x"'), 3, "soruce", "source", id="top level"),
        pytest.param(short(more="[restart]\nbrust = 3"), 7, "restart.brust", "burst", id="in a table"),
        pytest.param(short("burst = 3"), 3, "burst", "[restart] burst", id="key of another table"),
        pytest.param(short(more="[restrat]\nburst = 3"), 6, "restrat", "restart", id="table name"),
        pytest.param(
            short(more="[health]\nprogress = { factor = 5, flor_s = 3 }"),
            7,
            "health.progress.flor_s",
            "floor_s",
            id="inline table",
        ),
        pytest.param(
            short(
                more='[[restart.rules]]\nexit_codes = [7]\naction = "hold"\n'
                '[[restart.rules]]\nacton = "x"\nsignal = 9'
            ),
            10,
            "restart.rules[1].acton",
            "action",
            id="second of an array of tables",
        ),
        pytest.param(
            short(more='[restart]\npolicy = "on-failur"'), 7, "restart.policy", "on-failure", id="value"
        ),
        pytest.param(
            short(more='[drift]\nrelease = "at_next_checkpont"'),
            7,
            "drift.release",
            "at_next_checkpoint",
            id="drift",
        ),
    ],
)
def test_a_typo_is_found_with_its_line_and_the_nearest_key(
    text: str, line: int, field: str, suggestion: str
) -> None:
    error = refusal(text)
    found = [problem for problem in error.data["problems"] if problem["field"] == field]
    assert found, error.data["problems"]
    assert found[0]["line"] == line
    assert found[0]["suggestion"] == suggestion
    assert f"run.toml:{line}: {field}: " in error.message
    assert f"did you mean {suggestion}" in error.message


@pytest.mark.parametrize(
    ("text", "line"),
    [("name = ", 1), ('name = "a"\nname = "b"', 2), ("[command\n", 1), ('a = "b', 1), ("\n\n= 3\n", 3)],
)
def test_a_syntax_error_names_its_line(text: str, line: int) -> None:
    error = refusal(text)
    assert error.reason == "InvalidToml"
    assert error.data["line"] == line
    assert error.data["file"] == "run.toml"


@pytest.mark.parametrize(
    ("top", "more", "field"),
    [
        ("", "[restart]\nbase_s = 0", "restart.base_s"),
        ("", "[restart]\nbase_s = '10'", "restart.base_s"),
        ("", "[restart]\nburst = 0", "restart.burst"),
        ("", "[restart]\nburst = 2.5", "restart.burst"),
        ("", "[restart]\nfactor = 0.5", "restart.factor"),
        ("", "[restart]\nfactor = inf", "restart.factor"),
        ("", "[restart]\ncap_s = nan", "restart.cap_s"),
        ("", "[restart]\nmax_restarts = -1", "restart.max_restarts"),
        ("", "[restart]\nsuccess_exit_codes = [256]", "restart.success_exit_codes[0]"),
        ("", "[restart]\nsuccess_exit_codes = []", "restart.success_exit_codes"),
        ("", "[restart]\nrules = [{ action = 'hold' }]", "restart.rules[0]"),
        ("", "[restart]\nbase_s = 400", "restart"),
        ("", "[gpus]\nindices = [0, 0]", "gpus.indices"),
        ("", "[gpus]\nindices = [-1]", "gpus.indices[0]"),
        ("", "[gpus]\nshare = 1", "gpus.share"),
        ("", "[stop]\nsignal = 'SIGKILL'", "stop.signal"),
        ("", "[stop]\nverify_s = 0", "stop.verify_s"),
        ("", "[stop]\ngpu_free_bytes = -1", "stop.gpu_free_bytes"),
        ("", "[health]\nready_regex = '('", "health.ready_regex"),
        ("", "[health]\nprogress_regex = '(a+)+b'", "health.progress_regex"),
        ("", "[health]\nquality = { throughput_drop = 1.5 }", "health.quality.throughput_drop"),
        ("", "[log]\npattern = 'train.log'", "log.pattern"),
        ("", "[log]\npattern = '/x/{who}{attempt}.log'", "log.pattern"),
        ("", "[log]\npattern = '/x/same.log'", "log.pattern"),
        ("", "[log]\npattern = '/x/../{attempt}.log'", "log.pattern"),
        ("", "[log]\npattern = '/x/{attempt:>9}.log'", "log.pattern"),
        ("", "[resume]\nfrom = 'last'", "resume.from"),
        ("", "[stage]\ncopy = [{ from = 'models', to = '/x' }]", "stage.copy[0].from"),
        ("", "[environment]\npython = 'python3'", "environment.python"),
        ("", "[environment]\nlock = 'bundled'\npython = '/x'", "environment"),
        ("", "[capabilities]\nnvml = true", "capabilities.nvml"),
        ("", "[env]\nLD_PRELOAD = 'x'", "env.LD_PRELOAD"),
        ("", "[env]\nPYTHONPATH = 'x'", "env.PYTHONPATH"),
        ("", "[env]\nPATH = 'x'", "env.PATH"),
        ("", "[env]\nBASH_ENV = 'x'", "env.BASH_ENV"),
        ("", "[env]\nIFS = 'x'", "env.IFS"),
        ("", "[env]\nENV = 'x'", "env.ENV"),
        ("", "[env]\nlower = 'x'", "env.lower"),
        ("", "[env]\n\"A B\" = 'x'", "env.A B"),
        ("", "[env]\nDFLASH_RUN_DIR = 'x'", "env.DFLASH_RUN_DIR"),
        ("", "[env]\nA = true", "env.A"),
        ("", '[env]\nA = "a\\u0000b"', "env.A"),
        ("secrets = ['PATH']", "", "secrets[0]"),
        ("source = ''", "", "source"),
        ("source = 'none'", "", "command"),
    ],
)
def test_a_value_out_of_range_is_refused_by_field(top: str, more: str, field: str) -> None:
    error = refusal(short(top, more))
    assert field in {problem["field"] for problem in error.data["problems"]}, error.message
    assert error.data["file"] == "run.toml"
    assert error.data["line"] is not None


@pytest.mark.parametrize("name", ["Big", "-x", "", "a" * 65, "a b", "a/b", "ä", ".x", "a\n"])
def test_a_name_outside_the_pattern_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        parse_run_dict({"name": name, "node": "local", "command": {"args": []}})


@pytest.mark.parametrize(
    "command",
    [
        {},
        {"args": [], "argv": ["/x"]},
        {"argv": []},
        {"argv": ["run.sh"]},
        {"args": ["a\0b"]},
        {"args": ["x" * 200_000]},
    ],
)
def test_a_command_that_cannot_be_executed_is_refused(command: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="command"):
        parse_run_dict({"name": "a", "node": "local", "command": command})


def test_a_program_of_the_old_kind_is_accepted() -> None:
    spec = parse_run_dict(
        {
            "name": "old",
            "node": "ct200",
            "source": "none",
            "environment": {"python": "/root/venv/bin/python"},
            "command": {"argv": ["/root/run.sh"]},
            "health": {"ready_regex": "step [0-9]+"},
        }
    )
    assert spec.command.is_program
    assert not spec.has_release
    assert spec.environment.is_external


def test_a_backoff_that_makes_the_burst_unreachable_is_refused() -> None:
    error = refusal(short(more="[restart]\nburst = 20\ninterval_s = 3600"))
    assert "burst 20 cannot be reached" in error.message
    parse_run_file(short(more="[restart]\nburst = 12\ninterval_s = 3600"), "x")
    parse_run_file(short(more="[restart]\nburst = 20\ninterval_s = 36000"), "x")
    parse_run_file(short(more='[restart]\npolicy = "never"\nburst = 20'), "x")


def test_a_name_that_is_both_secret_and_variable_is_refused() -> None:
    error = refusal(short("secrets = ['A_KEY']", "[env]\nA_KEY = 'x'"))
    assert "A_KEY is both" in error.message


def test_all_problems_are_told_at_once() -> None:
    error = refusal(short("nod = 1", "[restart]\nburst = 0\ncap = 3"))
    assert len(error.data["problems"]) == 3
    assert error.message.count("run.toml:") == 3


def test_relative_paths_are_taken_against_the_folder_of_the_file() -> None:
    text = short('source = "../trainer"', '[environment]\nlock = "locks/a.txt"')
    spec = parse_run_file(text, "run.toml", base_dir="/home/me/runs")
    assert spec.source == "/home/me/trainer"
    assert spec.environment.lock == "/home/me/runs/locks/a.txt"
    assert parse_run_file(short(), "run.toml", base_dir="/home/me").source == "bundled"


def test_explicit_indices_win_over_the_flags() -> None:
    text = short(more="[gpus]\nindices = [3, 1]").replace('"cpu"', '"0,1"')
    assert parse_run_file(text, "x").gpu_indices() == (3, 1)


def test_numbers_in_env_become_text() -> None:
    assert parse_run_file(short(more="[env]\nA = 60\nB = 0.5"), "x").env == {"A": "60", "B": "0.5"}


def test_lines_are_found_past_strings_and_arrays_that_look_like_keys() -> None:
    text = 'a = """\nb = 1\n[t]\n"""\nc = [\n  1, # d = 2\n  { e = 3 },\n]\n'
    text += '[t."x.y"]\nf.g = 1\n[[r]]\nh = 1\n[[r]]\nh = 2\n'
    found = locate_keys(text)
    assert line_of(found, ["a"]) == 1
    assert line_of(found, ["b"]) is None
    assert line_of(found, ["c", 0, "e"]) == 5
    assert line_of(found, ["d"]) is None
    assert line_of(found, ["t", "x.y", "f", "g"]) == 10
    assert line_of(found, ["r", 0, "h"]) == 12
    assert line_of(found, ["r", 1, "h"]) == 14


VALUES = st.one_of(
    st.text(max_size=8), st.integers(), st.booleans(), st.lists(st.text(max_size=3), max_size=3)
)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_whatever_is_sent_ends_as_a_spec_or_as_a_config_error(extra: dict[str, Any]) -> None:
    data = {"name": "a", "node": "local", "command": {"args": []}, **extra}
    try:
        spec = parse_run_dict(data)
    except ConfigError as error:
        spec = None
        problems = error.data["problems"]
    assert problems if spec is None else parse_run_dict(render_spec(spec)) == spec
