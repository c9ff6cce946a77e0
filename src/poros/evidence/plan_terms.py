"""What a training step asks of a GPU's allocator, found on the meta device: the real modules run, without values.

[Note: a step without values]
The model is the real one, with real adapters, on torch's meta device, where an operation gives the shapes and types of
its results and nothing else. A :class:`Tape` sees every storage that comes and goes. One layer of each kind is run, and
its tape stands for the others of its kind; the rest of the model runs whole. Three things do not run there as on a GPU,
and stand-ins take their place: 4-bit products, the fused attention and dropout. Each asks for what the real one does:

- a 4-bit linear expands the weight (and, with double quantisation, its scales) for the time of the product, forward and
  backward, and keeps only the packed weight. Small batches may take a fused kernel that expands nothing: less memory;
- fused attention keeps queries, keys, values, its output and one float32 a row and head; its backward takes a float32
  accumulator for the queries' gradient, and the gradients of keys and values once for each query head;
- dropout keeps one byte an element.
"""

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from poros.model.quantize import is_4bit
from poros.residency.layer import is_constant
from poros.residency.layout import Layout, plan_layout, span_bytes
from poros.residency.tree import flatten, mappings, unflatten

LAYER, EXPANDED, ENDS = "one layer at work", "expanded 4-bit weight", "logits and loss"

_BLOCK, _NESTED_BLOCK = 64, 256  # weights an absmax, absmaxes a nested one


@dataclass(frozen=True)
class Event:
    """A storage comes (``num_bytes``), goes (``None``), or a layer's visit stands here (``visit``)."""

    key: int
    num_bytes: int | None = None
    label: str = ""
    visit: "Visit | None" = None


@dataclass(frozen=True)
class Visit:
    """The forward or backward of a layer, with the storages that it hands to the rest of the model."""

    layer: int
    backward: bool
    kind: "Kind"
    results: tuple[int, ...]  # keys on the tape of the rest: outputs, or gradients of inputs
    inputs: tuple[int, ...] = ()  # those of a forward that are kept until the backward


@dataclass(eq=False)
class Kind:
    """The tapes of the layers of one kind.

    Attributes:
        forward, backward: Events of either visit.
        outputs: Keys of what the forward returns.
        input_gradients, gradients: Keys of what the backward leaves: for inputs, for trainable parameters.
        keeps: For each input, whether it is kept until the backward.
        inputs: Bytes of each input.
    """

    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    input_gradients: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    keeps: list[bool] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    result: Any = None  # template of the layer's result and of what it wrote to mappings
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]] = field(default_factory=list)


