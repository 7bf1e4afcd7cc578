"""The per-attempt shim: watches one trainer, carries out a stop to its end, writes the exit record.

Created by the launcher (as the trainer's parent) or by `adopt` (after the first shim died: then the exit
status is unknowable). It serves the attempt's socket, reaps all descendants, and enforces the stop deadline
itself. It never restarts the trainer, never decides policy, and its own death does not hurt the trainer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import Any

from . import cgroup, locks, logfile
from .attempt import attempt_request, stop_record
from .control import ControlServer
from .proc import Family, identity_of, is_alive, open_pidfd, signal_identity, signal_number
from .records import AttemptFiles, RefusedError, note, note_exception, read_json, write_json
from .request import MAX_REQUEST_BYTES, parse_stop_policy
from .spawn import detach
from .stop import LEFTOVER_TERM_S, StopPlan

HEARTBEAT_S = 5.0
TICK_S = 1.0
STOPPING_TICK_S = 0.1


class AttemptShim:
    """Supervises one attempt until nothing of it is left.

    Args:
        files: the attempt.
        state: its present `state.json`; this object is the only writer from now on.
        server: the attempt's socket, listening already.
        child: pid of the trainer when it is our child, None when adopted.
        keep: lock descriptors that must stay open as long as this process lives.
    """

    def __init__(
        self,
        files: AttemptFiles,
        state: dict[str, Any],
        server: ControlServer,
        child: int | None,
        keep: list[int],
    ) -> None:
        launch = read_json(files.path("launch.json")) or {}
        self.files = files
        self.state = state
        self._child = child
        self._keep = keep
        self._policy = parse_stop_policy(launch.get("stop"))
        self._orphan_after_s = float(launch.get("orphan_after_s") or 0)
        self._oom_before = launch.get("oom_kills_before")
        shim_pid = os.getpid() if child is not None else None
        self._family = Family(state["identity"], shim_pid, launch.get("token") or "-", state["cgroup"])
        self._plan: StopPlan | None = None
        self._is_killed = False
        self._last_heartbeat = self._last_contact = time.monotonic()
        self._server = server
        self._pidfd = open_pidfd(state["identity"])
        if self._pidfd is not None:
            self._server.watch(self._pidfd)

    def run(self) -> None:
        """Loop until the trainer and all its descendants are gone and the exit record is on disk."""
        is_over = False
        while not is_over:
            try:
                is_over = self._turn()
            except Exception:  # noqa: BLE001 - a shim that dies loses the exit status; it notes and goes on
                note_exception()
                time.sleep(TICK_S)
        self._server.close()

    def _turn(self) -> bool:
        is_busy = self._plan is not None or self.state["main_exit"] is not None
        self._server.poll(STOPPING_TICK_S if is_busy else TICK_S, self._handle)
        self._reap()
        self._heartbeat()
        self._check_orphaned()
        if self._plan is not None:
            self._advance()
        return self._finish()

    def resume(self) -> None:
        """After an adoption: go on with what the dead shim had begun."""
        if self.state["stop"] is not None:
            self._plan = StopPlan(self._policy, time.monotonic())
        if self.state["main_exit"] is not None:
            self._clear_leftovers(None)

    def _reap(self) -> None:
        if self._family.shim_pid is None:
            if self.state["main_exit"] is None and is_alive(self.state["identity"]) is False:
                self._main_ended(None, None, {})
            return
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self._child:
                self._child = None
                code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
                self._main_ended(code, number, _rusage(usage))

    def _main_ended(self, code: int | None, number: int | None, rusage: dict[str, Any]) -> None:
        if self._pidfd is not None:
            self._server.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self.state["main_exit"] = {
            "code": code,
            "signal": number,
            "ended_at": time.time(),
            "rusage": rusage,
            "oom": self._oom_evidence(code, number),
        }
        self.save()
        self.files.event("MainExited", "trainer process ended", code=code, signal=number)
        self._retake_locks()
        self._clear_leftovers(number)

    def _retake_locks(self) -> None:
        """Hold the locks while leftovers are cleared away, also when we did not inherit them."""
        if self._family.shim_pid is None:
            with contextlib.suppress(RefusedError, OSError):
                state = self.state
                self._keep += locks.take_launch_locks(
                    self.files.root, self.files.attempt_id, state["run_id"], state["gpus"], state["share"]
                )

    def _clear_leftovers(self, number: int | None) -> None:
        leftovers = self._family.members()
        if not leftovers:
            return
        self.files.event("LeftoversFound", "processes outlived the trainer", processes=_pids(leftovers))
        now = time.monotonic()
        if self._plan is None:
            policy = dict(self._policy)
            policy["term_s"] = min(policy["term_s"], LEFTOVER_TERM_S)
            self._plan = StopPlan(policy, now, first="term")
        elif self._plan.step == "asked" and number is not None:
            # A wrapper died of the signal before it could pass it on: its children get it and the rest of
            # the grace, because one of them is the program that has a checkpoint to save.
            self._signal(leftovers, signal_number(self._policy["signal"]))
        elif self._plan.step == "asked":
            self._plan.skip_to("term", now)
        elif self._plan.step == "term":
            self._signal(leftovers, signal.SIGTERM)

    def _oom_evidence(self, code: int | None, number: int | None) -> bool | None:
        count = cgroup.oom_kills(self.state["cgroup"] or cgroup.own_group())
        evidence = cgroup.oom_evidence(self._oom_before, count, code, number)
        return evidence and not self._is_killed

    def _heartbeat(self) -> None:
        if time.monotonic() - self._last_heartbeat >= HEARTBEAT_S:
            self._family.members()  # remembered, so that a later look still knows them as ours
            self.save()

    def save(self) -> None:
        """Write `state.json`; a full disk is noted in shim.log and tried again at the next heartbeat."""
        self._last_heartbeat = time.monotonic()
        self.state["heartbeat_at"] = time.time()
        try:
            self.files.write_state(self.state)
        except OSError as error:
            note("state.json not written: %s" % error)

    def _check_orphaned(self) -> None:
        silent_s = time.monotonic() - self._last_contact
        if self._orphan_after_s and self._plan is None and silent_s > self._orphan_after_s:
            self.begin_stop(
                {
                    "stop_id": "orphan-" + self.files.attempt_id,
                    "reason": "Orphaned",
                    "actor": "shim",
                    "save": True,
                }
            )

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        self._last_contact = time.monotonic()
        op = request.get("op")
        if op == "ping":
            return {"pid": os.getpid()}
        if op == "stop":
            return {"state": self.begin_stop(request)}
        return attempt_request(self.files, request)

    def begin_stop(self, request: dict[str, Any]) -> dict[str, Any]:
        """Begin a stop, or join the one in progress; returns the state."""
        stop = stop_record(request)
        overrides = {key: request[key] for key in self._policy if request.get(key) is not None}
        policy = parse_stop_policy({**self._policy, **overrides})
        now = time.monotonic()
        current = self.state["stop"]
        if self.state["main_exit"] is not None and self._plan is None:
            return self.state
        if current is not None and self._plan is not None:
            if current["id"] != stop["id"]:
                if self._plan.step == "done":
                    self._plan = StopPlan(policy, now, first="kill")
                self._plan.shorten(policy, now)
                current["deadline_s"] = self._plan.grace_s()
                self.files.event("StopJoined", "a second stop joined the one in progress", **stop)
                self.save()
            return self.state
        stop["deadline_s"] = policy["grace_s"]
        self.state.update(stop=stop, phase="stopping")
        self._policy = policy
        if self._plan is None:
            self._plan = StopPlan(policy, now)
        self.files.event("StopRequested", "stop requested", **stop)
        self.save()
        self._advance()
        return self.state

    def _advance(self) -> None:
        plan, stop = self._plan, self.state["stop"]
        assert plan is not None
        extend_s = self._extension(stop) if plan.step == "asked" else 0.0
        action = plan.tick(time.monotonic(), extend_s)
        if stop is not None and plan.step == "asked" and plan.grace_s(extend_s) != stop["deadline_s"]:
            stop["deadline_s"] = plan.grace_s(extend_s)
            self.files.event("StopExtended", "the trainer asked for more time", deadline_s=stop["deadline_s"])
            self.save()
        if stop is not None and stop["step"] != plan.step:
            stop["step"] = plan.step
            self.files.event("StopStep", "stop goes on: " + plan.step)
            self.save()
        if action == "ask":
            self._ask()
        elif action == "term":
            self._signal(self._targets(), signal.SIGTERM)
        elif action == "kill":
            self._kill()

    def _extension(self, stop: dict[str, Any] | None) -> float:
        answer = (self.files.status() or {}).get("stop")
        if stop is None or not isinstance(answer, dict) or answer.get("id") != stop["id"]:
            return 0.0
        extend_s = answer.get("extend_s")
        return float(extend_s) if isinstance(extend_s, (int, float)) else 0.0

    def _ask(self) -> None:
        stop = self.state["stop"]
        body = {key: stop[key] for key in ("id", "reason", "actor", "requested_at", "deadline_s", "save")}
        try:
            write_json(self.files.path("control", "stop.json"), {"v": 1, **body})
        except OSError as error:
            self.files.event("StopFileFailed", "control/stop.json not written: %s" % error)
        self._signal(self._targets(), signal_number(self._policy["signal"]))

    def _targets(self) -> list[dict[str, Any]]:
        """The main process alone while it lives (it needs its helpers to save), else what it left."""
        return self._family.members() if self.state["main_exit"] else [self.state["identity"]]

    def _signal(self, targets: list[dict[str, Any]], number: int) -> None:
        sent = [target["pid"] for target in targets if signal_identity(target, number)]
        name = signal.Signals(number).name
        self.files.event("Signalled", "signal sent: " + name, signal=name, pids=sent)

    def _kill(self) -> None:
        targets = self._family.members()
        if not targets:
            return
        group = self.state["cgroup"]
        if not self._is_killed:
            self.files.event("Signalled", "signal sent: SIGKILL", signal="SIGKILL", pids=_pids(targets))
        self._is_killed = True
        if group is not None:
            cgroup.kill_group(group)
        for target in targets:
            signal_identity(target, signal.SIGKILL)

    def _finish(self) -> bool:
        """Write the exit record once nothing is left, or a quarantine record when the stop gave up."""
        gave_up = self._plan is not None and self._plan.step == "done"
        if self.state["main_exit"] is None and not gave_up:
            return False
        members = self._family.members()
        if members and (not gave_up or self.state.get("survivors") == _pids(members)):
            return False
        if not members and self.state["main_exit"] is None:
            return False
        unknown: dict[str, Any] = {"code": None, "signal": None, "ended_at": None, "rusage": {}, "oom": None}
        return self._write_exit(self.state["main_exit"] or unknown, members)

    def _write_exit(self, main: dict[str, Any], members: list[dict[str, Any]]) -> bool:
        stop = self.state["stop"]
        record = {
            "v": 1,
            "attempt_id": self.files.attempt_id,
            "code": main["code"],
            "signal": main["signal"],
            "oom": main["oom"],
            "started_at": self.state["started_at"],
            "ended_at": main["ended_at"],
            "rusage": main["rusage"],
            "last_lines": self._last_lines(),
            "stop_id": stop["id"] if stop else None,
            "killed": self._is_killed,
            "survivors": members,
            "quarantined": bool(members),
        }
        try:
            write_json(self.files.path("exit.json"), record)
        except OSError as error:
            note("exit.json not written, trying again: %s" % error)
            time.sleep(TICK_S)
            # Somebody removed the folder: there will never be a place for the record, nor a reader.
            return not members and not self.files.exists()
        self.state["survivors"] = _pids(members)
        if members:
            self.files.event("Quarantined", "processes survived SIGKILL", processes=_pids(members))
        else:
            self.state["phase"] = "exited"
            if stop is not None:
                stop["step"] = "done"
            self.files.event(
                "Exited", "nothing of the attempt is left", code=main["code"], signal=main["signal"]
            )
            cgroup.remove_group(self.state["cgroup"])
        self.save()
        return not members

    def _last_lines(self) -> list[str]:
        try:
            return logfile.last_lines(self.state["log_path"])
        except RefusedError as failure:
            return ["[%s]" % failure.message]


def run_adopt(root: str, attempt_id: str) -> int:
    """Handle `adopt`: detach, take over the attempt, carry out the stop request that stdin holds."""
    stop = json.loads(sys.stdin.buffer.read(MAX_REQUEST_BYTES))
    if os.fork():
        return 0
    os.setsid()
    if os.fork():
        os._exit(0)
    detach(keep=[])
    files = AttemptFiles(root, attempt_id)
    files.redirect_stderr()
    return 0 if adopt(root, attempt_id, stop) else 1


def adopt(root: str, attempt_id: str, stop: dict[str, Any]) -> bool:
    """Take over an attempt whose shim is dead, to carry out `stop`; False if somebody else did."""
    files = AttemptFiles(root, attempt_id)
    lock = locks.try_lock(files.path(locks.SHIM_LOCK))
    if lock is None:
        return False
    state = files.state()
    record = files.exit()
    is_over = record is not None and not record["quarantined"]
    if state is None or state["identity"] is None or is_over:
        os.close(lock)
        return False
    state["shim"] = identity_of(os.getpid())
    state["phase"] = "stopping" if state["stop"] else "running"
    shim = AttemptShim(files, state, ControlServer(files.folder), child=None, keep=[lock])
    files.write_state(state)
    files.event("ShimAdopted", "a new shim took over; the exit status will be unknown")
    shim.resume()
    shim.begin_stop(stop)
    shim.run()
    return True


def _pids(processes: list[dict[str, Any]]) -> list[int]:
    return [process["pid"] for process in processes]


def _rusage(usage: Any) -> dict[str, Any]:
    return {
        "user_s": usage.ru_utime,
        "system_s": usage.ru_stime,
        "max_rss_bytes": usage.ru_maxrss * 1024,
        "read_blocks": usage.ru_inblock,
        "written_blocks": usage.ru_oublock,
    }
