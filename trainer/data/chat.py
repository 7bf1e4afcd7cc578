"""Chats as token ids: the tokenizer's own chat template, and which tokens a drafter is trained on.

Called by `prepare`, `generate` and the evaluator, so that training data, completions and measured prompts are
all rendered by the same code. A supervised turn is what the target read at that turn (the rendered chat
before it, with the generation prompt), then what the assistant said, then the token that ends the turn. No
rendering is taken for the beginning of another one: turns share a sample only where the tokens of the earlier
turn return unchanged in the prompt of the later one; where a template rewrites history, the next turn begins
a sample of its own. Pure apart from the tokenizer; must not read files.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from trainer.data.rendering import (
    Messages,
    Rendering,
    find_border,
    has_generation_marks,
    tokenize,
    with_parsed_arguments,
)

TURN_REASONS = {
    "empty_turn": "the assistant said nothing",
    "stop_inside": "the answer holds a token that ends a turn",
    "open_thinking": "the generation prompt opens a thinking block that the answer does not close",
    "not_in_template": "the template does not render the answer",
    "not_marked": "the template marks generated text, and this answer is not marked",
    "reasoning_not_in_template": "the template does not render the thinking that came before the answer",
    "tool_call_not_in_template": "the template does not render the tool call",
    "token_border": "the answer cannot be tokenized apart from its prompt",
    "unknown_token": "the tokenizer has no token for a part of the answer",
}
"""Why an assistant turn is not supervised, and what that means."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One supervised turn: `message` is its index in the chat, `start` and `end` are tokens of its sample."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ChatSample:
    """Tokens up to the end of the last supervised turn."""

    input_ids: list[int]
    turns: tuple[Turn, ...]

    @property
    def loss_mask(self) -> list[int]:
        """1 on what the assistant said, 0 elsewhere; as long as `input_ids`."""
        mask = [0] * len(self.input_ids)
        for turn in self.turns:
            mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
        return mask


@dataclass(slots=True)
class EncodedChat:
    """A tokenized chat: one sample, or several where the template rewrites history."""

    samples: list[ChatSample] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    """assistant turns that are not supervised, by reason"""
    respelled: int = 0
    """turns that the template or the tokenizer spells otherwise than the assistant did"""


@dataclass(frozen=True, slots=True)
class _SpokenTurn:
    """A turn as text: `before` is read by the target, `said` and `stop` are what it is trained to say."""

    before: str
    said: str
    stop: str
    is_respelled: bool = False


@dataclass(frozen=True, slots=True)
class _Settings:
    """What one call of `encode` is asked for."""

    tools: Sequence[Any] | None
    thinking: bool | None
    is_cut_off: bool
    enough_tokens: int | None