class Tape(TorchDispatchMode):
    """Notes each storage on the meta device that an operation makes, and when it is let go."""

    def __init__(self, label: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.label = label
        self._keys: dict[int, int] = {}  # address of a live storage -> its key
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note what is new in its results."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True  # transformers asks whether all rows are full, and each of them one sequence: they are
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._keys:
                    self.events.append(Event(self._watch(storage), storage.nbytes(), self.label))
        return out

    def adopt(self, tensor: Tensor) -> int:
        """Watch a storage that somebody else asks for: only its end is noted."""
        return self._watch(tensor.untyped_storage())

    def key_of(self, tensor: Tensor) -> int | None:
        """Key of the storage of ``tensor``; None if it was not made here."""
        return self._keys.get(tensor.untyped_storage()._cdata)

    def close(self) -> None:
        """Note nothing any more."""
        self._alive.clear()
        self._keys.clear()

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """What is asked for inside counts under ``label``."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    def _watch(self, storage: Any) -> int:
        self._num += 1
        key, address = self._num, storage._cdata

        def gone(_: Any) -> None:
            if self._alive.pop(key, None) is not None:
                self._keys.pop(address, None)
                self.events.append(Event(key))

        self._keys[address] = key
        self._alive[key] = weakref.ref(storage, gone)
        return key


_tapes: list[Tape] = []  # the one that runs now, last


def _expanded() -> Any:
    return _tapes[-1].labelled(EXPANDED) if _tapes else contextmanager(lambda: iter((None,)))()


class _Product4Bit(torch.autograd.Function):
    """Asks for what a product with a 4-bit weight asks for."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, linear: Any) -> Tensor:
        ctx.linear, ctx.dtype = linear, rows.dtype
        return nn.functional.linear(rows, _expand(linear, rows.dtype), linear.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.matmul(gradient, _expand(ctx.linear, gradient.dtype)), None


def _expand(linear: Any, dtype: torch.dtype) -> Tensor:
    with _expanded():
        num_blocks = -(-linear.in_features * linear.out_features // _BLOCK)
        scales = torch.empty(num_blocks, device="meta") if linear.weight.compress_statistics else None
        weight = torch.empty(linear.out_features, linear.in_features, dtype=dtype, device="meta")
        del scales
    return weight


def _forward_4bit(linear: Any, rows: Tensor) -> Tensor:
    dtype = rows.dtype
    result: Tensor = _Product4Bit.apply(rows.to(linear.compute_dtype or dtype), linear)  # type: ignore[no-untyped-call]
    return result.to(dtype)


class _Attention(torch.autograd.Function):
    """Asks for what fused attention asks for. Its output lies (batch, seq, heads, dim)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, seq, _ = query.shape
        out = torch.empty(batch, seq, heads, value.shape[-1], dtype=query.dtype, device="meta").transpose(1, 2)
        rows = torch.empty(batch, heads, seq, device="meta")
        ctx.save_for_backward(query, key, value, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, _, rows = ctx.saved_tensors
        _work = [torch.empty_like(rows), torch.empty_like(query, dtype=torch.float32)]
        of_query = torch.empty_like(query)
        repeats = query.shape[1] // key.shape[1]
        if repeats == 1:
            return of_query, torch.empty_like(key), torch.empty_like(value)
        wide = [torch.empty_like(t.repeat_interleave(repeats, 1)) for t in (key, value)]
        return of_query, *(t.unflatten(1, (-1, repeats)).sum(2) for t in wide)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]


def _dropout(rows: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(rows, p, True)[0] if training and p > 0 else rows


class _Autocast(torch.autocast):
    """Autocast that may be asked for, and switched off, on the meta device, where there is none."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *args, **kwargs)


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """Let ``model`` run on the meta device inside; see [Note: a step without values]."""
    functional: Any = nn.functional
    before = functional.scaled_dot_product_attention, functional.dropout, torch.autocast
    linears = [module for module in model.modules() if is_4bit(module)]
    for linear in linears:
        linear.forward = lambda rows, linear=linear: _forward_4bit(linear, rows)
    functional.scaled_dot_product_attention, functional.dropout = _attention, _dropout
    torch.autocast = _Autocast  # type: ignore[misc]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout, torch.autocast = before  # type: ignore[misc]
        for linear in linears:
            del linear.forward


class _Stub(torch.autograd.Function):
    """A layer's visit on the tape of the rest of the model: keeps the layer's inputs, gives its outputs."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, index: int, kind: Kind, adapter: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tape, ctx.index, ctx.kind = tape, index, kind
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(t for t, kept in zip(tensors, kind.keeps, strict=True) if kept))
        ctx.specs = [(tuple(t.shape), t.stride(), t.dtype) if t.requires_grad else None for t in tensors]
        outputs, keys = _made(tape, [(shape, stride, dtype) for shape, stride, dtype, _ in kind.shapes])
        kept_keys = [tape.key_of(t) for t, kept in zip(tensors, kind.keeps, strict=True) if kept]
        inputs = tuple(key for key in kept_keys if key is not None)
        tape.events.append(Event(0, visit=Visit(index, False, kind, tuple(keys), inputs)))
        ctx.mark_non_differentiable(*(o for o, spec in zip(outputs, kind.shapes, strict=True) if not spec[3]))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        made, keys = _made(ctx.tape, [spec for spec in ctx.specs if spec is not None])
        ctx.tape.events.append(Event(0, visit=Visit(ctx.index, True, ctx.kind, tuple(keys))))
        gradients = iter(made)
        return None, None, None, None, *(None if spec is None else next(gradients) for spec in ctx.specs)


def _made(tape: Tape, specs: Any) -> tuple[list[Tensor], list[int]]:
    """Tensors that the layer's own tape asks for."""
    with torch.utils._python_dispatch._disable_current_modes():
        tensors = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in specs]
    return tensors, [tape.adopt(tensor) for tensor in tensors]


class Tracer:
    """Runs one step of an adapted model on the meta device.

    Args:
        layers: The decoder layers.
        stream: Whether each layer's graph is dropped after its forward and built anew in the backward.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module], *, stream: bool) -> None:
        self._model, self._layers, self._stream = model, layers, stream
        self._kinds: dict[Any, Kind] = {}

    def step(self, run: Callable[[], Tensor]) -> list[Event]:
        """The events of the forward and backward of the loss that ``run`` gives."""
        tape = Tape(ENDS)
        with standing_in(self._model):
            for index, layer in enumerate(self._layers):
                layer.forward = self._stub(tape, index, layer, layer.forward)
            try:
                with tape:
                    loss = run()
                    loss.backward()
                del loss
            finally:
                for layer in self._layers:
                    del layer.forward
        tape.close()
        return tape.events

    def _stub(self, tape: Tape, index: int, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def stub(*args: Any, **kwargs: Any) -> Any:
            tensors: list[Tensor] = []
            template = flatten((args, kwargs), tensors)
            with torch.utils._python_dispatch._disable_current_modes():
                kind = self._kind(layer, forward, template, tensors)
            adapter = next((p for p in layer.parameters() if p.requires_grad), None)
            outputs: Any = _Stub.apply(tape, index, kind, adapter, *tensors)  # type: ignore[no-untyped-call]
            result, written = unflatten(kind.result, list(outputs))
            for mapping, changes in zip(mappings((args, kwargs)), written, strict=True):
                mapping.update(changes)
            return result

        return stub

    def _kind(self, layer: nn.Module, forward: Callable[..., Any], template: Any, tensors: list[Tensor]) -> Kind:
        parts = (*layer.named_parameters(), *layer.named_buffers())
        signature = (
            tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in parts),
            tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors),
            tuple(_settings(part) for part in layer.modules()),
            tuple(map(len, mappings(template))),
        )
        if signature not in self._kinds:
            self._kinds[signature] = self._record(layer, forward, template, tensors)
        return self._kinds[signature]

    def _record(self, layer: nn.Module, forward: Callable[..., Any], template: Any, tensors: list[Tensor]) -> Kind:
        """Run a layer forward and backward as the engine does."""
        kind, tape = Kind(), Tape(LAYER)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        parameters = [p for p in layer.parameters() if p.requires_grad]
        kind.inputs = [span_bytes(t) for t in tensors]
        kind.keeps = [True] * len(tensors) if self._stream else _saved(forward, template, leaves)
        _tapes.append(tape)
        try:
            with tape, torch.enable_grad():
                outputs = _outputs(kind, forward, template, leaves)
                kind.shapes = [(tuple(o.shape), o.stride(), o.dtype, o.requires_grad) for o in outputs]
                kind.outputs = [tape.key_of(o) or 0 for o in outputs]
                if self._stream:
                    kept = [o.data for o in outputs]
                    del outputs
                    kind.forward, tape.events = tape.events, []
                    outputs = _outputs(kind, forward, template, leaves)
                else:
                    kept = []
                    kind.forward, tape.events = tape.events, []
                roots = [o for o in outputs if o.requires_grad]
                needed = [leaf for leaf in leaves if leaf.requires_grad]
                if roots:
                    with torch.utils._python_dispatch._disable_current_modes():
                        incoming = [torch.empty_like(root) for root in roots]
                    found: Any = torch.autograd.grad(roots, [*needed, *parameters], incoming, allow_unused=True)
                else:
                    found = (None,) * (len(needed) + len(parameters))
                del outputs, roots
            keys = [0 if t is None else tape.key_of(t) or 0 for t in found]
            kind.input_gradients, kind.gradients = keys[: len(needed)], keys[len(needed) :]
            kind.backward = list(tape.events)
            tape.close()
            del found, kept
        finally:
            _tapes.pop()
        return kind


def _saved(forward: Callable[..., Any], template: Any, leaves: list[Tensor]) -> list[bool]:
    """Which inputs a layer's own graph keeps."""
    kept: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage()._cdata)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _outputs(Kind(), forward, template, leaves)
    return [leaf.untyped_storage()._cdata in kept for leaf in leaves]


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """What tells modules of one class apart, but for their place."""
    return tuple(
        (k, v) for k, v in vars(module).items() if isinstance(v, bool | int | float | str) and k != "layer_idx"
    )


def _outputs(kind: Kind, forward: Callable[..., Any], template: Any, leaves: list[Tensor]) -> list[Tensor]:
    args, kwargs = unflatten(template, leaves)
    copies: list[MutableMapping[Any, Any]] = mappings((args, kwargs))
    before = [dict(mapping) for mapping in copies]
    result = forward(*args, **kwargs)
    written = [
        [(key, value) for key, value in mapping.items() if key not in old or value is not old[key]]
        for mapping, old in zip(copies, before, strict=True)
    ]
    outputs: list[Tensor] = []
    kind.result = flatten((result, written), outputs)
    return outputs


def frozen_sizes(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """name -> meta tensor of everything frozen in a skeleton's ``module``, once its 4-bit weights are packed."""
    found: dict[str, Tensor] = {}
    for path, inner in module.named_modules(prefix=prefix):
        for leaf, tensor in (*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False)):
            name = f"{path}.{leaf}" if path else leaf
            if leaf == "weight" and is_4bit(inner):
                found |= _packed(name, inner)
            else:
                found[name] = tensor.detach().to("meta")
    return found


def _packed(name: str, linear: Any) -> dict[str, Tensor]:
    weight, num_weights = linear.weight, linear.in_features * linear.out_features
    num_blocks = -(-num_weights // _BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    num_bytes = (num_weights + 1) // 2
    found = {name: empty(num_bytes // weight.quant_storage.itemsize, 1, dtype=weight.quant_storage)}
    state = f"{name}.quant_state"
    found[f"{state}.code"] = empty(16)
    if weight.compress_statistics:
        found[f"{state}.absmax"] = empty(num_blocks, dtype=torch.uint8)
        found[f"{state}.offset"] = empty()
        found[f"{state}.state2.absmax"] = empty(-(-num_blocks // _NESTED_BLOCK))
        found[f"{state}.state2.code"] = empty(256)
    else:
        found[f"{state}.absmax"] = empty(num_blocks)
    return found


def layer_layout(layer: nn.Module) -> Layout:
    """The byte plan of a skeleton's bare ``layer``: that of the engine, before there are any bytes."""
    return plan_layout({name: tensor for name, tensor in frozen_sizes(layer).items() if not is_constant(name)})
