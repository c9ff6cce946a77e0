"""Other tensors in the places of a layer's own, for the time of one visit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from poros.residency.cleanup import Cleanup
from poros.residency.inventory import Place


@contextmanager
def put_in_place(
    cleanup: Cleanup, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], places: Sequence[Place]
) -> Iterator[None]:
    """Let ``others`` hang where ``tensors`` do, and put back afterwards what hung there before.

    Args:
        cleanup: Of the prepared model.
        places: Where the tensors hang; a tensor may have several.
    """
    replaced = {id(tensor): other for tensor, other in zip(tensors, others, strict=True)}
    # What hangs there now may be another object than in the forward (an average swapped in, say).
    present = [(store, name, replaced[id(tensor)], store.get(name)) for store, name, tensor in places]

    def put_back() -> None:
        for store, name, other, before in present:
            if store.get(name) is other:
                if before is None:
                    del store[name]
                else:
                    store[name] = before

    with cleanup.ensured(put_back):
        for store, name, other, _ in present:
            store[name] = other
        yield
