"""Prove that an environment can run a release: byte-compile and import it, by the environment's own Python.

Sent on stdin by `reconciler.scripts` to the *environment's* interpreter; arguments: marker, one JSON
object {"release": path or null, "modules": [names]}. Byte code goes beside the sources, so a release
stays content-addressed. An import that fails is an answer with its traceback's end, not a crash.
"""

from __future__ import annotations

import compileall
import importlib
import io
import json
import os
import platform
import py_compile
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from typing import Any


def compile_release(release: str) -> str | None:
    """Byte-compile every source; returns the compiler's complaints."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        is_fine = compileall.compile_dir(
            release,
            quiet=1,
            force=False,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    return None if is_fine else output.getvalue()[-4000:]


def import_module(name: str) -> dict[str, str] | None:
    """Import one module; None when it works."""
    output = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output):
            importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - SystemExit at import is a finding too
        frames = traceback.format_exception(type(error), error, error.__traceback__)
        return {"type": type(error).__name__, "message": str(error), "traceback": "".join(frames)[-4000:]}
    return None


def main() -> None:
    """Compile, import, report."""
    marker, request = sys.argv[1], json.loads(sys.argv[2])
    release = request["release"]
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "compile_error": None,
        "import_errors": {},
    }
    if release:
        result["compile_error"] = compile_release(release)
        sys.path.insert(0, release)
        os.chdir(release)
    for name in request["modules"]:
        error = import_module(name)
        if error is not None:
            result["import_errors"][name] = error
    sys.stdout.write(marker + json.dumps({"ok": True, "result": result}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a library's own exit hooks must not turn a finished check into a failure


main()
