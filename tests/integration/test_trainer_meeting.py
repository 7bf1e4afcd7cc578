"""A run on two machines whose second one never comes: it says what it waits for, and can be stopped."""

import contextlib
import signal

import pytest

from tests.support.ports import reserved_port
from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import await_status, launch, read_status, settings_for


@pytest.fixture
def lonely(tmp_path):
    """Start rank 0 of two alone; ends it in any case."""
    held = contextlib.ExitStack()
    started = []

    def begin(**settings):
        port = str(held.enter_context(reserved_port()))
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
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait(180)
    held.close()


def await_wait(process, tmp_path):
    """Wait until it waits for the other machine: the status is told just before, the log line then."""
    await_status(
        process,
        tmp_path / "run",
        lambda status: (
            "other machine" in (status["message"] or "")
            and "rank 0 waits for the other 1 at 127.0.0.1" in (tmp_path / "log").read_text()
        ),
    )


@pytest.mark.parametrize("how", ["signal", "file"])
def test_a_stop_ends_the_wait_for_the_other_machine(tmp_path, lonely, how):
    process = lonely()
    await_wait(process, tmp_path)

    if how == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        (tmp_path / "run" / "control").mkdir(exist_ok=True)
        whole = tmp_path / "run" / "control" / "stop.tmp"
        whole.write_text('{"v": 1, "id": "s1"}')
        whole.rename(whole.with_name("stop.json"))

    assert process.wait(180) == 9, (tmp_path / "log").read_text()
    assert read_status(tmp_path / "run")["phase"] == "done"


def test_a_machine_that_never_comes_ends_the_wait_at_the_limit_of_the_start(tmp_path, lonely):
    process = lonely(queue__start_stall_s=1.0)

    assert process.wait(180) == 7, (tmp_path / "log").read_text()
    assert "waiting for the other machines" in read_status(tmp_path / "run")["message"]
