"""Models that step side by side on the same batches, and what is equal between them after each step."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from poros.evidence.bits import Comparison, Values, Verdict, as_floats, as_integers, fetch
from poros.train.loop import Batch, accumulate, next_token_loss

SURFACES = ("loss", "gradients", "grad_norm", "adapters", "optimizer", "rng")
_BEFORE_THE_OPTIMIZER = SURFACES[:2]

# Kernels that give the same bits when run again. Where flash attention cannot do it (a mask, heads of more than 256),
# torch takes the plain one; strict never takes one that is not reproducible.
_KERNELS = {"strict": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], "math": [SDPBackend.MATH]}


class Lane:
    """One of the models: with an optimizer and a random state of its own.

    Args:
        model: its trainable parameters learn.
        learning_rate: of AdamW.
        max_grad_norm: gradients are scaled down to it.
        seed: of the random state.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, *, learning_rate: float, max_grad_norm: float, seed: int
    ) -> None:
        self.model = model.train()
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trainable.values(), lr=learning_rate)
        self.losses: list[Tensor] = []
        self.grad_norm: Tensor | None = None
        self._device = device
        self._max_grad_norm = max_grad_norm
        torch.manual_seed(seed)
        self._random_state = self._read_random_state()

    def learn(self, batches: Sequence[Batch]) -> Tensor:
        """Forwards and backwards of one step; returns the loss and leaves the gradients."""

        def loss_of(model: nn.Module, batch: Batch, num_tokens: Tensor) -> Tensor:
            loss = next_token_loss(model, batch, num_tokens)
            self.losses.append(loss.detach())
            return loss

        self.losses = []
        with self._own_random_state():
            return accumulate(self.model, batches, loss_fn=loss_of)

    def finish(self) -> None:
        """Clip, let the optimizer step, drop the gradients."""
        with self._own_random_state():
            self.grad_norm = nn.utils.clip_grad_norm_(self.trainable.values(), self._max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def values(self, surface: str) -> Values:
        """The tensors of one of :data:`SURFACES`, by name. Loss and gradients are there until :meth:`finish`."""
        if surface == "loss":
            return {str(i): loss for i, loss in enumerate(self.losses)}
        if surface == "gradients":
            return {name: p.grad for name, p in self.trainable.items()}
        if surface == "grad_norm":
            return {"": self.grad_norm}
        if surface == "adapters":
            return dict(self.trainable)
        if surface == "optimizer":
            states = (
                (name, self.optimizer.state[p]) for name, p in self.trainable.items() if p in self.optimizer.state
            )
            return {f"{name}.{key}": torch.as_tensor(value) for name, state in states for key, value in state.items()}
        return self._random_state

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        torch.set_rng_state(self._random_state["cpu"])
        if "cuda" in self._random_state:
            torch.cuda.set_rng_state(self._random_state["cuda"], self._device)
        yield
        self._random_state = self._read_random_state()

    def _read_random_state(self) -> dict[str, Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state


@dataclass(frozen=True)
class Step:
    """What one step in lockstep gave.

    Attributes:
        loss: Of the resident model.
        largest: Of each of its gradients, the largest absolute value; None for a parameter without one.
        verdicts: Of each other model, by surface.
    """

    loss: float
    largest: dict[str, float | None]
    verdicts: dict[str, dict[str, Verdict]]


def step_together(resident: Lane, others: Mapping[str, Lane], batches: Sequence[Batch]) -> Step:
    """One optimizer step of all models; every tensor of every surface is compared with the resident model's.

    At no time are the gradients of more than two models alive, and the device is waited for once, at the end.
    """
    comparisons: dict[tuple[str, str], Comparison] = {}

    def compare(name: str, surfaces: Sequence[str]) -> None:
        for surface in surfaces:
            comparisons[name, surface] = Comparison(resident.values(surface), others[name].values(surface))

    loss = resident.learn(batches)
    learning, largest = _largest_gradients(resident)
    summary = as_integers(torch.stack([loss, *largest]))
    for name, lane in others.items():
        lane.learn(batches)
        compare(name, _BEFORE_THE_OPTIMIZER)
        lane.finish()
    resident.finish()
    for name in others:
        compare(name, [surface for surface in SURFACES if surface not in _BEFORE_THE_OPTIMIZER])

    figures = iter(fetch([summary, *(tensor for c in comparisons.values() for tensor in c.figures)]))
    first, *sizes = as_floats(next(figures))
    found = dict(zip(learning, sizes, strict=True))
    verdicts: dict[str, dict[str, Verdict]] = {name: {} for name in others}
    for (name, surface), comparison in comparisons.items():
        verdicts[name][surface] = comparison.read([next(figures) for _ in comparison.figures])
    return Step(first, {name: found.get(name) for name in resident.trainable}, verdicts)


def _largest_gradients(lane: Lane) -> tuple[list[str], list[Tensor]]:
    """The parameters that have a gradient, and the largest absolute value of each."""
    gradients = {name: p.grad for name, p in lane.trainable.items() if p.grad is not None}
    if not gradients:
        return [], []
    return list(gradients), list(torch._foreach_norm(list(gradients.values()), ord=float("inf")))


def twin_of(model: nn.Module) -> nn.Module:
    """A copy with adapters of its own over the same frozen tensors."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not tensor.requires_grad:
                memo[id(tensor)] = tensor
                state = getattr(tensor, "quant_state", None)
                memo[id(state)] = state
    return copy.deepcopy(model, memo)


def copy_adapters(source: nn.Module, target: nn.Module) -> None:
    """Give the trainable parameters of ``target`` the values of those in ``source``."""
    values = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(values[name].data)


@contextmanager
def reproducible(path: str, device: torch.device) -> Iterator[None]:
    """Deterministic algorithms, the attention kernels of ``path``, and on a CPU one thread.

    ``"strict"`` takes flash attention where it can (on a CPU torch's own fused kernel), ``"math"`` the plain one. The
    global random state is left as it was. (On a CPU, products of few rows change bits with the number of threads.)
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        with sdpa_kernel(_KERNELS[path]), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
