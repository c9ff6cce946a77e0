"""A step that fails leaves nothing behind, and the debugging modes catch what they are for."""

import contextlib

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import poros
from poros.residency import attach, attachment
from poros.residency.block import visiting
from poros.residency.schedule import Phase
from poros.residency.transfer import Transfer
from tests import tiny
from tests.oracle import check_parity, compare, run
from tests.test_contract import assert_same_values, make, values

WINDOWS = [{"slots": 2, "poison": True}, {"block_size": 2, "slots": 2, "poison": True}, {"slots": 3, "poison": True}]
BATCHES = tiny.batches("llama", 6)


class PlannedError(Exception):
    """Raised where a test wants a failure."""


@contextlib.contextmanager
def failing_layer(model, layer, run, error=PlannedError):
    """Let the ``run``-th computation of a layer fail in its middle (1: the forward, 2: the recompute)."""
    target, count = tiny.text_layers(model)[layer].post_attention_layernorm, 0

    def fail(module, args):
        nonlocal count
        count += module is target
        if module is target and count == run:
            raise error

    handle = register_module_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def failing_gradient(model, layer):
    """Let the backward fail where a layer's gradients are accumulated, after those above it."""

    def fail(grad):
        raise PlannedError

    handle = tiny.text_layers(model)[layer].mlp.up_proj.lora_B["default"].weight.register_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def interrupted_copy(number):
    """Ctrl-C in the middle of a copy: half of the bytes are there, the rest are the slot's old ones."""
    copy, count = Transfer.copy, 0

    def interrupted(self, target, source, after=()):
        nonlocal count
        count += 1
        if count == number:
            half = source.numel() // 2
            copy(self, target[:half], source[:half], after)
            raise KeyboardInterrupt
        return copy(self, target, source, after)

    Transfer.copy = interrupted
    try:
        yield
    finally:
        Transfer.copy = copy


def learn_with(fault):
    """A step whose first batch fails under ``fault`` and is skipped, as a careful loop would do it."""

    def learn(model, pair):
        bad, good = pair
        try:
            with fault(model):
                model(**bad).loss.backward()
        except (PlannedError, KeyboardInterrupt, torch.OutOfMemoryError):
            learn.failures += attach.attachment_of(model) is not None
        model.zero_grad()
        torch.manual_seed(11)  # how much a failed step has drawn is its own affair
        loss = model(**good).loss
        loss.backward()
        return (loss,)

    learn.failures = 0
    return learn


