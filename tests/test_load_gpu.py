"""Loading on a GPU: quantised there, to the bytes that ``from_pretrained`` gives there, through a small window."""

from pathlib import Path

import pytest
import torch

import poros
from poros.model.build import from_shape
from poros.model.checkpoint import Checkpoint
from tests import checkpoints, skips, tiny

pytestmark = [pytest.mark.gpu, skips.needs_cuda]


@pytest.mark.parametrize("quantization", ["nf4", "nf4-dq", None])
@pytest.mark.parametrize("family", ["qwen2", "gemma4", "qwen3_moe"])
def test_the_bytes_are_those_of_from_pretrained_on_the_same_device(
    family: str, quantization: str | None, tmp_path: Path
) -> None:
    folder = checkpoints.save(tmp_path, family)
    expected = checkpoints.resident(folder, quantization=quantization, dtype=torch.bfloat16, device="cuda:0")
    options = {"quantization": quantization and "nf4", "double_quant": quantization == "nf4-dq", "device": "cuda:0"}
    checkpoints.assert_same(poros.load(folder, stream=False, **options), expected)
    streamed = poros.load(folder, block_size=2, **options)
    batch = tiny.batch(family, device="cuda:0")
    with torch.no_grad():
        assert torch.equal(streamed(**batch).logits, expected(**batch).logits)
    poros.unprepare(streamed)
    checkpoints.assert_same(streamed, expected)


def test_a_tensor_reaches_the_gpu_in_chunks_unharmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poros.model.checkpoint._CHUNK_BYTES", 1000)
    checkpoint = Checkpoint(checkpoints.save(tmp_path, "llama"))
    for name in checkpoint:
        assert torch.equal(checkpoint.read(name, "cuda:0").cpu(), checkpoint.read(name)), name


def test_a_real_shape_never_takes_more_of_the_gpu_than_its_window_and_what_stays() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    model = from_shape("qwen2.5-7b", device="cuda:0")
    report = poros.report(model)
    # While a layer is made, one weight is there in 16 bits, in 4, and as what the quantiser needs.
    largest = 2 * 18944 * 3584
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < report.resident_bytes + max(report.window_bytes, report.host_bytes // report.num_blocks + 4 * largest)
    assert report.host_bytes > 28 * 100 * 2**20


def test_the_weights_of_a_shape_do_not_depend_on_streaming() -> None:
    config = tiny.build("qwen2", quant=None, lora=False).config
    resident = from_shape(config, device="cuda:0", stream=False, seed=5)
    streamed = from_shape(config, device="cuda:0", block_size=2, seed=5)
    poros.unprepare(streamed)
    checkpoints.assert_same(streamed, resident)
