"""Prompts of an evaluation as token ids, with thinking on or off as it was asked for.

Called by `eval.measure` and by `trainer.assembly` for the evaluation during training, so that both render
the same. Must not read files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.data.chat import encode_prompt
from trainer.data.prompts import Prompt


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt], thinking: str) -> list[list[int]]:
    """Render prompts by the target's chat template.

    Args:
        tokenizer: with a chat template.
        prompts: their own choice of thinking, where they have one, comes first.
        thinking: `template` leaves the choice to the template, `on` and `off` make it.
    """
    return [
        encode_prompt(tokenizer, prompt.messages, tools=prompt.tools, thinking=_thinking_of(prompt, thinking))
        for prompt in prompts
    ]


def _thinking_of(prompt: Prompt, thinking: str) -> bool | None:
    if prompt.thinking is not None or thinking == "template":
        return prompt.thinking
    return thinking == "on"