FAULTS = {
    "forward of the first layer": lambda model: failing_layer(model, 0, 1),
    "forward of a middle layer": lambda model: failing_layer(model, 3, 1),
    "forward, out of memory": lambda model: failing_layer(model, 2, 1, torch.OutOfMemoryError),
    "forward, Ctrl-C": lambda model: failing_layer(model, 4, 1, KeyboardInterrupt),
    "recompute of the last layer": lambda model: failing_layer(model, 4, 2),
    "recompute of a middle layer": lambda model: failing_layer(model, 2, 2),
    "recompute, out of memory": lambda model: failing_layer(model, 1, 2, torch.OutOfMemoryError),
    "recompute, Ctrl-C": lambda model: failing_layer(model, 0, 2, KeyboardInterrupt),
    "gradient hook": lambda model: failing_gradient(model, 2),
    "copy in the forward": lambda model: interrupted_copy(2),
    "later copy in the forward": lambda model: interrupted_copy(3),
    "copy in the backward": lambda model: interrupted_copy(6),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_step_leaves_nothing_behind(fault):
    """The steps after it are those of a resident run that skipped it."""
    learn = learn_with(FAULTS[fault])
    check_parity(lambda: make(dropout=0.1), BATCHES, *WINDOWS, accumulation=2, learn=learn, recomputed=False)
    # Wider windows need fewer copies, so a late one does not come in every step.
    assert learn.failures >= (3 if "cop" in fault else 9)


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_step_leaves_every_value_readable(fault):
    model = make(dropout=0.1)
    true = values(model)
    poros.prepare(model, slots=2, device="cpu", poison=True)
    random = torch.get_rng_state()
    with pytest.raises((PlannedError, KeyboardInterrupt, torch.OutOfMemoryError)), FAULTS[fault](model):
        model(**BATCHES[0]).loss.backward()
    assert_same_values(true, values(model))
    assert model.training
    torch.set_rng_state(random)
    poros.unprepare(model)
    assert_same_values(true, values(model))


def test_failure_in_an_evaluation_leaves_nothing_behind():
    model, twin = poros.prepare(make(), slots=2, device="cpu", poison=True), make()
    for target in (model, twin):
        target.eval()
        with torch.no_grad(), pytest.raises(PlannedError), failing_layer(target, 2, 1):
            target(**BATCHES[0])
        target.train()
    assert compare(run(twin, BATCHES[:2]), run(model, BATCHES[:2])) is None


def test_random_state_is_put_back_after_a_failed_recompute():
    model = poros.prepare(make(dropout=0.1), slots=2, device="cpu")
    loss = model(**BATCHES[0]).loss
    before = torch.get_rng_state()
    model.eval()
    with pytest.raises(PlannedError), failing_layer(model, 2, 1):
        loss.backward()
    assert torch.equal(before, torch.get_rng_state())
    assert not any(module.training for module in model.modules())
    assert not torch.is_autocast_enabled("cpu")


def test_adapters_are_themselves_after_a_failed_recompute():
    """The recompute runs over stand-ins for the trainable parameters."""
    model = poros.prepare(make(), slots=2, device="cpu")
    parameters = dict(model.named_parameters())
    loss = model(**BATCHES[0]).loss
    with pytest.raises(PlannedError), failing_layer(model, 2, 1):
        loss.backward()
    now = dict(model.named_parameters())
    assert parameters.keys() == now.keys()
    assert all(parameters[name] is now[name] for name in now)


def test_prepare_that_fails_half_way_leaves_nothing_behind(monkeypatch):
    from tests.test_contract import attributes

    model = make()
    had, true = attributes(model), values(model)
    pack = attachment.Attachment.pack

    def fail(self, block):
        if block == 2:
            raise PlannedError
        pack(self, block)

    monkeypatch.setattr(attachment.Attachment, "pack", fail)
    with pytest.raises(PlannedError):
        poros.prepare(model, device="cpu")
    assert attributes(model) == had
    assert_same_values(true, values(model))
    monkeypatch.undo()
    check_parity(make, BATCHES[:2], WINDOWS[0], prepare=lambda fresh, **settings: poros.prepare(model, **settings))


# ---------------------------------------------------------------------------------------------------------------------
# Debugging modes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["nf4-dq", None])
def test_checksums_of_an_honest_run_agree(quant):
    settings = {"checksum": True, "slots": 2}, {"checksum": True, "block_size": 3}
    check_parity(lambda: make(quant=quant, dropout=0.1), BATCHES[:2], *settings)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_checksum_names_the_layer_whose_weights_changed(layer):
    """One bit of a host master flips between the forward and the recompute."""
    model = poros.prepare(make(quant=None), slots=2, device="cpu", checksum=True)
    loss = model(**BATCHES[0]).loss
    master = attach.attachment_of(model).layers[layer].module.mlp.down_proj.base_layer.weight
    bits = master.data.view(torch.int32)
    bits[0, 0] ^= 1 << 22
    with pytest.raises(poros.ChecksumError, match=rf"layers\.{layer}: the recompute in backward did not reproduce"):
        loss.backward()
    bits[0, 0] ^= 1 << 22
    with torch.no_grad():
        model(**BATCHES[0])  # the wrong bytes leave the window
    model.zero_grad()
    model(**BATCHES[0]).loss.backward()


def test_checksum_names_a_layer_that_does_not_reproduce_itself():
    model = poros.prepare(make(), device="cpu", checksum=True)
    noise = torch.Generator().manual_seed(0)

    def unrepeatable(module, args, output):
        return output + torch.randn(output.shape, generator=noise)

    tiny.text_layers(model)[3].mlp.register_forward_hook(unrepeatable)
    with pytest.raises(poros.ChecksumError, match=r"layers\.3: .*not reproducible on this device"):
        model(**BATCHES[0]).loss.backward()


def keep_the_first_graph(residency, layer, args, kwargs):
    """What a naive streamer does: let autograd keep the graph of the first forward, over a slot that is refilled."""
    layer.walk(residency.device)
    with visiting(residency, layer, Phase.FORWARD):
        return layer.forward(*args, **kwargs)


@pytest.mark.parametrize("quant", ["nf4-dq", "nf4"])
def test_poison_exposes_a_graph_kept_from_the_first_forward(monkeypatch, quant):
    """The bug that this project is built around: right loss, wrong gradients, and no error from anyone.

    https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2034
    """
    monkeypatch.setattr(attachment, "streamed_forward", keep_the_first_graph)
    with pytest.raises(pytest.fail.Exception, match=r"not equal .*: step 0, grad "):
        check_parity(lambda: make(quant=quant), BATCHES[:1], WINDOWS[0])


def test_poison_fills_what_is_not_in_use():
    model = poros.prepare(make(), slots=3, device="cpu", poison=True)
    window = attach.attachment_of(model).window
    assert all(bool((slot.memory == 0xFF).all()) for slot in window.slots)
    model(**BATCHES[0]).loss.backward()
    assert not any(bool((slot.memory == 0xFF).all()) for slot in window.slots)


def test_debugging_modes_change_no_bit():
    plain, debugged = ({"slots": 2}, {"slots": 2, "poison": True, "checksum": True})
    check_parity(lambda: make(dropout=0.1), BATCHES[:2], plain, debugged)
