"""The decoder layers of a streamed model, replayed from CUDA graphs: see ``stream_loop``. CUDA only."""

from collections import deque
from typing import Any

import torch
from torch import nn

from poros.errors import UnsupportedModelError
from poros.evidence.engines.base import CellRequest
from poros.evidence.engines.batches import make_batches
from poros.evidence.engines.qlora import add_adapters, build_base
from poros.evidence.engines.recorder import Recorder
from poros.evidence.engines.stream_loop import Visit, plan_visits
from poros.residency.attachment import Attachment, attachment_of
from poros.residency.transfer import Mark, Transfer

_WARMUP_RUNS = 2  # of a layer before it is captured: libraries allocate their workspaces


class _CapturedSlot:
    """One slot with the graphs over it; see [Note: one layer, captured once a slot] in ``stream_loop``."""

    def __init__(self, memory: torch.Tensor, num_adapters: int) -> None:
        self.memory = memory
        self.adapters = torch.empty(num_adapters, device=memory.device)
        self.gradients = torch.zeros(num_adapters, device=memory.device)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.output: torch.Tensor  # of the forward
        self.ready: Mark = None  # its weights have come
        self.free: Mark = None  # what read them last has passed


class ReplayedLayers:
    """All layers of a request's model, forward and backward, with nothing but copies and replays.

    Attributes:
        adapters: ``(layers, parameters of one)`` in fp32; its ``grad`` is ``gradients``.
        gradients: added to by each :meth:`forward_and_backward`.
    """

    def __init__(self, request: CellRequest, recorder: Recorder) -> None:
        base = build_base(request, recorder, stream=True, block_size=1, slots=request.slots)
        model = add_adapters(request, base).train()
        attachment = attachment_of(model)
        assert attachment is not None
        _require_one_structure(model, attachment)
        self._attachment, self._masters = attachment, attachment.store.blocks
        self._args, self._kwargs = _call_of_first_layer(model, make_batches(request, model, recorder)[0][0], attachment)
        self._take_adapters()
        _free_what_does_not_stream(model, attachment)
        self._transfer = Transfer(attachment.device)
        self._content: tuple[int | None, ...] = (None,) * attachment.slots
        hidden = self._args[0] if self._args else self._kwargs["hidden_states"]
        self._x = hidden.detach().clone().requires_grad_()
        self._x.grad = torch.zeros_like(self._x)
        self._grad = torch.randn_like(self._x.detach())  # of the layer's output
        self._saved = torch.empty(len(self._masters), *hidden.shape, dtype=hidden.dtype, device=hidden.device)
        self._slots: list[_CapturedSlot] = []
        for index in range(attachment.slots):
            self._slots.append(self._capture(index))
        recorder.facts |= {
            "slots": attachment.slots,
            "host_locked_bytes": attachment.store.locked_bytes,
        }

    def forward_and_backward(self) -> None:
        """Visit every layer twice; weights arrive while earlier layers compute."""
        visits, self._content = plan_visits(len(self._masters), self._content)
        loads = deque(position for position, visit in enumerate(visits) if visit.load)
        for position, visit in enumerate(visits):
            while loads and visits[loads[0]].after < position:
                self._load(visits[loads.popleft()])
            slot = self._slots[visit.slot]
            self._transfer.wait(slot.ready)
            slot.adapters.copy_(self.adapters.data[visit.layer])
            if visit.backward:
                self._x.data.copy_(self._saved[visit.layer])
                slot.backward.replay()
                self.gradients[visit.layer].add_(slot.gradients)
                assert self._x.grad is not None
                self._grad.copy_(self._x.grad)
            else:
                self._saved[visit.layer].copy_(self._x.detach())
                slot.forward.replay()
                self._x.data.copy_(slot.output)
            slot.free = self._transfer.mark()

    def _load(self, visit: Visit) -> None:
        slot, master = self._slots[visit.slot], self._masters[visit.layer]
        slot.ready = self._transfer.copy(slot.memory[: master.numel()], master, after=[slot.free])

    def _take_adapters(self) -> None:
        """Put the adapters of each layer in a row of one tensor, which is what the optimizer gets."""
        of_layers = [_trainable(layer.module) for layer in self._attachment.layers]
        rows = [torch.cat([parameter.data.flatten() for parameter in one]) for one in of_layers]
        self.adapters = nn.Parameter(torch.stack(rows))
        self.gradients = torch.zeros_like(self.adapters.data)
        self.adapters.grad = self.gradients
        for index, one in enumerate(of_layers):
            _bind(one, self.adapters.data[index])

    def _capture(self, index: int) -> _CapturedSlot:
        """The first layer's forward, and its recompute with the backward, over slot ``index``."""
        attachment, layer = self._attachment, self._attachment.layers[0]
        slot = _CapturedSlot(attachment.window.slots[index].memory, self.adapters.shape[1])
        slot.memory[: self._masters[0].numel()].copy_(self._masters[0])
        slot.adapters.copy_(self.adapters.data[0])
        layer.bind(attachment.views(index, layer), attachment.window)
        parameters = _trainable(layer.module)
        _bind(parameters, slot.adapters)
        _bind([parameter.grad for parameter in _with_grads(parameters)], slot.gradients)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARMUP_RUNS):
                self._run_layer()
                self._run_backward(slot)
        torch.cuda.current_stream().wait_stream(aside)
        pool = self._slots[0].forward.pool() if self._slots else None
        with torch.cuda.graph(slot.forward, pool=pool):
            slot.output = self._run_layer().detach()
        with torch.cuda.graph(slot.backward, pool=slot.forward.pool()):
            self._run_backward(slot)
        return slot

    def _run_layer(self) -> torch.Tensor:
        args, kwargs = self._args, self._kwargs
        if args:
            args = (self._x, *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": self._x}
        result = self._attachment.layers[0].forward(*args, **kwargs)
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return output

    def _run_backward(self, slot: _CapturedSlot) -> None:
        assert self._x.grad is not None
        slot.gradients.zero_()
        self._x.grad.zero_()
        self._run_layer().backward(self._grad)


def _require_one_structure(model: Any, attachment: Attachment) -> None:
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if len(kinds) > 1 or any(layer.layout != attachment.layers[0].layout for layer in attachment.layers):
        raise UnsupportedModelError(
            f"the layers of {model.config.model_type} are of several kinds, and stream-loop replays one for all"
        )


def _call_of_first_layer(model: Any, batch: Any, attachment: Attachment) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With which arguments the model calls its first layer."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = attachment.layers[0].module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(input_ids=batch["input_ids"], use_cache=False)
    hook.remove()
    torch.cuda.synchronize()  # the window is done with its slots
    return calls[0]


def _free_what_does_not_stream(model: Any, attachment: Attachment) -> None:
    inside = {id(parameter) for layer in attachment.layers for parameter in layer.module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _with_grads(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters


def _bind(tensors: Any, flat: torch.Tensor) -> None:
    """Let ``tensors`` be consecutive views into ``flat``."""
    offset = 0
    for tensor in tensors:
        tensor.data = flat[offset : offset + tensor.numel()].view(tensor.shape)
        offset += tensor.numel()
