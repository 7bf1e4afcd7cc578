"""A tiny random target and corpus, made locally: for every test that needs a model but not a real one.

`tiny_target(folder)` saves a random Llama (H=64, L=8, V=97, fp32 safetensors) with a character tokenizer and
a ChatML-like template; rows 55..96 of its vocabulary are never produced by text, so the mask token can be
chosen there. `tiny_samples` / `write_tiny_corpus` give tokenized rows over the same vocabulary. Seeds make
all of it repeatable. Needs no network; must not be used by anything outside tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

VOCAB = 97
HIDDEN = 64
LAYERS = 8
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,?!'-:+=*/()"
SPECIALS = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
TOKENS = len(SPECIALS) + len(LETTERS)
PAD_ID, UNK_ID, START_ID, END_ID = range(4)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_target(folder: Path, *, seed: int = 0, with_tokenizer: bool = True, **overrides: object) -> Path:
    """Save a random Llama target below `folder` and return its directory; `overrides` change its config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, object] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": START_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
    }
    directory = folder / f"tiny-target-{seed}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(fields | overrides)))
    model.save_pretrained(directory)
    if with_tokenizer:
        tiny_tokenizer().save_pretrained(directory)
    return directory


def tiny_tokenizer():
    """A character tokenizer of 55 tokens (4 specials + `LETTERS`) with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *LETTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_samples(
    count: int = 24,
    *,
    seed: int = 0,
    min_length: int = 8,
    max_length: int = 48,
    domains: tuple[str, ...] = ("a", "b"),
) -> list[dict[str, object]]:
    """Rows `{input_ids, loss_mask, domain}`; the first third of each is prompt, the rest supervised."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for index in range(count):
        length = int(rng.integers(min_length, max_length + 1))
        prompt = max(1, length // 3)
        rows.append(
            {
                "input_ids": rng.integers(len(SPECIALS), TOKENS, size=length).tolist(),
                "loss_mask": [0] * prompt + [1] * (length - prompt),
                "domain": domains[index % len(domains)],
            }
        )
    return rows


def write_tiny_corpus(folder: Path, rows: list[dict[str, object]] | None = None) -> Path:
    """Write `rows` (default `tiny_samples()`) as `folder/train.jsonl`; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in (tiny_samples() if rows is None else rows)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder
