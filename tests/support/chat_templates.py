"""Small chat templates after real families, and a byte-level tokenizer for them.

`chat_tokenizer(family)` gives a tokenizer that loses no byte and merges across words and line breaks as real
ones do, with the special tokens and the template of one family. `FAMILIES` names them. Must not be used by
anything outside tests.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{%- if m['role'] == 'assistant' %}{% generation %}"
    "{{ '\n' + m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{ '\n' + m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Marks generated text; the mark begins before the line break that the generation prompt already has."""

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

THINKING = """
{%- macro thought(m) -%}
{%- if m.reasoning_content is string %}{{ m.reasoning_content }}
{%- elif '</think>' in m.content %}{{ m.content.split('</think>')[0].split('<think>')[-1] }}{% endif %}
{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools %}{{ '<|im_start|>system\nTools:' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set answer = m.content.split('</think>')[-1].lstrip('\n') -%}
{%- set inner = thought(m).strip('\n') -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last and (inner or loop.last) -%}
{{- '<think>\n' + inner + '\n</think>\n\n' + answer -}}
{%- else -%}{{- answer -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""
"""Drops the thinking of answers before the last question; writes an empty block where there was none."""

OPEN_BLOCK = THINKING.replace("set answer = m.content", "set answer = (m.content | trim)").replace(
    "{%- endif -%}\n{%- endif -%}\n", "{%- else -%}{{- '<think>\n' -}}{%- endif -%}\n{%- endif -%}\n"
)
"""As `THINKING`, but trims, and the generation prompt opens the block that rendered answers have."""

OBJECT_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}[call {{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value | tojson }}{% endfor %}]"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Wants arguments of tool calls as objects and fails on text."""

OPEN_THINKING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<|Assistant|>{{ m['content'].split('</think>')[-1] }}<|eos|>"
    "{% else %}<|User|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
"""The generation prompt opens a thinking block; rendered answers have none."""

PLAIN_SPACE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %} {{ m['content'] | trim }}</s>{% endif %}{% endfor %}"
)
"""No generation prompt; a blank before each answer."""

FAMILIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "marked": (MARKED, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama3": (
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "gemma": (GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "thinking": (THINKING, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"), "<|im_end|>"),
    "open_block": (OPEN_BLOCK, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"), "<|im_end|>"),
    "object_tools": (OBJECT_TOOLS, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "open_thinking": (OPEN_THINKING, ("<|bos|>", "<|User|>", "<|Assistant|>", "<|eos|>"), "<|eos|>"),
    "plain_space": (PLAIN_SPACE, ("<s>", "</s>"), "</s>"),
}
"""Template, special tokens (the first is the bos), end of turn."""

_TEXT = (
    "the quick brown fox says hello to the lazy dog.\n\nanswer: yes, it is so!\n\n\n"
    "  return value, 12 + 30 = 42\n"
) * 4


@lru_cache
def chat_tokenizer(family: str) -> Any:
    """The tokenizer of one family; shared, so a test that changes it takes a copy."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template, specials, stop = FAMILIES[family]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\r\n]+|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([_TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=specials[0],
        eos_token=stop,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def stop_of(family: str) -> str:
    """The text that ends a turn."""
    return FAMILIES[family][2]
