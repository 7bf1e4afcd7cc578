"""The costs of a plan as a person reads them: labels, durations and shares; unknown is not zero."""

from __future__ import annotations

import re

from supervisor.commands.costs import cost_lines
from tests.support.api_app import seed_attempt
from tests.support.commandline import ctl

RESTART = {
    "gpus": 8,
    "lost_s": 600.0,
    "overhead_s": 420.0,
    "wait_s": 1200.0,
    "now_gpu_s": 8160.0,
    "next_checkpoint_gpu_s": 3360.0,
    "share_of_elapsed": 0.0999007779533576,
    "unknown": [],
    "recommendation": "next_checkpoint",
    "recommendation_reason": "it saves work",
    "advised_checkpoint_interval_s": 1000.0,
}


def test_a_restart_on_gpus_costs_gpu_time_and_a_share_in_per_cent():
    assert dict(cost_lines(RESTART)) == {
        "GPUs": "8",
        "work since checkpoint": "10m 0s, 10 % of the attempt so far",
        "stop, launch, warm-up": "7m 0s",
        "a restart now costs": "2h 16m of GPU time",
        "at the next checkpoint": "56m 0s of GPU time, in 20m 0s",
        "recommended": "at the next checkpoint",
        "advised interval": "a checkpoint every 16m 40s",
    }


def test_without_a_gpu_nothing_is_called_gpu_time_and_what_is_unknown_is_said():
    costs = RESTART | {"gpus": 0, "now_gpu_s": None, "lost_s": None, "share_of_elapsed": None}
    costs |= {"unknown": ["stop", "time since the last checkpoint"], "recommendation": "unknown"}

    told = dict(cost_lines(costs))

    assert told["GPUs"] == "none"
    assert told["work since checkpoint"] == "not known yet"
    assert told["stop, launch, warm-up"] == "7m 0s (not known yet: stop)"
    assert not any("GPU time" in text for text in told.values())
    assert told["recommended"] == "not known yet"


def test_a_plan_shows_no_name_of_a_field(live, run):
    seed_attempt(live.api.state, run)

    for words in (["plan", "restart", "slammed"], ["plan", "stop", "slammed"], ["plan", "deploy", "local"]):
        result = ctl(*words)
        assert result.code == 0, result.err
        assert not re.search(r"_s\b|share_of|on_release", result.out), result.out
    assert "touches: slammed, attempt 1; on a change of: release notify" in result.out
