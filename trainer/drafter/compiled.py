"""Compiling a kernel once per shape, and never falling back to its slow form unnoticed.

Used by `masks` and `attention` for FlexAttention. Each micro-batch length, layer type and dtype is a shape of
its own; past a limit the compiler would silently run the uncompiled function, which materialises all scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MAX_SHAPES = 256
"""More than `loss._coarse_length` and the layer types can produce."""


def compile_per_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for fixed shapes; raises at the limit of shapes instead of running uncompiled.

    The limits are settings of the process. torch's default of 8 is fewer than one run has shapes; it is
    suspected, not measured, to be why steps took minutes on an H200 (torch 2.11) before it was raised.
    """
    # torch loads this package on first access; that takes seconds, and only CUDA runs need it.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_SHAPES)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * MAX_SHAPES)
    dynamo.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False)
