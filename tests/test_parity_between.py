"""What happens between a forward and its backward, inside layers, and in other threads does not change the bits.

Found by a review of the engine; each case once gave wrong gradients, mostly without an error.
"""

import sys
import threading
from collections.abc import Callable

import pytest
import torch
from peft.helpers import rescale_adapter_scale
from torch import nn

import poros
from poros.residency import block
from poros.residency.layer import StreamedLayer
from tests import oracle, tiny

BATCHES = tiny.batches("llama", 3, seq_len=12)
TOKENS = [int(BATCHES[0]["input_ids"][0, place]) for place in (5, 6)]
FIRST_ROW = {name: value[:1] for name, value in BATCHES[0].items()}

Gradients = dict[str, torch.Tensor | None]


def make(**changes: object) -> nn.Module:
    return tiny.build("llama", **{"num_layers": 4, **changes})


def prepared(model: nn.Module, **settings: object) -> nn.Module:
    return poros.prepare(model, **{"device": "cpu", "slots": 2, "poison": True, **settings})


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_same(mine: Gradients, theirs: Gradients) -> None:
    assert mine.keys() == theirs.keys()
    assert any(g is not None and bool(g.any()) for g in theirs.values()), "vacuous"
    differing = [n for n in theirs if oracle.describe_difference(theirs[n], mine[n]) is not None]
    assert not differing, f"{len(differing)} of {len(theirs)} differ: {differing[0]}"


def hook_removed(model: nn.Module) -> None:
    handle = tiny.text_layers(model)[1].mlp.register_forward_hook(lambda module, args, output: output * 1.5)
    loss = model(**BATCHES[0]).loss
    handle.remove()
    loss.backward()


def rescaled(model: nn.Module) -> None:
    with rescale_adapter_scale(model, 0.5):
        loss = model(**BATCHES[0]).loss
    loss.backward()


def one_row(model: nn.Module) -> None:
    model(**FIRST_ROW).loss.backward()


def attention_switched(model: nn.Module) -> None:
    loss = model(**BATCHES[0]).loss
    model.base_model.model.set_attn_implementation("eager")
    loss.backward()
    model.base_model.model.set_attn_implementation("sdpa")


def kernels_switched(model: nn.Module) -> None:
    torch._C._set_mkldnn_enabled(False)
    loss = model(**BATCHES[0]).loss
    torch._C._set_mkldnn_enabled(True)
    loss.backward()


def newer_precision_interface(model: nn.Module) -> None:
    """After it was used, the older interface cannot even be read."""
    before = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"
        loss = model(**BATCHES[0]).loss
        torch.backends.fp32_precision = before
        loss.backward()
    finally:
        torch.backends.fp32_precision = before


def average_swapped_in(model: nn.Module) -> None:
    loss = model(**BATCHES[0]).loss
    module = tiny.text_layers(model)[1].self_attn.q_proj.lora_A["default"]
    own = module.weight
    module.weight = nn.Parameter(own.detach() * 0.5)
    loss.backward()
    module.weight = own


def passed_through(model: nn.Module) -> None:
    layer = tiny.text_layers(model)[2]
    handle = layer.register_forward_hook(lambda module, args, output: args[0].mul(1.0))
    model(**BATCHES[0]).loss.backward()
    handle.remove()


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (hook_removed, {}),
        (rescaled, {}),
        (one_row, {"lora": {"alora_invocation_tokens": TOKENS}}),
        (attention_switched, {}),
        (kernels_switched, {}),
        (newer_precision_interface, {}),
        (average_swapped_in, {}),
        (passed_through, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_recompute_is_the_forward_again(step: Callable[[nn.Module], None], changes: dict[str, object]) -> None:
    resident, streamed = make(**changes), prepared(make(**changes))
    with oracle.fixed_threads():
        step(resident)
        step(streamed)
    assert_same(gradients(streamed), gradients(resident))


def test_functional_call_gets_its_gradients() -> None:
    def of(model: nn.Module) -> Gradients:
        own = {n: (p.detach() * 1.1).requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
        loss = torch.func.functional_call(model, own, (), BATCHES[0]).loss
        return dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))

    with oracle.fixed_threads():
        assert_same(of(prepared(make())), of(make()))


