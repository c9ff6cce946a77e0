"""A large batch, visited a few rows at a time: one transfer serves all of them.

[Note: block by block]
Accumulation over small batches reloads every layer for each of them. Given at once, a large batch is split inside each
visit instead: every product keeps the row count of the small batch, and so its bits. It is what a resident layer does
that splits its inputs with ``torch.split``, runs on each piece, and puts the outputs together with ``torch.cat``. The
backward takes the pieces in reverse, and adds the gradients of the parameters in that order, as autograd does there.
"""

from collections.abc import Sequence
from typing import Any

import torch

from poros.errors import ResidencyError
from poros.residency.block import Call, Gradients
from poros.residency.tree import unflatten

Maybe = torch.Tensor | None


class SplitCall(Call):
    """One forward of one layer over a batch of which ``residency.micro_batch_size`` rows are visited at a time.

    Raises:
        ResidencyError: the layer's arguments or results cannot be split by rows.
    """

    def __init__(self, *args: Any, shared: bool, **kwargs: Any) -> None:
        super().__init__(*args, shared=shared, **kwargs)
        self.shared = False  # an input is used once here, by the split: its gradient is one sum, whoever else uses it
        size = self.residency.micro_batch_size
        assert size is not None
        self._num_rows = self.tensors[0].shape[0]
        self._pieces = [(start, min(size, self._num_rows - start)) for start in range(0, self._num_rows, size)]
        self._parts: list[Call] = []
        self._has_rows = [self._is_by_rows(tensor) for tensor in self.tensors[: len(self.needs_grad)]]
        if self.num_mappings:
            self._refuse("a mapping among its arguments, which it may write to")
        if any(needs and not has_rows for needs, has_rows in zip(self.needs_grad, self._has_rows, strict=True)):
            self._refuse("an argument without a batch dimension that needs a gradient")
        if self.carriers is not None:
            for _ in self._pieces[1:]:  # each piece uses the parameters' casts
                self.carriers.join(self.trainables.parameters)

    def forward_in(self, slot: int) -> tuple[list[torch.Tensor], list[bool]]:
        found: list[list[torch.Tensor]] = []
        self._parts = []
        differentiable: list[bool] = []
        for start, length in self._pieces:
            # Made here, and not before: its snapshot has the random state that its own forward finds.
            part = self._part(start, length)
            outputs, differentiable = part.forward_in(slot)
            part.tensors = []  # the backward cuts them from what autograd has saved
            if any(output.ndim == 0 or output.shape[0] != length for output in outputs):
                self._refuse("a result without a batch dimension")
            found.append(outputs)
            self._parts.append(part)
        self.result = self._parts[0].result
        return [torch.cat(pieces) for pieces in zip(*found, strict=True)], differentiable

    def differentiate_in(self, slot: int, tensors: Sequence[torch.Tensor], grads: Sequence[Maybe]) -> Gradients:
        num_inputs = len(self.needs_grad)
        found: list[Gradients] = []
        for (start, length), part in zip(reversed(self._pieces), reversed(self._parts), strict=True):
            pieces = [None if grad is None else grad.narrow(0, start, length) for grad in grads]
            cut = [*self._cut(tensors[:num_inputs], start, length), *tensors[num_inputs:]]
            found.append(part.differentiate_in(slot, cut, pieces))
        of_inputs = [
            _joined(list(reversed(of_one)), tensor, self._pieces) if needs else None
            for needs, tensor, of_one in zip(
                self.needs_grad, tensors, zip(*(one.of_inputs for one in found), strict=True), strict=False
            )
        ]
        of_parameters = [_added(of_one) for of_one in zip(*(one.of_parameters for one in found), strict=True)]
        carried = [_added(of_one) for of_one in zip(*(one.carried for one in found), strict=True)]
        return Gradients(of_inputs, of_parameters, carried, [])

    def _part(self, start: int, length: int) -> Call:
        inputs = self._cut(self.tensors[: len(self.needs_grad)], start, length)
        arguments = unflatten(self.template, inputs)
        return Call(self.residency, self.layer, self.inventory, arguments, shared=False)

    def _cut(self, tensors: Sequence[torch.Tensor], start: int, length: int) -> list[torch.Tensor]:
        return [
            tensor.narrow(0, start, length) if has_rows else tensor
            for tensor, has_rows in zip(tensors, self._has_rows, strict=True)
        ]

    def _is_by_rows(self, tensor: torch.Tensor) -> bool:
        if tensor.ndim < 2:
            return False  # the same for all rows, as what has one row for all of them is
        if tensor.shape[0] not in (1, self._num_rows):
            self._refuse(f"an argument of shape {tuple(tensor.shape)}")
        return tensor.shape[0] == self._num_rows

    def _refuse(self, what: str) -> None:
        raise ResidencyError(
            f"{self.layer.name} has {what}, so a batch of {self._num_rows} rows cannot be split there. Prepare the "
            "model without micro_batch_size, and give it small batches."
        )


def _joined(pieces: Sequence[Maybe], whole: torch.Tensor, places: Sequence[tuple[int, int]]) -> Maybe:
    """The gradient of an input from those of its pieces; a piece without one counts as zeros."""
    if all(piece is None for piece in pieces):
        return None
    return torch.cat(
        [
            torch.zeros_like(whole.narrow(0, start, length)) if piece is None else piece
            for piece, (start, length) in zip(pieces, places, strict=True)
        ]
    )


def _added(gradients: Sequence[Maybe]) -> Maybe:
    total: Maybe = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total
