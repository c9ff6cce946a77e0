"""The uses of a layer's input inside the layer, one by one.

[Note: sums in order]
Autograd adds the gradients of a tensor's uses one after another, in the order in which they arrive, and floating-point
sums depend on the order. If a hidden state is used inside the next layer only, that layer's visit may add its uses and
return the sum. If it is used elsewhere too (a loss over hidden states, keys and values that several layers share), the
resident run has ((elsewhere + first use) + second use) where that would give (elsewhere + (first + second)). So such an
input is passed to the visit once for each use, and the visit returns the gradients of the uses separately, in the
order in which they came; autograd then adds them as it would have.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


def find_uses(outputs: Iterable[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[list[tuple[Any, int]]]:
    """For each leaf: the (node, input of the node) pairs of the graph behind ``outputs`` that take it."""
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    uses: list[list[tuple[Any, int]]] = [[] for _ in leaves]
    for node in nodes(outputs):
        for slot, (parent, _) in enumerate(node.next_functions):
            place = places.get(id(getattr(parent, "variable", None)))
            if place is not None:
                uses[place].append((node, slot))
    return uses


def graph_leaves(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors at which gradients from ``outputs`` would be accumulated."""
    return [node.variable for node in nodes(outputs) if hasattr(node, "variable")]


def nodes(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Every node of the graph behind ``outputs``, once."""
    pending: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                pending.append(parent)


class UseRecorder:
    """Records the gradient of each use of some leaves while a graph is differentiated.

    Args:
        outputs, leaves: As for :func:`find_uses`.
    """

    def __init__(self, outputs: Iterable[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
        self.gradients: list[list[torch.Tensor]] = [[] for _ in leaves]  # of each leaf's uses, as they arrived
        slots: dict[Any, list[tuple[int, int]]] = {}  # node -> (its input, the leaf's place)
        for place, uses in enumerate(find_uses(outputs, leaves)):
            for node, slot in uses:
                slots.setdefault(node, []).append((slot, place))
        for node, taken in slots.items():
            node.register_hook(self._hook(sorted(taken)))

    def _hook(self, taken: list[tuple[int, int]]) -> Any:
        def record(gradients: Sequence[torch.Tensor | None], _: Any) -> None:
            for slot, place in taken:
                gradient = gradients[slot]
                if gradient is not None:
                    self.gradients[place].append(gradient)

        return record
