"""A run on two machines whose second one never comes: it says what it waits for, and can be stopped."""

import signal
import socket

import pytest

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import await_status, launch, read_status, settings_for


@pytest.fixture
def lonely(tmp_path):
    """Start rank 0 of two alone; ends it in any case."""
    started = []

    def begin(**settings):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = settings_for(
            tiny_target(tmp_path), write_tiny_corpus(tmp_path / "data"), tmp_path / "out", **settings
        )
        process = launch(
            words,
            tmp_path / "log",
            **variables,
            DFLASH_RUN_DIR=str(tmp_path / "run"),
            GLOO_SOCKET_IFNAME="lo",
        )
        started.append(process)
        # the status is told just before the wait; the log line is its beginning
        await_status(
            process,
            tmp_path / "run",
            lambda status: (
                "other machine" in (status["message"] or "")
                and "rank 0 waits for the other 1 at 127.0.0.1" in (tmp_path / "log").read_text()
            ),
        )
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait(30)


@pytest.mark.parametrize("how", ["signal", "file"])
def test_a_stop_ends_the_wait_for_the_other_machine(tmp_path, lonely, how):
    process = lonely()

    if how == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        (tmp_path / "run" / "control").mkdir(exist_ok=True)
        (tmp_path / "run" / "control" / "stop.json").write_text('{"v": 1, "id": "s1"}')

    assert process.wait(60) == 9, (tmp_path / "log").read_text()
    assert read_status(tmp_path / "run")["phase"] == "done"


def test_a_machine_that_never_comes_ends_the_wait_at_the_limit_of_the_start(tmp_path, lonely):
    process = lonely(queue__start_stall_s=1.0)

    assert process.wait(60) == 7, (tmp_path / "log").read_text()
    assert "waiting for the other machines" in read_status(tmp_path / "run")["message"]
