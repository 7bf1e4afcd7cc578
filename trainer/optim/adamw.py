"""AdamW on fp32 masters, with clipping and the finite check on the device.

Owns masters, moments, gradient sums and the counters of skipped steps. Called by the drafter worker; its
state goes to `checkpoint.state`. The steady path (`accumulate`, `step`) must never read a device value on
the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.config import OptimConfig
from trainer.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """Constants of the optimizer; the learning rate comes with each step."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float

    @classmethod
    def from_config(cls, optim: OptimConfig) -> AdamWSettings:
        """Pick the constants from the configuration."""
        return cls(
            beta1=optim.beta1,
            beta2=optim.beta2,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            grad_clip=optim.grad_clip,
        )


class MasterAdamW:
    """Updates fp32 masters from summed loss numerators and copies them back into the parameters.

    Where a parameter is fp32 itself it is its own master. Gradients of the *numerators* are summed in fp32
    over the micro-batches; `step` divides by the global denominator, clips the global norm, and leaves
    everything untouched when loss or gradient is not finite. One-dimensional parameters (norms) are not
    decayed.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], settings: AdamWSettings) -> None:
        self._settings = settings
        self._parameters = dict(parameters)
        self._masters: dict[str, Tensor] = {
            name: parameter.detach()
            if parameter.dtype == torch.float32
            else parameter.detach().float().clone()
            for name, parameter in self._parameters.items()
        }
        device = next(iter(self._masters.values())).device
        self._gradients = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        groups = [
            {
                "params": [m for m in self._masters.values() if m.ndim > 1],
                "weight_decay": settings.weight_decay,
            },
            {"params": [m for m in self._masters.values() if m.ndim <= 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self._numerator = torch.zeros((), device=device)
        self._denominator = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        """non-finite steps so far (device counter)"""
        self.in_a_row = torch.zeros((), device=device)
        """non-finite steps since the last good one"""
        self.longest_row = torch.zeros((), device=device)
        """longest such row so far"""

    def accumulate(self, numerator: Tensor, denominator: Tensor) -> None:
        """Run backward on a micro-batch's loss numerator and add gradient and sums."""
        if numerator.requires_grad:
            numerator.backward()  # type: ignore[no-untyped-call]
        have = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        if have:  # a micro-batch without anchors brings no gradient at all
            torch._foreach_add_(
                [self._gradients[name] for name in have],
                [_gradient(self._parameters[name]).float() for name in have],
            )
        for parameter in self._parameters.values():
            parameter.grad = None
        self._numerator += numerator.detach()
        self._denominator += denominator.detach()

    @property
    def loss_sums(self) -> tuple[Tensor, Tensor]:
        """Loss numerator and denominator of the present step, on the device."""
        return self._numerator, self._denominator

    def pending_sums(self) -> list[Tensor]:
        """Return everything that is summed over replicas before a step: gradients, numerator, denominator."""
        return [*self._gradients.values(), self._numerator, self._denominator]

    @torch.no_grad()
    def checksum(self) -> Tensor:
        """Return a whole number (0-dim int64, 52 bits) that follows from every bit of the masters."""
        total = torch.zeros((), dtype=torch.int64, device=self._numerator.device)
        for place, master in enumerate(self._masters.values()):
            # odd factors, so that exchanged tensors do not cancel out; the sum wraps round
            total += master.view(torch.int32).sum(dtype=torch.int64) * (2 * place + 0x9E3779B1)
        return total & ((1 << 52) - 1)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply the summed gradients once and start a new sum.

        A step without any supervised block (denominator 0) changes nothing and is not counted as non-finite.
        """
        gradients = list(self._gradients.values())
        torch._foreach_mul_(gradients, 1.0 / self._denominator.clamp(min=1e-12))
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        is_bad = ~(torch.isfinite(norm) & torch.isfinite(self._numerator) & torch.isfinite(self._denominator))
        torch._foreach_mul_(gradients, (self._settings.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        for name, master in self._masters.items():
            master.grad = self._gradients[name]
        for group in self._adam.param_groups:
            group["lr"] = lr
        # torch's fused kernels leave parameters, moments and step counter alone where found_inf is 1
        self._adam.found_inf = (is_bad | (self._denominator == 0)).float()  # type: ignore[attr-defined]
        self._adam.grad_scale = None  # type: ignore[attr-defined]
        self._adam.step()
        for name, master in self._masters.items():
            master.grad = None
            if self._parameters[name].dtype != torch.float32:
                self._parameters[name].copy_(master)
        bad = is_bad.float()
        self.skipped += bad
        self.in_a_row.add_(1.0).mul_(bad)
        torch.maximum(self.longest_row, self.in_a_row, out=self.longest_row)
        self.discard()

    def discard(self) -> None:
        """Drop the sums of an unfinished step."""
        torch._foreach_zero_(list(self._gradients.values()))
        self._numerator.zero_()
        self._denominator.zero_()

    def state_sources(self) -> dict[str, Tensor]:
        """Return masters, moments and counters by name, where they live; the next step changes them."""
        tensors = {f"master.{name}": master for name, master in self._masters.items()}
        for name, master in self._masters.items():
            state = self._adam.state.get(master)
            if state:
                tensors |= {f"{kind}.{name}": state[kind] for kind in _ADAM_KINDS}
        tensors |= {f"counter.{kind}": getattr(self, kind) for kind in _COUNTERS}
        return tensors

    def state_tensors(self) -> dict[str, Tensor]:
        """Return copies of `state_sources` on the CPU."""
        # host sync: the values are needed; only between optimizer steps
        return {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in self.state_sources().items()
        }

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        for name, master in self._masters.items():
            master.copy_(_matching(tensors, f"master.{name}", master))
            self._parameters[name].copy_(master)
            if f"exp_avg.{name}" in tensors:
                like = {"step": torch.zeros(()), "exp_avg": master, "exp_avg_sq": master}
                self._adam.state[master] = {
                    kind: _matching(tensors, f"{kind}.{name}", like[kind]).to(master.device, copy=True)
                    for kind in _ADAM_KINDS
                }
        for kind in _COUNTERS:
            getattr(self, kind).copy_(_matching(tensors, f"counter.{kind}", self.skipped))
        # the limit is for this process: a row that ended the former one must not end this one at once
        self.longest_row.zero_()


_ADAM_KINDS = ("step", "exp_avg", "exp_avg_sq")
_COUNTERS = ("skipped", "in_a_row", "longest_row")


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _matching(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"the training state holds no tensor {name}")
    if tensors[name].shape != like.shape:
        raise CheckpointError(
            f"tensor {name} of the training state has shape {tuple(tensors[name].shape)}, "
            f"the drafter needs {tuple(like.shape)}"
        )
    return tensors[name]
