"""The user's model stays theirs: what it looks like, what it saves, and what it is again after ``unprepare``."""

import copy
import gc
import inspect
import weakref
from pathlib import Path

import bitsandbytes as bnb
import peft
import pytest
import torch
from torch import nn

import poros
from tests import tiny
from tests.oracle import check_parity, compare, describe_difference, run

SETTINGS = {"block_size": 2, "slots": 2, "device": "cpu", "poison": True}
FAMILIES = ["llama", "qwen3_moe", "gemma4", "gemma3_text"]


def make(family="llama", **options):
    num_layers = None if "gemma" in family else 5
    return tiny.build(family, **{"num_layers": num_layers, **options})


def prepared(family="llama", **options):
    return poros.prepare(make(family, **options), **SETTINGS)


def values(model):
    """name -> copy of everything that a module holds, the statistics of quantised weights included."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    found = {name: tensor.data.clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        state = getattr(tensor, "quant_state", None)
        if state is not None:
            found |= {f"{name}.{key}": value.clone() for key, value in state.as_dict(packed=True).items()}
    return found


def assert_same_values(left, right):
    assert list(left) == list(right)
    wrong = {name: detail for name in left if (detail := describe_difference(left[name], right[name]))}
    assert not wrong


def looks(model):
    """Everything by which other code recognises a model."""
    base = model.get_base_model()
    layers = tiny.text_layers(model)
    return {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "parameters": [
            (name, id(p), type(p), p.requires_grad, p.dtype, p.shape, p.device, p.stride(), p.is_leaf)
            for name, p in model.named_parameters(remove_duplicate=False)
        ],
        "buffers": [(name, id(b), type(b), b.dtype, b.shape) for name, b in model.named_buffers()],
        "signatures": [inspect.signature(m.forward) for m in (model, base, base.model, *layers)],
        "names": [(layer.forward.__name__, layer.forward.__doc__) for layer in layers],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._state_dict_hooks))
            for m in model.modules()
        ],
        "isinstance": (isinstance(model, peft.PeftModel), isinstance(base, type(base)), type(base).__mro__),
        "device": (
            model.device,
            base.device,
            base.dtype,
            *(vars(base).get(n) for n in ("is_loaded_in_4bit", "is_quantized")),
        ),
        "sizes": (
            base.num_parameters(),
            base.num_parameters(only_trainable=True),
            base.get_memory_footprint(),
            model.get_nb_trainable_parameters(),
        ),
        "embeddings": (id(base.get_input_embeddings()), id(base.get_output_embeddings())),
        "config": (id(base.config), id(model.peft_config), model.active_adapter, base.training),
        "text": repr(model),
        "state_dict": [(name, t.shape, t.dtype) for name, t in model.state_dict().items()],
        "quant_state": [
            (m.quant_state is m.weight.quant_state, m.weight.quant_type, m.weight.blocksize, m.weight.quant_storage)
            for m in model.modules()
            if isinstance(m, bnb.nn.Linear4bit)
        ],
    }


def assert_same_looks(left, right):
    for key in left:
        assert left[key] == right[key], key


def attributes(model):
    """Every instance attribute of every module, by identity where that can be."""
    return {name: {key: id(value) for key, value in vars(m).items()} for name, m in model.named_modules()}


# ---------------------------------------------------------------------------------------------------------------------
# What it looks like
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_model_looks_the_same(family):
    model = make(family)
    before = looks(model)
    assert poros.prepare(model, **SETTINGS) is model
    assert_same_looks(before, looks(model))
    run(model, tiny.batches(family, 2))
    assert_same_looks(before, looks(model))
    assert poros.unprepare(model) is model
    assert_same_looks(before, looks(model))


@pytest.mark.parametrize("quant", ["nf4", "nf4-dq", None])
def test_every_value_can_be_read_at_any_time(quant):
    model = make(quant=quant)
    true = values(model)
    poros.prepare(model, **SETTINGS)
    assert_same_values(true, values(model))
    model(**tiny.batch("llama")).loss.backward()
    assert_same_values(true, values(model))
    state = model.state_dict()
    assert {name for name in true if name in state} == {name for name in state if name in true}
    assert_same_values({name: true[name] for name in state if name in true}, {n: state[n] for n in state if n in true})


def test_state_dict_is_the_resident_one():
    resident, streamed = make(), prepared()
    run(streamed, tiny.batches("llama", 2))
    run(resident, tiny.batches("llama", 2))
    assert_same_values(dict(resident.state_dict()), dict(streamed.state_dict()))


def test_nothing_is_quantised_again(monkeypatch):
    model = make()

    def refuse(*args, **kwargs):
        raise AssertionError("quantised a second time")

    monkeypatch.setattr(bnb.functional, "quantize_4bit", refuse)
    run(poros.prepare(model, **SETTINGS), tiny.batches("llama", 2))
    poros.unprepare(model)


def test_states_stay_one_object_with_their_weight():
    model = prepared()
    model(**tiny.batch("llama")).loss.backward()
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            assert module.quant_state is module.weight.quant_state
            assert module.weight.bnb_quantized


def test_layers_hold_no_device_memory_between_visits():
    """A frozen tensor is a view on the host master, and the window's slots are nobody's."""
    from poros.residency.attach import attachment_of

    model = prepared()
    model(**tiny.batch("llama")).loss.backward()
    slabs = [(b.data_ptr(), b.data_ptr() + b.numel()) for b in attachment_of(model).store.blocks]
    for layer in attachment_of(model).layers:
        for tensor in layer.tensors:
            assert any(start <= tensor.data_ptr() < end for start, end in slabs)


def test_every_entry_of_a_slab_is_aligned():
    """GEMMs of few rows change bits with the alignment of their operands."""
    from poros.residency.attach import attachment_of

    for layer in attachment_of(prepared("gemma4")).layers:
        assert all(tensor.data_ptr() % 512 == 0 for tensor in layer.masters)


# ---------------------------------------------------------------------------------------------------------------------
# What it saves
# ---------------------------------------------------------------------------------------------------------------------


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["adapters", "adapters and the head"])
def test_saved_adapter_is_byte_identical(tmp_path, saved):
    lora = {"modules_to_save": saved, "target_modules": ["q_proj", "down_proj"]} if saved else True
    folders = tmp_path / "resident", tmp_path / "streamed"
    for folder, prepare in zip(folders, (lambda m: m, lambda m: poros.prepare(m, **SETTINGS)), strict=True):
        model = prepare(make(lora=lora))
        run(model, tiny.batches("llama", 3))
        model.save_pretrained(folder)
    resident, streamed = map(files, folders)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= resident.keys()
    assert resident == streamed
    assert len(resident["adapter_model.safetensors"]) > 10_000


def test_saved_adapter_loads_into_a_plain_model(tmp_path):
    model = prepared()
    run(model, tiny.batches("llama", 2))
    model.save_pretrained(tmp_path)
    plain = peft.PeftModel.from_pretrained(make(lora=False), str(tmp_path)).eval()
    model.eval()
    with torch.no_grad():
        batch = tiny.batch("llama")
        assert torch.equal(plain(**batch).logits, model(**batch).logits)


def test_adapter_state_goes_in_and_out():
    """As a resume does: PEFT's state of one model into another, both prepared."""
    source, target = prepared(seed=0), prepared(seed=1)
    state = peft.get_peft_model_state_dict(source)
    assert len(state) == 5 * 7 * 2
    peft.set_peft_model_state_dict(target, state)
    loaded = peft.get_peft_model_state_dict(target)
    assert_same_values(dict(state), dict(loaded))


