"""On a CUDA device: recorded visits are real graphs here, and give the resident run's bits.

Run with ``pytest -m gpu``. What a recording has to be careful of is tested in ``test_replay.py``, without a GPU.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import poros
from poros.residency.attach import attachment_of
from poros.residency.replay import Replays
from poros.residency.transfer import Recorder, Transfer
from tests import oracle, skips, test_gpu_window, tiny

pytestmark = [pytest.mark.gpu, skips.needs_cuda]

CUDA = torch.device("cuda", 0)
# Their layers take one hidden state and give one.
PLAIN = {"llama", "mistral", "qwen2", "qwen3", "phi3", "glm4", "gemma3_text"}
WINDOWS = [{"block_size": 1, "slots": 3, "poison": True}, {"block_size": 2, "slots": 2}]


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def replayed(model: nn.Module, **settings: Any) -> nn.Module:
    model = poros.prepare(model, **settings)
    attachment = attachment_of(model)
    assert attachment is not None
    attachment.replays = Replays(Recorder(CUDA), Transfer(CUDA))
    return model


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_every_family_replays_to_the_same_bits(family: str) -> None:
    found: list[Replays] = []

    def prepare(model: nn.Module, **settings: Any) -> nn.Module:
        model = replayed(model, **settings)
        found.append(attachment_of(model).replays)  # type: ignore[union-attr, arg-type]
        return model

    oracle.check_parity(
        lambda: tiny.build(family, dtype=torch.bfloat16, dropout=0.1, device=CUDA),
        tiny.batches(family, 6, device=CUDA),
        *WINDOWS,
        prepare=prepare,
        recomputed=False,
    )
    for replays in found:
        assert replays.num_programs or family not in PLAIN, replays.eager


def test_a_layer_that_waits_for_the_device_runs_eagerly_and_is_named() -> None:
    def make() -> nn.Module:
        model = tiny.build("llama", dtype=torch.bfloat16, device=CUDA)
        norm = type(tiny.text_layers(model)[0].input_layernorm)

        class Waits(norm):  # type: ignore[misc, valid-type]
            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                assert hidden_states.isfinite().all().item()
                return super().forward(hidden_states)

        for layer in tiny.text_layers(model):
            layer.input_layernorm.__class__ = Waits
        return model

    batches = tiny.batches("llama", 4, device=CUDA)
    model = replayed(make())
    assert oracle.compare(oracle.run(make(), batches), oracle.run(model, batches)) is None
    replays = attachment_of(model).replays  # type: ignore[union-attr]
    assert replays is not None
    assert replays.num_programs == 0
    assert replays.eager


@pytest.mark.parametrize("slow", ["copy", "mark"])
def test_recordings_and_replays_wait_for_what_still_runs(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = tiny.batches("llama", 4, device=CUDA)

    def make() -> nn.Module:
        return tiny.build("llama", dtype=torch.bfloat16, dropout=0.1, num_layers=8, device=CUDA)

    reference = oracle.run(make(), batches)
    model = replayed(make(), block_size=1, slots=3, poison=True)
    test_gpu_window.delay(monkeypatch, slow)
    assert oracle.compare(reference, oracle.run(model, batches)) is None
    assert attachment_of(model).replays.num_programs == 2  # type: ignore[union-attr]


def test_random_numbers_and_memory_survive_a_recording_that_breaks_off() -> None:
    recorder = Recorder(CUDA)
    reserved = []
    for _ in range(3):
        state = torch.cuda.get_rng_state()
        expected = torch.randn(1000, device=CUDA)
        torch.cuda.set_rng_state(state)
        with pytest.raises(RuntimeError):
            recorder().record(lambda: [torch.randn(2**22, device=CUDA).sum().item()])  # type: ignore[list-item]
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.randn(1000, device=CUDA), expected)
        good = recorder()
        (result,) = good.record(lambda: [torch.ones(1000, device=CUDA) * 2])
        good.replay()
        assert result.sum() == 2000
        del good, result
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[0] == reserved[2], reserved


def test_replaying_keeps_memory_flat() -> None:
    model = replayed(tiny.build("llama", dtype=torch.bfloat16, dropout=0.1, device=CUDA), block_size=1)
    optimizer = oracle.adamw([p for p in model.parameters() if p.requires_grad])
    reserved = []
    for step in range(60):
        model(**tiny.batch("llama", seq_len=(128, 256)[step % 2], seed=step, device=CUDA)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[20] == reserved[-1], reserved


def test_a_users_own_stream_is_followed() -> None:
    batches = tiny.batches("llama", 4, device=CUDA)

    def make() -> nn.Module:
        return tiny.build("llama", dtype=torch.bfloat16, dropout=0.1, device=CUDA)

    reference = oracle.run(make(), batches)
    assert oracle.compare(reference, test_gpu_window.run_aside(replayed(make()), batches)) is None
