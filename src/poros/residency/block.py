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
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.cache_utils import Cache

from poros.errors import ChecksumError, ResidencyError
from poros.residency.casts import Carriers, CastBlock
from poros.residency.layer import StreamedLayer, Trainables
from poros.residency.schedule import Phase
from poros.residency.snapshot import Snapshot
from poros.residency.tree import flatten, mappings, unflatten
from poros.residency.window import Window

_LEFT_EMPTY = "_poros_left_empty"  # on a cache: the layers that did not write to it
_CACHE_IN_TRAINING = (
    "a forward with gradients was given a key-value cache to continue from (prefix tuning, or decoding outside "
    "torch.no_grad()). Run decoding under torch.no_grad(); prefix tuning of a prepared model is not supported."
)


class Residency(Protocol):
    """What a visit needs of the prepared model that its layer belongs to."""

    device: torch.device
    window: Window
    casts: CastBlock
    checksum: bool

    def views(self, slot: int, layer: StreamedLayer) -> list[torch.Tensor]: ...


@contextmanager
def visiting(residency: Residency, layer: StreamedLayer, phase: Phase) -> Iterator[None]:
    """The layer's frozen tensors are real on the device inside, and host masters again after."""
    slot = residency.window.acquire(layer.block, phase)
    try:
        layer.bind(residency.views(slot, layer))
        yield
    finally:
        layer.unbind()
        residency.window.release(slot)


