"""Types and ranges of the values in a drafter's `config.json`, before anything is computed from them.

Called by `checkpoint.drafter_format` for every config that is read. A number that is none, or one that no
machine could hold, is refused with file, key and value. Must not judge what values mean together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from trainer.errors import CheckpointError

MOST_LAYERS = 1000
"""Of drafter or target; far above any model, and still a loop that ends."""
MOST = 2**31 - 1


def check_values(raw: Mapping[str, Any], source: str) -> None:
    """Refuse the first value of a wrong type or size; what is absent or null is another check's.

    Raises:
        CheckpointError: names file, key, value and what it must be.
    """
    section = raw.get("dflash_config")
    _check(raw, _TOP, source, "")
    _check(section or {}, _SECTION, source, "dflash_config.")
    for block in ("rope_parameters", "rope_scaling"):
        for key, value in (raw.get(block) or {}).items():
            if key not in ("rope_type", "type") and not _is_setting(value):
                raise CheckpointError(f"{source}: {block}.{key} must be a number: {_shown(value)}")


def _check(raw: Mapping[str, Any], rules: Mapping[str, _Rule], source: str, prefix: str) -> None:
    for key, (what, holds) in rules.items():
        value = raw.get(key)
        if value is not None and not holds(value):
            raise CheckpointError(f"{source}: {prefix}{key} must be {what}: {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_setting(value: Any) -> bool:
    """Whether a value can stand in a rotary scaling block."""
    if isinstance(value, list):
        return all(_is_number(entry) for entry in value)
    return value is None or isinstance(value, bool) or _is_number(value)


def _whole(low: int, high: int = MOST) -> _Rule:
    return f"a whole number from {low} to {high}", lambda value: _is_whole(value, low, high)


def _wholes(low: int, high: int = MOST) -> _Rule:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and all(_is_whole(entry, low, high) for entry in value)

    return f"a list of whole numbers from {low} to {high}", holds


def _is_token(value: Any) -> bool:
    return all(_is_whole(entry, -1, MOST) for entry in (value if isinstance(value, list) else [value]))


_Rule = tuple[str, Callable[[Any], bool]]
_POSITIVE: _Rule = ("a number above 0", lambda value: _is_number(value) and value > 0)
_NUMBER: _Rule = ("a number", _is_number)
_MAPPING: _Rule = ("an object", lambda value: isinstance(value, dict))
_TOKEN: _Rule = ("a token id", _is_token)
_SHARED: Mapping[str, _Rule] = {
    "block_size": _whole(1),
    "mask_token_id": _whole(0),
    "target_layer_ids": _wholes(0, MOST_LAYERS),
    "input_embedding_scale": _NUMBER,
    "final_logit_softcapping": _NUMBER,
}
"""Keys that older drafters have outside of the section."""
_SECTION = _SHARED
_TOP: Mapping[str, _Rule] = {
    **_SHARED,
    "num_hidden_layers": _whole(1, MOST_LAYERS),
    "num_target_layers": _whole(1, MOST_LAYERS),
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), _whole(1)),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"), _whole(1)),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), _POSITIVE),
    **dict.fromkeys(("dflash_config", "rope_parameters", "rope_scaling"), _MAPPING),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKEN),
    "initializer_range": _NUMBER,
    "attention_bias": ("true or false", lambda value: isinstance(value, bool)),
    "sliding_window": _whole(1),
    "layer_types": (
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(entry, str) for entry in value),
    ),
}
