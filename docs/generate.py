"""Writes every generated reference page: `make docs`, or `python -m docs.generate`.

The pages are made from the program itself (`tests.support.reference`, `trainer.flags`, `docs.run_file`,
`docs.states`); contract tests compare what is committed with what would be written. Needs the development
installation, no torch and no network.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.run_file import render_run_file_page
from docs.states import render_states_page
from tests.support import reference
from trainer.flags import render_reference
from trainer.telemetry import fields

FOLDER = Path(__file__).resolve().parent / "reference"

PAGES: Mapping[str, Callable[[], str]] = {
    "metrics.md": fields.render_reference,
    "run-file.md": render_run_file_page,
    "states.md": render_states_page,
    "trainer-settings.md": render_reference,
}
"""Pages that are rendered here; those of command line and REST are written by `reference.main`."""


def main() -> None:
    """Write all pages and name those that changed."""
    before = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    reference.main()
    for name, render in PAGES.items():
        (FOLDER / name).write_text(render(), encoding="utf-8")
    changed = [
        path.name
        for path in sorted(FOLDER.glob("*.md"))
        if before.get(path.name) != path.read_text(encoding="utf-8")
    ]
    sys.stdout.write(f"changed: {', '.join(changed) or 'nothing'}\n")


if __name__ == "__main__":
    main()
