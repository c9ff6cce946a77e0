"""On a CUDA device: the window's order of copies and computation, its memory, and every family's bits.

Run with ``pytest -m gpu``. Models are tiny; the real shapes are in ``test_gpu_parity.py``. Where layer runs
are counted, none is replayed; ``test_gpu_replay.py`` has what is.
"""

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import poros
from poros.residency import store
from poros.residency.attach import attachment_of
from poros.residency.transfer import Transfer
from tests import oracle, skips, test_micro_batches, tiny

pytestmark = [pytest.mark.gpu, skips.needs_cuda]

CUDA = torch.device("cuda", 0)
DELAY_CYCLES = 2_000_000  # about a millisecond, many times a tiny layer's work


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    """The strict path: deterministic kernels only, so that two resident runs agree."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def llama(**changes: object) -> torch.nn.Module:
    return tiny.build("llama", dtype=torch.bfloat16, device=CUDA, **{"dropout": 0.1, "num_layers": 8, **changes})


def llama_batches(count: int, **changes: object) -> list[dict[str, torch.Tensor]]:
    return tiny.batches("llama", count, device=CUDA, **changes)


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_every_family_is_bit_equal(family: str) -> None:
    oracle.check_parity(
        lambda: tiny.build(family, dtype=torch.bfloat16, dropout=0.1, device=CUDA),
        tiny.batches(family, 3, device=CUDA, padding="left"),
        {"block_size": 2, "slots": 2, "poison": True, "checksum": True, "replay": False},
        {"block_size": 1, "slots": 3, "replay": False},
    )


def test_blocks_that_stay_change_no_bit() -> None:
    oracle.check_parity(
        llama,
        llama_batches(3),
        {"resident_blocks": 3, "poison": True, "replay": False},
        {"resident_blocks": 99, "replay": False},
    )


def test_a_batch_that_is_split_inside_each_visit_has_the_bits_of_its_split_twin() -> None:
    def make() -> torch.nn.Module:
        model = llama()
        model.config.use_cache = False  # the twin's pieces would share one
        return model

    oracle.check_parity(
        make,
        llama_batches(3, batch_size=test_micro_batches.ROWS),
        {"block_size": 1, "slots": 2, "poison": True},
        prepare=lambda model, **settings: poros.prepare(model, micro_batch_size=2, **settings),
        prepare_resident=lambda model: test_micro_batches.split_layers(model, 2),
        recomputed=False,
    )


@pytest.mark.parametrize("where", ["mark", "copy"])
def test_delays_on_either_stream_change_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = llama_batches(2)
    reference = oracle.run(llama(), data)
    assert oracle.compare(reference, oracle.run(llama(), data)) is None, "inconclusive: resident runs differ"
    delay(monkeypatch, where)
    model = poros.prepare(llama(), block_size=1, slots=2, poison=True)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for repeat in range(50):
        for name, parameter in model.named_parameters():
            if name in start:
                parameter.data.copy_(start[name])
        difference = oracle.compare(reference, oracle.run(model, data))
        assert difference is None, f"repeat {repeat}: {difference}"


def delay(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Let each ``"copy"`` start late on its stream, or each ``"mark"`` be reached late on that of the computation."""
    copy, mark = Transfer.copy, Transfer.mark

    def late_copy(self, target, source, after=()):
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(DELAY_CYCLES)
        return copy(self, target, source, after)

    def late_mark(self):
        torch.cuda._sleep(DELAY_CYCLES)
        return mark(self)

    monkeypatch.setattr(Transfer, what, late_copy if what == "copy" else late_mark)


def test_a_users_own_stream_is_followed() -> None:
    data = llama_batches(3)
    reference = oracle.run(llama(), data)
    model = poros.prepare(llama(), block_size=1, slots=2, poison=True)
    assert oracle.compare(reference, run_aside(model, data)) is None


def run_aside(model: torch.nn.Module, data: list[dict[str, torch.Tensor]]) -> oracle.Trace:
    """Run ``model`` in a stream of the user's own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        trace = oracle.run(model, data)
    torch.cuda.synchronize()
    return trace


def test_checkpointing_switched_on_does_not_add_a_third_run() -> None:
    def prepared(model: torch.nn.Module, **settings: object) -> torch.nn.Module:
        model = poros.prepare(model, **settings)
        model.gradient_checkpointing_enable()
        return model

    oracle.check_parity(llama, llama_batches(3), {"block_size": 2, "replay": False}, prepare=prepared)


def test_memory_stays_flat_over_random_lengths() -> None:
    gc.collect()  # what earlier tests left behind must not count
    torch.cuda.empty_cache()
    model = poros.prepare(llama(), block_size=1)
    lengths = [512, *(random.Random(0).choices(range(16, 513), k=199))]
    reserved = []
    optimizer = oracle.adamw([p for p in model.parameters() if p.requires_grad])
    for seed, length in enumerate(lengths):
        batch = tiny.batch("llama", batch_size=1, seq_len=length, seed=seed, device=CUDA)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[19] == reserved[199], reserved[19::20]


def test_preparing_and_undoing_leaks_nothing() -> None:
    model = llama(num_layers=16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    allocated, resident = [], []
    for _ in range(5):
        poros.prepare(model, block_size=2)
        oracle.run(model, llama_batches(1))
        poros.unprepare(model)
        gc.collect()
        torch.cuda.empty_cache()
        allocated.append(torch.cuda.memory_allocated())
        resident.append(_resident_bytes())
    assert len(set(allocated)) == 1, allocated
    assert max(resident[1:]) - min(resident[1:]) < 8 * 2**20, resident
    after = model.state_dict()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(after[name], value) for name, value in before.items() if name not in trained)
    assert all(after[name].device == value.device for name, value in before.items())


def test_locked_memory_is_what_the_slabs_need() -> None:
    model = poros.prepare(llama(hidden_size=512, intermediate_size=2048, num_layers=12), block_size=1)
    report = poros.report(model)
    slabs = sum(layer.layout.num_bytes for layer in attachment_of(model).layers)
    assert report.locked_bytes == report.host_bytes == slabs


def test_a_failed_page_lock_is_announced_and_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = llama_batches(3)
    reference = oracle.run(llama(), data)
    allocate, first = store.allocate, []

    def already_locked(num_bytes: int) -> torch.Tensor:
        block = allocate(num_bytes)
        if len(first) == 3:
            assert int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)) == 0
        first.append(block)
        return block

    monkeypatch.setattr(store, "allocate", already_locked)
    with caplog.at_level("WARNING", logger="poros"):
        model = poros.prepare(llama(), block_size=1)
    assert "page-locking" in caplog.text
    report = poros.report(model)
    assert 0 < report.locked_bytes < report.host_bytes
    assert any("page-locking" in note for note in report.notes)
    assert oracle.compare(reference, oracle.run(model, data)) is None
    torch.cuda.cudart().cudaHostUnregister(first[3].data_ptr())


def test_a_base_on_the_cpu_trains_on_the_gpu() -> None:
    data = llama_batches(3)
    on_gpu = llama()
    on_cpu = llama().to("cpu")
    reference = oracle.run(on_gpu, data)
    model = poros.prepare(on_cpu, device="cuda")
    assert {p.device for p in model.parameters() if p.requires_grad} == {CUDA}
    assert oracle.compare(reference, oracle.run(model, data)) is None


def test_nothing_of_an_evicted_layer_is_left_on_the_gpu() -> None:
    model = poros.prepare(llama(), block_size=1)
    oracle.run(model, llama_batches(1))
    for layer in attachment_of(model).layers:
        assert all(tensor.device.type == "cpu" for tensor in layer.tensors)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
