"""What a prepared model cannot do is refused with the reason and the way out, and nothing is half-done."""

import copy
import inspect
import io
import pickle

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers as tf

import poros
from tests import tiny
from tests.oracle import compare, run
from tests.test_contract import (
    SETTINGS,
    assert_same_looks,
    assert_same_values,
    attributes,
    dispatch,
    looks,
    make,
    values,
)

BATCHES = tiny.batches("llama", 2)


@pytest.fixture(scope="module")
def reference():
    return run(make(), BATCHES)


@pytest.fixture
def untouched(reference):
    """A prepared model, and the check that after the test it still is what it was and trains to the resident bits."""
    model = poros.prepare(make(), **SETTINGS)
    before, had, true = looks(model), attributes(model), values(model)
    yield model
    assert attributes(model) == had
    assert_same_looks(before, looks(model))
    assert_same_values(true, values(model))
    assert compare(reference, run(model, BATCHES)) is None


# ---------------------------------------------------------------------------------------------------------------------
# Moving, casting, copying, merging
# ---------------------------------------------------------------------------------------------------------------------

MOVES = {
    "half": (lambda m: m.half(), "read-only and cannot be cast to torch.float16"),
    "bfloat16": (lambda m: m.bfloat16(), "read-only and cannot be cast to torch.bfloat16"),
    "to dtype": (lambda m: m.to(torch.float64), "cannot be cast to torch.float64"),
    "to meta": (lambda m: m.to("meta"), "prepared for cpu and cannot be moved to meta"),
    "to both": (lambda m: m.to("cpu", torch.float16), "cannot be cast to torch.float16"),
    "to_empty": (lambda m: m.to_empty(device="meta"), "cannot be moved to meta"),
    "backbone": (lambda m: m.get_base_model().model.half(), "cannot be cast"),
    "list of layers": (lambda m: tiny.text_layers(m).half(), "cannot be cast"),
    "one layer": (lambda m: tiny.text_layers(m)[2].half(), "cannot be cast"),
}


@pytest.mark.parametrize("move", MOVES)
def test_moves_are_refused(untouched, move):
    act, message = MOVES[move]
    with pytest.raises(poros.ResidencyError, match=message) as error:
        act(untouched)
    assert "poros.unprepare(model)" in str(error.value)