def test_a_tensor_kept_from_inside_a_layer_is_refused_in_the_loss() -> None:
    model = prepared(make())
    kept: list[torch.Tensor] = []
    handle = tiny.text_layers(model)[1].mlp.register_forward_hook(lambda module, args, output: kept.append(output))
    loss = model(**BATCHES[0]).loss + kept[0].square().mean()
    with pytest.raises(poros.ResidencyError, match=r"captured inside .*layers\.1"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    model(**BATCHES[0]).loss.backward()
    reference = make()
    reference(**BATCHES[0]).loss.backward()
    assert_same(gradients(model), gradients(reference))


def test_a_tensor_that_learns_unseen_is_refused() -> None:
    model = prepared(make())
    unseen = nn.Parameter(torch.ones(128) * 0.1)
    tiny.text_layers(model)[1].mlp.register_forward_hook(lambda module, args, output: output + unseen)
    loss = model(**BATCHES[0]).loss
    with pytest.raises(poros.ResidencyError, match=r"layers\.1 uses a tensor that requires gradients"):
        loss.backward()


def test_a_layer_that_writes_to_its_input_is_refused() -> None:
    model = make()
    layer = tiny.text_layers(model)[0]
    forward = layer.forward
    layer.forward = lambda hidden, *args, **kwargs: forward(hidden.mul_(1.5), *args, **kwargs)
    with pytest.raises(poros.ResidencyError, match=r"layers\.0 changes its input in place"):
        prepared(model)(**BATCHES[0])


@pytest.mark.parametrize("quant", [None, "nf4-dq"])
def test_forwards_in_two_threads_do_not_mix(quant: str | None) -> None:
    resident, streamed = make(lora=False, quant=quant).eval(), prepared(make(lora=False, quant=quant)).eval()
    expected = []
    with torch.no_grad(), oracle.fixed_threads():
        expected = [resident(**batch).logits for batch in BATCHES[:2]]
    wrong: list[int] = []

    def forwards(which: int) -> None:
        with torch.no_grad():
            for _ in range(8):
                if not torch.equal(streamed(**BATCHES[which]).logits, expected[which]):
                    wrong.append(which)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with oracle.fixed_threads():
            threads = [threading.Thread(target=forwards, args=(which,)) for which in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def two_backwards(model: nn.Module) -> None:
    model(**BATCHES[0]).loss.backward()
    model(**BATCHES[0]).loss.backward()


@pytest.mark.parametrize("visit", [1, 3, 6, 9])
def test_an_interrupt_inside_clean_up_is_made_good(visit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may strike while a visit puts things back; weights must not stay those of another layer."""
    reference = make(quant=None)
    model = prepared(make(quant=None))
    true = {name: value.clone() for name, value in model.state_dict().items()}
    unbind, count = StreamedLayer.unbind, 0

    def interrupted(self: StreamedLayer) -> None:
        nonlocal count
        count += 1
        if count == visit:
            raise KeyboardInterrupt
        unbind(self)

    monkeypatch.setattr(StreamedLayer, "unbind", interrupted)
    with pytest.raises(KeyboardInterrupt):
        two_backwards(model)
    monkeypatch.undo()
    model.zero_grad()
    with oracle.fixed_threads():
        model(**BATCHES[1]).loss.backward()
        reference(**BATCHES[1]).loss.backward()
    assert_same(gradients(model), gradients(reference))
    poros.unprepare(model)
    assert all(torch.equal(value, true[name]) for name, value in model.state_dict().items())


def test_an_interrupt_leaves_every_adapter_the_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(make())
    held = {id(p) for p in model.parameters() if p.requires_grad}
    compare, count = block.run_layer, 0

    def interrupted(*args: object) -> object:
        nonlocal count
        count += 1
        if count == 6:  # the second recompute
            raise KeyboardInterrupt
        return compare(*args)

    monkeypatch.setattr(block, "run_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(**BATCHES[0]).loss.backward()
    monkeypatch.undo()
    model(**BATCHES[0])
    assert {id(p) for p in model.parameters() if p.requires_grad} == held


def test_a_pack_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    before = {name: (value.clone(), value.device) for name, value in model.state_dict().items()}
    pack = StreamedLayer.pack

    def fails(self: StreamedLayer, slab: torch.Tensor) -> None:
        if self.index == 2:
            raise MemoryError("no more")
        pack(self, slab)

    monkeypatch.setattr(StreamedLayer, "pack", fails)
    with pytest.raises(MemoryError, match="no more"):
        prepared(model)
    monkeypatch.undo()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, (value, _) in before.items())
    prepared(model)(**BATCHES[0]).loss.backward()


def test_an_expanded_buffer_stays_where_it_is() -> None:
    model = make()
    tiny.text_layers(model)[2].register_buffer("wide", torch.ones(1).expand(8))
    prepared(model)(**BATCHES[0]).loss.backward()
    assert torch.equal(tiny.text_layers(model)[2].wide, torch.ones(8))


def test_the_backbone_of_a_prepared_model_is_prepared_already() -> None:
    model = prepared(make(lora=False))
    assert prepared(model.model) is model.model
    assert poros.report(model).resident_bytes == poros.report(model.model).resident_bytes
    poros.unprepare(model)
    with torch.no_grad():
        model(**BATCHES[0])


def test_a_users_change_after_prepare_outlives_unprepare() -> None:
    model = prepared(make(quant=None))
    norm = tiny.text_layers(model)[1].input_layernorm
    norm.weight.data = norm.weight.data.double() * 3
    poros.unprepare(model)
    assert norm.weight.dtype == torch.float64


def test_slots_beyond_the_number_of_blocks_are_not_allocated() -> None:
    model = prepared(make(), slots=50)
    assert poros.report(model).slots == 4
