"""A reused pid, made to happen: in a PID namespace of its own the kernel gives out the number we want."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.transport.bundle import build_shim

INSIDE = """
import contextlib, json, os, signal, subprocess, sys, time
python, pyz, root, log = sys.argv[1:]
request = {"v": 1, "attempt_id": "a1", "run_id": "r1", "argv": ["/bin/sleep", "600"], "log_path": log,
           "stop": {"grace_s": 0.2, "extend_max_s": 0.2, "term_s": 0.2, "kill_s": 0.5, "verify_s": 0.5}}
done = subprocess.run([python, pyz, "start", "--root", root], input=json.dumps(request).encode(),
                      stdout=subprocess.PIPE, check=True)
state = json.loads(done.stdout)["state"]
trainer = state["identity"]["pid"]
os.kill(state["shim"]["pid"], signal.SIGKILL)
os.kill(trainer, signal.SIGKILL)
ends = time.monotonic() + 120
while os.path.exists("/proc/%d" % trainer) and time.monotonic() < ends:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    time.sleep(0.01)
for _ in range(50):
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(trainer - 1))
    innocent = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    if innocent.pid == trainer:
        break
    innocent.kill()
    innocent.wait()
frames = [{"id": 1, "op": "status", "attempt_id": "a1"},
          {"id": 2, "op": "signal", "attempt_id": "a1", "signal": "SIGKILL"},
          {"id": 3, "op": "stop", "attempt_id": "a1", "stop_id": "s1", "save": False}]
serve = [python, pyz, "serve", "--root", root]
agent = subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
replies = {}
for frame in frames:
    agent.stdin.write(json.dumps(frame).encode() + b"\\n")
    agent.stdin.flush()
    while frame["id"] not in replies:
        line = agent.stdout.readline()
        if line.strip():
            reply = json.loads(line)
            replies[reply.get("id")] = reply
exit_path = os.path.join(root, "attempts", "a1", "exit.json")
ends = time.monotonic() + 120
while not os.path.exists(exit_path) and time.monotonic() < ends:
    time.sleep(0.05)
with open(exit_path) as file:
    record = json.load(file)
print(json.dumps({"trainer": trainer, "innocent": innocent.pid, "lives": innocent.poll() is None,
                  "status": replies[1]["result"], "signal": replies[2], "exit": record}))
innocent.kill()
innocent.wait()
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a PID namespace needs root and unshare"
)
def test_a_process_that_got_the_trainers_pid_is_left_alone(tmp_path: Path) -> None:
    pyz = tmp_path / "dflash-shim.pyz"
    pyz.write_bytes(build_shim().data)
    script = tmp_path / "inside.py"
    script.write_text(INSIDE)
    namespace = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]
    arguments = [sys.executable, str(script), sys.executable, str(pyz)]

    done = subprocess.run(
        [*namespace, *arguments, str(tmp_path / "node"), str(tmp_path / "a1.log")],
        capture_output=True,
        timeout=400,
        check=False,
    )

    assert done.returncode == 0, done.stderr.decode()
    seen = json.loads(done.stdout)
    assert seen["innocent"] == seen["trainer"], "the pid was really used again"
    assert seen["status"]["alive"] is False
    assert seen["signal"]["error"]["reason"] == "IdentityMismatch"
    assert seen["exit"]["killed"] is False
    assert seen["lives"] is True
