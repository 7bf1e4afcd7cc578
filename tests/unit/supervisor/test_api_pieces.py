"""Small parts of the API: valid JSON, limits, entity tags, cursors."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.api.conditional import check_if_match, etag_of
from supervisor.api.errors import HttpError
from supervisor.api.jsonsafe import SafeJSONResponse, render_json
from supervisor.api.limits import (
    LOGINS_PER_MINUTE,
    MAX_TRACKED,
    REQUEST_BURST,
    STREAMS_PER_TOKEN,
    LoginLimit,
    RequestLimit,
    StreamLimit,
)
from supervisor.api.paging import decode_cursor, decode_number, encode_cursor, page_of

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_whatever_a_trainer_reports_becomes_valid_json(value):
    def refuse(name):
        raise AssertionError(f"not JSON: {name}")

    body = SafeJSONResponse({"value": value}).body

    json.loads(body.decode("utf-8"), parse_constant=refuse)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_become_null_at_any_depth(number):
    assert render_json({"a": [1.5, {"b": number}]}) == '{"a":[1.5,{"b":null}]}'


def test_lone_surrogates_do_not_break_an_answer():
    assert json.loads(SafeJSONResponse({"line": "x\udc80y"}).body) == {"line": "x?y"}


def test_types_that_are_not_json_are_a_bug_and_not_hidden():
    with pytest.raises(TypeError, match="not JSON: set"):
        render_json({"a": {1}})


class Time:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_sixth_login_within_a_minute_is_refused_and_the_first_after_it_passes():
    time = Time()
    limit = LoginLimit(time)
    for _ in range(LOGINS_PER_MINUTE):
        limit.check("10.0.0.1")

    with pytest.raises(HttpError) as refusal:
        limit.check("10.0.0.1")
    limit.check("10.0.0.2")
    time.now += 60
    limit.check("10.0.0.1")

    assert refusal.value.status == 429
    assert int(refusal.value.headers["Retry-After"]) >= 60


def test_login_limit_remembers_a_bounded_number_of_clients():
    limit = LoginLimit(Time())
    for number in range(MAX_TRACKED + 10):
        limit.check(f"client-{number}")

    assert len(limit._attempts) == MAX_TRACKED


def test_requests_of_one_token_are_limited_and_refill_with_time():
    time = Time()
    limit = RequestLimit(time)
    for _ in range(int(REQUEST_BURST)):
        limit.check("token/a")

    with pytest.raises(HttpError, match="requests a second"):
        limit.check("token/a")
    limit.check("token/b")
    time.now += 1
    limit.check("token/a")


def test_streams_of_one_token_are_limited_and_given_back():
    limit = StreamLimit()
    held = [limit.hold("a") for _ in range(STREAMS_PER_TOKEN)]
    for place in held:
        place.__enter__()

    with pytest.raises(HttpError, match="streams are open"), limit.hold("a"):
        pass
    with limit.hold("b"):
        assert limit.count == STREAMS_PER_TOKEN + 1
    for place in held:
        place.__exit__(None, None, None)

    assert limit.count == 0


@pytest.mark.parametrize("header", ['"3"', '"1", "3"', "*"])
def test_present_version_passes_the_precondition(header):
    check_if_match(header, 3)


@pytest.mark.parametrize("header", ['"2"', "3", 'W/"3"', "", '"33"'])
def test_any_other_version_is_stale(header):
    with pytest.raises(HttpError) as refusal:
        check_if_match(header, 3)

    assert refusal.value.status == 412
    assert "version 3" in refusal.value.message


def test_missing_precondition_is_its_own_status():
    with pytest.raises(HttpError) as refusal:
        check_if_match(None, 3)

    assert (refusal.value.status, etag_of(3)) == (428, '"3"')


@given(st.text())
def test_cursors_round_trip(key):
    if key.isprintable():
        assert decode_cursor(encode_cursor(key)) == key


@pytest.mark.parametrize("cursor", ["!", "a", "é", "=", "AA==AA", "____"])
def test_foreign_cursors_are_refused(cursor):
    with pytest.raises(HttpError, match="not a cursor"):
        decode_cursor(cursor)


@pytest.mark.parametrize("key", ["x", "-1", "1" * 40, "1.5", "²"])
def test_number_cursors_hold_plain_numbers_only(key):
    with pytest.raises(HttpError, match="not a cursor"):
        decode_number(encode_cursor(key))


@given(st.lists(st.text(alphabet="abc", min_size=1), unique=True), st.integers(1, 4))
def test_pages_hold_every_item_once_in_order(names, limit):
    items = [{"name": name} for name in sorted(names)]
    seen, cursor = [], None
    while True:
        page = page_of(items, key=lambda item: item["name"], limit=limit, cursor=cursor)
        seen += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break

    assert seen == items
