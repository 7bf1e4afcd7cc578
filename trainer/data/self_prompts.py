"""Prompts that the target invents: given only the opening of a user's turn, it samples what a user would say.

Called by `generate --sample-prompts`. Every draw, also one that is not used, stands in
`<output>.prompts.jsonl`, so an interrupted command draws only what is missing; which draws become prompts is
decided over the whole file in the order of their numbers. Draw `n` depends on the seed and on `n` alone (its
random numbers come from a generator of its own); the target's rounding, so device, dtype and batch size, can
still tip a choice. Must not complete prompts.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from trainer.data.completions import companion_rows
from trainer.data.decoding import Completion, Request
from trainer.data.encoded_prompts import TEMPLATE_FAULTS
from trainer.data.prompts import Prompt
from trainer.data.target_decoding import DecodingLimits, Target
from trainer.data.token_choice import Sampling
from trainer.errors import ConfigError, DataError

log = logging.getLogger(__name__)

DOMAIN = "self"
_SENTENCE_END = re.compile(r"[.!?:]['\")\]]*(?=\s)|\n")
_MARK = "mark0of0content"


@dataclass(frozen=True, slots=True)
class UserHeader:
    """How a user's turn begins and ends in the target's chat template.

    Attributes:
        text: what the target is given.
        input_ids: its tokens.
        end_ids: tokens that end the turn.
    """

    text: str
    input_ids: list[int]
    end_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawSettings:
    """What shapes the draws; `count` draws are made, not all of them become prompts."""

    count: int
    seed: int
    sampling: Sampling
    max_tokens: int
    batch_size: int | None = None


def find_user_header(tokenizer: Any) -> UserHeader:
    """Derive the opening of a user's turn from the chat template.

    A default system prompt is left out where the template shows a later user's turn without it.

    Raises:
        ConfigError: the template does not render a user's text, or puts nothing in front of it.
    """
    try:
        lone = _render(tokenizer, ("user", _MARK))
    except TEMPLATE_FAULTS as error:
        raise ConfigError(
            f"the target's chat template does not render a user's text: {error}; mend it, or give --prompts"
        ) from error
    if _MARK not in lone:
        raise ConfigError(
            "the target's chat template does not show what the user says: give --prompts instead"
        )
    before, _, after = lone.partition(_MARK)
    text = _without_system(tokenizer, before)
    if not text:
        raise ConfigError(
            "the target's chat template puts nothing in front of the user's text: give --prompts instead"
        )
    closing = _tokenize(tokenizer, after)[:1]
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return UserHeader(text, _tokenize(tokenizer, text), frozenset(closing) & special)


def sample_prompts(
    path: Path,
    target: Target,
    tokenizer: Any,
    settings: DrawSettings,
    *,
    header: UserHeader,
    stop_ids: frozenset[int],
) -> tuple[list[Prompt], Counter[str]]:
    """Draw what is missing in `path`, then return the prompts and how many draws were dropped, by reason.

    Raises:
        DataError: no draw can be used.
    """
    ends = stop_ids | header.end_ids
    with companion_rows(path, key="index") as rows:
        missing = [index for index in range(settings.count) if str(index) not in rows.ids]
        if missing:
            log.info("sampling %d prompts behind %r", len(missing), header.text)
            target.decode(
                [Request(index, header.input_ids, _uniforms(settings, index)) for index in missing],
                DecodingLimits(
                    max_new_tokens=settings.max_tokens,
                    stop_ids=ends,
                    sampling=settings.sampling,
                    batch_size=settings.batch_size,
                ),
                lambda finished: rows.write([_draw(tokenizer, *pair, ends) for pair in finished]),
            )
    prompts, dropped = choose_prompts(path, settings)
    if not prompts:
        raise DataError(f"none of {settings.count} sampled prompts is usable: dropped {dict(dropped)}")
    return prompts, dropped


def choose_prompts(path: Path, settings: DrawSettings) -> tuple[list[Prompt], Counter[str]]:
    """Read the draws in order of their numbers and drop those that are no prompt of their own.

    A draw that the length limit cut off is used up to its last whole sentence: small targets seldom end a
    user's turn by themselves (17 % did within 128 tokens with SmolLM2-135M-Instruct).
    """
    # by "\n" alone: a text may hold other line separators, which JSON does not escape
    lines = path.read_text(encoding="utf-8").split("\n")
    draws = [json.loads(line) for line in lines if line]
    prompts: list[Prompt] = []
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    for draw in sorted(draws, key=lambda entry: int(entry["index"])):
        if draw["index"] >= settings.count:
            continue
        text, fault = draw["text"], draw["fault"]
        if fault == "cut_off":
            text = _whole_sentences(text)
            fault = None if text else fault
        fault = fault or ("duplicate" if text.strip() in seen else None)
        if fault:
            dropped[fault] += 1
            continue
        seen.add(text.strip())
        messages = ({"role": "user", "content": text},)
        prompts.append(Prompt(f"{DOMAIN}-{settings.seed}-{draw['index']:07d}", DOMAIN, messages))
    return prompts, dropped


def _whole_sentences(text: str) -> str:
    """Return the text up to its last sentence end; empty when it holds none."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]].strip() if ends else ""


def _uniforms(settings: DrawSettings, index: int) -> npt.NDArray[np.float32]:
    bits = np.random.Philox(key=[settings.seed % 2**64, index])
    return np.random.Generator(bits).random(settings.max_tokens, dtype=np.float32)


def _draw(tokenizer: Any, request: Request, completion: Completion, ends: frozenset[int]) -> dict[str, Any]:
    spoken = [token for token in completion.token_ids if token not in ends]
    text = tokenizer.decode(spoken)
    fault = None
    if set(spoken) & set(tokenizer.all_special_ids):
        fault = "special_token"
    elif completion.is_cut_off:
        fault = "cut_off"
    elif not text.strip():
        fault = "empty"
    return {"index": request.key, "text": text, "tokens": len(completion.token_ids), "fault": fault}


def _without_system(tokenizer: Any, before: str) -> str:
    """The opening of a user's turn alone, if it can be told apart in `before`, else all of `before`."""
    try:
        earlier = _render(tokenizer, ("user", "a"), ("assistant", "b"))
        later = _render(tokenizer, ("user", "a"), ("assistant", "b"), ("user", _MARK))
    except (TemplateError, TypeError, ValueError):
        return before
    turn = later[len(earlier) :].partition(_MARK)[0]
    if not later.startswith(earlier) or not turn or not before.endswith(turn):
        return before
    start = tokenizer.bos_token or ""
    return start + turn if start and before.startswith(start) and not turn.startswith(start) else turn


def _render(tokenizer: Any, *turns: tuple[str, str]) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
