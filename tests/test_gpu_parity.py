"""Parity at a real model's shape: resident, resident again, and streamed, in lockstep on one GPU.

Set ``POROS_GPU_TEST_MODEL`` to a hub id, a folder, or a shape's name (random weights of a real configuration), then run
``pytest -m gpu tests/test_gpu_parity.py``. The other ``POROS_GPU_TEST_*`` variables are the fields of
:class:`Settings` in capitals; ``POROS_GPU_TEST_PATHS`` says which attention paths, and ``POROS_GPU_TEST_ROWS`` names a
file to which the verdicts are appended.
"""

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import poros
from poros.evidence import provenance as rows
from poros.model.build import from_shape
from poros.model.shapes import shape_names
from tests import skips

# Read when the CUDA context is made; without it cuBLAS is not reproducible.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [pytest.mark.gpu, skips.needs_cuda, skips.needs_gpu_model, pytest.mark.timeout(0)]

SURFACES = ("loss", "gradients", "grad_norm", "adapters", "optimizer", "rng")
LORA = {"rank": 16, "alpha": 32, "dropout": 0.05, "targets": "all-linear"}


@dataclass(frozen=True)
class Settings:
    """One parity run. ``control_steps``: for how many steps the resident run is repeated (0: for all)."""

    steps: int = 20
    seq_len: int = 512
    accumulation: int = 1
    block_size: int = 4
    slots: int = 2
    poison: bool = False
    control_steps: int = 0

    @classmethod
    def from_environment(cls) -> "Settings":
        given = {f.name: os.environ.get(f"POROS_GPU_TEST_{f.name.upper()}") for f in fields(cls)}
        return replace(cls(), **{name: int(value) for name, value in given.items() if value is not None})


