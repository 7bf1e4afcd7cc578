"""What an environment can do beyond running: asked by its own interpreter, with a reason for every no.

Used by `deploy` (stored with the pair, which never changes) and by launches in external environments. A
capability that is missing is reported with its cause and remedy; whether that refuses a launch is the spec's
word (`required | wanted | off`), applied in `preflight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from supervisor.domain.errors import ShimError
from supervisor.reconciler.checks import Finding
from supervisor.reconciler.connections import NodeConnection

CAPABILITIES = ("nvml", "wandb", "flash_linear_attention", "kernels", "gpu_direct", "cuda")
PROBE_DEADLINE_S = 600.0

REMEDIES: Mapping[str, str] = {
    "nvml": "add nvidia-ml-py (the module is pynvml) to the lock and deploy again",
    "wandb": "add wandb to the lock and deploy again",
    "flash_linear_attention": "add flash-linear-attention to the lock and deploy again",
    "kernels": "add liger-kernel to the lock and deploy again",
    "gpu_direct": "needs a CUDA build of torch and at least one visible GPU",
    "cuda": "needs a CUDA build of torch, the driver's libraries in the node and at least one visible GPU",
}

PACKAGES: Mapping[str, str] = {
    "nvml": "nvidia-ml-py",
    "wandb": "wandb",
    "flash_linear_attention": "flash-linear-attention",
    "kernels": "liger-kernel",
}
"""What to install in an interpreter that is not ours: no deploy changes that."""

_DRIVER_REASONS: Mapping[str, str] = {
    "LibraryNotFound": "install the NVIDIA user-space libraries of the host's driver version in the node",
    "DriverMismatch": "install the same driver version in the node as on its host",
    "NoCuda": "needs a CUDA build of torch and at least one visible GPU",
}


async def probe_capabilities(
    connection: NodeConnection, python: str, names: Iterable[str] = CAPABILITIES, *, is_external: bool = False
) -> dict[str, Any]:
    """Probe with the interpreter `python` in the node; the answer maps each name to what was found.

    Args:
        connection: to the node.
        python: path of the interpreter.
        names: of the capabilities.
        is_external: the interpreter is the user's, so remedies name it and not the lock.
    """
    wanted = list(names)
    try:
        answer = await connection.request(
            "probe", python=python, capabilities=wanted, deadline_s=PROBE_DEADLINE_S
        )
    except ShimError as error:
        remedy = error.hint or (interpreter_remedy(python) if is_external else "")
        return {name: _unknown(error, remedy) for name in wanted}
    external = python if is_external else None
    return {name: with_remedy(name, entry, external) for name, entry in answer["capabilities"].items()}


def _unknown(error: ShimError, remedy: str) -> dict[str, Any]:
    return {"available": None, "reason": error.reason, "message": error.message, "remedy": remedy}


def interpreter_remedy(python: str) -> str:
    """What to do about an interpreter of the user's that cannot be run."""
    return f'correct [environment] python = "{python}": it must be a Python interpreter on the node'


def with_remedy(name: str, entry: Mapping[str, Any], external: str | None = None) -> dict[str, Any]:
    """The probe's entry plus what to do about it, in an external interpreter when one is named."""
    remedy = REMEDIES.get(name, "")
    if external is not None and name in PACKAGES:
        remedy = f'{external} -m pip install {PACKAGES[name]}, or {name} = "off"'
    remedy = "" if entry.get("available") else _DRIVER_REASONS.get(str(entry.get("reason")), remedy)
    return {**entry, "remedy": remedy}


def capability_findings(needs: Mapping[str, str], found: Mapping[str, Any]) -> list[Finding]:
    """Compare what a run declares with what its environment has; `off` is not looked at."""
    return [_finding(name, need, found.get(name)) for name, need in needs.items() if need != "off"]


def _finding(name: str, need: str, entry: Mapping[str, Any] | None) -> Finding:
    if entry is not None and entry.get("available"):
        value = str(entry.get("version") or "available")
        return Finding(name=f"capability {name}", status="ok", value=value)
    is_unknown = entry is None or entry.get("available") is None
    why = (entry or {}).get("message") or "it was not probed in this environment"
    return Finding(
        name=f"capability {name}",
        status="fail" if need == "required" else "warn",
        value="unknown" if is_unknown else "missing",
        reason=str((entry or {}).get("reason") or "CapabilityUnknown"),
        message=f"{name} is {need} but not available: {why}",
        remedy=str((entry or {}).get("remedy") or "deploy again, then check the node"),
    )
