"""The visit: a layer runs over borrowed weights, forward once and backward once more.

[Note: two visits, one graph]
Autograd must never hold on to a slot's memory: by the time of the backward it holds another block. (bitsandbytes keeps
the packed weight in plain attributes of its autograd context, where no hook and no version counter sees it; a graph
kept from the first forward gives the right loss and wrong gradients.) So the forward's graph is thrown away, and the
backward builds a new one over the weights that it has just acquired, differentiates it, and throws it away too.

[Note: same program]
The result must be that of the resident run to the bit, so the forward runs with gradients enabled over detached inputs
that require gradients exactly where the caller's do: 4-bit kernels are chosen by that. Only the recompute's forward
runs under the restored state; its differentiation runs under the backward's own, as it would have.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from poros.errors import ChecksumError, ResidencyError
from poros.residency.caches import fresh_cache
from poros.residency.casts import Carriers, CastBlock, cast_only
from poros.residency.cleanup import Cleanup
from poros.residency.inventory import Inventory
from poros.residency.layer import StreamedLayer
from poros.residency.places import put_in_place
from poros.residency.replay import Program, Replays
from poros.residency.schedule import Phase
from poros.residency.snapshot import Snapshot
from poros.residency.tree import flatten, mappings, unflatten
from poros.residency.uses import UseRecorder, find_uses, graph_leaves
from poros.residency.window import Window


class Residency(Protocol):
    """What a visit needs of the prepared model that its layer belongs to."""

    device: torch.device
    window: Window
    casts: CastBlock
    cleanup: Cleanup
    lock: AbstractContextManager[Any]
    checksum: bool
    micro_batch_size: int | None
    replays: Replays | None

    def views(self, slot: int, layer: StreamedLayer) -> list[torch.Tensor]: ...

    def guard_inside(self, layer: StreamedLayer) -> None: ...


@contextmanager
def holding(residency: Residency, layer: StreamedLayer, phase: Phase) -> Iterator[int]:
    """The layer's bytes are in the slot that is yielded, until the body ends."""
    window = residency.window
    slot = window.acquire(layer.block, phase)
    with residency.cleanup.ensured(lambda: window.release(slot)):
        yield slot


@contextmanager
def bound(residency: Residency, layer: StreamedLayer, slot: int) -> Iterator[None]:
    """The layer's frozen tensors are those in ``slot`` inside, and host masters again after."""
    with residency.cleanup.ensured(layer.unbind):
        layer.bind(residency.views(slot, layer), residency.window)
        yield


@contextmanager
def visiting(residency: Residency, layer: StreamedLayer, phase: Phase) -> Iterator[None]:
    """The layer's frozen tensors are real on the device inside, and host masters again after."""
    with holding(residency, layer, phase) as slot, bound(residency, layer, slot):
        yield


