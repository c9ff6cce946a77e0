"""What a training run is: the settings of ``poros train run.yaml`` and their limits.

The docstring under each field is its only description: the command line's help and the documentation are made from it.
"""

from collections.abc import Iterator
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticUndefined


class _Section(BaseModel):
    """A group of settings: nothing unknown, nothing converted behind the user's back, nothing changed afterwards."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(_Section):
    """The frozen base, and where it is kept."""

    path: str = Field(min_length=1)
    """Folder of the base model, or its id on the model hub."""
    revision: str | None = None
    """Branch, tag or commit on the model hub; the default branch if left out."""
    gguf_file: str | None = None
    """Name of a GGUF file inside `path` to read the weights and the tokenizer from."""
    quantization: Literal["nf4", "none"] = "nf4"
    """Precision in which the base is kept: `nf4` (4 bits) or `none` (as `dtype`)."""
    double_quant: bool = True
    """Quantise the NF4 scales too, which saves 0.4 bits a parameter."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the computation; `auto` is bfloat16 on a GPU and float32 on the CPU."""
    stream: bool = True
    """Keep the base in host memory and move it through a window. `false` keeps it on the device, for the same bits."""
    block_size: int = Field(default=1, ge=1)
    """Consecutive layers that are moved together; 1 needs least memory."""
    slots: int | None = Field(default=None, ge=1)
    """Blocks that fit the window at once; chosen for the block size if left out."""
    resident_blocks: int = Field(default=0, ge=0)
    """Blocks that stay on the device, spread evenly between those that stream: more memory, fewer transfers."""
    vram: str | int | None = None
    """The most that the process may take on the GPU, such as `11GiB`: chooses the three sizes above, which stay out."""
    replay: bool = True
    """On a GPU, record what a layer does as CUDA graphs and replay them: less work for the host, for the same bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the computation runs; `auto` is the GPU if there is one. CUDA_VISIBLE_DEVICES chooses among several."""
    attn_implementation: str | None = None
    """Attention of transformers, such as `sdpa` or `eager`; the model's own default if left out."""

    @model_validator(mode="after")
    def _one_way_to_say_the_sizes(self) -> Self:
        if self.vram is None:
            return self
        if given := sorted({"block_size", "slots", "resident_blocks"} & self.model_fields_set):
            raise ValueError(f"vram chooses {given[0]} by itself: leave out one of the two")
        if not self.stream:
            raise ValueError("vram is a limit for a base that streams; with stream: false all of it is on the device")
        if self.gguf_file is not None:
            raise ValueError("vram cannot be planned for a GGUF file yet: give block_size, slots and resident_blocks")
        return self


class LoraConfig(_Section):
    """The adapter that is trained."""

    rank: int = Field(default=16, ge=1)
    """Rank of the two adapter matrices."""
    alpha: float = Field(default=32, gt=0)
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    dropout: float = Field(default=0.05, ge=0, lt=1)
    """Probability that an input of the adapter is dropped in training."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get an adapter: `all-linear` (all but the head), or a list such as `[q_proj, v_proj]`."""


class DataConfig(_Section):
    """The rows to learn from."""

    train: str | list[str] = Field(min_length=1)
    """JSONL file, or a list of them: one row a line with `messages`, `prompt` and `completion`, or `text`."""
    eval: str | list[str] | None = Field(default=None, min_length=1)
    """JSONL file, or a list of them, to measure the loss on during training."""
    format: Literal["auto", "messages", "prompt", "text"] = "auto"
    """Which fields of a row to use; `auto` decides row by row."""
    chat_template: str | None = None
    """File with the Jinja chat template to use instead of the tokenizer's own."""
    assistant_turns: Literal["all", "last"] = "all"
    """Which assistant turns of a conversation are trained."""
    append_eos: bool = True
    """End `text` and `completion` with the end-of-sequence token, once. Conversations end as their template says."""
    max_length: int = Field(default=1024, ge=2)
    """Longest sequence in tokens."""
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = "keep_start"
    """What happens to a longer row: keep its first tokens, keep its last tokens, drop the row, or stop."""
    pad_to_multiple_of: int | None = Field(default=None, ge=1)
    """Pad batches to a multiple of so many tokens: the fewer lengths, the more is replayed. 64 on a GPU if left out."""
    packing: Literal["none"] = "none"
    """Rows are never packed together: each is a sequence of its own."""


class TrainConfig(_Section):
    """How it is learnt."""

    batch_size: int = Field(default=1, ge=1)
    """Rows in one forward and backward."""
    accumulation: int = Field(default=1, ge=1)
    """Batches whose gradients are added up before the optimizer steps."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps to take. Give this or `epochs`."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the rows; one if neither this nor `steps` is given."""
    learning_rate: float = Field(default=2e-4, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 leaves them as they are."""
    loss_chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens whose logits exist at once, such as 256, to save memory; those of the whole batch if left out."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the adapter's first values, the order of the rows, and dropout."""
    save_steps: int = Field(default=50, ge=1)
    """Steps between two checkpoints."""
    save_total_limit: int = Field(default=2, ge=1)
    """Checkpoints to keep; older ones are deleted."""
    logging_steps: int = Field(default=1, ge=1)
    """Steps between two reports of the loss."""
    eval_steps: int | None = Field(default=None, ge=1)
    """Steps between two evaluations on `data.eval`; as `save_steps` if left out."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps is {self.steps} and epochs is {self.epochs}: give one of the two")
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} of {self.steps} steps, so learning_rate would never be reached: "
                "give fewer"
            )
        return self


class RunConfig(_Section):
    """The settings of one training run. Relative paths start at the current folder."""

    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig
    train: TrainConfig = TrainConfig()
    output: str = Field(min_length=1)
    """Folder for the checkpoints and, at the end, the adapter."""

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Self:
        if self.train.eval_steps is not None and self.data.eval is None:
            raise ValueError("train.eval_steps is set, but there is nothing to evaluate on: set data.eval, or leave it")
        return self


def describe_settings() -> Iterator[tuple[str, str, str, str]]:
    """Every setting as (path, type, default, description), in the order of the file."""
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, _Section):
            for key, sub in section.model_fields.items():
                yield f"{name}.{key}", _type_name(sub.annotation), _default(sub.default), sub.description or ""
        else:
            yield name, _type_name(field.annotation), _default(field.default), field.description or ""


def _type_name(annotation: Any) -> str:
    """A type as people write it: ``whole number, or none``."""
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "none"}
    if annotation in names:
        return names[annotation]
    arguments = getattr(annotation, "__args__", ())
    if getattr(annotation, "__origin__", None) is list:
        return "list"
    if getattr(annotation, "__origin__", None) is Literal:
        return " | ".join(map(str, arguments))
    return " | ".join(_type_name(argument) for argument in arguments)


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