# ---------------------------------------------------------------------------------------------------------------------
# Moves that change nothing
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cpu"),
        lambda model: model.cpu(),
        lambda model: model.to(torch.device("cpu")),
        lambda model: model.get_base_model().to("cpu"),
        lambda model: tiny.text_layers(model)[1].to("cpu"),
        lambda model: model.float(),
    ],
    ids=["to", "cpu", "device", "base", "layer", "float"],
)
def test_move_to_where_it_is(move):
    def prepare(model, **settings):
        poros.prepare(model, **settings)
        before = looks(model)
        move(model)
        assert_same_looks(before, looks(model))
        return model

    check_parity(lambda: make(quant=None), tiny.batches("llama", 2), SETTINGS, prepare=prepare)


# ---------------------------------------------------------------------------------------------------------------------
# Preparing again, and undoing
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trained", [False, True], ids=["at once", "after training"])
def test_unprepare_restores_everything(family, trained):
    model = make(family)
    had, was = attributes(model), values(model)
    states = {id(p): id(p.quant_state) for p in model.parameters() if hasattr(p, "quant_state")}
    poros.prepare(model, **SETTINGS)
    if trained:
        run(model, tiny.batches(family, 2))
    poros.unprepare(model)
    assert attributes(model) == had
    assert states == {id(p): id(p.quant_state) for p in model.parameters() if hasattr(p, "quant_state")}
    now = values(model)
    learnt = {name for name, p in model.named_parameters() if p.requires_grad} if trained else set()
    assert_same_values(
        {n: v for n, v in was.items() if n not in learnt}, {n: v for n, v in now.items() if n not in learnt}
    )
    with pytest.raises(poros.ResidencyError, match="not prepared"):
        poros.report(model)


