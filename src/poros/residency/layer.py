"""One decoder layer whose frozen tensors live elsewhere: what it owns, and how a slot's bytes become its weights."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from poros.errors import ResidencyError, UnsupportedModelError
from poros.residency.casts import Carriers
from poros.residency.inventory import Inventory, descendants
from poros.residency.layout import Layout, plan_layout
from poros.residency.window import Window
from poros.units import format_bytes

# A frozen tensor that a user replaces after prepare (say, a norm cast to fp32) may stay on the device up to this size.
_MAX_ADOPTED_BYTES = 2**20


def adapter_tensors(layer: nn.Module) -> set[int]:
    """Ids of the tensors that belong to adapters, trainable now or not: they never leave the device.

    PEFT's layers name their adapters' containers in ``adapter_layer_names`` and ``other_param_names``.
    """
    owned: set[int] = set()
    for module in descendants(layer):
        for name in (*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ())):
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                owned.update(id(tensor) for tensor in (*part.parameters(), *part.buffers()))
    return owned


def side_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a quantised weight carries in its ``quant_state``, nested statistics included, by path."""

    def walk(holder: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value
            elif type(value) is type(holder):
                yield from walk(value, f"{path}.{name}")

    state = getattr(tensor, "quant_state", None)
    if state is not None:
        yield from walk(state, "quant_state")


def frozen_tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    """name -> tensor of everything in ``layer`` that moves with it: frozen parameters, buffers, statistics.

    Raises:
        UnsupportedModelError: a weight is of a kind whose values cannot be moved as bytes.
    """
    adapters = adapter_tensors(layer)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if tensor.requires_grad or id(tensor) in adapters:
            continue
        if _overlaps(tensor):
            continue  # several elements in one place cannot be copied back and forth; it stays on the device
        if tensor.is_meta:
            raise ResidencyError(f"{name} of {type(layer).__name__} has no values (it is on the meta device)")
        _refuse_kind(name, tensor)
        found[name] = tensor
        found |= {f"{name}.{path}": side for path, side in side_tensors(tensor)}
    return found


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def refuse_kinds(layers: Sequence[tuple[str, nn.Module]]) -> None:
    """Refuse weights that cannot be moved as bytes, before anything is changed.

    Raises:
        UnsupportedModelError: a frozen weight is of such a kind.
    """
    for prefix, layer in layers:
        for name, parameter in layer.named_parameters():
            if not parameter.requires_grad and not parameter.is_meta:
                _refuse_kind(f"{prefix}.{name}", parameter)


def _refuse_kind(name: str, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "SCB"):
        raise UnsupportedModelError(
            f"{name} is an 8-bit weight; only 4-bit and unquantised bases can be streamed. "
            "Load the model with load_in_4bit=True, or without quantisation."
        )
    if getattr(tensor, "bnb_quantized", True) is False and hasattr(tensor, "quant_type"):
        raise ResidencyError(
            f"{name} is a 4-bit weight that was not quantised yet. Move the model to its device first "
            "(model.to(device)), or load it with poros.load."
        )
    if getattr(tensor, "bnb_quantized", False) and getattr(tensor, "quant_state", None) is None:
        raise ResidencyError(
            f"{name} is a packed 4-bit weight without its quantisation state, so its values are lost. "
            "Load the model anew; if it was saved in 4 bits, its files are incomplete."
        )
    if tensor.layout is not torch.strided or type(tensor.data) is not torch.Tensor:
        raise UnsupportedModelError(f"{name} is a {type(tensor.data).__name__} with layout {tensor.layout}")


def _is_packed(name: str, tensor: torch.Tensor) -> bool:
    """Whether the tensor is a quantised weight or one of its statistics."""
    return ".quant_state." in name or getattr(tensor, "quant_state", None) is not None


def is_constant(name: str) -> bool:
    """Whether the entry is a quantisation code table: the same in all layers, so one copy serves all."""
    return name.endswith(".code")


class StreamedLayer:
    """A decoder layer of a prepared model.

    Between visits its frozen parameters are views on the host master, so they can be read and saved as ever; during a
    visit they are views into a slot. Only ``.data`` changes: every parameter, buffer and statistics tensor stays the
    object that it was.

    Args:
        name: Qualified name in the model.
        module: The layer.
        index: Its place among the decoder layers.
        block: The block it belongs to.
        forward: The layer's own forward, bound.
        frozen: name -> frozen tensor, from :func:`frozen_tensors`, without constants and shared tensors.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        index: int,
        block: int,
        forward: Callable[..., Any],
        frozen: dict[str, torch.Tensor],
    ) -> None:
        self.name = name
        self.index = index
        self.module = module
        self.block = block
        self.forward = forward
        self.names = list(frozen)
        self.tensors = list(frozen.values())
        self.layout: Layout = plan_layout(frozen)
        self.offset = 0  # of the slab inside its block
        self.before: StreamedLayer | None = None  # the layer that runs before this one
        self.carriers: Carriers | None = None  # of the latest forward under autocast
        self.checked = False  # whether a backward has looked for tensors that learn unseen
        self.homes = [tensor.device for tensor in self.tensors]
        self.masters: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._adopted: set[int] = set()  # indices of tensors that a user replaced
        self._inventory: Inventory | None = None
        self.frozen_ids = {id(tensor) for tensor in self.tensors}
        stores: list[dict[str, Any]] = [s for inner in descendants(module) for s in (inner._parameters, inner._buffers)]
        self._places = [  # where each frozen parameter and buffer hangs
            (store, name, tensor) for store in stores for name, tensor in store.items() if id(tensor) in self.frozen_ids
        ]
        self.num_guarded = 0  # modules inside when merging was last refused on all of them
        self._num_visible = sum(
            1 for tensor in dict.fromkeys((*module.parameters(), *module.buffers())) if id(tensor) in self.frozen_ids
        )

    def pack(self, slab: torch.Tensor) -> None:
        """Copy the frozen values into ``slab`` (flat ``uint8`` on the host) and let the tensors live there."""
        masters = self.layout.views(slab)
        for tensor, master in zip(self.tensors, masters, strict=True):
            master.copy_(tensor.data)
        self.masters = masters
        self._addresses = [master.data_ptr() for master in masters]
        self.unbind()

    def bind(self, views: list[torch.Tensor], window: Window) -> None:
        """Let the frozen tensors be ``views`` (into a slot of ``window``, in the layout's order)."""
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        if addresses != self._addresses:
            for index, (present, master) in enumerate(zip(addresses, self._addresses, strict=True)):
                if present != master and not window.owns(present):
                    self._adopt(index, views[index].device)
        self._point_to(views)

    def unbind(self) -> None:
        """Let the frozen tensors be their host masters again."""
        self._put_back()
        self._point_to(self.masters)

    def is_as_packed(self) -> bool:
        """Whether every frozen tensor is its host master, so that the slab holds all of them."""
        return not self._adopted and [tensor.data_ptr() for tensor in self.tensors] == self._addresses

    def _point_to(self, values: list[torch.Tensor]) -> None:
        if self._adopted:
            for index, (tensor, value) in enumerate(zip(self.tensors, values, strict=True)):
                if index not in self._adopted:
                    tensor.data = value
            return
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.data = value

    def _put_back(self) -> None:
        """Undo replacements by an alias, which would stay on the slot: PEFT's DoRA makes them on a CPU."""
        for store, name, tensor in self._places:
            present = store.get(name)
            if present is not tensor and present is not None and present.data_ptr() == tensor.data_ptr():
                store[name] = tensor

    def restore(self) -> None:
        """Let the frozen tensors be ordinary tensors where they were before (those from the host keep the master).

        What a user has put in an unquantised tensor's place since stays.
        """
        masters = zip(self.names, self.tensors, self.homes, self.masters, strict=False)  # no masters before pack()
        for name, tensor, home, master in masters:
            replaced = tensor.data_ptr() != master.data_ptr() and not _is_packed(name, tensor)
            tensor.data = tensor.data.to(home) if replaced else master.to(home)

    def walk(self, device: torch.device) -> Inventory:
        """Find what the layer holds now, and see to it that what does not stream is on ``device``.

        Adapters may be added, frozen, switched or deleted at any time, so what is remembered is checked at each visit.

        Raises:
            ResidencyError: a frozen weight was replaced or made trainable after :func:`prepare`.
        """
        found = self._inventory
        if found is None or not found.is_current():
            self._inventory = None
            found = Inventory(self.module, self.frozen_ids)
            if found.num_frozen != self._num_visible:
                gone = [name for name, tensor in zip(self.names, self.tensors, strict=True) if not found.holds(tensor)]
                base = [name for name in gone if ".quant_state." not in name]
                raise ResidencyError(self._changed(base[0], "was replaced (merging an adapter does that)"))
            self._inventory = found
        if learning := found.learning_frozen():
            raise ResidencyError(self._changed(learning, "was made trainable"))
        for tensor in found.others:
            if tensor.device != device:
                with torch.inference_mode(False):
                    tensor.data = tensor.data.to(device)
        return found

    def _adopt(self, index: int, device: torch.device) -> None:
        """Keep a tensor that was replaced by the user on the device, as it is now."""
        tensor, name = self.tensors[index], self.names[index]
        if index in self._adopted:
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
            return
        size = tensor.numel() * tensor.element_size()
        if size > _MAX_ADOPTED_BYTES or _is_packed(name, tensor):
            raise ResidencyError(self._changed(name, f"was replaced ({tensor.dtype}, {format_bytes(size)})"))
        tensor.data = tensor.data.to(device)
        self._adopted.add(index)

    def _changed(self, name: str, what: str) -> str:
        return (
            f"{self.name}: {name} {what} after poros.prepare. The base of a prepared model is read-only: "
            "call poros.unprepare(model), make the change, and prepare again."
        )
