"""Tiny models of every supported family, built the way users get theirs, and batches for them.

Small enough for a CPU test, but never small in what matters: ``in_features`` are multiples of 64 (or bitsandbytes never
selects its 4-bit kernels), there are more layers than window slots, norms and buffers differ from layer to layer (so
that one layer served with another's weights shows), and ``lora_B`` is random (zero would make every ``lora_A``
gradient zero).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import bitsandbytes as bnb
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.auto import AutoHfQuantizer

VOCAB = 256
PAD = 0
IMAGE, VIDEO, AUDIO, IMAGE_START, IMAGE_END = 250, 251, 252, 253, 254
IMAGE_TOKENS = 4  # a 2 x 2 grid, in each of the vision towers below

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {"head_dim": 32, "sliding_window": 8}
_MOE = {"num_experts_per_tok": 2}


def _pattern(num_layers: int, *, every: int, other: str) -> list[str]:
    """``other`` everywhere, full attention in every ``every``-th layer and in the last."""
    return [
        "full_attention" if (i + 1) % every == 0 or i == num_layers - 1 else f"{other}_attention"
        for i in range(num_layers)
    ]


@dataclass(frozen=True)
class Family:
    """What :func:`build` needs to know of one family."""

    config: Callable[..., Any]  # the text configuration's class
    model: type  # the class users load
    settings: dict[str, Any] = field(default_factory=dict)
    num_layers: int = 7
    layer_types: Callable[[int], list[str]] | None = None
    multimodal: Callable[[Any], Any] | None = None  # text configuration -> configuration of the class users load
    attn: str = "sdpa"
    fused_experts: bool = False  # PEFT adapts the experts as bare parameters, which it cannot do with dropout


_QWEN3_5 = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
    },
}
_GEMMA4 = {
    **_GEMMA,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
}


def _gemma3_config(text: Any) -> Any:
    vision = tf.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
        vision_use_head=False,
    )
    return tf.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=IMAGE,
        boi_token_index=IMAGE_START,
        eoi_token_index=IMAGE_END,
    )


def _gemma4_config(text: Any) -> Any:
    vision = tf.Gemma4VisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        patch_size=4,
        pooling_kernel_size=2,
        position_embedding_size=16,
    )
    return tf.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        boi_token_id=IMAGE_START,
        eoi_token_id=IMAGE_END,
    )


def _qwen3_5_config(text: Any) -> Any:
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 1,
        "spatial_merge_size": 2,
        "out_hidden_size": _TEXT["hidden_size"],
        "num_position_embeddings": 16,
    }
    return tf.Qwen3_5Config(
        text_config=text.to_dict(),
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=IMAGE_START,
        vision_end_token_id=IMAGE_END,
    )


def _hybrid(n: int) -> list[str]:
    return _pattern(n, every=3, other="linear")


def _sliding(n: int) -> list[str]:
    return _pattern(n, every=3, other="sliding")


_GEMMA3_TEXT = {"config": tf.Gemma3TextConfig, "settings": _GEMMA, "layer_types": _sliding}
# Eight layers: the last three read the keys and values of the last two before them, one of each kind.
_GEMMA4_TEXT = {"config": tf.Gemma4TextConfig, "settings": _GEMMA4, "num_layers": 8, "layer_types": _sliding}
_QWEN3_5_TEXT = {"config": tf.Qwen3_5TextConfig, "settings": _QWEN3_5, "layer_types": _hybrid}

FAMILIES: dict[str, Family] = {
    "llama": Family(tf.LlamaConfig, tf.LlamaForCausalLM),
    "mistral": Family(tf.MistralConfig, tf.MistralForCausalLM, {"sliding_window": 8}),
    "qwen2": Family(tf.Qwen2Config, tf.Qwen2ForCausalLM),
    "qwen3": Family(tf.Qwen3Config, tf.Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3_5_text": Family(model=tf.Qwen3_5ForCausalLM, **_QWEN3_5_TEXT),
    "gemma3_text": Family(model=tf.Gemma3ForCausalLM, **_GEMMA3_TEXT),
    "gemma4_text": Family(model=tf.Gemma4ForCausalLM, **_GEMMA4_TEXT),
    "phi3": Family(tf.Phi3Config, tf.Phi3ForCausalLM),
    "glm4": Family(tf.Glm4Config, tf.Glm4ForCausalLM, {"head_dim": 32}),
    "gpt_oss": Family(
        tf.GptOssConfig,
        tf.GptOssForCausalLM,
        {
            **_MOE,
            "head_dim": 32,
            "sliding_window": 8,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        attn="eager",  # its sinks have no SDPA path
    ),
    "qwen3_moe": Family(
        tf.Qwen3MoeConfig,
        tf.Qwen3MoeForCausalLM,
        {**_MOE, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 64, "mlp_only_layers": [2]},
        fused_experts=True,
    ),
    "gemma3": Family(model=tf.Gemma3ForConditionalGeneration, multimodal=_gemma3_config, **_GEMMA3_TEXT),
    "gemma4": Family(model=tf.Gemma4ForConditionalGeneration, multimodal=_gemma4_config, **_GEMMA4_TEXT),
    "qwen3_5": Family(model=tf.Qwen3_5ForConditionalGeneration, multimodal=_qwen3_5_config, **_QWEN3_5_TEXT),
}


def build(
    family: str,
    *,
    quant: str | None = "nf4-dq",
    quant_storage: torch.dtype = torch.uint8,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    seed: int = 0,
    num_layers: int | None = None,
    lora: bool | dict[str, Any] = True,
    attn: str | None = None,
    tied: bool | None = None,
    device: str | torch.device = "cpu",
    **settings: Any,
) -> Any:
    """A model of ``family`` with random weights in train mode; the same bits for the same arguments.

    Args:
        quant: ``"nf4"``, ``"nf4-dq"`` (double quantisation) or None. Only the text layers are quantised.
        quant_storage: dtype that the packed bytes pretend to have.
        dropout: of the adapters and of the attention.
        lora: False for the bare model; a dict changes fields of the ``LoraConfig``.
        attn: the attention's implementation; None takes SDPA where the family has it.
        tied: tie the head to the embedding; None keeps the family's default.
        settings: further fields of the text configuration.

    The global random state is left as it was.
    """
    spec = FAMILIES[family]
    num_layers = num_layers or spec.num_layers
    fields = {**_TEXT, **spec.settings, "num_hidden_layers": num_layers, "attention_dropout": dropout}
    if spec.layer_types is not None:
        fields["layer_types"] = spec.layer_types(num_layers)
    if family == "phi3":
        fields |= {"resid_pdrop": dropout, "embd_pdrop": dropout}
    if tied is not None:
        fields["tie_word_embeddings"] = tied
    config = spec.config(**{**fields, **settings})
    if spec.multimodal is not None:
        config = spec.multimodal(config)
        if tied is not None:
            config.tie_word_embeddings = tied
    config._attn_implementation = attn or spec.attn

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = spec.model(config)
        _make_distinct(model)
        model.to(device=device, dtype=dtype).requires_grad_(False)
        if quant is not None:
            _quantise(model, quant, dtype, quant_storage)
        model.train()
        if lora is False:
            return model
        attention_only = spec.fused_experts and dropout > 0
        return _adapted(model, dropout, attention_only, lora if isinstance(lora, dict) else {})


def batch(
    family: str,
    *,
    batch_size: int = 2,
    seq_len: int = 24,
    padding: str | None = None,
    image: bool = False,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> dict[str, torch.Tensor]:
    """Keyword arguments of one forward: token ids, mask, labels and, with ``image``, one image a row.

    Args:
        padding: ``"left"`` or ``"right"``: row i has 3 * i + 2 padded places. None: full rows and no mask.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, IMAGE, (batch_size, seq_len), generator=generator)
    out: dict[str, torch.Tensor] = {}
    keep = torch.ones_like(ids)
    if padding is not None:
        for row in range(batch_size):
            gone = 3 * row + 2
            keep[row, slice(0, gone) if padding == "left" else slice(seq_len - gone, seq_len)] = 0
        out["attention_mask"] = keep
    ids = ids.masked_fill(keep == 0, PAD)
    is_image = torch.zeros_like(ids)
    if image:
        at = seq_len // 2 - IMAGE_TOKENS  # clear of the padding on either side
        is_image[:, at : at + IMAGE_TOKENS] = 1
        ids = ids.masked_fill(is_image == 1, IMAGE)
        ids[:, at - 1], ids[:, at + IMAGE_TOKENS] = IMAGE_START, IMAGE_END
        out |= _pixels(family, batch_size, generator)
    if family == "gemma3":
        out["token_type_ids"] = is_image
    elif family in ("gemma4", "qwen3_5"):
        out["mm_token_type_ids"] = is_image
    out |= {"input_ids": ids, "labels": ids.masked_fill((keep == 0) | (is_image == 1), -100)}
    return {name: value.to(device) for name, value in out.items()}


