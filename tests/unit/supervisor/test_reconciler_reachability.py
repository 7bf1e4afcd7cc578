"""Unknown is not dead: when a node counts as unreachable, and how long we wait before asking again."""

from __future__ import annotations

import random
from datetime import UTC, datetime

from supervisor.domain.errors import AuthError, ConnectError, HostKeyError, NotRunningError
from supervisor.reconciler.reachability import FAILED_PROBES, Reachability, reconnect_delay_s

NOW = datetime(2026, 1, 1, tzinfo=UTC)
REFUSED = ConnectError("connection refused", reason="ConnectRefused")


def test_a_first_failure_makes_the_state_unknown_and_not_false() -> None:
    reach = Reachability()
    reach.note_success(NOW)

    changed = reach.note_failure(REFUSED, NOW, 0.0)

    assert changed
    assert reach.is_reachable is None
    assert reach.reason == "ConnectRefused"


def test_false_needs_three_failures_and_a_minute() -> None:
    many_quick = Reachability()
    for second in range(10):
        many_quick.note_failure(REFUSED, NOW, float(second))
    few_slow = Reachability()
    few_slow.note_failure(REFUSED, NOW, 0.0)
    few_slow.note_failure(REFUSED, NOW, 300.0)

    assert many_quick.is_reachable is None
    assert few_slow.is_reachable is None

    few_slow.note_failure(REFUSED, NOW, 301.0)
    assert few_slow.is_reachable is False


def test_success_resets_the_failure_clock() -> None:
    reach = Reachability()
    for second in (0.0, 30.0, 59.0):
        reach.note_failure(REFUSED, NOW, second)
    reach.note_success(NOW)

    reach.note_failure(REFUSED, NOW, 61.0)

    assert reach.is_reachable is None
    assert reach.failures == 1


def test_a_stopped_container_is_evidence_at_once() -> None:
    reach = Reachability()

    reach.note_failure(NotRunningError("container '200' not running!"), NOW, 0.0)

    assert reach.is_reachable is False
    assert reach.container_status == "stopped"
    assert reach.reason == "ContainerStopped"


def test_a_refused_connection_says_nothing_about_the_container() -> None:
    reach = Reachability()
    reach.note_failure(REFUSED, NOW, 0.0)
    assert reach.container_status is None


def test_a_changed_host_key_blocks_all_traffic() -> None:
    reach = Reachability()
    reach.note_failure(HostKeyError("host key changed", expected="a", seen="b"), NOW, 0.0)
    assert reach.is_blocked
    assert reach.is_reachable is False


def test_an_outage_alerts_once_after_five_minutes() -> None:
    reach = Reachability()
    reach.note_failure(REFUSED, NOW, 0.0)

    assert [reach.should_alert(at) for at in (299.0, 300.0, 900.0)] == [False, True, False]


def test_backoff_is_jittered_and_capped() -> None:
    rng = random.Random(1)
    delays = [reconnect_delay_s(n, rng) for n in range(1, 40)]

    assert all(0.5 <= delay <= 60.0 for delay in delays)
    assert delays[0] < 1.01
    assert max(delays) > 40
    assert reconnect_delay_s(1, rng, error=AuthError("refused")) >= 30.0


def test_who_waits_is_told_sooner_than_the_condition_turns_false() -> None:
    reach = Reachability()
    assert not reach.is_out_of_reach

    for second in range(FAILED_PROBES):
        assert not reach.is_out_of_reach
        reach.note_failure(REFUSED, NOW, float(second))

    assert (reach.is_reachable, reach.is_out_of_reach) == (None, True)
    assert reach.remedy == "start the SSH server, or correct host and port"
    reach.note_success(NOW)
    assert (reach.is_out_of_reach, reach.remedy) == (False, "")


def test_a_host_that_does_not_let_us_in_is_out_of_reach_at_once() -> None:
    reach = Reachability()

    reach.note_failure(AuthError("no", reason="IdentityMissing", hint="set the node's identity"), NOW, 0.0)

    assert (reach.is_reachable, reach.is_out_of_reach) == (None, True)
    assert reach.remedy == "set the node's identity"