def test_training_goes_on_after_unprepare():
    """Two steps streamed, two resident, against four resident; and the other way round."""
    batches = tiny.batches("llama", 4)

    def changing(at):
        def before_step(model, step):
            if step == at:
                poros.unprepare(model) if prepared_first else poros.prepare(model, **SETTINGS)

        return before_step

    reference = run(make(dropout=0.1), batches)
    for prepared_first in (True, False):
        model = make(dropout=0.1)
        if prepared_first:
            poros.prepare(model, **SETTINGS)
        assert compare(reference, run(model, batches, before_step=changing(2))) is None


def test_prepare_and_unprepare_again_and_again():
    model = make()
    had = attributes(model)
    for size in (1, 2, 3):
        poros.prepare(model, block_size=size, device="cpu")
        model(**tiny.batch("llama")).loss.backward()
        poros.unprepare(model)
        assert attributes(model) == had


def test_unprepare_between_forward_and_backward_is_an_error():
    for again in (lambda model: None, lambda model: poros.prepare(model, device="cpu")):
        model = prepared()
        loss = model(**tiny.batch("llama")).loss
        poros.unprepare(model)
        again(model)
        with pytest.raises(poros.ResidencyError, match="between a forward and its backward"):
            loss.backward()
        model.zero_grad()
        model(**tiny.batch("llama")).loss.backward()


def test_a_model_that_is_let_go_takes_its_window_with_it():
    from poros.residency.attach import attachment_of

    model = prepared()
    model(**tiny.batch("llama")).loss.backward()
    alive = [weakref.ref(model), weakref.ref(attachment_of(model).window), weakref.ref(attachment_of(model).store)]
    del model
    gc.collect()
    assert [thing() for thing in alive] == [None, None, None]


def test_prepare_twice_changes_nothing():
    model = prepared()
    before, had = poros.report(model), attributes(model)
    assert poros.prepare(model, **SETTINGS) is model
    assert poros.prepare(model) is model
    assert poros.report(model) == before
    assert attributes(model) == had


@pytest.mark.parametrize(
    "other",
    [{"block_size": 1}, {"slots": 3}, {"poison": False}, {"checksum": True}],
    ids=lambda other: next(iter(other)),
)
def test_prepare_again_with_other_settings_is_refused(other):
    model = prepared()
    with pytest.raises(poros.ConfigError, match=rf"already prepared with {next(iter(other))}="):
        poros.prepare(model, **other)
    assert poros.report(model).block_size == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"slots": 0}, "slots is 0; it must be at least 1"),
        ({"device": "meta"}, "device 'meta' is not supported"),
    ],
)
def test_settings_out_of_limits_are_refused(settings, message):
    model = make()
    had = attributes(model)
    with pytest.raises(poros.ConfigError, match=message):
        poros.prepare(model, **{"device": "cpu", **settings})
    assert attributes(model) == had


def test_adapters_may_come_after_prepare():
    """The bare model is prepared, then PEFT wraps it, then ``prepare`` is told."""

    def wrap(model):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
            wrapped = peft.get_peft_model(model, config)
            tiny.randomise_lora_b(wrapped)
        return wrapped

    def prepare(wrapped, **settings):
        base = poros.prepare(make(lora=False), **settings)
        before = id(base.model.layers[0].mlp.up_proj.weight)
        wrapped = wrap(base)
        assert id(base.model.layers[0].mlp.up_proj.weight) == before
        return poros.prepare(wrapped, **settings)

    check_parity(lambda: wrap(make(lora=False)), tiny.batches("llama", 3), SETTINGS, prepare=prepare)


def test_bare_model_gives_the_same_logits():
    """Without anything to train: inference through the window, cached decoding included."""
    resident, streamed = make(lora=False).eval(), poros.prepare(make(lora=False), **SETTINGS).eval()
    batch = tiny.batch("llama", padding="left")
    with torch.no_grad():
        assert torch.equal(resident(**batch).logits, streamed(**batch).logits)
    assert torch.equal(resident(**batch).logits, streamed(**batch).logits)
    ask = {"attention_mask": batch["attention_mask"], "max_new_tokens": 5, "do_sample": False}
    tokens = resident.generate(batch["input_ids"], **ask)
    assert torch.equal(tokens, streamed.generate(batch["input_ids"], **ask))
    assert tokens.shape[1] == batch["input_ids"].shape[1] + 5


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------


