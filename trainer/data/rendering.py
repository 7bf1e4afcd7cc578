"""Beginnings of a chat as text, rendered by the tokenizer's own template, and that text as tokens.

Called by `chat`. Knows where a template marks what the assistant generates, and where in a rendering the
prompt of inference ends. Pure apart from the tokenizer; must not decide what is supervised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Rendering:
    """Renders beginnings of one chat as text."""

    def __init__(
        self,
        tokenizer: Any,
        messages: Messages,
        tools: Sequence[Any] | None,
        thinking: bool | None,
        has_marks: bool,
    ) -> None:
        self.messages = messages
        self._tokenizer = tokenizer
        self._has_marks = has_marks
        self._options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        if tools:
            self._options["tools"] = list(tools)

    def prompt(self, index: int) -> str:
        """What the target reads before it says message `index`."""
        turns = [dict(message) for message in self.messages[:index]]
        return str(
            self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **self._options
            )
        )

    def through(self, index: int) -> tuple[str, list[tuple[int, int]]]:
        """The chat up to and with message `index`, and the character spans that the template marks."""
        turns = [dict(message) for message in self.messages[: index + 1]]
        if not self._has_marks:
            return str(
                self._tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=False, **self._options
                )
            ), []
        encoded = self._tokenizer.apply_chat_template(
            turns,
            add_generation_prompt=False,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
            **self._options,
        )
        text = str(
            self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=False, **self._options
            )
        )
        return text, _spans(encoded["assistant_masks"], encoded["offset_mapping"])


def has_generation_marks(tokenizer: Any) -> bool:
    """Whether the chat template itself marks what the assistant generates."""
    template = tokenizer.chat_template
    return (
        isinstance(template, str)
        # Without offsets of tokens the marks cannot be placed; turns are then found without them.
        and tokenizer.is_fast
        and _GENERATION_MARK.search(template) is not None
    )


def find_border(prompt: str, whole: str, marks: list[tuple[int, int]] | None) -> str | None:
    """The part of `whole` that the target reads; None when the prompt of inference does not return in it."""
    begins = whole.startswith(prompt)
    if marks:
        start = next((start for start, end in marks if end > len(prompt)), marks[-1][0])
        # Between the generation prompt and the mark: blanks are said by the model, text is not.
        if not begins or whole[len(prompt) : start].strip():
            return whole[:start]
    return prompt if begins else None


def with_parsed_arguments(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with arguments of its tool calls as objects, where all of them are JSON."""
    if not turn.get("tool_calls"):
        return turn
    calls = []
    for call in turn["tool_calls"]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return turn
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**turn, "tool_calls": calls}


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Token ids of rendered text."""
    # The template writes the special tokens itself; adding them again would double the first one.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _spans(mask: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Character spans of neighbouring marked tokens."""
    spans: list[tuple[int, int]] = []
    was_marked = False
    for is_marked, (start, end) in zip(mask, offsets, strict=True):
        if is_marked and was_marked:
            spans[-1] = (spans[-1][0], end)
        elif is_marked:
            spans.append((start, end))
        was_marked = bool(is_marked)
    return spans
