"""The page: built files without a token, and a plain answer with the remedy when it is not built."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from supervisor.api.webui import install_page


def client_of(folder):
    app = FastAPI(openapi_url=None)
    install_page(app, folder)
    return TestClient(app)


@pytest.fixture
def built(tmp_path):
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text("<!doctype html><title>page</title>")
    (tmp_path / "assets" / "app.js").write_text("1")
    (tmp_path.parent / "secret.txt").write_text("hunter2")
    return client_of(tmp_path)


def test_files_are_served_and_views_fall_back_to_the_page(built):
    assert "<title>page" in built.get("/").text
    assert built.get("/assets/app.js").text == "1"
    assert "<title>page" in built.get("/runs/slammed", headers={"Accept": "text/html"}).text


def test_missing_files_are_not_answered_with_the_page(built):
    assert built.get("/assets/none.js").status_code == 404


@pytest.mark.parametrize(
    "path", ["/../secret.txt", "/%2e%2e/secret.txt", "/assets/..%2f..%2fsecret.txt", "/..%5csecret.txt"]
)
def test_nothing_outside_the_folder_is_served(built, path):
    assert "hunter2" not in built.get(path).text


def test_without_a_build_the_page_says_what_to_do(tmp_path):
    response = client_of(tmp_path / "nothing").get("/")

    assert response.status_code == 503
    assert "make setup" in response.text
    assert "<script" not in response.text
