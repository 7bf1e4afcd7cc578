"""The page: the built files where they are, and a plain explanation with the remedy where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import HTMLResponse

import supervisor

if TYPE_CHECKING:
    from fastapi import FastAPI

WEBUI_DIR = Path(supervisor.__file__).parent / "_webui"

NOT_BUILT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dflash-supervisor</title></head>
<body><h1>dflash-supervisor is running</h1>
<p>The web page is not part of this installation: it has not been built.</p>
<p>In a checkout, build it with <code>make setup</code> and start the daemon again; a wheel has it,
so reinstall the wheel if this is one.</p>
<p>Everything works without it: <code>dflashctl --help</code>, or REST under <code>/v1</code>.</p>
</body></html>
"""


def install_page(app: FastAPI, directory: Path = WEBUI_DIR) -> None:
    """Serve the page at the root; its files carry no data, so they need no token."""
    if (directory / "index.html").is_file():
        app.frontend("/", directory=directory, fallback="index.html")
        return

    @app.get("/", include_in_schema=False)
    async def page_is_missing() -> HTMLResponse:
        return HTMLResponse(NOT_BUILT, status_code=503)