COPIES = {
    "deepcopy": lambda m: copy.deepcopy(m),
    "deepcopy of the base": lambda m: copy.deepcopy(m.get_base_model()),
    "deepcopy of the layers": lambda m: copy.deepcopy(tiny.text_layers(m)),
    "deepcopy of a layer": lambda m: copy.deepcopy(tiny.text_layers(m)[0]),
    "deepcopy in a container": lambda m: copy.deepcopy({"model": [m]}),
    "pickle": lambda m: pickle.dumps(m),
    "torch.save": lambda m: torch.save(m, io.BytesIO()),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_are_refused(untouched, kind):
    with pytest.raises(
        poros.ResidencyError, match=r"(deepcopy|pickling).*poros\.unprepare\(model\) first.*save_pretrained"
    ):
        COPIES[kind](untouched)


MERGES = {
    "merge_adapter": lambda m: m.merge_adapter(),
    "unmerge_adapter": lambda m: m.unmerge_adapter(),
    "merge_and_unload": lambda m: m.merge_and_unload(),
    "unload": lambda m: m.unload(),
    "base merge_adapter": lambda m: m.base_model.merge_adapter(),
    "base merge_and_unload": lambda m: m.base_model.merge_and_unload(),
    "one projection": lambda m: tiny.text_layers(m)[1].self_attn.q_proj.merge(),
}


@pytest.mark.parametrize("merge", MERGES)
def test_merging_is_refused(untouched, merge):
    with pytest.raises(poros.ResidencyError, match=r"merge|unload.*is not possible while the model is prepared"):
        MERGES[merge](untouched)


def test_merging_is_refused_for_adapters_that_came_later():
    model = poros.prepare(make(lora=False), **SETTINGS)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    poros.prepare(model, **SETTINGS)
    for merge in MERGES.values():
        with pytest.raises(poros.ResidencyError, match="not possible while the model is prepared"):
            merge(model)


def test_merge_works_again_after_unprepare():
    merged = [poros.unprepare(poros.prepare(make(), **SETTINGS)), make()]
    with torch.no_grad(), pytest.warns(UserWarning, match="rounding errors"):
        logits = [model.merge_and_unload().eval()(**BATCHES[0]).logits for model in merged]
    assert torch.equal(*logits)


# ---------------------------------------------------------------------------------------------------------------------
# Writing to the base
# ---------------------------------------------------------------------------------------------------------------------


def test_loading_frozen_weights_is_refused(untouched):
    state = {name: value for name, value in untouched.state_dict().items() if "layers.3" in name}
    with pytest.raises(poros.ResidencyError, match=r"load_state_dict would write to the frozen weight .*layers\.3"):
        untouched.load_state_dict(state, strict=False)


def test_base_made_trainable_is_refused():
    model = poros.prepare(make(), **SETTINGS)
    weight = tiny.text_layers(model)[1].input_layernorm.weight.requires_grad_(True)
    with pytest.raises(poros.ResidencyError, match=r"layers\.1: weight was made trainable after poros.prepare"):
        model(**BATCHES[0])
    weight.requires_grad_(False)
    model(**BATCHES[0]).loss.backward()


def test_base_weight_replaced_is_refused():
    model = poros.prepare(make(quant=None), **SETTINGS)
    projection = tiny.text_layers(model)[1].mlp.up_proj.base_layer
    true = projection.weight
    projection.weight = torch.nn.Parameter(true.detach().clone(), requires_grad=False)
    with pytest.raises(poros.ResidencyError, match=r"layers\.1: mlp\.up_proj\.base_layer\.weight was replaced"):
        model(**BATCHES[0])
    projection.weight = true
    model(**BATCHES[0]).loss.backward()


@pytest.mark.parametrize("storage", [torch.uint8, torch.float32], ids=str)
def test_blanket_cast_does_not_reach_packed_weights(storage):
    """``for p in model.parameters(): if p.dtype == float32: p.data = p.data.to(bfloat16)``, as scripts have it."""
    model = poros.prepare(make(quant_storage=storage), **SETTINGS)
    true = values(model)
    for parameter in model.parameters():
        if parameter.dtype == torch.float32 and not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    if storage == torch.float32:
        with pytest.raises(poros.ResidencyError, match=r"proj.*weight was replaced \(torch.bfloat16"):
            model(**BATCHES[0])
    poros.unprepare(model)
    now = values(model)
    assert_same_values(
        {name: value for name, value in true.items() if "proj" in name},
        {name: value for name, value in now.items() if "proj" in name},
    )


# ---------------------------------------------------------------------------------------------------------------------
# Forwards that cannot be streamed
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT passes it
def test_prefix_tuning_is_refused():
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = poros.prepare(peft.get_peft_model(make(lora=False), config), **SETTINGS)
    with pytest.raises(poros.ResidencyError, match="prefix tuning of a prepared model is not supported"):
        model(**BATCHES[0])


def cached(model, ids, cache):
    """A forward that reads and writes ``cache``, under the name that this transformers has for it."""
    name = "cache" if "cache" in inspect.signature(model.get_base_model().forward).parameters else "past_key_values"
    return model(input_ids=ids, use_cache=True, **{name: cache})


def test_going_on_from_the_cache_of_a_training_forward_is_refused():
    """Its layers left the cache empty; an answer from it would be wrong."""
    model = poros.prepare(make(), **SETTINGS)
    ids, cache = BATCHES[0]["input_ids"], tf.DynamicCache(config=model.config)
    cached(model, ids, cache)
    with torch.no_grad(), pytest.raises(poros.ResidencyError, match="key-value cache"):
        cached(model, ids[:, -1:], cache)


def test_decoding_with_gradients_is_refused():
    model = poros.prepare(make(), **SETTINGS)
    ids, cache = BATCHES[0]["input_ids"], tf.DynamicCache(config=model.config)
    with torch.no_grad():
        cached(model, ids, cache)
    with pytest.raises(poros.ResidencyError, match=r"Run decoding under torch\.no_grad\(\)"):
        cached(model, ids[:, -1:], cache)


@pytest.mark.parametrize("name", ["output_attentions", "output_router_logits"])
def test_outputs_from_inside_the_layers_are_refused(name):
    """They would carry no gradient; without gradients they are as ever."""
    family = "qwen3_moe"
    model = poros.prepare(make(family, attn="eager"), **SETTINGS)
    batch = tiny.batch(family)
    with pytest.raises(poros.ResidencyError, match=rf"{name}=True is not possible .* under torch.no_grad"):
        model(**batch, **{name: True})
    with torch.no_grad():
        key = name.removeprefix("output_")
        resident = make(family, attn="eager")(**batch, **{name: True})[key]
        streamed = model(**batch, **{name: True})[key]
    assert len(resident) > 0
    assert all(torch.equal(a, b) for a, b in zip(resident, streamed, strict=True))


def test_loss_over_what_a_hook_caught_inside_a_layer_is_refused():
    """Its graph is thrown away with the forward's, and a gradient that went missing would be silent."""
    model = poros.prepare(make(), **SETTINGS)
    caught = []
    hook = tiny.text_layers(model)[2].mlp.register_forward_hook(lambda module, args, output: caught.append(output))
    loss = model(**BATCHES[0]).loss + caught[0].mean()
    with pytest.raises(poros.ResidencyError, match=r"captured inside .*layers\.2 .*is part of the loss"):
        loss.backward()
    hook.remove()
    model.zero_grad()
    model(**BATCHES[0]).loss.backward()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of Dynamo
def test_compiling_is_refused():
    model = poros.prepare(make(num_layers=1), **SETTINGS)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(Exception, match=r"cannot be traced by torch\.compile"):
        compiled(**BATCHES[0])


# ---------------------------------------------------------------------------------------------------------------------
# Models that are not supported
# ---------------------------------------------------------------------------------------------------------------------

_SMALL = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 64}


