"""The judge of every parity test: run, record, compare bit by bit.

A *trace* holds, for each optimizer step, what the parity contract names: the losses, every gradient before clipping,
the gradient norm, every trainable tensor, the optimizer's state, and the state of the random generators. Two traces
are equal when all bits are: -0.0 is not 0.0, and a NaN equals only the same NaN.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from poros.evidence import bits
from poros.evidence.bits import Difference, describe_difference
from tests.tiny import text_layers

Batch = dict[str, Tensor]
# Runs the forwards and backwards of one optimizer step, and returns the losses it saw.
Learn = Callable[[nn.Module, Sequence[Batch]], Sequence[Tensor]]


@dataclass
class Trace:
    """What a run left behind: ``steps[i]`` maps ``"surface/tensor"`` to its value after step i, or None if absent."""

    steps: list[dict[str, Tensor | None]] = field(default_factory=list)
    layer_runs: list[int] = field(default_factory=list)  # how often each text layer really computed

    def surface(self, name: str, step: int = -1) -> dict[str, Tensor | None]:
        """The tensors of one surface (``"grad"``, ``"param"``, ...) after ``step``."""
        prefix = name + "/"
        return {key.removeprefix(prefix): v for key, v in self.steps[step].items() if key.startswith(prefix)}


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.01)


def accumulate(model: nn.Module, micro_batches: Sequence[Batch]) -> list[Tensor]:
    """The usual step: the mean of the micro-batches' losses."""
    losses = []
    for micro_batch in micro_batches:
        loss = model(**micro_batch).loss
        (loss / len(micro_batches)).backward()
        losses.append(loss)
    return losses