def test_report_counts_every_byte():
    model = make()
    layers = tiny.text_layers(model)
    frozen = {
        name: tensor.numel() * tensor.element_size()
        for name, tensor in values(layers).items()
        if "lora_" not in name and not name.endswith(("quant_map", "bitsandbytes__nf4"))
    }
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    report = poros.report(poros.prepare(model, **SETTINGS))
    padding = report.host_bytes - sum(frozen.values())
    assert 0 <= padding < 512 * len(frozen) * 2
    assert (report.num_layers, report.num_blocks, report.block_size, report.slots) == (5, 3, 2, 2)
    assert report.window_bytes == 2 * -(-report.host_bytes * 2 // 5)
    assert report.trainable_bytes == trained
    weights = sum(size for name, size in frozen.items() if name.endswith("weight"))
    assert report.resident_bytes >= whole - weights
    assert report.model_type == "llama"
    assert "4-bit, double-quantised" in report.precision
    assert "bit for bit" in report.guarantee
    for text in ("llama", "5 layers", "2 slots", "guarantee"):
        assert text in str(report)


@pytest.mark.parametrize("quant", ["nf4", None])
def test_report_names_the_precision(quant):
    assert {"nf4": "4-bit", None: "float32"}[quant] in poros.report(prepared(quant=quant)).precision


def test_report_and_unprepare_of_a_plain_model_are_refused():
    for function in (poros.report, poros.unprepare):
        with pytest.raises(poros.ResidencyError, match="not prepared"):
            function(make())


# ---------------------------------------------------------------------------------------------------------------------
# Where models come from
# ---------------------------------------------------------------------------------------------------------------------


def dispatch(model):
    import accelerate

    device_map = {"model": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(model, device_map, main_device="cpu", force_hooks=True)


def test_model_dispatched_by_accelerate_is_absorbed():
    def make_dispatched():
        model = make(lora=False)
        dispatch(model)
        assert hasattr(model, "_hf_hook")
        return model

    def adapt(model):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
            tiny.randomise_lora_b(model)
        return model

    true = values(make(lora=False))
    model = poros.prepare(make_dispatched(), **SETTINGS)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert_same_values(true, values(model))
    assert set(model.hf_device_map.values()) == {torch.device("cpu")}
    check_parity(
        lambda: adapt(make(lora=False)),
        tiny.batches("llama", 2),
        SETTINGS,
        prepare=lambda _, **settings: poros.prepare(adapt(make_dispatched()), **settings),
    )


def test_model_offloaded_to_host_by_accelerate_is_absorbed():
    """Its parameters are on the meta device, and the values in the hooks."""
    import accelerate

    true = values(make(quant=None, lora=False))
    model = make(quant=None, lora=False)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(tiny.text_layers(model).parameters()).is_meta
    poros.prepare(model, **SETTINGS)
    assert_same_values(true, values(model))


def test_model_whose_values_accelerate_keeps_elsewhere_is_refused():
    """The message has the line to load it with, and the model goes on working as it was."""
    import accelerate

    source = make(quant=None, lora=False)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    batch = tiny.batch("llama")
    with torch.no_grad():
        logits = source(**batch).logits
        model = copy.deepcopy(source).to("meta")
        for name, buffer in source.named_buffers():
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module)._buffers[leaf] = buffer
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), state_dict=state)
        assert torch.equal(logits, model(**batch).logits)
        with pytest.raises(poros.ResidencyError, match=r'from_pretrained\(\.\.\., device_map="cpu"\)'):
            poros.prepare(model, **SETTINGS)
        assert torch.equal(logits, model(**batch).logits)


def test_data_parallel_is_refused():
    model = make()
    with pytest.raises(poros.ResidencyError, match=r"nn.DataParallel.*model.module"):
        poros.prepare(nn.DataParallel(model), **SETTINGS)
    poros.prepare(model, **SETTINGS)
    with pytest.raises(poros.ResidencyError, match="one GPU only"):
        tiny.text_layers(model)[0]._replicate_for_data_parallel()


def test_compiled_model_is_refused():
    model = make()
    with pytest.raises(poros.ResidencyError, match=r"torch.compile"):
        poros.prepare(torch.compile(model, backend="eager"), **SETTINGS)
