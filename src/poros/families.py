"""Which decoder families are shown to be bit-equal when streamed, and which are refused, by ``model_type``.

Pure data, so that a model can be refused by name from its configuration alone, before a byte of it is read.
"""

from poros.errors import UnsupportedModelError

# model_type of the text model -> the family's name. Every entry has a parity test.
VERIFIED: dict[str, str] = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_moe": "Qwen3 MoE",
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4",
    "phi3": "Phi-3/Phi-4",
    "glm4": "GLM-4",
    "gpt_oss": "GPT-OSS",
}

# model_type of the class that users load -> model_type of the text model inside it.
MULTIMODAL: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
}


def text_family(model_type: str) -> str:
    """The verified text ``model_type`` behind ``model_type``; :class:`UnsupportedModelError` if there is none."""
    text = MULTIMODAL.get(model_type, model_type)
    if text not in VERIFIED:
        known = ", ".join(sorted({*VERIFIED, *MULTIMODAL}))
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported: its layers have not been shown to train bit for bit when "
            f"streamed. Supported: {known}."
        )
    return text