def run(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    accumulation: int = 1,
    learn: Learn = accumulate,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw,
    max_grad_norm: float = 1.0,
    autocast: torch.dtype | None = None,
    seed: int = 7,
    before_step: Callable[[nn.Module, int], None] | None = None,
) -> Trace:
    """Train ``model`` on ``batches``, ``accumulation`` of them a step, and record everything.

    Args:
        autocast: dtype of an autocast around ``learn`` (on the device of the batches).
        before_step: called with the model and the step's number; may change the model as users do. The optimizer
            holds what was trainable before step 0.
    """
    device = next(iter(batches[0].values())).device.type
    trace = Trace()
    with fixed_threads(), count_layer_runs(model) as trace.layer_runs:
        torch.manual_seed(seed)
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        for step in range(len(batches) // accumulation):
            if before_step is not None:
                before_step(model, step)
            group = batches[step * accumulation : (step + 1) * accumulation]
            with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                losses = learn(model, group)
            trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
            record: dict[str, Tensor | None] = {f"loss/{i}": _kept(loss) for i, loss in enumerate(losses)}
            record |= {f"grad/{name}": _kept(p.grad) for name, p in trainable.items()}
            record["grad_norm/"] = _kept(nn.utils.clip_grad_norm_(list(trainable.values()), max_grad_norm))
            optimizer.step()
            optimizer.zero_grad()
            record |= {f"param/{name}": _kept(p) for name, p in trainable.items()}
            for name, p in trainable.items():
                for key, value in optimizer.state.get(p, {}).items():
                    record[f"optimizer/{name}.{key}"] = _kept(value)
            record["rng/cpu"] = torch.get_rng_state()
            if device == "cuda":
                record["rng/cuda"] = torch.cuda.get_rng_state()
            trace.steps.append(record)
    return trace


def compare(a: Trace, b: Trace) -> Difference | None:
    """The first difference between two traces, None if there is none."""
    if len(a.steps) != len(b.steps):
        return Difference(min(len(a.steps), len(b.steps)), "steps", "", f"{len(a.steps)} against {len(b.steps)}")
    for step, (left, right) in enumerate(zip(a.steps, b.steps, strict=True)):
        verdict = bits.compare(left, right)
        if verdict.tensor is not None:
            surface, _, tensor = verdict.tensor.partition("/")
            element = verdict.element
            detail = describe_difference(left[verdict.tensor], right[verdict.tensor]) if element else verdict.detail
            return Difference(step, surface, tensor, detail or "", element)
    return None


def check_parity(
    make_model: Callable[[], nn.Module],
    batches: Sequence[Batch],
    *settings: dict[str, Any],
    prepare: Callable[..., nn.Module] | None = None,
    prepare_resident: Callable[[nn.Module], object] | None = None,
    recomputed: bool = True,
    idle_steps: Sequence[int] = (),
    **options: Any,
) -> Trace:
    """Assert that a model prepared with each of ``settings`` trains to the bits of its resident twin.

    The resident run is repeated first: if it does not reproduce itself, nothing can be said of streaming.

    Args:
        make_model: gives the same model at every call.
        settings: keyword arguments of ``poros.prepare``, one dict for each streamed run.
        prepare: stands in for ``poros.prepare``.
        prepare_resident: done to the resident twin alone.
        recomputed: expect each layer from the first trainable one on to compute exactly twice as often as in the
            resident run, and those below as often. False where forwards are dropped or run without gradient.
        idle_steps: steps that are not expected to give every layer a gradient.
        options: of :func:`run`.

    Returns:
        The resident run's trace.
    """
    if prepare is None:
        import poros

        prepare = poros.prepare
    device = next(iter(batches[0].values())).device

    def resident() -> Trace:
        model = make_model()
        if prepare_resident is not None:
            prepare_resident(model)
        return run(model, batches, **options)

    reference = resident()
    if difference := compare(reference, resident()):
        pytest.fail(f"inconclusive: the resident run does not reproduce itself: {difference}")
    _assert_not_vacuous(reference, idle_steps)
    for setting in settings or ({},):
        model = prepare(make_model(), **{"device": device, **setting})
        trace = run(model, batches, **options)
        if difference := compare(reference, trace):
            pytest.fail(f"not equal to the resident run with {setting}: {difference}")
        if recomputed:
            assert trace.layer_runs == expected_layer_runs(reference), f"layer runs with {setting}"
    return reference


def expected_layer_runs(reference: Trace) -> list[int]:
    """How often each layer computes in a streamed run, given an uncheckpointed resident one."""
    owners = layers_with_gradient(reference)
    first = min(owners, default=len(reference.layer_runs))
    if any(g is not None and layer_of(name) is None for name, g in reference.surface("grad").items()):
        first = 0  # something in front of the layers may be learning
    return [runs * (2 if i >= first else 1) for i, runs in enumerate(reference.layer_runs)]


def layers_with_gradient(trace: Trace, step: int = -1) -> set[int]:
    """The text layers that own a non-zero gradient."""
    owners = {layer_of(name) for name, g in trace.surface("grad", step).items() if g is not None and bool(g.any())}
    return {layer for layer in owners if layer is not None}


def layer_of(name: str) -> int | None:
    """The number of the text layer that a parameter belongs to."""
    match = re.search(r"(?<!encoder)\.layers\.(\d+)\.", name)
    return None if match is None else int(match[1])


@contextmanager
def count_layer_runs(model: nn.Module) -> Iterator[list[int]]:
    """Count how often each text layer computes, recomputes included, without touching the model.

    The layer's first norm is what is counted, so that a layer whose own ``forward`` is wrapped or skipped counts only
    when it really runs.
    """
    norms = [layer.input_layernorm for layer in text_layers(model)]
    index = {id(norm): i for i, norm in enumerate(norms)}
    runs = [0] * len(norms)

    def count(module: nn.Module, args: object) -> None:
        if (i := index.get(id(module))) is not None:
            runs[i] += 1

    handle = register_module_forward_pre_hook(count)
    try:
        yield runs
    finally:
        handle.remove()


@contextmanager
def fixed_threads(count: int = 1) -> Iterator[None]:
    """Few-row GEMMs change bits with the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _assert_not_vacuous(reference: Trace, idle_steps: Sequence[int]) -> None:
    for step, record in enumerate(reference.steps):
        if step in idle_steps:
            continue
        owners = {layer for key in record if key.startswith("grad/") and (layer := layer_of(key)) is not None}
        idle = owners - layers_with_gradient(reference, step)
        assert not idle, f"vacuous: no gradient in layers {sorted(idle)} at step {step}"
        assert any(bool(g.any()) for g in reference.surface("grad", step).values() if g is not None), "vacuous"
    assert min(reference.layer_runs) >= len(reference.steps), f"vacuous: layers ran {reference.layer_runs} times"
    first, last = (reference.surface("param", step) for step in (0, -1))
    changed = [describe_difference(value, last[name]) for name, value in first.items() if name in last]
    assert len(reference.steps) == 1 or any(changed), "vacuous: nothing was learnt"


def _kept(value: Any) -> Tensor | None:
    return value.detach().clone().cpu() if isinstance(value, Tensor) else None if value is None else torch.tensor(value)
