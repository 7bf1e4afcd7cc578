"""Prompt files: rows `{"id", "domain", "prompt"}`, or `messages` in place of `prompt`, JSONL or tables.

Called by `generate` and by the evaluator. Bad rows are skipped and counted by reason; a file without one good
row is a `DataError`. Must not know tokenizers or models.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.conversations import CHAT_REASONS, find_id, parse_conversation
from trainer.data.sources import READ_REASONS, read_rows, refuse_special
from trainer.errors import DataError

PROMPT_REASONS = {
    **READ_REASONS,
    **CHAT_REASONS,
    "no_prompt": "neither messages nor a prompt that is not blank",
    "ends_with_assistant": "the assistant has spoken last, so nothing is left to answer",
    "duplicate_id": "an earlier row has the same id",
}
"""Why a row is no prompt, and what that means."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `messages` ends before the assistant speaks."""

    id: str
    domain: str | None
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    """function schemas for the template"""
    thinking: bool | None = None
    """the template's thinking switch as the row wants it"""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The usable prompts in file order, and how many rows were skipped for which reason."""

    prompts: tuple[Prompt, ...]
    skipped: Counter[str]


def read_prompts(path: Path | str) -> PromptFile:
    """Read a prompt file.

    Raises:
        DataError: unreadable, or no usable prompt in it.
        ConfigError: a device, or a pipe that nobody has opened.
    """
    refuse_special(Path(path))
    prompts: dict[str, Prompt] = {}
    skipped: Counter[str] = Counter()
    for row in read_rows(Path(path)):
        outcome = row.fault or _parse_prompt(row.value)
        if isinstance(outcome, str):
            skipped[outcome] += 1
        elif outcome.id in prompts:
            skipped["duplicate_id"] += 1
        else:
            prompts[outcome.id] = outcome
    if not prompts:
        raise DataError(f"no usable prompt in {path}: skipped {dict(skipped) or 'nothing, it is empty'}")
    return PromptFile(tuple(prompts.values()), skipped)


def _parse_prompt(row: dict[str, Any]) -> Prompt | str:
    if "messages" not in row:
        text = row.get("prompt")
        if not isinstance(text, list) and not (isinstance(text, str) and text.strip()):
            return "no_prompt"
        row = {**row, "messages": text if isinstance(text, list) else [{"role": "user", "content": text}]}
    chat = parse_conversation(row)
    if isinstance(chat, str):
        return chat
    if chat.messages[-1]["role"] == "assistant":
        return "ends_with_assistant"
    # Without an id of its own a row gets one by its content, the same each time.
    spelled = json.dumps(chat.messages, sort_keys=True)
    identity = find_id(row) or hashlib.sha256(spelled.encode()).hexdigest()[:16]
    tools = tuple(chat.tools) if chat.tools else None
    return Prompt(identity, chat.domain, tuple(chat.messages), tools, chat.thinking)
