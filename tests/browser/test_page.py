"""The page in a real browser against a real daemon: each action, each live view, and what goes wrong."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import Site

pytestmark = pytest.mark.browser

LONG_RUN = ("--steps", "100000", "--step-s", "0.02")


def open_run(page: Page, site: Site, name: str) -> None:
    page.goto(f"{site.url}/runs/{name}")
    expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()


def badge(page: Page, word: str):
    return page.locator(".badge", has_text=re.compile(f"^{word}$")).first


def test_the_printed_link_logs_in_once_and_leaves_no_code_in_the_address(
    browser: Browser, site: Site
) -> None:
    first, second = browser.new_context().new_page(), browser.new_context().new_page()

    first.goto(site.link)
    expect(first.get_by_role("heading", name="Runs")).to_be_visible()
    second.goto(site.link)

    assert "code" not in first.url
    expect(second.get_by_role("heading", name="Log in")).to_be_visible()


def test_a_wrong_token_says_so_and_keeps_the_door_shut(browser: Browser, site: Site) -> None:
    page = browser.new_context().new_page()
    page.goto(site.url)

    page.get_by_label("Token").fill("dfs_wrong")
    page.get_by_role("button", name="Log in").click()

    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()


def test_a_run_is_watched_restarted_and_stopped_from_its_page(page: Page, site: Site) -> None:
    site.run("watched", *LONG_RUN)
    open_run(page, site, "watched")

    expect(badge(page, "running")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("Loss over time, newest loss [0-9]"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("queue by bucket over time, newest ≤"))).to_be_visible()

    events = page.get_by_role("region", name="events")
    expect(events.get_by_role("row", name=re.compile("StartRequested"))).to_contain_text("token admin")

    page.get_by_role("button", name="Restart").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("watched")
    expect(dialog).to_contain_text("checkpoint")
    dialog.get_by_role("button", name="Restart").click()
    rows = page.get_by_role("region", name="attempts").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(badge(page, "running")).to_be_visible()

    page.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    expect(badge(page, "stopped")).to_be_visible()
    expect(page.get_by_role("button", name="Start")).to_be_enabled()

    page.get_by_role("button", name="Start").click()
    expect(rows).to_have_count(3)
    expect(badge(page, "running")).to_be_visible()


def test_declining_a_stop_changes_nothing(page: Page, site: Site) -> None:
    site.run("declined", *LONG_RUN)
    open_run(page, site, "declined")
    expect(badge(page, "running")).to_be_visible()

    page.get_by_role("button", name="Stop").click()
    page.keyboard.press("Escape")

    expect(page.get_by_role("dialog")).to_have_count(0)
    assert site.client.get("/v1/runs/declined")["desired"] == "running"


def test_a_run_that_dies_shows_its_reason_and_its_last_lines(page: Page, site: Site) -> None:
    site.run("dying", "--die", "7")
    open_run(page, site, "dying")

    expect(badge(page, "failed")).to_be_visible()
    expect(page.get_by_role("region", name="attempts")).to_contain_text("exit 7")
    expect(page.get_by_test_id("log")).to_contain_text("toy trainer")


def test_gpu_tiles_show_samples_with_units(page: Page, site: Site) -> None:
    site.run("gpus", *LONG_RUN)
    open_run(page, site, "gpus")

    tiles = page.get_by_role("region", name="GPUs")
    expect(tiles).to_contain_text("97 %")
    expect(tiles).to_contain_text("80 GiB of 140 GiB")
    expect(tiles).to_contain_text("590 W")


def test_a_single_sample_is_drawn_and_told(page: Page, site: Site) -> None:
    site.run("short", "--steps", "1")
    open_run(page, site, "short")

    charts = page.get_by_role("region", name="charts")
    expect(charts.get_by_text("one sample so far").first).to_be_visible()
    loss = page.get_by_role("img", name=re.compile("Loss over time"))
    middle = loss.evaluate(
        """plot => { const canvas = plot.querySelector("canvas"), context = canvas.getContext("2d");
        const x = Math.round(canvas.width / 2), colours = new Set();
        const half = context.getImageData(x - 60, 0, 160, canvas.height).data;
        for (let at = 0; at < half.length; at += 4) if (half[at + 3] === 255)
          colours.add([half[at], half[at + 1], half[at + 2]].join());
        return [...colours]; }"""
    )
    colour = page.evaluate(
        """() => { const probe = document.createElement("i");
        probe.style.color = "var(--series-1)"; document.body.append(probe);
        return getComputedStyle(probe).color.match(/\\d+/g).join(); }"""
    )
    assert colour in middle


def test_the_log_follows_until_the_reader_scrolls_up(page: Page, site: Site) -> None:
    site.run("chatty", "--flood", "2000000", *LONG_RUN)
    open_run(page, site, "chatty")
    log = page.get_by_test_id("log")
    expect(page.get_by_role("button", name="following the end")).to_be_visible()
    expect(log.locator(".log-line").nth(30)).to_be_attached()

    log.evaluate("element => { element.scrollTop = 0; }")

    expect(page.get_by_role("button", name="follow the end", exact=True)).to_be_visible()
    page.get_by_role("button", name="follow the end", exact=True).click()
    expect(page.get_by_role("button", name="following the end")).to_be_visible()


def test_the_list_links_to_runs_and_filters_by_phase(page: Page, site: Site) -> None:
    site.run("listed", "--steps", "1")
    page.goto(site.url)
    expect(page.get_by_role("link", name="listed")).to_be_visible()

    page.get_by_label("phase").select_option("held")

    expect(page).to_have_url(re.compile("phase=held"))
    expect(page.get_by_text("No run is held.")).to_be_visible()
    page.go_back()
    page.get_by_role("link", name="listed").click()
    expect(page.get_by_role("heading", name="listed")).to_be_visible()


def test_an_unknown_run_is_named_with_a_way_back(page: Page, site: Site) -> None:
    page.goto(f"{site.url}/runs/nothing-here")

    expect(page.get_by_role("alert")).to_contain_text("NotFound")
    page.get_by_role("link", name="All runs").click()
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()


def test_the_page_says_when_the_daemon_is_gone(page: Page, site: Site) -> None:
    expect(badge(page, "live")).to_be_visible()

    page.context.set_offline(True)

    expect(page.locator(".badge", has_text=re.compile("offline|quiet"))).to_be_visible(timeout=60_000)
    page.context.set_offline(False)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_run_page_is_accessible_and_does_not_scroll_sideways(
    page: Page, site: Site, theme: str, width: int
) -> None:
    if not any(run["name"] == "a11y" for run in site.client.list_all("/v1/runs")):
        site.run("a11y", *LONG_RUN)
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=theme)
    open_run(page, site, "a11y")
    expect(page.get_by_role("img", name=re.compile("Loss over time"))).to_be_visible()

    findings = Axe().run(page).response["violations"]

    serious = [finding["id"] for finding in findings if finding["impact"] in ("serious", "critical")]
    assert not serious, findings
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
