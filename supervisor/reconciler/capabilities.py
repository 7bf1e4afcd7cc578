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

_DRIVER_REASONS: Mapping[str, str] = {
    "LibraryNotFound": "install the NVIDIA user-space libraries of the host's driver version in the node",
    "DriverMismatch": "install the same driver version in the node as on its host",
    "NoCuda": "needs a CUDA build of torch and at least one visible GPU",
}


async def probe_capabilities(
    connection: NodeConnection, python: str, names: Iterable[str] = CAPABILITIES
) -> dict[str, Any]:
    """Probe with the interpreter `python` in the node; the answer maps each name to what was found."""
    wanted = list(names)
    try:
        answer = await connection.request(
            "probe", python=python, capabilities=wanted, deadline_s=PROBE_DEADLINE_S
        )
    except ShimError as error:
        return {name: _unknown(error) for name in wanted}
    return {name: with_remedy(name, entry) for name, entry in answer["capabilities"].items()}


def _unknown(error: ShimError) -> dict[str, Any]:
    return {"available": None, "reason": error.reason, "message": error.message, "remedy": error.hint or ""}


def with_remedy(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The probe's entry plus what to do about it."""
    reason = entry.get("reason")
    remedy = "" if entry.get("available") else _DRIVER_REASONS.get(str(reason), REMEDIES.get(name, ""))
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
