"""The sizes of a run, found once, and the bill that they make under given settings of the window."""

import copy
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from poros.errors import UnsupportedModelError
from poros.evidence.plan_allocator import Allocator, Block
from poros.evidence.plan_cards import CARDS, Card
from poros.evidence.plan_result import Plan
from poros.evidence.plan_terms import LAYER, Event, Tracer, frozen_sizes, layer_layout
from poros.model import upstream
from poros.model.adapter import add_lora
from poros.model.options import Precision
from poros.model.quantize import is_4bit, weight_bytes
from poros.residency.discover import find_decoder
from poros.residency.layer import is_constant
from poros.residency.layout import span_bytes
from poros.residency.schedule import spread
from poros.train.chunked_loss import ChunkedCausalLMLoss

# What a process takes beside torch's allocator: process_bytes - reserved_bytes of the rows in
# docs/validation/h200_launches_32b.jsonl, and the host peak of its resident row, which keeps nothing else on the host.
# The context and the kernels of torch and bitsandbytes; with page-locked weights the driver's tables of their pages.
CONTEXT_BYTES = {False: 727_711_744, True: 801_112_064}  # by whether the base streams
GRAPHS_BYTES = 4_194_304  # of the driver, with recorded visits
LIBRARIES_BYTES = 1_945_968_640
# cuBLAS takes a workspace for each thread that calls it, the forward's and the backward's.
_NUM_WORKSPACES = 2

SLOTS, KEPT, FIXED, ADAPTERS = "window", "blocks that stay", "embeddings, head, norms", "adapters"
GRADIENTS, OPTIMIZER, UPDATE = "gradients", "optimizer state", "optimizer at work"
RECORDED = "recorded visits"
BLOCKS_ON_THEIR_WAY = "two blocks on their way"
INPUTS, WORKSPACES, ACTIVATIONS = "saved layer inputs", "cuBLAS workspaces", "base and activations"


@dataclass(frozen=True)
class Run:
    """What is to be trained, and how."""

    name: str
    config: PreTrainedConfig
    seq_len: int
    batch_size: int
    rank: int
    targets: str | list[str]
    precision: Precision
    loss_chunk_tokens: int | None = None


