"""The judge is judged first: it must see a single wrong bit on any surface, and nothing where nothing is."""

import copy

import pytest
import torch

from tests import tiny
from tests.oracle import check_parity, compare, describe_difference, run


def make():
    return tiny.build("llama", dropout=0.1)


BATCHES = tiny.batches("llama", 3)


@pytest.fixture(scope="module")
def trace():
    return run(make(), BATCHES)


def test_trace_holds_every_surface_of_every_step(trace):
    assert len(trace.steps) == 3
    for step in range(3):
        assert len(trace.surface("loss", step)) == len(trace.surface("grad_norm", step)) == 1
        names = trace.surface("param", step).keys()
        assert len(names) == 7 * 7 * 2
        assert trace.surface("grad", step).keys() == names
        states = {f"{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
        assert trace.surface("optimizer", step).keys() == states
        assert "cpu" in trace.surface("rng", step)
    assert trace.layer_runs == [3] * 7


@pytest.mark.parametrize("surface", ["loss", "grad", "grad_norm", "param", "optimizer", "rng"])
def test_one_flipped_bit_is_found_and_named(trace, surface):
    other = copy.deepcopy(trace)
    name = next(iter(other.surface(surface, 1)))
    value = other.steps[1][f"{surface}/{name}"]
    flat = value.view(-1)
    bits = flat if value.dtype == torch.uint8 else flat.view(torch.int32)
    bits[-1] ^= 1
    difference = compare(trace, other)
    assert (difference.step, difference.surface, difference.tensor) == (1, surface, name)
    assert f"1 of {value.numel()} differ" in difference.detail
    assert "0x" in difference.detail


def test_missing_and_extra_tensors_are_differences(trace):
    other = copy.deepcopy(trace)
    key = next(key for key in other.steps[0] if key.startswith("grad/"))
    other.steps[0][key] = None
    assert "nothing" in compare(trace, other).detail
    del other.steps[0][key]
    assert compare(trace, other).detail == "only in the first run"
    assert compare(other, trace).detail == "only in the second run"


def test_nan_equals_itself_and_zero_has_a_sign():
    nan = torch.tensor([1.0, float("nan")])
    assert describe_difference(nan, nan.clone()) is None
    assert "-0.0 (0x80000000)" in describe_difference(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert "bfloat16" in describe_difference(nan, nan.bfloat16())


def test_recompute_in_place_of_streaming_passes():
    def checkpointed(model, device):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    check_parity(make, BATCHES, prepare=checkpointed)


def test_a_model_that_differs_by_one_bit_fails():
    def flipped(model, device):
        weight = tiny.text_layers(model)[3].self_attn.q_proj.base_layer.weight
        weight.data.view(-1)[100] ^= 1
        return model

    with pytest.raises(pytest.fail.Exception, match=r"not equal to the resident run .* step 0, loss"):
        check_parity(make, BATCHES, prepare=flipped, recomputed=False)


def test_a_resident_run_that_does_not_reproduce_itself_is_inconclusive():
    seeds = iter(range(9))
    with pytest.raises(pytest.fail.Exception, match="inconclusive"):
        check_parity(lambda: tiny.build("llama", seed=next(seeds)), BATCHES, prepare=lambda model, device: model)


def test_zero_gradients_are_vacuous():
    def dead():
        model = make()
        for name, parameter in model.named_parameters():
            if ".layers.4." in name and "lora_" in name:
                parameter.data.zero_()
        return model

    with pytest.raises(AssertionError, match=r"vacuous: no gradient in layers \[4\]"):
        check_parity(dead, BATCHES, prepare=lambda model, device: model)
