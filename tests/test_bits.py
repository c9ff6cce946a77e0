"""Comparing bits where they are: the answer of a plain loop over the elements, for every type and however it is cut."""

import math
import struct

import pytest
import torch

from poros.evidence import bits
from poros.evidence.bits import Comparison, compare, describe_difference, fetch
from tests import skips

TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.int8, torch.uint8]


def some(dtype, *shape):
    return (torch.arange(math.prod(shape)).reshape(shape) % 50).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_first_differing_element_is_named_with_its_bits(dtype):
    a = {name: some(dtype, 3, 5) for name in "xyz"}
    b = {name: value.clone() for name, value in a.items()}
    assert compare(a, b) == bits.Verdict()
    for name, place in ("z", (0, 0)), ("y", (2, 4)), ("y", (1, 3)):
        b[name].view(torch.uint8).view(3, 5, -1)[(*place, 0)] ^= 1
    verdict = compare(a, b)
    assert (verdict.num_different, verdict.tensor, verdict.element.index) == (3, "y", (1, 3))
    assert int(verdict.element.expected_bits, 16) ^ int(verdict.element.found_bits, 16) == 1
    assert len(verdict.element.found_bits) == 2 + 2 * dtype.itemsize
    assert verdict.element.expected == a["y"][1, 3].item() == 8
    assert verdict.element.found == b["y"][1, 3].item()
    if dtype.is_floating_point:
        assert verdict.max_abs == max((a[name].double() - b[name].double()).abs().max() for name in a)


def test_pieces_of_any_size_give_the_same_answer(monkeypatch):
    a = {str(i): some(torch.float32, i) for i in range(1, 30)} | {
        "half": some(torch.bfloat16, 4),
        "empty": torch.empty(0),
    }
    b = {name: value.clone() for name, value in a.items()}
    for name in ("17", "5", "29", "half"):
        b[name][2] = 99.0
    expected = compare(a, b)
    assert (expected.tensor, expected.element.index, expected.max_abs) == ("5", (2,), 97.0)
    assert expected.num_different == 4
    for size in (4, 64, 200):
        monkeypatch.setattr(bits, "_PIECE_BYTES", size)
        assert compare(a, b) == expected


def test_equal_nans_and_infinities_are_no_distance():
    a = {"x": torch.tensor([math.nan, math.inf, 1.0, 0.0])}
    assert compare(a, {"x": a["x"].clone()}) == bits.Verdict()
    verdict = compare(a, {"x": torch.tensor([math.nan, math.inf, 1.5, -0.0])})
    assert (verdict.num_different, verdict.max_abs) == (2, 0.5)
    other_nan = torch.tensor(struct.unpack("i", struct.pack("I", 0x7FC00001))[0], dtype=torch.int32).view(torch.float32)
    found = compare({"x": torch.tensor([math.nan])}, {"x": other_nan.reshape(1)})
    assert found.element.found_bits == "0x7fc00001"
    assert math.isnan(found.max_abs)


def test_what_is_not_alike_is_a_difference_before_any_bit():
    one, two = torch.zeros(2), torch.ones(2)
    assert compare({"a": one, "b": None}, {"a": one, "b": None}) == bits.Verdict()
    assert compare({"a": one, "b": one}, {"a": one, "b": None}).detail == "torch.float32 (2,) against nothing"
    assert compare({"a": one}, {"a": one.double()}).detail == "torch.float32 (2,) against torch.float64 (2,)"
    missing = compare({"a": one, "b": one}, {"b": two})
    assert (missing.tensor, missing.detail, missing.num_different) == ("a", "only in the first run", 3)
    assert describe_difference(one, two) == ("2 of 2 differ, first at (0,): 0.0 (0x00000000) against 1.0 (0x3f800000)")


@pytest.mark.gpu
@skips.needs_cuda
def test_on_a_gpu_nothing_waits_before_the_figures_are_fetched():
    a = {str(i): torch.randn(100, 10, device="cuda") for i in range(300)}
    b = {name: value.clone() for name, value in a.items()}
    b["7"][3, 4] += 1.0
    compare(a, b)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        comparison = Comparison(a, b)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    assert torch.cuda.max_memory_allocated() - before < 4 * bits._PIECE_BYTES
    verdict = comparison.read(fetch(comparison.figures))
    assert (verdict.num_different, verdict.tensor, verdict.element.index) == (1, "7", (3, 4))