class Work:
    """A run's sizes, found once; :meth:`bill` makes a plan of them for given settings of the window.

    Attributes:
        slabs: Bytes of each layer's slab.
        fixed: Bytes of each tensor that neither streams nor learns.
        adapters: For each layer and, last, the rest of the model, bytes of each trainable tensor.
    """

    def __init__(self, run: Run, *, stream: bool = True) -> None:
        self.run, self.stream = run, stream
        model = _skeleton(run)
        decoder = find_decoder(model)
        self.model_type = decoder.model_type
        layers = [layer for _, layer in decoder.layers]
        layouts = [layer_layout(layer) for layer in layers]
        self.slabs = [layout.num_bytes for layout in layouts]
        self.layer_tensors = [[entry.num_bytes for entry in layout.entries] for layout in layouts]
        self.packed = [sum(weight_bytes(module) for module in layer.modules()) for layer in layers]
        linears = [m for layer in layers for m in layer.modules() if is_4bit(m) or isinstance(m, nn.Linear)]
        self.linear_weights = sum(m.in_features * m.out_features for m in linears)
        self.packed_weights = sum(m.in_features * m.out_features for m in linears if is_4bit(m))
        head = model.get_output_embeddings()
        self.head_weights = 0 if head is None else sum(p.numel() for p in head.parameters())
        self.fixed = _fixed(model, [name for name, _ in decoder.layers])
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = add_lora(
                model, rank=run.rank, alpha=2 * run.rank, dropout=_dropout(model), target_modules=run.targets
            )
        adapted.train()
        inside = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
        known = {id(p) for group in inside for p in group}
        rest = [p for p in adapted.parameters() if p.requires_grad and id(p) not in known]
        self.adapters = [[p.numel() * p.element_size() for p in group] for group in (*inside, rest)]
        self._adapted, self._layers = adapted, layers

    @property
    def num_trainable(self) -> int:
        """Bytes of everything that learns."""
        return sum(map(sum, self.adapters))

    @cached_property
    def events(self) -> list[Event]:
        """The tape of a step; :class:`UnsupportedModelError` if the model cannot be run without values."""
        return _trace(self.run, self._adapted, self._layers, stream=self.stream)

    def blocks(self, block_size: int) -> list[int]:
        """Bytes of each block."""
        return [sum(self.slabs[i : i + block_size]) for i in range(0, len(self.slabs), block_size)]

    def bill(
        self, *, block_size: int, slots: int, resident_blocks: int, replay: bool = True, card: Card | None = None
    ) -> Plan:
        """The plan for these settings; without streaming they mean nothing."""
        blocks = self.blocks(block_size)
        resident_blocks, slots = min(resident_blocks, len(blocks)), min(slots, len(blocks))
        allocator = Allocator()
        if self.stream:
            for _ in range(slots):
                allocator.allocate(max(blocks), SLOTS)
            for block in spread(len(blocks), resident_blocks) if resident_blocks else ():
                allocator.allocate(blocks[block], KEPT)
        else:
            for num_bytes in (size for sizes in self.layer_tensors for size in sizes):
                allocator.allocate(num_bytes, ACTIVATIONS)
        for num_bytes in self.fixed:
            allocator.allocate(num_bytes, FIXED)
        for num_bytes in (size for group in self.adapters for size in group):
            allocator.allocate(num_bytes, ADAPTERS)
        for _ in range(_NUM_WORKSPACES):
            allocator.allocate((card or CARDS["h200"]).workspace_bytes, WORKSPACES)
        steps = _Steps(allocator, self.events, self.adapters, stream=self.stream)
        replay = replay and self.stream
        steps.run(1 if replay else 2)
        if replay:
            steps.start_replaying()
            steps.run(2)
        context = CONTEXT_BYTES[self.stream] + GRAPHS_BYTES * replay
        store = sum(blocks) if self.stream else 0
        host = {
            "torch and its libraries": LIBRARIES_BYTES,
            "frozen base": store,
            BLOCKS_ON_THEIR_WAY: 2 * block_size * max(self.packed),
        }
        streamed = 2 * sum(sorted(blocks)[: max(0, len(blocks) - resident_blocks - slots)]) if self.stream else 0
        run = self.run
        return Plan(
            model=run.name,
            model_type=self.model_type,
            num_layers=len(self.slabs),
            quantization="nf4" if self.packed_weights else None,
            dtype=str(run.precision.dtype).removeprefix("torch."),
            seq_len=run.seq_len,
            batch_size=run.batch_size,
            rank=run.rank,
            targets=run.targets,
            loss_chunk_tokens=run.loss_chunk_tokens,
            block_size=block_size,
            num_blocks=len(blocks),
            slots=slots,
            resident_blocks=resident_blocks,
            replay=replay,
            device_terms=dict(sorted(allocator.peak_terms.items(), key=lambda term: -term[1])),
            allocated_bytes=allocator.peak_allocated_bytes,
            reserved_bytes=allocator.peak_reserved_bytes,
            pool_bytes=allocator.pool_bytes,
            context_bytes=context,
            process_bytes=allocator.peak_reserved_bytes + context,
            host_terms=host,
            host_bytes=sum(host.values()),
            locked_bytes=store,
            streamed_bytes=streamed,
            seconds_at_least=None if card is None else self._seconds(streamed, card),
        )

    def _seconds(self, streamed: int, card: Card) -> float:
        """No step is faster, by what crosses the link, or by the products and the unpacking at the card's peaks.

        Packed weights are read in each pass, but expanded only in the one that differentiates for certain.
        """
        tokens = self.run.seq_len * self.run.batch_size
        num_passes = 3 if self.stream else 2  # forward, recompute, gradients of the inputs
        operations = 2 * tokens * (num_passes * self.linear_weights + 2 * self.head_weights)
        moved = self.packed_weights * (0.5 * num_passes + self.run.precision.dtype.itemsize)
        compute = operations / card.bf16_flops + moved / card.memory_bytes_per_s
        return max(streamed / card.link_bytes_per_s, compute)


