"""What to do about a name that nothing has: the nearest one that exists, or how to make one.

Pure. Used where the daemon and the commands look a node or a run up by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

SHOWN = 8


def unknown_name_hint(kind: str, name: str, known: Sequence[str]) -> str:
    """Return the way out.

    Args:
        kind: `node`, `run` or another kind of object.
        name: what was asked for.
        known: the names that exist.
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}"
    if kind != "node":
        return "list what there is with `dflashctl ps`"
    add = f"add it with `dflashctl node add {name} --transport local|ssh|proxmox`"
    if not known:
        return f"there is no node yet (`dflashctl node ls`): {add}"
    more = " …" if len(known) > SHOWN else ""
    return f"known: {', '.join(sorted(known)[:SHOWN])}{more} (`dflashctl node ls`); or {add}"
