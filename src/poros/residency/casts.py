"""Several forwards in one autocast block add their gradients in low precision; so must their visits.

[Note: shared casts]
Autocast casts an fp32 parameter once a block and lets every forward in the block use that one copy. So in a resident
run the gradients of two such forwards meet at the copy, in bf16, and are cast to fp32 once they are added. A visit that
returned its gradient for the parameter itself would have them added in fp32: other bits.
Therefore each parameter gets a *carrier*, a tensor without values in the cast's type, one for each autocast block.
Visits take it as an input besides the parameter. As soon as a block holds a second forward of the layer, visits return
the gradients of cast parameters for the carriers, where autograd adds them as it would have, and in the same order.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from poros.residency.uses import nodes


class CastBlock:
    """Tells one autocast block from the next.

    Autocast drops its copies when the outermost block ends, and offers no way to see that. But the copy of a parameter
    of our own comes from another autograd node after that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._probe = nn.Parameter(torch.zeros(1, 1, device=device))
        self._nothing = torch.zeros(0, 1, device=device)

    def present(self) -> int | None:
        """A number for the autocast block that runs now; None outside of one, or if it keeps no copies."""
        kind = self._device.type
        if not torch.is_autocast_enabled(kind) or not torch.is_autocast_cache_enabled():
            return None
        with torch.enable_grad():
            node = nn.functional.linear(self._nothing, self._probe).grad_fn
        while node is not None and node.name() != "ToCopyBackward0":
            node = next((parent for parent, _ in node.next_functions if parent is not None), None)
        return None if node is None else node._sequence_nr()


class Carriers:
    """The carriers of one layer's parameters in one autocast block.

    Args:
        block: The block, from :meth:`CastBlock.present`.
        dtype: The type that autocast casts to.
    """

    def __init__(self, block: int, dtype: torch.dtype) -> None:
        self.block = block
        self._dtype = dtype
        self._carriers: dict[int, torch.Tensor] = {}  # id of a parameter -> its carrier
        self._num_uses: dict[int, int] = {}  # id of a parameter -> forwards in this block that use it

    def join(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """The carriers of those ``parameters`` that autocast would cast, for one more forward."""
        cast = self.eligible(parameters)
        missing = [parameter for parameter in cast if id(parameter) not in self._carriers]
        if missing:
            made = _Carry.apply(self._dtype, *missing)  # type: ignore[no-untyped-call]
            self._carriers |= {id(parameter): carrier for parameter, carrier in zip(missing, made, strict=True)}
        for parameter in cast:
            self._num_uses[id(parameter)] = self._num_uses.get(id(parameter), 0) + 1
        return [self._carriers[id(parameter)] for parameter in cast]

    def eligible(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of ``parameters`` that autocast keeps a copy of when it casts them."""
        return [p for p in parameters if p.dtype == torch.float32 and p.is_leaf and p.device.type != "meta"]

    def is_shared(self, parameter: nn.Parameter) -> bool:
        """Whether more than one forward of this block uses ``parameter``."""
        return self._num_uses.get(id(parameter), 0) > 1

    def route(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor | None],
        find_cast: Callable[[], Sequence[bool]],
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Split a visit's gradients into those of the parameters and those of the carriers.

        Args:
            parameters, gradients: The trainable parameters, and what the visit found for them.
            find_cast: Tells which of them the recompute used as copies only; see :func:`cast_only`.
        """
        direct: list[torch.Tensor | None] = list(gradients)
        carried: list[torch.Tensor | None] = []
        cast = find_cast() if any(map(self.is_shared, parameters)) else [False] * len(parameters)
        eligible = {id(parameter) for parameter in self.eligible(parameters)}
        for index, parameter in enumerate(parameters):
            if id(parameter) not in eligible:
                continue
            gradient = direct[index]
            if gradient is None or not cast[index] or not self.is_shared(parameter):
                carried.append(None)
                continue
            # Exact: the value came out of a gradient in this very type.
            carried.append(gradient.to(self._dtype))
            direct[index] = None
        return direct, carried


class _Carry(torch.autograd.Function):
    """Parameters in, carriers out: no values, only a place where gradients meet before they are cast."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        return tuple(torch.empty(1, dtype=dtype, device=p.device).expand(p.shape) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *(None if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)))


def cast_only(outputs: Iterable[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[bool]:
    """Which of ``leaves`` reach ``outputs`` through a cast and in no other way."""
    through: dict[int, set[str]] = {}  # id of a leaf -> names of the nodes that take it
    for node in nodes(outputs):
        for parent, _ in node.next_functions:
            if hasattr(parent, "variable"):
                through.setdefault(id(parent.variable), set()).add(node.name())
    return [through.get(id(leaf)) == {"ToCopyBackward0"} for leaf in leaves]
