"""The hand-typed restart that this project replaces, kept word for word so that its failure stays a test.

`run_restart` types it as then: one `ssh host "pct exec ID -- bash -lc TEXT"`. It runs only inside
a test host's own PID namespace, where its `pkill` can reach nothing else.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.pct_host import DEFAULT_VMID, PctHost

LOG = "/workspace/train_slammed5.log"
EARLIER_LOG = "/workspace/train_slammed4.log"

OLD_LAUNCH = (
    f"cd /root; DFLASH_PROFILE_INTERVAL=60 nohup /root/run.sh > {EARLIER_LOG} 2>&1 & "
    f"sleep 0.7; pgrep -af train_dflash_pipeline.py; tail -n 25 {EARLIER_LOG}"
)
"""The launch that worked: it kills nothing."""

OLD_RESTART = (
    "pkill -9 -f '[t]rain_dflash_pipeline.py' || true; sleep 0.3; cd /root; "
    f"DFLASH_PROFILE_INTERVAL=60 nohup /root/run.sh > {LOG} 2>&1 & "
    f"sleep 0.7; pgrep -af train_dflash_pipeline.py; tail -n 25 {LOG}"
)
"""The bracket protects from its own text; the plain name in the later pgrep is what pkill finds."""

BRACKETED_RESTART = OLD_RESTART.replace(
    "pgrep -af train_dflash_pipeline.py", "pgrep -af '[t]rain_dflash_pipeline.py'"
)
"""The only change: brackets in the pgrep as well."""

_TRAINER = "import time\nprint('training', flush=True)\ntime.sleep(600)\n"
_RUN_SH = "#!/bin/sh\nexec python3 /root/train_dflash_pipeline.py\n"


def install_trainer(host: PctHost, vmid: int = DEFAULT_VMID) -> None:
    """The two files that lay in /root."""
    host.ct_path("/root/train_dflash_pipeline.py", vmid).write_text(_TRAINER, "utf-8")
    script = host.ct_path("/root/run.sh", vmid)
    script.write_text(_RUN_SH, "utf-8")
    script.chmod(0o755)


def run_restart(host: PctHost, text: str, vmid: int = DEFAULT_VMID) -> subprocess.CompletedProcess[bytes]:
    """Type `text` as it was typed, and return what the operator saw."""
    return host.pct("exec", str(vmid), "--", "bash", "-lc", text, check=False)


def hand_launched(host: PctHost, vmid: int = DEFAULT_VMID) -> list[str]:
    """Command lines of the trainers of the old kind that live in the container now."""
    words = ("pgrep", "-af", "^python3 /root/train_dflash_pipeline.py")
    seen = host.pct("exec", str(vmid), "--", *words, check=False)
    return [line.partition(" ")[2] for line in seen.stdout.decode().splitlines()]


def log_of(host: PctHost, vmid: int = DEFAULT_VMID) -> Path:
    """The log that the restart names."""
    return host.ct_path(LOG, vmid)
