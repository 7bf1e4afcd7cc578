"""A whole daemon as its own process, a toy run on a local node, and a headless Chromium."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, StorageState, expect, sync_playwright

from supervisor.client import Client

SUPPORT = Path(__file__).parents[1] / "support"
TOY = SUPPORT / "toy_trainer.py"
CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
]
expect.set_options(timeout=60_000)

LIVE = {"starting", "running", "stopping", "backoff", "pending"}
GPU = {"uuid": "GPU-1", "name": "H200", "util": 97, "used": 80 << 30, "total": 140 << 30}
SCENE = {"driver": "580.1", "gpus": [{**GPU, "power_mw": 590_000, "temp": 61, "clock": 1980}]}


@dataclass(frozen=True)
class Site:
    """A daemon with one node; `link` logs in once."""

    url: str
    link: str
    client: Client
    folder: Path

    def run(self, name: str, *flags: str) -> None:
        """Store a run of the toy trainer and start it."""
        python = str(self.folder / "venv" / "bin" / "python")
        spec = {
            "name": name,
            "node": "local",
            "source": "none",
            "environment": {"python": python},
            "command": {"argv": [python, str(TOY), "--output-dir", str(self.folder / name), *flags]},
            "capabilities": {
                "nvml": "wanted",
                "wandb": "off",
                "flash_linear_attention": "off",
                "kernels": "off",
            },
            "stop": {
                "grace_s": 10,
                "extend_max_s": 10,
                "term_s": 2,
                "kill_s": 2,
                "verify_s": 5,
                "gpu_wait_s": 0,
            },
            "log": {"min_free_bytes": 1000},
            "restart": {"policy": "never"},
        }
        self.client.post("/v1/runs", spec)
        self.client.post(f"/v1/runs/{name}/start", {})

    def stop_all(self) -> None:
        """End what tests left running, through the product."""
        for run in self.client.list_all("/v1/runs"):
            if run["phase"] in LIVE:
                operation = self.client.post(f"/v1/runs/{run['name']}/stop", {"save": False})
                self.client.wait_operation(operation["id"], timeout_s=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One daemon for the module."""
    folder = tmp_path_factory.mktemp("site")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (packages,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    shutil.copy(SUPPORT / "fake_nvml" / "pynvml.py", packages)
    (folder / "scene.json").write_text(json.dumps(SCENE))
    # the agent's environment is built explicitly, so the interpreter tells the scene's place
    line = f"import os; os.environ.setdefault('FAKE_NVML', {str(folder / 'scene.json')!r})\n"
    (packages / "scene.pth").write_text(line)
    words = [
        str(Path(sys.executable).parent / "dflashctl"),
        "serve",
        "--state-dir",
        str(folder / "state"),
        "--port",
        "0",
    ]
    with (folder / "daemon.log").open("wb") as log:
        daemon = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        link = daemon.stdout.readline().split()[2]
        url = link.partition("/#")[0]
        with Client(url, (folder / "state" / "admin.token").read_text().strip()) as client:
            client.post("/v1/nodes", {"name": "local", "transport": "local", "root": str(folder / "node")})
            found = Site(url=url, link=link, client=client, folder=folder)
            yield found
            found.stop_all()
    finally:
        daemon.terminate()
        daemon.wait(timeout=120)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium; a missing one fails in CI and is skipped loudly elsewhere."""
    if not Path(CHROMIUM).exists():
        message = f"no browser at {CHROMIUM}: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def cookies(browser: Browser, site: Site) -> StorageState:
    """One login for the module: the daemon refuses more than five a minute."""
    context = browser.new_context()
    log_in(context.new_page(), site)
    state = context.storage_state()
    context.close()
    return state


@pytest.fixture
def page(
    browser: Browser, site: Site, cookies: StorageState, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Page]:
    """A logged-in page; errors in its console fail the test, a screenshot is kept on failure."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, storage_state=cookies)
    opened = context.new_page()
    opened.set_default_timeout(60_000)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(site.url)
    opened.get_by_role("heading", name="Runs").wait_for()
    failures = request.session.testsfailed
    yield opened
    if request.session.testsfailed > failures:
        opened.screenshot(path=str(tmp_path / "failed.png"), animations="disabled")
    context.close()
    assert not problems


def log_in(page: Page, site: Site) -> None:
    """By token, as a person would who has it in the clipboard."""
    page.goto(site.url)
    page.get_by_label("Token").fill((site.folder / "state" / "admin.token").read_text().strip())
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Runs").wait_for()
