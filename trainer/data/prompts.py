"""Prompt files: JSONL rows `{"id", "domain", "prompt"}`, or `messages` in place of `prompt`.

Called by `generate` and by the evaluator. Bad rows are skipped and counted by reason; a file without one good
row is a `DataError`. Must not know tokenizers or models.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.chat import find_message_fault
from trainer.errors import DataError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `messages` ends before the assistant speaks."""

    id: str
    domain: str | None
    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The usable prompts in file order, and how many rows were skipped for which reason."""

    prompts: tuple[Prompt, ...]
    skipped: Counter[str]


def read_prompts(path: Path | str) -> PromptFile:
    """Read a prompt file.

    Raises:
        DataError: unreadable, or no usable prompt in it.
    """
    prompts: dict[str, Prompt] = {}
    skipped: Counter[str] = Counter()
    for row in read_json_lines(Path(path)):
        outcome = _parse_prompt(row)
        if isinstance(outcome, str):
            skipped[outcome] += 1
        elif outcome.id in prompts:
            skipped["duplicate_id"] += 1
        else:
            prompts[outcome.id] = outcome
    if not prompts:
        raise DataError(f"no usable prompt in {path}: skipped {dict(skipped) or 'nothing, it is empty'}")
    return PromptFile(tuple(prompts.values()), skipped)


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield each non-blank line's value, None for a line that is not JSON.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            for line in stream:
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError:
                        yield None
    except OSError as error:
        raise DataError(f"cannot read: {path}: {error.strerror or error}") from error


def _parse_prompt(row: Any) -> Prompt | str:
    if not isinstance(row, dict):
        return "bad_json"
    text = row.get("prompt")
    if "messages" in row:
        messages = row["messages"]
    elif isinstance(text, str) and text.strip():
        messages = [{"role": "user", "content": text}]
    else:
        return "no_prompt"
    fault = find_message_fault(messages)
    if fault is not None:
        return fault
    if messages[-1]["role"] == "assistant":
        return "ends_with_assistant"
    domain = row.get("domain")
    identity = row.get("id")
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        identity = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]
    return Prompt(str(identity), domain if isinstance(domain, str) else None, tuple(messages))