class ChatEncoder:
    """Encodes chats by one tokenizer.

    Args:
        tokenizer: with a chat template.
        stop_ids: ids that end a turn.
        thinking: handed to the template as `enable_thinking`; None leaves the choice to the template.
    """

    def __init__(self, tokenizer: Any, *, stop_ids: Collection[int], thinking: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        spelled = (tokenizer.decode([token]) for token in sorted(self._stop_ids))
        self._stops = [stop for stop in spelled if stop.strip()]
        self._thinking = thinking
        self._has_marks = has_generation_marks(tokenizer)

    def encode(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        thinking: bool | None = None,
        is_cut_off: bool = False,
        enough_tokens: int | None = None,
    ) -> EncodedChat:
        """Tokenize a chat and mark what its assistant said.

        Args:
            messages: turns in normal form (see `conversations`), at least one of the assistant.
            tools: function schemas for the template.
            thinking: overrides the encoder's own.
            is_cut_off: the last assistant turn ended by a length limit: the end of turn is not its own.
            enough_tokens: leave out what comes behind the first turn that starts there or later.
        """
        settings = _Settings(
            tools, self._thinking if thinking is None else thinking, is_cut_off, enough_tokens
        )
        parsed = [with_parsed_arguments(message) for message in messages]
        if parsed == list(messages):
            return self._encode(messages, settings)
        # Some templates take arguments of tool calls as text and repeat it, others want objects. A failure
        # of the first try is not lost: the row counts as respelled, and what refuses both raises below.
        with contextlib.suppress(TemplateError, TypeError, ValueError):
            chat = self._encode(messages, settings)
            if not chat.lost["tool_call_not_in_template"]:
                return chat
        chat = self._encode(parsed, settings)
        chat.respelled += 1
        return chat

    def _encode(self, messages: Messages, settings: _Settings) -> EncodedChat:
        view = Rendering(self._tokenizer, messages, settings.tools, settings.thinking, self._has_marks)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        chat = EncodedChat()
        for index in answers:
            keeps_stop = not (settings.is_cut_off and index == answers[-1])
            outcome = self._encode_turn(view, index, keeps_stop=keeps_stop)
            if isinstance(outcome, str):
                chat.lost[outcome] += 1
                continue
            input_ids, start, is_exact = outcome
            chat.respelled += not is_exact
            _append_turn(chat.samples, input_ids, Turn(index, start, len(input_ids)))
            if settings.enough_tokens is not None and start >= settings.enough_tokens:
                # Each further turn would cost the whole chat again, and none of it would be kept.
                break
        return chat

    def _encode_turn(
        self, view: Rendering, index: int, *, keeps_stop: bool
    ) -> tuple[list[int], int, bool] | str:
        spoken = self._find_turn(view, index)
        if isinstance(spoken, str):
            return spoken
        outcome = self._tokenize_turn(spoken, spoken.stop if keeps_stop else "")
        if isinstance(outcome, str):
            return outcome
        input_ids, start, is_exact = outcome
        return input_ids, start, is_exact and not spoken.is_respelled

    def join_completion(
        self,
        messages: Messages,
        completion_ids: Any,
        *,
        tools: Sequence[Any] | None = None,
        thinking: bool | None = None,
    ) -> ChatSample | None:
        """Put recorded completion tokens behind the prompt's: exactly what the target read and said.

        Args:
            messages: turns that end with the completion.
            completion_ids: the tokens of that last turn as generated, its stop token included.
            tools: function schemas for the template.
            thinking: overrides the encoder's own.

        Returns:
            The sample with only the completion supervised, or None when the ids do not spell the last turn
            (they belong to another tokenizer, or somebody edited the text).
        """
        if messages[-1]["role"] != "assistant" or not _are_ids(completion_ids):
            return None
        text = self._tokenizer.decode([token for token in completion_ids if token not in self._stop_ids])
        if text != messages[-1]["content"] and not _spells_turn(text, messages[-1]):
            return None
        prompt = encode_prompt(
            self._tokenizer,
            messages[:-1],
            tools=tools,
            thinking=self._thinking if thinking is None else thinking,
        )
        turn = Turn(len(messages) - 1, len(prompt), len(prompt) + len(completion_ids))
        return ChatSample(prompt + completion_ids, (turn,))

    def _find_turn(self, view: Rendering, index: int) -> _SpokenTurn | str:
        """Text of one assistant turn as the target reads and says it, or a key of `TURN_REASONS`."""
        message = view.messages[index]
        texts = (message["content"], message.get("reasoning_content", ""))
        if not any(text.strip() for text in texts) and not message.get("tool_calls"):
            return "empty_turn"
        if any(stop in text for stop in self._stops for text in texts):
            return "stop_inside"
        prompt = view.prompt(index)
        whole, marks = view.through(index)
        before = find_border(prompt, whole, marks if self._has_marks else None)
        if before is None:
            return self._say_verbatim(prompt, whole, message)
        if self._has_marks and not any(end > len(before) for _, end in marks):
            return "not_marked"
        said, stop = self._split_stop(whole[len(before) :])
        if "reasoning_content" not in message and not message.get("tool_calls"):
            return _say_plain(before, said, stop, message["content"])
        # Thinking and tool calls are spelled by the template; all of it must be there.
        fault = _structure_fault(said, message)
        return fault or _SpokenTurn(before, said if stop else said.rstrip(), stop)

    def _say_verbatim(self, prompt: str, whole: str, message: Mapping[str, Any]) -> _SpokenTurn | str:
        """The template writes this turn's opening in another way than its generation prompt does."""
        content, thought = message["content"], message.get("reasoning_content")
        opens_thinking = prompt.rstrip().endswith("<think>")
        if message.get("tool_calls"):
            return "not_in_template"
        if thought is not None and not opens_thinking:
            return "reasoning_not_in_template"
        if opens_thinking and thought is None and "</think>" not in content:
            return "open_thinking"
        said, stop = self._split_stop(whole, from_end=True)
        tail = _squeeze(content.rpartition("</think>")[2])
        if not stop or not tail or not _squeeze(said).endswith(tail):
            return "not_in_template"
        return _SpokenTurn(prompt, _join_thought(thought, content), stop, is_respelled=True)

    def _split_stop(self, text: str, *, from_end: bool = False) -> tuple[str, str]:
        """Split at the first token that ends a turn (`from_end`: the last); without one, all is text."""
        search = str.rfind if from_end else str.find
        found = [(search(text, stop), stop) for stop in self._stops if stop in text]
        if not found:
            return text, ""
        place, stop = max(found) if from_end else min(found)
        return text[:place], stop

    def _tokenize_turn(self, spoken: _SpokenTurn, stop: str) -> tuple[list[int], int, bool] | str:
        """Token ids, where the turn starts in them, and whether they spell it byte by byte."""
        prompt_ids = tokenize(self._tokenizer, spoken.before)
        whole = spoken.before + spoken.said + stop
        input_ids = tokenize(self._tokenizer, whole)
        start = len(prompt_ids)
        if input_ids[:start] != prompt_ids:
            # A token lies across the border. The target reads the prompt's own tokens, then chooses anew.
            apart = prompt_ids + tokenize(self._tokenizer, spoken.said + stop)
            if self._tokenizer.decode(apart) != self._tokenizer.decode(input_ids):
                return "token_border"
            input_ids = apart
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and unknown not in self._stop_ids and unknown in input_ids[start:]:
            return "unknown_token"
        spelled = self._tokenizer.decode(input_ids[start:])
        # Some decoders drop the blank in front of the first word.
        is_exact = spelled == spoken.said + stop or self._tokenizer.decode(input_ids).endswith(
            spoken.said + stop
        )
        return input_ids, start, is_exact


def encode_prompt(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: Sequence[Any] | None = None,
    thinking: bool | None = None,
) -> list[int]:
    """Token ids of a chat up to where the assistant starts to speak.

    Args:
        tokenizer: with a chat template.
        messages: turns, the last one not of the assistant.
        tools: function schemas for the template.
        thinking: handed to the template as `enable_thinking`; None leaves the choice to the template.
    """
    return tokenize(tokenizer, Rendering(tokenizer, messages, tools, thinking, False).prompt(len(messages)))


def _say_plain(before: str, said: str, stop: str, content: str) -> _SpokenTurn | str:
    """A turn of text alone: the template may put something in front of it, or trim it."""
    place = said.rfind(content)
    if place >= 0 and not said[place + len(content) :].strip():
        if not said[:place].strip():
            # All behind the generation prompt is generated, a blank that the template writes included.
            place = 0
        return _SpokenTurn(before + said[:place], said[place:] if stop else said[place:].rstrip(), stop)
    rendered, wanted = _squeeze(said), _squeeze(content)
    if wanted.endswith(rendered) and rendered:
        return _SpokenTurn(before, content, stop, is_respelled=True)
    if rendered.endswith(wanted):
        front = _front(said, len(rendered) - len(wanted))
        return _SpokenTurn(before + front, content, stop, is_respelled=True)
    return "not_in_template"


def _join_thought(thought: str | None, content: str) -> str:
    """What was said behind a generation prompt that opens the thinking block."""
    if thought is None:
        return content
    # Servers that take the two apart may keep the line breaks between them, or strip those that are usual.
    has_breaks = thought.endswith("\n") or content.startswith("\n")
    return f"{thought}</think>{content}" if has_breaks else f"{thought}\n</think>\n\n{content}"


def _structure_fault(said: str, message: Mapping[str, Any]) -> str:
    """A key of `TURN_REASONS` where thinking, text or a tool call is missing, else nothing."""
    rendered = _squeeze(said)
    if _squeeze(message.get("reasoning_content", "")) not in rendered:
        return "reasoning_not_in_template"
    if _squeeze(message["content"]) not in rendered:
        return "not_in_template"
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        is_there = not isinstance(arguments, str) or arguments.strip() in said
        if function["name"] not in said or not is_there:
            return "tool_call_not_in_template"
    return ""


def _append_turn(samples: list[ChatSample], input_ids: list[int], turn: Turn) -> None:
    """Lengthen the last sample where its tokens come back unchanged, else begin a sample."""
    if samples:
        last = samples[-1]
        if input_ids[: len(last.input_ids)] == last.input_ids and turn.start >= len(last.input_ids):
            samples[-1] = ChatSample(input_ids, (*last.turns, turn))
            return
    samples.append(ChatSample(input_ids, (turn,)))


def _spells_turn(text: str, message: Mapping[str, Any]) -> bool:
    """Whether generated text is this message, whose thinking and tool calls a server has taken apart."""
    if "reasoning_content" not in message and not message.get("tool_calls"):
        return False
    if _structure_fault(text, with_parsed_arguments(dict(message))):
        return False
    return bool(message.get("tool_calls")) or _squeeze(text).endswith(_squeeze(message["content"]))


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in value
        )
    )


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _front(text: str, visible: int) -> str:
    """The beginning of `text` with so many characters that are not blank, and the blanks behind them."""
    if visible == 0:
        return ""
    count = 0
    for place, character in enumerate(text):
        count += not character.isspace()
        if count > visible:
            return text[:place]
    return text
