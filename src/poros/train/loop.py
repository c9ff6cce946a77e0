"""The bare training step: forward and backward of each batch, clip, optimizer.

It takes a model and cannot tell whether the weights are resident or streamed. Whoever compares two models, or times
one, steps them with this.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poros.train.encode import IGNORED

Batch = Mapping[str, torch.Tensor]
LossFn = Callable[[Any, Batch, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one step gave, on the model's device: reading a value is what waits for it."""

    loss: torch.Tensor  # mean over the learnt tokens of all batches
    grad_norm: torch.Tensor  # before clipping


def train_step(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    *,
    max_grad_norm: float = 1.0,
    loss_fn: LossFn | None = None,
) -> StepResult:
    """One optimizer step over ``batches``, whose gradients are added up.

    Args:
        batches: each with ``labels`` and whatever else the model's forward takes, on the model's device.
        max_grad_norm: gradients are scaled down to it; 0 leaves them as they are.
        loss_fn: of the model, a batch and the number of learnt tokens in all batches; the default is the model's own
            next-token loss.
    """
    loss = accumulate(model, batches, loss_fn=loss_fn)
    parameters = trainable(model)
    grad_norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm if max_grad_norm > 0 else float("inf"))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, grad_norm)


def accumulate(model: nn.Module, batches: Sequence[Batch], *, loss_fn: LossFn | None = None) -> torch.Tensor:
    """Forward and backward of every batch; returns the loss and leaves the sum of the gradients.

    The loss is the mean over the learnt tokens of all batches together, so it does not depend on how they were split.
    """
    loss_fn = loss_fn or next_token_loss
    num_tokens = torch.stack([num_learnt(batch["labels"]) for batch in batches]).sum()
    losses = []
    for batch in batches:
        loss = loss_fn(model, batch, num_tokens)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def next_token_loss(model: nn.Module, batch: Batch, num_tokens: torch.Tensor) -> torch.Tensor:
    """The model's own loss of one batch, as its share of the mean over ``num_tokens``."""
    loss: torch.Tensor = model(**batch, num_items_in_batch=num_tokens, use_cache=False).loss
    return loss


def num_learnt(labels: torch.Tensor) -> torch.Tensor:
    """Tokens of ``labels`` (batch, seq) that a next-token loss counts: the first of a row is never predicted."""
    return (labels[:, 1:] != IGNORED).sum()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer of ``model`` gets, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