def gpt2():
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2))


UNSUPPORTED = {
    "gpt2": gpt2,
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    ),
    "mamba": lambda: tf.MambaForCausalLM(tf.MambaConfig(**_SMALL, state_size=4)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**_SMALL, num_attention_heads=2, intermediate_size=64)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_SMALL, num_attention_heads=2, intermediate_size=64)),
}


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_unsupported_families_are_refused_by_name(model_type):
    model = UNSUPPORTED[model_type]().requires_grad_(False)
    had = attributes(model)
    with pytest.raises(poros.UnsupportedModelError, match=rf"'{model_type}' is not supported.*Supported: .*llama"):
        poros.prepare(model, device="cpu")
    assert attributes(model) == had


def test_refused_model_keeps_accelerates_hooks():
    import accelerate

    model = gpt2()
    accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    with pytest.raises(poros.UnsupportedModelError):
        poros.prepare(model, device="cpu")
    assert hasattr(model, "_hf_hook")
    supported = dispatch(make(lora=False))
    with pytest.raises(poros.ConfigError):
        poros.prepare(supported, device="cpu", slots=0)
    assert hasattr(supported, "_hf_hook")


def test_module_without_a_transformers_model_is_refused():
    with pytest.raises(poros.UnsupportedModelError, match="Sequential holds no transformers model"):
        poros.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def refused(model, error, message):
    """``prepare`` refuses, and leaves no trace."""
    had = attributes(model)
    with pytest.raises(error, match=message):
        poros.prepare(model, **SETTINGS)
    assert attributes(model) == had


def test_model_with_nothing_frozen_is_refused():
    refused(
        make(quant=None, lora=False).requires_grad_(True), poros.ResidencyError, "nothing to stream.*Freeze the base"
    )


def test_eight_bit_weights_are_refused():
    model = make(lora=False)
    mlp = tiny.text_layers(model)[3].mlp
    mlp.up_proj = bnb.nn.Linear8bitLt(128, 192, bias=False, has_fp16_weights=False).requires_grad_(False)
    refused(model, poros.UnsupportedModelError, r"mlp\.up_proj\.weight is an 8-bit weight.*load_in_4bit=True")


def test_weights_not_quantised_yet_are_refused():
    """``Linear4bit`` packs its weight when it is first moved, and this one never was."""
    model = make(lora=False)
    tiny.text_layers(model)[3].mlp.up_proj = bnb.nn.Linear4bit(128, 192, bias=False, quant_type="nf4")
    refused(model, poros.ResidencyError, r"mlp\.up_proj\.weight is a 4-bit weight that was not quantised yet")


def test_packed_weight_without_its_statistics_is_refused():
    model = make(lora=False)
    projection = tiny.text_layers(model)[3].mlp.up_proj
    projection.weight.quant_state = projection.quant_state = None
    refused(
        model, poros.ResidencyError, r"mlp\.up_proj\.weight is a packed 4-bit weight without its quantisation state"
    )


def test_weights_without_values_are_refused():
    model = make(quant=None, lora=False)
    tiny.text_layers(model)[3].mlp.up_proj.to("meta")
    refused(model, poros.ResidencyError, r"mlp\.up_proj\.weight .*has no values")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"slots": True}, "slots is True; it must be a whole number"),
        ({"block_size": "4"}, "block_size is '4'; it must be a whole number"),
        ({"block_size": 2.5}, "block_size is 2.5"),
        ({"device": "nonsense"}, "device 'nonsense' is not a device"),
    ],
)
def test_settings_of_the_wrong_type_are_refused_prepared_or_not(settings, text):
    model = make()
    for _ in range(2):
        with pytest.raises(poros.ConfigError, match=text):
            poros.prepare(model, **{"device": "cpu", **settings})
        poros.prepare(model, device="cpu")


@pytest.mark.parametrize("value", [None, "Qwen/Qwen2.5-32B"])
def test_what_is_no_model_is_refused(value):
    with pytest.raises(poros.UnsupportedModelError, match=r"not a (NoneType|str).*use poros.load"):
        poros.prepare(value)


def test_other_slots_are_refused_as_they_were_asked_for():
    model = poros.prepare(make(), device="cpu", slots=2)
    with pytest.raises(poros.ConfigError, match="slots=2, so not with slots=70"):
        poros.prepare(model, slots=70)


def test_report_says_where_an_evaluation_would_repack_weights():
    model = make()
    inner = next(module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu"))
    inner.support_avx512bf16_for_cpu = True
    poros.prepare(model, device="cpu")
    assert any("support_avx512bf16_for_cpu = False" in note for note in poros.report(model).notes)
    assert not inner.support_avx512bf16_for_cpu
    poros.unprepare(model)
    assert inner.support_avx512bf16_for_cpu