def streamed_forward(residency: Residency, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``layer`` as its own ``forward(*args, **kwargs)`` would have run on a resident model."""
    if torch.compiler.is_compiling():
        raise ResidencyError("a prepared model cannot be traced by torch.compile; run it without compiling")
    trainables = layer.walk(residency.device)
    if not torch.is_grad_enabled():
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache):
                _refuse_left_empty(value, layer)
        with visiting(residency, layer, Phase.INFERENCE):
            return run_layer(layer, args, kwargs)
    _refuse_captures()
    args, kwargs = _without_empty_cache(layer, args, kwargs)
    call = Call(residency, layer, trainables, (args, kwargs))
    if not any(tensor.requires_grad for tensor in call.tensors):
        with visiting(residency, layer, Phase.INFERENCE):
            return run_layer(layer, args, kwargs)
    tensors = call.tensors
    outputs = VisitFunction.apply(call, len(tensors), *tensors, *call.join())  # type: ignore[no-untyped-call]
    return call.collect(outputs)


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


class Call:
    """One forward of one layer, with all that its backward will need.

    Args:
        residency: The prepared model.
        layer: The layer.
        trainables: What :meth:`StreamedLayer.walk` found for this call.
        arguments: ``(args, kwargs)``.
    """

    def __init__(
        self, residency: Residency, layer: StreamedLayer, trainables: Trainables, arguments: tuple[Any, Any]
    ) -> None:
        self.residency = residency
        self.layer = layer
        self.trainables = trainables
        self.arguments = mappings(arguments)  # the caller's own mappings, which the layer may write to
        self.inputs: list[torch.Tensor] = []
        self.template = flatten(arguments, self.inputs)
        self.needs_grad = [tensor.requires_grad for tensor in self.inputs]
        self.snapshot = Snapshot(trainables.modules, residency.device)
        self.carriers = _carriers(residency, layer)
        self.result: Any = None  # the template of what the layer returned and wrote
        self.prints: list[int] | None = None  # debugging: checksums of the outputs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What autograd saves: the input tensors, then the trainable parameters."""
        return [*self.inputs, *self.trainables.parameters]

    def join(self) -> list[torch.Tensor]:
        """What takes the gradients of the parameters that autocast casts; see [Note: shared casts]."""
        return [] if self.carriers is None else self.carriers.join(self.trainables.parameters)

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[bool]]:
        """Run the layer; return its output tensors without their graph, and which of them require gradients."""
        leaves = self._leaves(tensors)
        with visiting(self.residency, self.layer, Phase.FORWARD), torch.enable_grad():
            outputs = self._run(leaves)
        if self.residency.checksum:
            self.prints = [checksum(output) for output in outputs]
        # .data and not .detach(): autograd forbids in-place changes of a view that a Function returns.
        return [output.data for output in outputs], [output.requires_grad for output in outputs]

    def differentiate(
        self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Recompute the layer over reloaded weights; return the gradients of ``tensors``, then of the carriers."""
        leaves = self._leaves(tensors)
        parameters = tensors[len(leaves) :]
        with visiting(self.residency, self.layer, Phase.BACKWARD):
            with self.snapshot.restored(), torch.enable_grad(), self._stand_ins(parameters) as stand_ins:
                outputs = self._run(leaves)
            if self.prints is not None:
                self._compare(outputs)
            roots = [(out, g) for out, g in zip(outputs, grads, strict=True) if g is not None and out.requires_grad]
            wanted = [leaf for leaf, needed in zip(leaves, self.needs_grad, strict=True) if needed]
            wanted += stand_ins
            found: list[torch.Tensor | None] = [None] * len(wanted)
            if roots:
                heads, incoming = zip(*roots, strict=True)
                found = list(torch.autograd.grad(heads, wanted, incoming, allow_unused=True))
        of_inputs = iter(found)
        gradients = [next(of_inputs) if needed else None for needed in self.needs_grad]
        of_parameters = list(of_inputs)
        if self.carriers is None:
            return gradients + of_parameters
        direct, carried = self.carriers.route(self.trainables.parameters, stand_ins, of_parameters, outputs)
        return gradients + direct + carried

    def collect(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Rebuild the layer's result from output tensors, and carry what it wrote into the caller's mappings."""
        result, written = unflatten(self.result, list(outputs))
        for mapping, changes in zip(self.arguments, written, strict=True):
            for key, value in changes:
                mapping[key] = value
        self.arguments = []  # do not keep the caller's objects alive until the backward
        return result

    def _leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            tensor.detach().requires_grad_() if needed else tensor
            for tensor, needed in zip(tensors, self.needs_grad, strict=False)
        ]

    def _run(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run over ``leaves`` and return all output tensors: those of the result, then those written to mappings."""
        args, kwargs = unflatten(self.template, leaves)
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
    def _stand_ins(self, parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Put a fresh leaf in each trainable parameter's place.

        Differentiating with respect to the parameters themselves would run the hooks on them here, and once more
        where the gradient is accumulated.
        """
        values = zip(self.trainables.parameters, parameters, strict=True)
        stand_ins = {id(parameter): nn.Parameter(value.data) for parameter, value in values}
        places = [(store, name, store[name]) for store, name in self.trainables.slots]
        try:
            for store, name, parameter in places:
                store[name] = stand_ins[id(parameter)]
            yield list(stand_ins.values())
        finally:
            for store, name, parameter in places:
                store[name] = parameter

    def _compare(self, outputs: Sequence[torch.Tensor]) -> None:
        if self.prints != [checksum(output) for output in outputs]:
            raise ChecksumError(
                f"{self.layer.name}: the recompute in backward did not reproduce the forward's output. Either the "
                "frozen weights changed in host memory in between, or the layer is not reproducible on this device."
            )


class VisitFunction(torch.autograd.Function):
    """One layer's forward and backward as autograd sees them; see [Note: two visits, one graph]."""

    @staticmethod
    def forward(ctx: Any, call: Call, num_saved: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = tensors[:num_saved]  # the rest are carriers, which have no values
        outputs, differentiable = call.forward(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(
            *(output for output, needed in zip(outputs, differentiable, strict=True) if not needed)
        )
        call.inputs = []  # saved by autograd now, which also checks that nobody changes them
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.call.differentiate(ctx.saved_tensors, grads))


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


def _without_empty_cache(layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Leave an empty key-value cache out of a forward that will be differentiated.

    transformers makes a cache in training too, unless told otherwise. Nobody reads it, and the recompute would write
    to it a second time.
    """

    def drop(value: Any) -> Any:
        if not isinstance(value, Cache):
            return value
        if value.get_seq_length() > 0:
            raise ResidencyError(_CACHE_IN_TRAINING)
        _refuse_left_empty(value, layer)
        value.__dict__.setdefault(_LEFT_EMPTY, set()).add(layer.name)
        return None

    return tuple(drop(value) for value in args), {key: drop(value) for key, value in kwargs.items()}


def _refuse_left_empty(cache: Cache, layer: StreamedLayer) -> None:
    """Refuse to continue from a cache that an earlier forward should have filled and did not."""
    if layer.name in cache.__dict__.get(_LEFT_EMPTY, ()):
        raise ResidencyError(_CACHE_IN_TRAINING)


def _refuse_captures() -> None:
    """Refuse outputs that transformers would pick up inside a layer: they would not be connected to the graph."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return
    inner = sorted({key for key in (_active_collector.get() or ()) if not key.startswith(("hidden_states", "_"))})
    if inner:
        raise ResidencyError(
            f"output_{inner[0]}=True is not possible in a forward with gradients of a prepared model: what is captured "
            "inside a layer would carry no gradient (a router's auxiliary loss among it). Set it to False, or run "
            "under torch.no_grad()."
        )
