"""Every supported family trains to the resident run's bits, for every kind of base and every shape of window."""

import pytest
import torch

from poros.families import MULTIMODAL, VERIFIED
from tests import tiny
from tests.oracle import check_parity

ALL = 99  # more layers than any model here: one block holds them all

# (quant, dropout, padding, settings of prepare). Not the full product: each value of each setting occurs with each kind
# of base in some row, each family runs all rows, and each row's resident run serves several streamed ones.
ROWS = {
    "nf4-dq": ("nf4-dq", 0.1, "left", [{"poison": True}, {"block_size": 3, "slots": 2}]),
    "nf4": ("nf4", 0.0, None, [{"block_size": 2, "slots": 3, "poison": True}, {"block_size": ALL, "slots": 2}]),
    "unquantised": (None, 0.1, "right", [{"slots": 2, "poison": True}, {"block_size": 3, "slots": 3}]),
}


def test_every_supported_family_is_here():
    assert {*VERIFIED, *MULTIMODAL} == tiny.FAMILIES.keys()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_family(family, row):
    quant, dropout, padding, settings = ROWS[row]
    batches = tiny.batches(family, 5, padding=padding, image=family in MULTIMODAL)
    check_parity(lambda: tiny.build(family, quant=quant, dropout=dropout), batches, *settings)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_multimodal_class_on_text_alone(family):
    batches = tiny.batches(family, 5, padding="right")
    check_parity(lambda: tiny.build(family), batches, {"block_size": 2, "slots": 2, "poison": True})


def test_llama_for_many_steps():
    """Twenty steps, with batches of four lengths, in windows of every shape."""
    batches = [tiny.batch("llama", seq_len=8 + 5 * (i % 4), seed=i) for i in range(20)]
    settings = [{"block_size": size, "slots": slots, "poison": True} for size in (1, 2, 3, ALL) for slots in (1, 2, 3)]
    check_parity(lambda: tiny.build("llama", dropout=0.1), batches, *settings)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "mistral", "qwen3_5_text"])
def test_eager_attention(family):
    """Masks are then real tensors, one for each kind of layer."""
    batches = tiny.batches(family, 5, padding="left")
    check_parity(lambda: tiny.build(family, attn="eager"), batches, {"block_size": 3, "slots": 2, "poison": True})


VARIANTS = {
    # keys that are values too, experts beside a dense MLP, no per-layer inputs: the larger Gemma 4
    "gemma4, keys are values": ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    ),
    "gemma4, no per-layer inputs": ("gemma4_text", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "gemma4, wide": ("gemma4_text", {"use_double_wide_mlp": True}),
    "gemma3, bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
    "gemma3, soft caps": ("gemma3_text", {"final_logit_softcapping": 30.0}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tied": True}),
    "qwen2, sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    "qwen3_moe, some dense layers": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "qwen3_moe, router loss": ("qwen3_moe", {"norm_topk_prob": True}),
    "phi3, partial rotary": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_family(variant):
    """What separates the sizes and releases of one family."""
    family, settings = VARIANTS[variant]
    batches = tiny.batches(family, 3, padding="left")
    windows = {"poison": True, "slots": 2}, {"block_size": 3, "slots": 2, "poison": True}
    check_parity(lambda: tiny.build(family, **settings), batches, *windows)


def test_gemma4_with_images_seen_both_ways():
    """The larger Gemma 4 let the tokens of an image attend to each other in both directions."""
    batches = tiny.batches("gemma4", 3, image=True, padding="left")
    check_parity(lambda: tiny.build("gemma4", use_bidirectional_attention="vision"), batches, {"poison": True})


def without_cache(model, batches):
    loss = model(**batches[0], use_cache=False).loss
    loss.backward()
    return (loss,)


LONG = {"seq_len": 130, "batch_size": 1}  # the delta rule goes through the sequence in chunks of 64 tokens


def test_qwen3_5_over_several_chunks():
    batches = tiny.batches("qwen3_5_text", 2, **LONG)
    check_parity(lambda: tiny.build("qwen3_5_text"), batches, {"poison": True, "slots": 2}, learn=without_cache)


def test_qwen3_5_over_several_chunks_with_the_default_cache():
    """With a cache, which transformers makes unless told otherwise, a convolution runs over a longer sequence."""
    batches = tiny.batches("qwen3_5_text", 2, **LONG)
    check_parity(lambda: tiny.build("qwen3_5_text"), batches, {"poison": True, "slots": 2})


def test_gemma4_gradient_reaches_the_per_layer_inputs():
    """Gemma 4 gives each layer a second tensor, which learns if the projection behind it does."""

    def make():
        targets = r".*\.(q_proj|o_proj|per_layer_projection)|.*per_layer_model_projection"
        model = tiny.build("gemma4_text", lora={"target_modules": targets})
        model.enable_input_require_grads()
        return model

    reference = check_parity(make, tiny.batches("gemma4_text", 5), {"poison": True}, {"block_size": 3, "slots": 2})
    learnt = [name for name, g in reference.surface("grad").items() if "per_layer_model_projection" in name and g.any()]
    assert len(learnt) == 2


def test_gemma4_shares_keys_with_later_layers_in_other_blocks():
    """The gradient of shared keys and values comes back through the mapping that layers read them from."""
    layers = tiny.text_layers(tiny.build("gemma4_text"))
    assert [layer.self_attn.is_kv_shared_layer for layer in layers] == [False] * 5 + [True] * 3
    only_producers = {"target_modules": r".*\.layers\.(2|4)\.self_attn\.(k_proj|v_proj)"}
    batches = tiny.batches("gemma4_text", 5)
    check_parity(
        lambda: tiny.build("gemma4_text", lora=only_producers), batches, {"poison": True}, {"block_size": 3, "slots": 2}
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_fused_experts(family):
    """PEFT reaches stacked experts as bare parameters, by replacing them for the time of a forward."""

    def make():
        return tiny.build(
            family, lora={"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": ["q_proj"]}
        )

    reference = check_parity(make, tiny.batches(family, 5), {"poison": True}, {"block_size": 2, "slots": 2})
    assert any("experts" in name and g.any() for name, g in reference.surface("grad").items())


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16], ids=str)
def test_packed_bytes_that_pose_as_floats(storage):
    """``bnb_4bit_quant_storage`` (peft: FSDP's advice) makes packed weights look like an unquantised base."""
    check_parity(
        lambda: tiny.build("llama", quant_storage=storage),
        tiny.batches("llama", 5),
        {"poison": True},
        {"block_size": 3},
    )


def test_bfloat16_base():
    """The precision of real runs, once and very small: this CPU has no fast bfloat16."""
    batches = tiny.batches("llama", 3, batch_size=1, seq_len=4)
    check_parity(lambda: tiny.build("llama", dtype=torch.bfloat16, num_layers=4), batches, {"poison": True, "slots": 2})