def batches(family: str, count: int, *, seed: int = 0, **options: Any) -> list[dict[str, torch.Tensor]]:
    """``count`` different batches."""
    return [batch(family, seed=1000 * seed + i, **options) for i in range(count)]


def text_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a model from :func:`build`, with adapters or without, prepared or not."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return base.get_submodule(_layers_path(base))


def _layers_path(base: nn.Module) -> str:
    return "model.language_model.layers" if hasattr(base.model, "language_model") else "model.layers"


def _pixels(family: str, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Images of 4 x 4 patches of 4 x 4 pixels, in the form that the family's processor gives."""
    if family == "gemma3":
        return {"pixel_values": torch.rand(count, 3, 16, 16, generator=generator)}
    if family == "gemma4":
        grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(16, 2)
        return {
            "pixel_values": torch.rand(count, 16, 48, generator=generator),
            "image_position_ids": grid.expand(count, 16, 2),
        }
    if family == "qwen3_5":
        return {
            "pixel_values": torch.rand(count * 16, 48, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * count),
        }
    raise ValueError(f"{family} takes no images")


def _make_distinct(model: nn.Module) -> None:
    """Give every vector of the text layers (norms, biases, sinks, Gemma 4's scalars) values of its own."""
    for layer in text_layers(model):
        for name, parameter in layer.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
        if hasattr(layer, "layer_scalar"):
            layer.layer_scalar.uniform_(0.7, 1.3)


def _quantise(model: Any, quant: str, dtype: torch.dtype, storage: torch.dtype) -> None:
    """Put the text layers in 4 bits and mark the model, as ``from_pretrained`` does with a ``BitsAndBytesConfig``."""
    config = tf.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant={"nf4": False, "nf4-dq": True}[quant],
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=storage,
    )
    layers = text_layers(model)
    masters = {
        name: (module.weight.data, module.bias) for name, module in layers.named_modules() if type(module) is nn.Linear
    }
    replace_with_bnb_linear(layers, quantization_config=config)
    for name, (weight, bias) in masters.items():
        module = layers.get_submodule(name)
        fresh = module.weight.__dict__  # holds the module too, so that quantising sets ``module.quant_state``
        module.weight = bnb.nn.Params4bit(weight, requires_grad=False, **fresh).to(weight.device)
        module.bias = bias
        # Where the CPU has AVX512-BF16, an eval forward would repack the weight in place.
        module.support_avx512bf16_for_cpu = False
    model.hf_quantizer = AutoHfQuantizer.from_config(config)
    model.is_quantized = model.is_loaded_in_4bit = model.is_4bit_serializable = True
    model.quantization_method = config.quant_method
    model.config.quantization_config = config


def _adapted(model: Any, dropout: float, attention_only: bool, changes: dict[str, Any]) -> PeftModel:
    path = _layers_path(model)
    leaves = {
        name.rpartition(".")[2]
        for name, module in text_layers(model).named_modules()
        if isinstance(module, nn.Linear) and (".self_attn." in name or not attention_only)
    }
    # A vision tower has linears of the same names, and names in a list would reach them.
    in_text = rf"{re.escape(path)}\.\d+\..*\b({'|'.join(sorted(leaves))})"
    targets = in_text if "language_model" in path else sorted(leaves)
    fields = {"r": 4, "lora_alpha": 8, "lora_dropout": dropout, "target_modules": targets, "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(**{**fields, **changes}))
    randomise_lora_b(adapted)
    return adapted


def randomise_lora_b(model: nn.Module, std: float = 0.05) -> None:
    """Replace the zeros that PEFT starts every ``lora_B`` with."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=std)
