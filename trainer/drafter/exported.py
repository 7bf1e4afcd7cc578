"""From an exported directory back to a drafter.

Called by the evaluator, by `import`, and by anything that continues from an export. The format itself is
`trainer.checkpoint.export`'s; this module only builds the module from what was verified there.
"""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.checkpoint.export import ExportedDrafter, read_export
from trainer.drafter.model import Drafter, DrafterConfig
from trainer.errors import CheckpointError, ConfigError


def load_drafter(
    directory: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Drafter:
    """Load an exported drafter; strict where serving engines are lenient.

    Args:
        directory: our export or a published z-lab style drafter.
        device: where the weights go.
        dtype: dtype of the weights, None keeps the stored one.

    Raises:
        CheckpointError: anything missing, extra, misnamed, misshapen or contradictory.
    """
    exported = read_export(Path(directory))
    config = published_config(exported, directory)
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(dict(exported.tensors), strict=True, assign=True)
    return drafter.to(device=device, dtype=dtype)


def published_config(exported: ExportedDrafter, directory: Path | str) -> DrafterConfig:
    """Build the config of a verified export.

    Raises:
        CheckpointError: no such drafter can exist.
    """
    try:
        return DrafterConfig(**exported.fields)
    except ConfigError as error:
        raise CheckpointError(f"{directory} describes an impossible drafter: {error}") from error
