"""From what the user said about resuming to a lineage and a verified state.

Called by `trainer.train` before anything is loaded. Never deletes or renames anything: `scratch` opens a new
lineage beside the old ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.state import Difference, check_state
from trainer.checkpoint.store import MANIFEST, CheckpointStore, list_lineages, new_lineage, verify
from trainer.errors import CheckpointError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Where a run begins: its lineage, and the state folder to load (None = from scratch)."""

    lineage: str
    state_dir: Path | None
    skipped: tuple[str, ...]

    @property
    def continues_lineage(self) -> bool:
        """True when the state lies in the lineage that goes on, not in another one that is branched off."""
        return self.state_dir is not None and self.state_dir.parent.parent.name == self.lineage

    def saved_at(self) -> float | None:
        """Return when the state was written."""
        if self.state_dir is None:
            return None
        manifest: dict[str, Any] = json.loads((self.state_dir / MANIFEST).read_text(encoding="utf-8"))
        return manifest.get("created_at")


def choose_start(output_dir: Path, resume: str) -> StartPoint:
    """Decide where to begin.

    `latest` is the newest state that verifies in the newest lineage, or step 0 where that has no state at
    all. A path continues its own lineage when nothing newer verifies there, else it opens a new one.

    Raises:
        CheckpointError: there are states, but none verifies.
    """
    lineages = list_lineages(output_dir)
    if resume == "scratch" or (resume == "latest" and not lineages):
        return StartPoint(lineage=new_lineage(output_dir), state_dir=None, skipped=())
    if resume != "latest":
        return _from_path(output_dir, Path(resume).resolve())
    found = CheckpointStore(output_dir / lineages[-1]).find_newest(accept=check_state)
    for reason in found.skipped:
        _LOG.warning("checkpoint skipped: %s", reason)
    if found.path is None and found.skipped:
        raise CheckpointError(
            f"none of the {len(found.skipped)} checkpoints in {output_dir / lineages[-1]} verifies: "
            f"{'; '.join(found.skipped)}; restore one or use --resume scratch"
        )
    return StartPoint(lineage=lineages[-1], state_dir=found.path, skipped=found.skipped)


def resume_record(
    start: StartPoint, step: int, differences: Sequence[Difference], *, is_ordered: bool
) -> dict[str, Any]:
    """Return what `resume.json` says: from where, what was passed over, and what differs and why."""
    order = (
        "the order of packs repeats the uninterrupted run"
        if is_ordered
        else "free-running: every pack of the plan once, in an order that depends on timing"
    )
    return {
        "v": 2,
        "from": str(start.state_dir),
        "step": step,
        "skipped": list(start.skipped),
        "differences": [{"field": d.field, "was": d.was, "is": d.now} for d in differences],
        "order": order,
    }


def total_steps_after(
    step: int, *, consumed: int, total_packs: int, packs_per_step: int, max_steps: int
) -> int:
    """Return where a resumed run ends: the steps done, and as many as the packs that are left make.

    Args:
        step: completed optimizer steps.
        consumed: packs that went into them, whatever number went into each.
        total_packs: packs of all epochs.
        packs_per_step: of this run: accumulation times drafters.
        max_steps: limit of the configuration; 0 = none.
    """
    total = step + -(-max(0, total_packs - consumed) // packs_per_step)
    return min(total, max(max_steps, step)) if max_steps else total


def _from_path(output_dir: Path, path: Path) -> StartPoint:
    verify(path)
    check_state(path)
    lineage_dir = path.parent.parent
    is_ours = path.parent.name == "state" and lineage_dir.parent == output_dir.resolve()
    if is_ours and CheckpointStore(lineage_dir).find_newest(accept=check_state).path == path:
        return StartPoint(lineage=lineage_dir.name, state_dir=path, skipped=())
    return StartPoint(lineage=new_lineage(output_dir), state_dir=path, skipped=())