class _Steps:
    """Puts the tapes of a step together and gives them to an allocator."""

    def __init__(self, allocator: Allocator, events: list[Event], adapters: list[list[int]], *, stream: bool) -> None:
        self._allocator, self._events, self._adapters, self._stream = allocator, events, adapters, stream
        self._alive: dict[Any, Block] = {}
        self._gradients: list[Block] = []
        self._has_state = False
        self._pool: Allocator | None = None  # of recordings
        self._recorded: dict[Any, list[Block]] = {}  # kind of layer -> the static memory of its recordings

    def start_replaying(self) -> None:
        """From now on layers are recorded when they come, and replayed."""
        self._pool = Allocator()

    def run(self, count: int) -> None:
        """Forward, backward and update, ``count`` times."""
        for _ in range(count):
            for event in self._events:
                if event.visit is not None and self._pool is not None:
                    self._replay(event.visit, self._pool)
                elif event.visit is not None:
                    self._visit(event.visit)
                else:
                    self._apply(event, "rest", event.label)
            for block in self._alive.values():
                self._allocator.release(block)
            self._alive.clear()
            self._update()

    def _apply(self, event: Event, tape: Any, label: str) -> None:
        if event.num_bytes is not None:
            self._alive[tape, event.key] = self._allocator.allocate(event.num_bytes, label)
        elif (block := self._alive.pop((tape, event.key), None)) is not None:
            self._allocator.release(block)

    def _visit(self, visit: Any) -> None:
        kind, tape = visit.kind, visit.layer
        for key in visit.inputs:
            if (block := self._alive.get(("rest", key))) is not None:
                self._allocator.relabel(block, INPUTS)
        for event in kind.backward if visit.backward else kind.forward:
            label = event.label if self._stream or visit.backward else ACTIVATIONS
            self._apply(event, tape, label)
        made = kind.input_gradients if visit.backward else kind.outputs
        for key, result in zip(made, visit.results, strict=False):
            if (block := self._alive.pop((tape, key), None)) is not None:
                self._alive["rest", result] = block
                self._allocator.relabel(block, LAYER if visit.backward else INPUTS)
        if visit.backward:
            for key in kind.gradients:
                if (block := self._alive.pop((tape, key), None)) is not None:
                    self._allocator.relabel(block, GRADIENTS)
                    self._gradients.append(block)
        if visit.backward or self._stream:  # what the tape leaves is let go with the graph
            for key in [key for key in self._alive if key[0] == tape]:
                self._allocator.release(self._alive.pop(key))

    def _replay(self, visit: Any, pool: Allocator) -> None:
        """What a recorded visit makes is copied out: outputs; gradients of inputs, and of parameters in one piece."""
        kind = visit.kind
        if kind not in self._recorded:
            self._record(visit, pool)
        for key in visit.inputs:
            if (block := self._alive.get(("rest", key))) is not None:
                self._allocator.relabel(block, INPUTS)
        sizes = {event.key: event.num_bytes for event in (kind.backward if visit.backward else kind.forward)}
        made = kind.input_gradients if visit.backward else kind.outputs
        for key, result in zip(made, visit.results, strict=False):
            if (size := sizes.get(key)) is not None:
                label = LAYER if visit.backward else INPUTS
                self._alive["rest", result] = self._allocator.allocate(size, label)
        if visit.backward and (size := sum(sizes.get(key) or 0 for key in kind.gradients)):
            self._gradients.append(self._allocator.allocate(size, GRADIENTS))

    def _record(self, visit: Any, pool: Allocator) -> None:
        """The pool holds what the larger visit needs; static memory, what both read and leave for parameters."""
        kind, parameters = visit.kind, self._adapters[visit.layer]
        self._allocator.trim()
        for tape in (kind.forward, kind.backward):
            made = {}
            for event in tape:
                if event.num_bytes is not None:
                    made[event.key] = pool.allocate(event.num_bytes, LAYER)
                elif (block := made.pop(event.key, None)) is not None:
                    pool.release(block)
            for block in made.values():
                pool.release(block)
            self._allocator.set_beside(pool.reserved_bytes)
        sizes = {event.key: event.num_bytes for event in kind.forward}
        runs = [sum(kind.inputs), sum(parameters), sum(parameters), sum(sizes.get(key) or 0 for key in kind.outputs)]
        if not self._recorded or all(sum(runs) > sum(b.num_bytes for b in held) for held in self._recorded.values()):
            self._recorded[kind] = [self._allocator.allocate(size, RECORDED) for size in runs if size]
        else:
            self._recorded[kind] = []  # they share what others have

    def _update(self) -> None:
        """AdamW over all tensors at once: two moments that stay, and one list of temporaries."""
        sizes = [size for group in self._adapters for size in group]
        if not self._has_state:
            for size in sizes:
                for _ in range(2):
                    self._allocator.allocate(size, OPTIMIZER)
            self._has_state = True
        for block in [self._allocator.allocate(size, UPDATE) for size in sizes]:
            self._allocator.release(block)
        for block in self._gradients:
            self._allocator.release(block)
        self._gradients = []


def _skeleton(run: Run) -> Any:
    config = copy.deepcopy(run.config)
    quantizer = run.precision.quantizer(config, torch.device("cpu"))
    model = upstream.new_skeleton(config, "", run.precision.dtype, quantizer)
    upstream.compute_buffers(model, torch.device("meta"))
    return model.requires_grad_(False)


def _dropout(model: nn.Module) -> float:
    """Adapters are planned with dropout, which takes more; those on fused experts cannot have it."""
    return (
        0.0
        if any("experts" in name and not isinstance(m, nn.ModuleList) for name, m in model.named_modules())
        else 0.05
    )


def _trace(run: Run, adapted: Any, layers: list[nn.Module], *, stream: bool) -> list[Event]:
    ids = torch.zeros(run.batch_size, run.seq_len, dtype=torch.long, device="meta")

    def loss() -> Tensor:
        if run.loss_chunk_tokens is None:
            found: Tensor = adapted(input_ids=ids, labels=ids, use_cache=False).loss
            return found
        in_chunks: Tensor = ChunkedCausalLMLoss(run.loss_chunk_tokens)(adapted, {"input_ids": ids, "labels": ids})
        return in_chunks

    try:
        return Tracer(adapted, layers, stream=stream).step(loss)
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{run.name!r} cannot be planned: the model does not run without values in {run.precision.dtype} "
            f"({str(error).splitlines()[0]}). bfloat16 may."
        ) from error


def _fixed(model: Any, layers: list[str]) -> list[int]:
    """Bytes of each tensor outside the layers, and of one code table of each kind."""
    tied = set(model.all_tied_weights_keys)
    sizes, codes = [], {}
    for name, tensor in frozen_sizes(model).items():
        if is_constant(name):
            codes[tensor.shape] = span_bytes(tensor)
        elif name not in tied and not any(name.startswith(f"{layer}.") for layer in layers):
            sizes.append(span_bytes(tensor))
    return [*sizes, *codes.values()]