class Run:
    """A model with its optimizer and its random state, stepped beside others."""

    def __init__(self, model: nn.Module, seed: int = 7) -> None:
        self.model = model.train()
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trainable.values(), lr=1e-4)
        torch.manual_seed(seed)
        self._rng = self._random_state()

    def step(self, batches: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """One optimizer step over micro-batches; surface -> tensors."""
        torch.set_rng_state(self._rng[0])
        torch.cuda.set_rng_state(self._rng[1])
        losses = []
        for ids in batches:
            loss = self.model(input_ids=ids, labels=ids).loss
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        gradients = [p.grad.clone() for p in self.trainable.values()]
        norm = nn.utils.clip_grad_norm_(self.trainable.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._rng = self._random_state()
        state = [self.optimizer.state[p] for p in self.trainable.values()]
        return {
            "loss": losses,
            "gradients": gradients,
            "grad_norm": [norm],
            "adapters": [p.detach() for p in self.trainable.values()],
            "optimizer": [value for entry in state for value in entry.values()],
            "rng": list(self._rng),
        }

    @staticmethod
    def _random_state() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.get_rng_state(), torch.cuda.get_rng_state()


def build(stream: bool, settings: Settings) -> nn.Module:
    """The model under test with adapters on all linears, ``lora_B`` random so that every gradient is alive."""
    name = os.environ["POROS_GPU_TEST_MODEL"]
    make = from_shape if name in shape_names() else poros.load
    window = {"block_size": settings.block_size, "slots": settings.slots, "poison": settings.poison}
    base = make(name, stream=stream, device="cuda", **(window if stream else {}))
    base.requires_grad_(False)
    base.config.use_cache = False
    torch.manual_seed(1)
    config = LoraConfig(
        r=LORA["rank"],
        lora_alpha=LORA["alpha"],
        lora_dropout=LORA["dropout"],
        target_modules=LORA["targets"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    return poros.prepare(model) if stream else model


def twin_of(model: nn.Module) -> nn.Module:
    """A copy with adapters of its own over the same frozen tensors."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not tensor.requires_grad:
                memo[id(tensor)] = tensor
                state = getattr(tensor, "quant_state", None)
                memo[id(state)] = state
    return copy.deepcopy(model, memo)


@contextmanager
def attention_path(path: str) -> Iterator[None]:
    """``strict``: flash attention with deterministic algorithms. ``math``: the plain attention."""
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel([{"strict": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}[path]]):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def runs() -> tuple[Run, Run, Run, Settings]:
    settings = Settings.from_environment()
    resident = build(stream=False, settings=settings)
    generator = torch.Generator("cuda").manual_seed(2)
    for name, parameter in resident.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.01, generator=generator)
    streamed = build(stream=True, settings=settings)
    adapters = dict(streamed.named_parameters())
    for name, parameter in resident.named_parameters():
        if parameter.requires_grad:
            adapters[name].data.copy_(parameter.data)
    return Run(resident), Run(twin_of(resident)), Run(streamed), settings


@pytest.mark.parametrize("path", os.environ.get("POROS_GPU_TEST_PATHS", "strict,math").split(","))
def test_four_surfaces_are_equal(path: str, runs: tuple[Run, Run, Run, Settings]) -> None:
    resident, control, streamed, settings = runs
    generator = torch.Generator().manual_seed({"strict": 11, "math": 12}[path])
    vocabulary = resident.model.config.get_text_config().vocab_size
    equal = dict.fromkeys(SURFACES, True)
    control_equal = dict.fromkeys(SURFACES, True)
    first: str | None = None
    losses: list[float] = []
    control_steps = settings.control_steps or settings.steps
    start = time.monotonic()
    with attention_path(path):
        for step in range(settings.steps):
            batches = [
                torch.randint(0, vocabulary, (1, settings.seq_len), generator=generator).cuda()
                for _ in range(settings.accumulation)
            ]
            expected = resident.step(batches)
            if step < control_steps:
                found = control.step(batches)
                for surface in SURFACES:
                    control_equal[surface] &= all(map(torch.equal, expected[surface], found[surface]))
                del found
            found = streamed.step(batches)
            assert all(bool(g.any()) for g in expected["gradients"]), f"step {step}: a gradient is zero"
            for surface in SURFACES:
                pairs = zip(expected[surface], found[surface], strict=True)
                same = [torch.equal(a, b) for a, b in pairs]
                if not all(same) and first is None:
                    first = f"step {step}, {surface}: {same.count(False)} of {len(same)} tensors differ"
                equal[surface] &= all(same)
            losses.append(float(expected["loss"][-1]))
            del expected, found
    verdict = "INCONCLUSIVE" if not all(control_equal.values()) else "PASS" if all(equal.values()) else "FAIL"
    record(path, settings, verdict, equal, control_equal, losses, time.monotonic() - start, runs)
    if settings.control_steps:  # the control is behind now; let the next path start from one state again
        for mine, theirs in zip(control.trainable.values(), resident.trainable.values(), strict=True):
            mine.data.copy_(theirs.data)
        control.optimizer.load_state_dict(copy.deepcopy(resident.optimizer.state_dict()))
        control._rng = resident._rng
    assert verdict == "PASS", f"{verdict}: {first}; control {control_equal}"


def record(
    path: str,
    settings: Settings,
    verdict: str,
    equal: dict[str, bool],
    control_equal: dict[str, bool],
    losses: list[float],
    seconds: float,
    runs: tuple[Run, Run, Run, Settings],
) -> None:
    """Append the verdict to the file of rows, if one was named."""
    target = os.environ.get("POROS_GPU_TEST_ROWS")
    if target is None:
        return
    report = poros.report(runs[2].model)
    name = os.environ["POROS_GPU_TEST_MODEL"]
    rows.write_row(
        target,
        kind="parity",
        model=name,
        weights="random" if name in shape_names() else "real",
        method="poros",
        engine="eager",
        path=path,
        batch_size=1,
        lora=LORA,
        resident_blocks=0,
        budget_bytes=None,
        options={"poison": settings.poison, "control_steps": settings.control_steps or settings.steps},
        **{key: asdict(settings)[key] for key in ("steps", "seq_len", "accumulation", "block_size", "slots")},
        verdict=verdict,
        surfaces={"streamed": equal, "control": control_equal},
        losses=losses,
        wall_s=seconds,
        num_gradients=len(runs[0].trainable),
        host_locked_bytes=report.locked_bytes,
        host_bytes=report.host_bytes,
        host_peak_bytes=rows.host_peak_bytes(),
    )