def run_layer(layer: StreamedLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The layer's own forward, without the checkpointing that transformers may wrap round it: a visit recomputes."""
    state = layer.module.__dict__
    missing = object()
    flag = state.get("gradient_checkpointing", missing)
    state["gradient_checkpointing"] = False
    try:
        return layer.forward(*args, **kwargs)
    finally:
        if flag is missing:
            del state["gradient_checkpointing"]
        else:
            state["gradient_checkpointing"] = flag


class Gradients(NamedTuple):
    """What a visit's backward found, in the order in which autograd was given the tensors."""

    of_inputs: list[torch.Tensor | None]
    of_parameters: list[torch.Tensor | None]
    carried: list[torch.Tensor | None]  # of the carriers
    further: list[torch.Tensor | None]  # of the inputs' further uses


class Call:
    """One forward of one layer, with all that its backward will need.

    Args:
        residency: The prepared model.
        layer: The layer.
        inventory: What :meth:`StreamedLayer.walk` found for this call.
        arguments: ``(args, kwargs)``.
        shared: Whether the inputs may be used outside the layer too; see [Note: sums in order].
    """

    def __init__(
        self,
        residency: Residency,
        layer: StreamedLayer,
        inventory: Inventory,
        arguments: tuple[Any, Any],
        *,
        shared: bool,
    ) -> None:
        self.residency = residency
        self.layer = layer
        self.inventory = inventory
        self.trainables = inventory.trainables()
        self._mappings = mappings(arguments)  # the caller's own, which the layer may write to
        self.tensors: list[torch.Tensor] = []  # input tensors, then trainable parameters, until autograd has them
        self.template = flatten(arguments, self.tensors)
        self.needs_grad = [tensor.requires_grad for tensor in self.tensors]
        self.tensors += self.trainables.parameters
        self.shared = shared or (bool(self._mappings) and any(self.needs_grad[1:]))
        self.num_uses: list[int] = []  # of each input that needs a gradient, if they are returned one by one
        self.snapshot = Snapshot(inventory, residency.device)
        self.carriers = _carriers(residency, layer)
        self.result: Any = None  # the template of what the layer returned and wrote
        self.prints: list[int] | None = None  # debugging: checksums of the outputs
        self.program: Program | None = None  # if the forward was replayed: that of which it was

    def run(self) -> Any:
        """Run the layer forward, tell autograd about it, and return what the layer returned."""
        tensors = self.tensors
        with holding(self.residency, self.layer, Phase.FORWARD) as slot:
            outputs, differentiable = self.forward_in(slot)
        carriers = [] if self.carriers is None else self.carriers.join(self.trainables.parameters)
        apply: Any = VisitFunction.apply
        returned = apply(self, outputs, differentiable, len(tensors), *tensors, *carriers, *self._further_uses())
        self.tensors = []  # saved by autograd now, which also checks that nobody changes them
        return self._collect(returned)

    @property
    def num_mappings(self) -> int:
        """Mappings among the arguments, apart from the keyword arguments themselves."""
        return len(self._mappings) - 1

    def forward_in(self, slot: int) -> tuple[list[torch.Tensor], list[bool]]:
        """Run the layer over ``slot``; return its outputs without their graph, and which of them require gradients."""
        replays = self.residency.replays
        replayed = None if replays is None else replays.forward(self, slot)
        return replayed or self._forward_eagerly(self.tensors, slot)

    def _forward_eagerly(self, tensors: Sequence[torch.Tensor], slot: int) -> tuple[list[torch.Tensor], list[bool]]:
        versions = [tensor._version for tensor in tensors]
        leaves = self._leaves(tensors)
        guarded = [leaf for leaf, needed in zip(leaves, self.needs_grad, strict=True) if needed]
        with self.bound(slot), torch.enable_grad(), ExitStack() as stack:
            if not guarded:
                guarded = stack.enter_context(self.stand_ins(self.trainables.parameters))
            for leaf in guarded:
                leaf.register_hook(self._refuse_inner_gradient)
            outputs = self.compute(leaves)
        if versions != [tensor._version for tensor in tensors]:
            raise ResidencyError(f"{self.layer.name} changes its input in place, so it cannot be recomputed")
        if self.shared:
            self.num_uses = self._count_uses(outputs, guarded) if any(self.needs_grad) else []
        if self.residency.checksum:
            self.prints = [checksum(output) for output in outputs]
        # .data and not .detach(): autograd forbids in-place changes of a view that a Function returns.
        return [output.data for output in outputs], [output.requires_grad for output in outputs]

    def differentiate(
        self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Recompute the layer over reloaded weights; return the gradients of what :meth:`run` gave to autograd."""
        self.residency.cleanup.finish()
        with holding(self.residency, self.layer, Phase.BACKWARD) as slot:
            found = self.differentiate_in(slot, tensors, grads)
        return [*found.of_inputs, *found.of_parameters, *found.carried, *found.further]

    def differentiate_in(
        self, slot: int, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> "Gradients":
        """The gradients, from a recompute over ``slot``."""
        replays = self.residency.replays
        found = None if replays is None else replays.backward(self, slot, tensors, grads)
        if found is None:
            return self._differentiate_eagerly(tensors, grads, slot)
        assert self.program is not None
        of_inputs = iter(found[: sum(self.needs_grad)])
        of_parameters = found[sum(self.needs_grad) :]
        carried: list[torch.Tensor | None] = []
        if self.carriers is not None:
            cast = self.program.cast
            of_parameters, carried = self.carriers.route(self.trainables.parameters, of_parameters, lambda: cast)
        return Gradients([next(of_inputs) if needs else None for needs in self.needs_grad], of_parameters, carried, [])

    def _differentiate_eagerly(
        self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], slot: int
    ) -> "Gradients":
        num_inputs = len(self.needs_grad)
        leaves, parameters = self._leaves(tensors[:num_inputs]), tensors[num_inputs:]
        with self.bound(slot):
            with (
                self.snapshot.restored(self.residency.cleanup),
                torch.enable_grad(),
                self.stand_ins(parameters) as stand_ins,
            ):
                outputs = self.compute(leaves)
            if self.prints is not None:
                self._compare(outputs)
            roots = [(out, g) for out, g in zip(outputs, grads, strict=True) if g is not None and out.requires_grad]
            needed = [leaf for leaf, needs in zip(leaves, self.needs_grad, strict=True) if needs]
            self._check_leaves(outputs, [*needed, *stand_ins])
            recorder = UseRecorder(outputs, needed) if self.num_uses else None
            found: list[torch.Tensor | None] = [None] * (len(needed) + len(stand_ins))
            if roots:
                heads, incoming = zip(*roots, strict=True)
                found = list(torch.autograd.grad(heads, [*needed, *stand_ins], incoming, allow_unused=True))
        of_inputs, direct = found[: len(needed)], found[len(needed) :]
        further: list[torch.Tensor | None] = []
        if recorder is not None:
            of_inputs, further = self._separate(recorder, of_inputs)
        carried: list[torch.Tensor | None] = []
        if self.carriers is not None:
            find_cast = partial(cast_only, outputs, stand_ins)
            direct, carried = self.carriers.route(self.trainables.parameters, direct, find_cast)
        gradients = iter(of_inputs)
        whole = [next(gradients) if needs else None for needs in self.needs_grad]
        return Gradients(whole, direct, carried, further)

    def _further_uses(self) -> list[torch.Tensor]:
        """Each input once more for each use beyond its first."""
        needed = [tensor for tensor, needs in zip(self.tensors, self.needs_grad, strict=False) if needs]
        return [tensor for tensor, uses in zip(needed, self.num_uses, strict=False) for _ in range(uses - 1)]

    @staticmethod
    def _count_uses(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[int]:
        """Uses of each leaf that are returned one by one; 1 for a leaf whose gradient is returned as a sum."""
        returned = {id(output) for output in outputs}  # a layer may hand an input through
        uses = find_uses(outputs, leaves)
        return [1 if id(leaf) in returned else max(len(found), 1) for leaf, found in zip(leaves, uses, strict=True)]

    def _separate(
        self, recorder: UseRecorder, sums: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """The first gradient of each input, and those of its further uses."""
        first: list[torch.Tensor | None] = []
        further: list[torch.Tensor | None] = []
        for gradients, total, uses in zip(recorder.gradients, sums, self.num_uses, strict=True):
            if uses == 1:
                first.append(total)
                continue
            padded = [*gradients, *[None] * (uses - len(gradients))]
            first.append(padded[0])
            further += padded[1:]
        return first, further

    def _refuse_inner_gradient(self, _: torch.Tensor) -> None:
        raise ResidencyError(
            f"a tensor that was captured inside {self.layer.name} (by a hook, say) is part of the loss. Gradients can "
            "only flow through what a layer returns while the model is prepared by poros: use the layer's output."
        )

    def _collect(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Rebuild the layer's result from output tensors, and carry what it wrote into the caller's mappings."""
        result, written = unflatten(self.result, list(outputs))
        for mapping, changes in zip(self._mappings, written, strict=True):
            for key, value in changes:
                mapping[key] = value
        self._mappings = []  # do not keep the caller's objects alive until the backward
        return result

    def _leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            tensor.detach().requires_grad_() if needed else tensor
            for tensor, needed in zip(tensors, self.needs_grad, strict=False)
        ]

    def bound(self, slot: int) -> AbstractContextManager[None]:
        """The layer's frozen tensors are those in ``slot`` inside."""
        return bound(self.residency, self.layer, slot)

    def compute(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run over ``leaves`` and return all output tensors: those of the result, then those written to mappings."""
        args, kwargs = unflatten(self.template, leaves)
        index = self.layer.index
        args = tuple(fresh_cache(value, index) for value in args)
        kwargs = {key: fresh_cache(value, index) for key, value in kwargs.items()}
        copies = mappings((args, kwargs))
        before = [dict(mapping) for mapping in copies]
        result = run_layer(self.layer, args, kwargs)
        written = [
            [(key, value) for key, value in mapping.items() if key not in old or value is not old[key]]
            for mapping, old in zip(copies, before, strict=True)
        ]
        outputs: list[torch.Tensor] = []
        self.result = flatten((result, written), outputs)
        return outputs

    @contextmanager
    def stand_ins(self, parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Put a fresh leaf in each trainable parameter's place, with the memory of ``parameters``.

        Differentiating with respect to the parameters themselves would run the hooks on them here, and once more
        where the gradient is accumulated.
        """
        leaves = [nn.Parameter(value.data) for value in parameters]
        with put_in_place(self.residency.cleanup, self.trainables.parameters, leaves, self.trainables.places):
            yield list(leaves)

    @contextmanager
    def fixed_in(self, values: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let what neither learns nor streams be ``values`` inside."""
        trainables = self.trainables
        fixed = [
            nn.Parameter(value, requires_grad=False) if isinstance(present, nn.Parameter) else value
            for present, value in zip(trainables.fixed, values, strict=True)
        ]
        with put_in_place(self.residency.cleanup, trainables.fixed, fixed, trainables.fixed_places):
            yield

    def _check_leaves(self, outputs: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> None:
        """Refuse a tensor that learns inside the layer, but is neither its parameter nor its argument.

        Looking through the graph takes time, so it happens once a layer, and where hooks may bring in anything.
        """
        if self.layer.checked and not self.snapshot.states.hooked:
            return
        ids = {id(leaf) for leaf in known}
        if any(id(leaf) not in ids for leaf in graph_leaves(outputs)):
            raise ResidencyError(
                f"{self.layer.name} uses a tensor that requires gradients but is neither a parameter of the layer nor "
                "an argument of its forward (a hook or an object among the arguments brings it in), so it would get "
                "none. Register it on a module of the layer, or pass it as a tensor."
            )
        self.layer.checked = True

    def _compare(self, outputs: Sequence[torch.Tensor]) -> None:
        if self.prints != [checksum(output) for output in outputs]:
            raise ChecksumError(
                f"{self.layer.name}: the recompute in backward did not reproduce the forward's output. Either the "
                "frozen weights changed in host memory in between, or the layer is not reproducible on this device."
            )


class VisitFunction(torch.autograd.Function):
    """One layer's forward and backward as autograd sees them; see [Note: two visits, one graph]."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        outputs: list[torch.Tensor],
        differentiable: list[bool],
        num_saved: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:num_saved])  # the rest are carriers and repetitions
        ctx.mark_non_differentiable(
            *(output for output, needed in zip(outputs, differentiable, strict=True) if not needed)
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        with call.residency.lock:
            return (None, None, None, None, *call.differentiate(ctx.saved_tensors, grads))


def _carriers(residency: Residency, layer: StreamedLayer) -> Carriers | None:
    """The layer's carriers in the present autocast block; None outside of one."""
    block = residency.casts.present()
    if block is None:
        layer.carriers = None
    elif layer.carriers is None or layer.carriers.block != block:
        layer.carriers = Carriers(block, torch.get_autocast_dtype(residency.device.type))
    return layer.carriers


def checksum(tensor: torch.Tensor) -> int:
    """A number that changes with any bit of ``tensor`` (debugging; makes the host wait)."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().view(-1).view(words).to(torch.int64)
    weights = torch.arange(1, flat.numel() + 1, device=flat.device)
    return int((flat * weights).sum())
