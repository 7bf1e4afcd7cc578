"""Prompts as token ids, rendered by the target's chat template, with thinking on or off as it was asked for.

Called by `generate`, by `eval` and by `trainer.assembly` for the evaluation during training, so that all of
them render the same and pass over the same prompts. A prompt that the template refuses is skipped and
counted, as in `prepare`. Must not read files.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from trainer.data.chat import encode_prompt
from trainer.data.prompts import Prompt
from trainer.errors import ConfigError, DataError

_LOG = logging.getLogger(__name__)

TEMPLATE_FAULTS = (TemplateError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What a chat template raises on messages that it does not take."""

ENCODE_REASONS = {
    "template_error": "the chat template refuses these messages",
    "no_tokens": "the chat template makes no text of these messages",
}
"""Why a prompt gives nothing to read for the target, and what that means."""


@dataclass(slots=True)
class EncodedPrompts:
    """Prompts that can be read by the target, in order; all lists have one entry for each."""

    prompts: list[Prompt] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    thinking: list[bool | None] = field(default_factory=list)
    """what the template was told, None for nothing"""
    skipped: Counter[str] = field(default_factory=Counter)
    """how many others there were, by a key of `ENCODE_REASONS`"""
    first_fault: str = ""
    """the first of them, for people"""

    def why_none(self) -> str:
        """Say why no prompt is left."""
        return (
            f"no prompt that the target's chat template takes: {dict(self.skipped)}; the first: "
            f"{self.first_fault}"
        )


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt], thinking: str) -> EncodedPrompts:
    """Render prompts by the target's chat template; those that it refuses are told in the log.

    Args:
        tokenizer: of the target, or None where it has none.
        prompts: their own choice of thinking, where they have one, comes first.
        thinking: `template` leaves the choice to the template, `on` and `off` make it.

    Raises:
        ConfigError: there is no tokenizer, it has no chat template, or one without a switch for thinking
            that was asked for.
    """
    if tokenizer is None or not tokenizer.chat_template:
        lacking = "no tokenizer" if tokenizer is None else "no chat template"
        raise ConfigError(f"target has {lacking}, so no prompt can be rendered: add its files to its folder")
    check_thinking(tokenizer, thinking)
    encoded = EncodedPrompts()
    for prompt in prompts:
        _add(encoded, tokenizer, prompt, thinking)
    if encoded.skipped:
        _LOG.warning("prompts left out: %s; the first: %s", dict(encoded.skipped), encoded.first_fault)
    return encoded


def encode_some(tokenizer: Any, prompts: Sequence[Prompt], thinking: str) -> EncodedPrompts:
    """Do the same, and raise where nothing is left.

    Raises:
        ConfigError: see `encode_prompts`.
        DataError: the template took none of them.
    """
    encoded = encode_prompts(tokenizer, prompts, thinking)
    if not encoded.prompts:
        raise DataError(encoded.why_none())
    return encoded


def check_thinking(tokenizer: Any, thinking: str) -> None:
    """Refuse a choice that the chat template has no switch for.

    Raises:
        ConfigError: `on` or `off` would change nothing.
    """
    if thinking != "template" and "enable_thinking" not in str(tokenizer.chat_template):
        raise ConfigError(
            f"--thinking {thinking} has no effect: the target's chat template has no enable_thinking; "
            "leave it out"
        )


def thinking_of(prompt: Prompt, thinking: str) -> bool | None:
    """Return what the template is told: a prompt's own wish comes before the flag, as in `prepare`."""
    if prompt.thinking is not None or thinking == "template":
        return prompt.thinking
    return thinking == "on"


def _add(encoded: EncodedPrompts, tokenizer: Any, prompt: Prompt, thinking: str) -> None:
    wish = thinking_of(prompt, thinking)
    try:
        ids = encode_prompt(tokenizer, prompt.messages, tools=prompt.tools, thinking=wish)
    except (*TEMPLATE_FAULTS, RecursionError) as error:
        _skip(encoded, prompt, "template_error", f"{type(error).__name__}: {error}")
        return
    if not ids:
        _skip(encoded, prompt, "no_tokens", ENCODE_REASONS["no_tokens"])
        return
    encoded.prompts.append(prompt)
    encoded.token_ids.append(ids)
    encoded.thinking.append(wish)


def _skip(encoded: EncodedPrompts, prompt: Prompt, reason: str, why: str) -> None:
    encoded.skipped[reason] += 1
    encoded.first_fault = encoded.first_fault or " ".join(f"{prompt.id[:40]}: {why}".split())[:300]
