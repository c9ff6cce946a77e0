"""Refuses to go on when a run is learning nothing, or nonsense."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from poros.errors import PorosError


@contextmanager
def modules_that_run() -> Iterator[set[nn.Module]]:
    """The modules whose forward runs inside the block, so far.

    A hook of all modules, not of each: a layer that finds hooks of its own may have to run another way.
    """
    seen: set[nn.Module] = set()
    handle = register_module_forward_pre_hook(lambda module, _: seen.add(module))
    try:
        yield seen
    finally:
        handle.remove()


def check_gradients(model: nn.Module, ran: set[nn.Module]) -> None:
    """After the first backward: every trainable parameter that took part must have a gradient, and not all be zero.

    Raises:
        PorosError: a loss that falls by itself, or not at all, would have hidden this for the whole run.
    """
    missing, gradients = [], []
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(prefix=name, recurse=False):
            if parameter.requires_grad and parameter.grad is not None:
                gradients.append(parameter.grad)
            elif parameter.requires_grad and module in ran:
                missing.append(own)
    if missing:
        raise PorosError(
            f"{len(missing)} trainable parameters took part in the first step but got no gradient, first {missing[0]}: "
            "they would never learn. Stopped before the optimizer's first step; nothing was saved. Please report this "
            "with the model's name."
        )
    if not any(gradient.any() for gradient in gradients):
        raise PorosError(
            "every gradient of the first step is zero, so nothing would be learnt. Stopped before the optimizer's "
            "first step; nothing was saved. Check that there are tokens to learn ('poros data' shows them), and that "
            "lora.target_modules names layers that the model uses."
        )


def check_loss(loss: torch.Tensor, step: int) -> None:
    """Stop at a loss that is no number, before the optimizer uses its gradients."""
    value = loss.item()
    if not math.isfinite(value):
        raise PorosError(
            f"the loss of step {step} is {value}. Stopped before the optimizer used it, so no saved adapter holds it. "
            "Lower train.learning_rate, add train.warmup_steps or set train.max_grad_norm: 1.0; in float16, set "
            "model.dtype: bfloat16."
        )


def check_adapter(model: nn.Module, what: str) -> None:
    """Refuse to save trained values that are no numbers."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.isfinite().all():
            raise PorosError(
                f"{name} holds values that are no numbers, so {what} is not saved. Resume from the newest checkpoint "
                "with a lower train.learning_rate in a new run, or with train.max_grad_norm: 1.0."
            )
