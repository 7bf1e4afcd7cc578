"""Chats as token ids: the tokenizer's own chat template, and which tokens a drafter is trained on.

Called by `prepare`, `generate` and the evaluator, so that training data, completions and measured prompts are
all rendered by the same code. Supervised are the tokens that the target itself would generate: from the first
token behind the generation prompt to the end-of-turn token, but not the line break that templates add behind
it. Pure apart from the tokenizer; must not read files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[Mapping[str, str]]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """One chat, tokenized; `unsupervised_turns` counts assistant turns that the template rewrites."""

    input_ids: list[int]
    loss_mask: list[int]
    unsupervised_turns: int


def find_message_fault(messages: Any) -> str | None:
    """Why `messages` is no chat (a short reason), or None."""
    if not isinstance(messages, list) or not messages:
        return "no_messages"
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return "bad_message"
        if not isinstance(message.get("content"), str):
            return "bad_message"
    return None


def encode_prompt(tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids of a chat up to where the assistant starts to speak."""
    return _tokenize(tokenizer, _render(tokenizer, messages, generation_prompt=True))


def encode_chat(
    tokenizer: Any, messages: Messages, *, stop_ids: Collection[int], is_cut_off: bool = False
) -> EncodedChat | None:
    """Tokenize a chat and mark what its assistant said.

    Args:
        tokenizer: with a chat template.
        messages: turns; at least one of the assistant.
        stop_ids: ids that end a turn.
        is_cut_off: the last assistant turn ended by a length limit: the end-of-turn token is not its own.

    Returns:
        The chat, or None when no assistant turn could be found again in the rendered whole.
    """
    whole = _tokenize(tokenizer, _render(tokenizer, messages, generation_prompt=False))
    mask = [0] * len(whole)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    lost = 0
    for index in turns:
        span = _find_span(tokenizer, messages, index, whole)
        if span is None:
            lost += 1
            continue
        start, end = _trim(whole, span, stop_ids, keep_stop=not (is_cut_off and index == turns[-1]))
        mask[start:end] = [1] * (end - start)
    if lost == len(turns):
        return None
    return EncodedChat(whole, mask, lost)


def join_completion(
    tokenizer: Any, messages: Messages, completion_ids: Any, *, stop_ids: Collection[int]
) -> EncodedChat | None:
    """Put recorded completion tokens behind the prompt's: exactly what the target read and said.

    Args:
        tokenizer: with a chat template.
        messages: turns that end with the completion's text.
        completion_ids: the tokens of that last turn as generated, its stop token included.
        stop_ids: ids that end a turn.

    Returns:
        The chat with only the completion supervised, or None when the ids do not spell the last turn (they
        belong to another tokenizer, or somebody edited the text).
    """
    if messages[-1]["role"] != "assistant" or not _are_ids(completion_ids):
        return None
    text = tokenizer.decode([token for token in completion_ids if token not in stop_ids])
    if text != messages[-1]["content"]:
        return None
    prompt = encode_prompt(tokenizer, messages[:-1])
    return EncodedChat(prompt + completion_ids, [0] * len(prompt) + [1] * len(completion_ids), 0)


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in value
        )
    )


def _find_span(tokenizer: Any, messages: Messages, index: int, whole: list[int]) -> tuple[int, int] | None:
    # Templates may drop earlier thinking or merge tokens across the border: no faithful sample.
    before = encode_prompt(tokenizer, messages[:index])
    through = _tokenize(tokenizer, _render(tokenizer, messages[: index + 1], generation_prompt=False))
    if whole[: len(before)] != before or whole[: len(through)] != through:
        return None
    return len(before), len(through)


def _trim(
    whole: list[int], span: tuple[int, int], stop_ids: Collection[int], *, keep_stop: bool
) -> tuple[int, int]:
    start, end = span
    stops = [position for position in range(start, end) if whole[position] in stop_ids]
    if not stops:
        return start, end
    return start, stops[-1] + 1 if keep_stop else stops[-1]


def _render(tokenizer: Any, messages: Messages, *, generation_prompt: bool) -> str:
    turns = [dict(message) for message in messages]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation_prompt))


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    # The template writes the special tokens itself; adding them again would double the first one.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
