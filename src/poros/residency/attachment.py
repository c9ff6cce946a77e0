"""A model whose layers stream: how it comes to be, and how it is undone. The only file that changes a module."""

import functools
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from poros.errors import ConfigError, ResidencyError
from poros.residency import guards
from poros.residency.casts import CastBlock
from poros.residency.cleanup import Cleanup
from poros.residency.discover import Decoder, find_decoder
from poros.residency.layer import StreamedLayer, frozen_tensors, is_constant
from poros.residency.layout import Layout
from poros.residency.replay import Replays
from poros.residency.report import REPACKING, Report, eager_notes, guarantee, precision
from poros.residency.schedule import Schedule, spread
from poros.residency.store import HostStore
from poros.residency.transfer import Recorder, Transfer, device_free_bytes, return_cached_memory
from poros.residency.visit import streamed_forward
from poros.residency.window import Window
from poros.units import format_bytes

_ATTACHMENT = "_poros_attachment"  # on the transformers model


class Attachment:
    """A model whose layers stream, or are about to.

    Lifecycle: construct (nothing moves), :meth:`pack` each block once its tensors are real, :meth:`finish`. Then the
    model is prepared, until :meth:`undo`.

    Args:
        model: A transformers decoder, bare or inside PEFT's wrappers; a meta skeleton will do until it is packed.
        block_size: Layers a block.
        slots: Blocks in the window; by default 3 for single-layer blocks and 2 for larger ones.
        resident_blocks: Blocks of which a copy stays on the compute device, so that none of their bytes cross the link.
        device: Where to compute; by default CUDA if there is one, else the CPU.
        poison: Overwrite slots before they are refilled (debugging).
        checksum: Compare each layer's recomputed output with its forward's (debugging).
        micro_batch_size: Rows of a batch that a visit computes at a time, in forwards with gradients; None for all.
        replay: Record visits as CUDA graphs, and replay them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        block_size: int = 1,
        slots: int | None = None,
        resident_blocks: int = 0,
        device: torch.device | str | None = None,
        poison: bool = False,
        checksum: bool = False,
        micro_batch_size: int | None = None,
        replay: bool = True,
    ) -> None:
        check_sizes(
            block_size=block_size, slots=slots, resident_blocks=resident_blocks, micro_batch_size=micro_batch_size
        )
        self.decoder: Decoder = find_decoder(model)
        _refuse_wrappers(model, self.decoder)
        self.model = model
        self.device = compute_device(device)
        self.block_size = min(block_size, len(self.decoder.layers))
        self.slots = min(slots or (3 if self.block_size == 1 else 2), self.num_blocks)
        self.resident_blocks = min(resident_blocks, self.num_blocks)
        self._kept: dict[int, torch.Tensor] = {}  # block -> its copy on the compute device
        self.poison, self.checksum = poison, checksum
        self.micro_batch_size = micro_batch_size
        self.replay = replay
        self.replays: Replays | None = None  # there are none before finish()
        self.repacking_off = False  # whether the CPU would repack 4-bit weights in an evaluation
        self.layers: list[StreamedLayer] = []
        self.store = HostStore(self.device)
        self.casts = CastBlock(self.device)
        self.cleanup = Cleanup()
        # Binding a layer's weights is seen by all threads: one visit at a time.
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.window: Window = None  # type: ignore[assignment]  # there is none before finish()
        self._overrides = guards.Overrides()
        self._constants: dict[tuple[torch.dtype, bytes], torch.Tensor] = {}
        self._moved: list[tuple[torch.Tensor, torch.device]] = []  # (not streamed, where it was)
        self._layouts: dict[Layout, Layout] = {}  # one object for all equal ones
        self._views: dict[tuple[int, int, int], list[torch.Tensor]] = {}  # (slot, id of layout, offset) -> views

    @property
    def num_blocks(self) -> int:
        """Blocks of the model; the last one may be short."""
        return -(-len(self.decoder.layers) // self.block_size)

    def layers_of(self, block: int) -> list[tuple[str, nn.Module]]:
        """(qualified name, layer) of each layer of ``block``."""
        return self.decoder.layers[block * self.block_size : (block + 1) * self.block_size]

    def pack(self, block: int) -> None:
        """Move the frozen tensors of a block's layers, real by now, into host memory. Blocks come in order."""
        assert block == len(self.store.blocks)
        shared = self._shared_tensors()
        streamed: list[StreamedLayer] = []
        for name, module in self.layers_of(block):
            frozen = {key: tensor for key, tensor in frozen_tensors(module).items() if id(tensor) not in shared}
            for key in [key for key in frozen if is_constant(key)]:
                self._keep_constant(frozen.pop(key))
            index = len(self.layers) + len(streamed)
            streamed.append(StreamedLayer(name, module, index, block, module.forward, frozen))
        slab = self.store.add(sum(layer.layout.num_bytes for layer in streamed))
        offset = 0
        for layer in streamed:
            layer.offset = offset
            layer.layout = self._layouts.setdefault(layer.layout, layer.layout)
            layer.before = self.layers[-1] if self.layers else None
            layer.pack(slab[offset : offset + layer.layout.num_bytes])
            self.layers.append(layer)
            offset += layer.layout.num_bytes
        self.store.lock(slab)

    def finish(self) -> None:
        """Move what does not stream to the compute device, allocate the window, and let the layers visit it."""
        if not any(layer.tensors for layer in self.layers):
            raise ResidencyError(
                "nothing to stream: the decoder layers hold no frozen tensor. Freeze the base first "
                "(get_peft_model does, or model.requires_grad_(False))."
            )
        self.settle()
        return_cached_memory(self.device)
        self._require_device_memory()
        self._kept = {
            block: self.store.blocks[block].to(self.device, copy=True)
            for block in (spread(self.num_blocks, self.resident_blocks) if self.resident_blocks else ())
        }
        transfer = Transfer(self.device)
        schedule = Schedule(self.num_blocks)
        sources = [self._kept.get(block, master) for block, master in enumerate(self.store.blocks)]
        self.window = Window(sources, self.slots, transfer, schedule, poison=self.poison)
        if self.replay and self.device.type == "cuda":
            self.replays = Replays(Recorder(self.device), transfer)
        for layer in self.layers:
            self._install(layer)
        self.guard(self.model)
        for module in (self.decoder.base, *(layer.module for layer in self.layers)):
            self._overrides.set(module, _ATTACHMENT, self)
        if isinstance(getattr(self.decoder.base, "hf_device_map", None), dict):
            # accelerate reads it to decide whether a 4-bit model can be trained where it is.
            self._overrides.set(self.decoder.base, "hf_device_map", {"": self.device})

    def _require_device_memory(self) -> None:
        """Refuse a window and blocks that stay which the device has no room for."""
        largest = max(block.numel() for block in self.store.blocks)
        need, free = largest * (self.slots + self.resident_blocks), device_free_bytes(self.device)
        if free is not None and need > free:
            raise ConfigError(
                f"{self.slots} slots and {self.resident_blocks} resident blocks of {format_bytes(largest)} take "
                f"{format_bytes(need)} on {self.device}, where {format_bytes(free)} are free. Lower resident_blocks, "
                "slots or block_size, or close what else uses the GPU."
            )

    def settle(self) -> None:
        """Move everything that does not stream to the compute device. Parameters stay the objects that they are."""
        streamed = {id(tensor) for layer in self.layers for tensor in layer.tensors}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if id(tensor) not in streamed and tensor.device != self.device:
                self._move(tensor)

    def guard(self, model: nn.Module) -> None:
        """Install the refusals on ``model`` and everything between it and the layers."""
        modules = [layer.module for layer in self.layers]
        path = find_decoder(model).path if model is not self.model else self.decoder.path
        if any(module is self.model for module in model.modules()):
            self.model = model  # the outermost that is known
        for module in path:
            if self._overrides.has(module, "_apply"):
                continue
            guards.guard_moves(self._overrides, module, self.device)
            guards.guard_copies(self._overrides, module)
            guards.settle_after_arrival(self._overrides, module, self.settle)
            guards.guard_checkpointing(self._overrides, module, modules)
        for module in path:
            guards.guard_merges(self._overrides, module)
        for layer in self.layers:
            self.guard_inside(layer)

    def guard_inside(self, layer: StreamedLayer) -> None:
        """Install the refusals on the modules inside a layer; again when adapters have come."""
        modules = list(layer.module.modules())
        layer.num_guarded = len(modules)
        for module in modules:
            guards.guard_merges(self._overrides, module)
            if any(
                id(tensor) in layer.frozen_ids for tensor in (*module._parameters.values(), *module._buffers.values())
            ):
                guards.guard_load(self._overrides, module, layer.frozen_ids)

    def views(self, slot: int, layer: StreamedLayer) -> list[torch.Tensor]:
        """The layer's tensors as views into a slot; layers of equal structure share them."""
        key = (slot, id(layer.layout), layer.offset)
        views = self._views.get(key)
        if views is None:
            with torch.inference_mode(False):
                memory = self.window.slots[slot].memory
                views = layer.layout.views(memory[layer.offset : layer.offset + layer.layout.num_bytes])
            self._views[key] = views
        return views

    def undo(self) -> None:
        """Put every tensor back where it was, and take every change to the modules back."""
        need = sum(
            layer.layout.payload_bytes for layer in self.layers if any(home.type == "cuda" for home in layer.homes)
        )
        free = device_free_bytes(self.device)
        if free is not None and self.window is not None:
            free += self.window.num_bytes + self._kept_bytes
        if free is not None and need > free:
            raise ResidencyError(
                f"unprepare would put {format_bytes(need)} of weights back on {self.device}, where "
                f"{format_bytes(free)} are free. Nothing was changed. Free memory there, or save the adapter and load "
                "it into a model on another device."
            )
        self.cleanup.finish()
        if self.replays is not None:
            self.replays.forget()
        self.replays = None
        self._views.clear()
        if self.window is not None:
            self.window.close()
        self._kept.clear()
        self._overrides.undo()
        streamed = {id(tensor) for layer in self.layers for tensor in layer.tensors}
        for layer in self.layers:
            layer.restore()
        self._send_home(streamed)
        self.store.close()
        self.layers = []

    def _send_home(self, streamed: set[int]) -> None:
        """Put what did not stream back; adapters that came later go where the base is."""
        homes = {home for _, home in self._moved}
        known = {id(tensor) for tensor, _ in self._moved}
        if len(homes) == 1:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                if id(tensor) not in known | streamed:
                    self._moved.append((tensor, next(iter(homes))))
        for tensor, home in reversed(self._moved):
            tensor.data = tensor.data.to(home)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(home)
        self._moved = []

    @property
    def _kept_bytes(self) -> int:
        return sum(block.numel() for block in self._kept.values())

    def report(self) -> Report:
        """What the model costs where, as of now."""
        streamed = {id(tensor) for layer in self.layers for tensor in layer.tensors}
        rest = [t for t in (*self.model.parameters(), *self.model.buffers()) if id(t) not in streamed]
        notes = [] if self.store.lock_error is None else [self.store.lock_error]
        if self.repacking_off:
            notes.append(REPACKING)
        eager = {} if self.replays is None else dict(self.replays.eager)
        notes += eager_notes(eager)
        return Report(
            model_type=self.decoder.model_type,
            precision=precision(self.layers),
            device=str(self.device),
            num_layers=len(self.layers),
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            slots=self.slots,
            host_bytes=self.store.num_bytes,
            locked_bytes=self.store.locked_bytes,
            window_bytes=self.window.num_bytes,
            resident_blocks=self.resident_blocks,
            resident_block_bytes=self._kept_bytes,
            resident_bytes=sum(tensor.numel() * tensor.element_size() for tensor in rest),
            trainable_bytes=sum(tensor.numel() * tensor.element_size() for tensor in rest if tensor.requires_grad),
            guarantee=guarantee(self.decoder.model_type, self.device),
            notes=notes,
            num_loads=self.window.num_loads,
            num_late_loads=self.window.num_waits,
            replay=self.replays is not None,
            replayed_layers=0 if self.replays is None else len(self.replays.replayed),
            eager_layers=eager,
        )

    def _install(self, layer: StreamedLayer) -> None:
        module = layer.module

        @functools.wraps(layer.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return streamed_forward(self, layer, args, kwargs)

        def _apply(fn: Any, *_: Any, **__: Any) -> nn.Module:
            guards.check_move(fn, self.device)
            streamed = {id(tensor) for tensor in layer.tensors}
            for tensor in (*module.parameters(), *module.buffers()):
                if id(tensor) not in streamed:
                    tensor.data = fn(tensor.data)
                    if tensor.grad is not None:
                        tensor.grad.data = fn(tensor.grad.data)
            return module

        self._overrides.set(module, "forward", forward)
        self._overrides.set(module, "_apply", _apply)
        guards.guard_copies(self._overrides, module)
        several = guards.refusal("nn.DataParallel", "show the process one GPU only (CUDA_VISIBLE_DEVICES=0)")
        self._overrides.set(module, "_replicate_for_data_parallel", several)
        for inner in module.modules():
            # On some CPUs an evaluation would repack these weights in place.
            if getattr(inner, "support_avx512bf16_for_cpu", False):
                self._overrides.set(inner, "support_avx512bf16_for_cpu", False)
                self.repacking_off = True

    def _shared_tensors(self) -> set[int]:
        """Ids of tensors that belong to more than one layer, or to a layer and the rest: they stay resident."""
        owners: dict[int, set[int]] = {}
        layers = {id(inner): index for index, (_, layer) in enumerate(self.decoder.layers) for inner in layer.modules()}
        for module in self.model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    owners.setdefault(id(tensor), set()).add(layers.get(id(module), -1))
        return {tensor for tensor, owner in owners.items() if len(owner) > 1}

    def _keep_constant(self, tensor: torch.Tensor) -> None:
        """Let a code table be one copy on the compute device that all layers share."""
        key = (tensor.dtype, tensor.detach().cpu().numpy().tobytes())
        self._moved.append((tensor, tensor.device))
        if key not in self._constants:
            self._constants[key] = tensor.data.to(self.device, copy=True)
        tensor.data = self._constants[key]

    def _move(self, tensor: torch.Tensor) -> None:
        self._moved.append((tensor, tensor.device))
        tensor.data = tensor.data.to(self.device)
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(self.device)


def attachment_of(model: nn.Module) -> Attachment | None:
    """The attachment of a prepared model, found from any module that holds its transformers model."""
    return next((m.__dict__[_ATTACHMENT] for m in model.modules() if _ATTACHMENT in m.__dict__), None)


def compute_device(device: torch.device | str | None) -> torch.device:
    """``device`` with its index, or the default: the current CUDA device if there is one, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device {device!r} is not a device; use 'cuda', 'cuda:0' or 'cpu'") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r} is not supported; use 'cuda' or 'cpu'")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device {str(device)!r} was asked for, but torch sees no CUDA device")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    return device


# size -> the least that it may be, and what that means
_LEAST = {
    "block_size": (1, "layers a block"),
    "slots": (1, "2 or more let copies overlap the computation"),
    "resident_blocks": (0, "every block streams"),
    "micro_batch_size": (1, "rows of a batch"),
}


def check_sizes(**sizes: Any) -> None:
    """Refuse sizes that are no sizes; None stands for a default."""
    for name, value in sizes.items():
        least, meaning = _LEAST[name]
        if value is None:
            continue
        if type(value) is not int:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number, at least {least} ({meaning})")
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least} ({meaning})")


def _refuse_wrappers(model: nn.Module, decoder: Decoder) -> None:
    if hasattr(model, "_orig_mod"):
        raise ResidencyError("the model is wrapped by torch.compile; prepare the model itself, and do not compile it")
    if isinstance(model, nn.DataParallel):
        raise ResidencyError("the model is wrapped by nn.DataParallel; prepare model.module, and use one GPU a process")
    if attachment_of(decoder.base) is not None:
        raise ResidencyError("the model is already prepared")
