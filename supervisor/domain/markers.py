"""Environment markers of a lock (`; python_full_version < '3.12'`), evaluated for one interpreter.

Used by `deploy.py` so that a line that does not apply on the node is no difference. Only what locks use is
understood: comparisons joined by and, or and brackets. What is not understood counts as applying.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_TOKEN = re.compile(
    r"\s*(?:(\(|\))|(<=|>=|==|!=|~=|===|<|>|not\s+in\b|in\b)|(and|or)\b|'([^']*)'|\"([^\"]*)\"|([A-Za-z_.]+))"
)
_VERSIONS = frozenset({"python_version", "python_full_version", "implementation_version"})


def marker_applies(marker: str, facts: Mapping[str, str]) -> bool:
    """Whether a marker holds.

    Args:
        marker: text after the semicolon.
        facts: `python_full_version`, `sys_platform`, `platform_machine` ...; a name that is absent makes its
            comparison hold.
    """
    tokens = _tokens(marker)
    if tokens is None:
        return True
    parser = _Parser(tokens, facts)
    result = parser.parse_or()
    return result if parser.is_done else True


def marker_facts(python: str | None, platform: str | None) -> dict[str, str]:
    """Facts from an interpreter's version and a platform text such as `linux-x86_64`."""
    facts: dict[str, str] = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    if python:
        facts["python_full_version"] = python
        facts["python_version"] = ".".join(python.split(".")[:2])
    if platform:
        system, _, machine = platform.lower().partition("-")
        facts["sys_platform"] = "linux" if system.startswith("linux") else system
        facts["platform_system"] = "Linux" if system.startswith("linux") else system.title()
        facts["os_name"] = "posix" if system != "windows" else "nt"
        for known in ("x86_64", "aarch64", "arm64"):
            if known in machine:
                facts["platform_machine"] = known
    return facts


def compare_versions(left: str, right: str) -> int:
    """-1, 0 or 1 by the numbers of two versions; trailing zeros do not count."""
    first, second = _numbers(left), _numbers(right)
    length = max(len(first), len(second))
    padded = [(*numbers, *(0,) * (length - len(numbers))) for numbers in (first, second)]
    return (padded[0] > padded[1]) - (padded[0] < padded[1])


class _Parser:
    """Recursive descent over the tokens; `and` binds tighter than `or`."""

    def __init__(self, tokens: list[tuple[str, str]], facts: Mapping[str, str]) -> None:
        self._tokens = tokens
        self._facts = facts
        self._position = 0

    @property
    def is_done(self) -> bool:
        return self._position >= len(self._tokens)

    def parse_or(self) -> bool:
        result = self._parse_and()
        while self._peek() == ("word", "or"):
            self._position += 1
            result = self._parse_and() or result
        return result

    def _parse_and(self) -> bool:
        result = self._parse_one()
        while self._peek() == ("word", "and"):
            self._position += 1
            result = self._parse_one() and result
        return result

    def _parse_one(self) -> bool:
        if self._peek() == ("bracket", "("):
            self._position += 1
            result = self.parse_or()
            if self._peek() == ("bracket", ")"):
                self._position += 1
            return result
        left, operator, right = (self._next() for _ in range(3))
        return self._compare(left, operator[1], right)

    def _compare(self, left: tuple[str, str], operator: str, right: tuple[str, str]) -> bool:
        first, second = self._value(left), self._value(right)
        if first is None or second is None:
            return True
        if left[1] in _VERSIONS or right[1] in _VERSIONS:
            sign = compare_versions(first, second)
            checks: dict[str, Callable[[], bool]] = {
                "<": lambda: sign < 0,
                "<=": lambda: sign <= 0,
                ">": lambda: sign > 0,
                ">=": lambda: sign >= 0,
                "==": lambda: _matches(first, second),
                "!=": lambda: not _matches(first, second),
            }
            return checks[operator]() if operator in checks else True
        plain = {"==": first == second, "!=": first != second, "in": first in second}
        return plain.get(operator, first not in second if operator.startswith("not") else True)

    def _value(self, token: tuple[str, str]) -> str | None:
        return token[1] if token[0] == "text" else self._facts.get(token[1])

    def _peek(self) -> tuple[str, str] | None:
        return None if self.is_done else self._tokens[self._position]

    def _next(self) -> tuple[str, str]:
        token = self._peek() or ("name", "")
        self._position += 1
        return token


def _matches(version: str, pattern: str) -> bool:
    if pattern.endswith(".*"):
        prefix = _numbers(pattern[:-2])
        return _numbers(version)[: len(prefix)] == prefix
    return compare_versions(version, pattern) == 0


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release.group(0).split(".")) if release else ()


def _tokens(marker: str) -> list[tuple[str, str]] | None:
    found: list[tuple[str, str]] = []
    position = 0
    text = marker.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        found.append(_token(match))
        position = match.end()
    return found


def _token(match: re.Match[str]) -> tuple[str, str]:
    groups: tuple[Any, ...] = match.groups()
    kinds = ("bracket", "operator", "word", "text", "text", "name")
    return next((kind, group) for kind, group in zip(kinds, groups, strict=True) if group is not None)
