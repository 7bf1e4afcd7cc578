"""What identifies a target on disk, read without loading it.

Called by `trainer.train`: the vocabulary for checking data before the model loads, and the fingerprint that a
stored training state is compared by.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

SAMPLE_KEY = "weights_sample_sha256"
SAMPLES = 256
SAMPLE_BYTES = 4096
"""What of each weight file goes into the fingerprint of a target: 1 MiB, wherever it lies."""


def read_vocab_size(directory: Path) -> int:
    """Return the rows of the target's embedding, from its config file."""
    try:
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return int(raw.get("vocab_size") or raw["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--target-model has a config.json that names no vocab_size: {directory} "
            f"({type(error).__name__}: {error}); name the folder of a language model"
        ) from error


def target_fingerprint(directory: Path, *, mask_token_id: int) -> dict[str, Any]:
    """Return what identifies a target independently of where its folder lies.

    Its weights are sampled: a fine-tuned copy has the same config and sizes, but hardly a page in common.

    Raises:
        ConfigError: a file cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    with _readable(directory):
        return {
            "config_sha256": hashlib.sha256((directory / "config.json").read_bytes()).hexdigest(),
            "weight_files": {file.name: file.stat().st_size for file in files},
            SAMPLE_KEY: sample_digest(files),
            "mask_token_id": mask_token_id,
        }


def export_identity(fingerprint: Mapping[str, Any]) -> dict[str, str]:
    """Return what an export remembers of its target: enough to tell another one of the same shape."""
    return {SAMPLE_KEY: str(fingerprint[SAMPLE_KEY])}


def is_other_target(meta: Mapping[str, str], directory: Path) -> bool:
    """Whether an export is known to be of other target weights than those of a folder.

    Args:
        meta: of the export, see `checkpoint.export.read_target_meta`; without the key nothing is known.
        directory: of the target.
    """
    known = meta.get(SAMPLE_KEY)
    with _readable(directory):
        return known is not None and known != sample_digest(sorted(directory.glob("*.safetensors")))


@contextlib.contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Translate what the disk says.

    Raises:
        ConfigError: a file of the target cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot read the target: {error.filename or directory}: {error.strerror or error}; "
            "copy its files again"
        ) from error


def sample_digest(files: Sequence[Path]) -> str:
    """Return the SHA-256 over `SAMPLES` pages of each file, evenly spread, first and last included."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            for number in range(SAMPLES):
                stream.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
