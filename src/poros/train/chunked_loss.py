"""The next-token loss in chunks of tokens: at no time do the logits of more than one chunk exist.

[Note: gradients in the forward]
Two ways are known. One recomputes each chunk's logits in the backward (Cut Cross-Entropy, arXiv 2411.09009); the other
differentiates each chunk as soon as its loss is there, and keeps only the gradients (Liger Kernel, arXiv 2410.10989).
This is the second. It runs the head once, not twice. And nothing that happens between forward and backward (another
active adapter, other random numbers, the end of an autocast block) can let a recompute differ from its forward. What is
kept until the backward is one gradient as large as the hidden states, which need not be kept themselves, and the
gradients of what is trainable in the head.
The gradients are those of the *sum* of the tokens' losses; the division by the number of tokens, and whatever the
caller does to the loss, reach them in the backward. Divided before, most would be lost to float16's smallest number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from poros.errors import ConfigError, DataError, UnsupportedModelError
from poros.families import text_family
from poros.residency.uses import graph_leaves
from poros.train.encode import IGNORED

# model_type -> whether the forward of its class caps the head's logits, if its configuration has a
# ``final_logit_softcapping``. Nothing else happens to the logits in these classes.
_CAPPED: dict[str, bool] = {
    "llama": False,
    "mistral": False,
    "qwen2": False,
    "qwen3": False,
    "qwen3_5": False,
    "qwen3_5_text": False,
    "qwen3_moe": False,
    "gemma3": False,  # the multimodal class has no cap, the text class has
    "gemma3_text": True,
    "gemma4": True,
    "gemma4_text": True,
    "phi3": False,
    "glm4": False,
    "gpt_oss": False,
}

# What the classes' own forward or PEFT's takes care of, in front of the backbone or behind it.
_NOT_TAKEN = ("adapter_names", "logits_to_keep", "output_router_logits", "shift_labels", "task_ids")


class ChunkedCausalLMLoss(nn.Module):
    """The next-token cross-entropy of a transformers causal language model, without the logits of the whole batch.

    For a training loop of your own, in place of ``model(**batch).loss``::

        loss_fn = poros.nn.ChunkedCausalLMLoss(chunk_tokens=256)
        loss = loss_fn(model, batch, num_items_in_batch=num_learnt_tokens_of_all_batches_of_the_step)
        loss.backward()

    It calls the backbone and then the head, chunk by chunk. So adapters on the head, hooks on either and a prepared
    model do what they always do; a hook or an autocast round the forward of the whole model (as Hugging Face
    ``Trainer`` puts one there with ``bf16=True``) does not run. Sums are in another order than in the model's own loss:
    values agree closely, not to the bit. Between a streamed and a resident run that both use it, all bits agree.

    While a chunk is differentiated it takes three to four times ``chunk_tokens * vocabulary * 4`` bytes.
    Trainable parameters of the head get the sum over the chunks, added up in float32 if they are of a lower precision.

    Args:
        chunk_tokens: Tokens, padding included, whose logits exist at once.

    Raises:
        ConfigError: ``chunk_tokens`` is less than 1.
    """

    def __init__(self, chunk_tokens: int = 256) -> None:
        super().__init__()
        if chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens is {chunk_tokens}; a chunk holds at least 1 token")
        self.chunk_tokens = chunk_tokens

    def check(self, model: nn.Module) -> None:
        """Refuse ``model`` now if its loss cannot be computed here: :class:`UnsupportedModelError`."""
        _find_tail(model)

    def forward(
        self, model: nn.Module, batch: Mapping[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The loss of ``batch``, a scalar in float32.

        Args:
            model: of a supported family, bare or with PEFT adapters, prepared or not; also a multimodal class.
            batch: ``labels`` (batch, seq), -100 where nothing is learnt, and whatever else the backbone takes. Labels
                are those of the tokens themselves; the shift by one is done here.
            num_items_in_batch: what the sum is divided by: the learnt tokens of all batches of the step, whose losses
                are then added up. The mean over this batch if left out.

        Raises:
            UnsupportedModelError: the model's loss is more than the cross-entropy of its head, or not known here.
            DataError: ``batch`` has no labels, or something that cannot be honoured.
        """
        tail = _find_tail(model)
        inputs = dict(batch)
        for name in _NOT_TAKEN:
            if inputs.get(name) is not None:
                raise DataError(f"the batch has {name!r}, which the chunked loss cannot honour: leave it out")
        labels = inputs.pop("labels", None)
        if labels is None:
            raise DataError(f"the batch has no 'labels' to compute a loss with, only {', '.join(sorted(inputs))}")
        hidden = tail.backbone(**{"use_cache": False, **inputs, "return_dict": True}).last_hidden_state
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).reshape(-1).to(hidden.device)
        total = _sum_of_losses(tail, hidden.flatten(0, 1), targets, self.chunk_tokens)
        if num_items_in_batch is None:
            num_items_in_batch = (targets != IGNORED).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def extra_repr(self) -> str:
        """What printing shows."""
        return f"chunk_tokens={self.chunk_tokens}"


@dataclass(frozen=True)
class _Tail:
    """What comes after the layers.

    Attributes:
        backbone: gives the last hidden states.
        head: makes logits of them; called as a module, because an adapter or a hook may be on it.
        cap: logits are squeezed into (-cap, cap).
    """

    backbone: nn.Module
    head: nn.Module
    cap: float | None

    def loss(self, rows: Tensor, targets: Tensor, stand_ins: Mapping[str, Tensor]) -> Tensor:
        """The sum of the losses of ``rows`` (tokens, hidden), the head computing with ``stand_ins``."""
        # Like a batch of one sequence: what is on a head may count on three dimensions.
        states = rows.unsqueeze(0)
        logits = functional_call(self.head, dict(stand_ins), (states,)) if stand_ins else self.head(states)
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return nn.functional.cross_entropy(logits.float()[0], targets, ignore_index=IGNORED, reduction="sum")


def _sum_of_losses(tail: _Tail, hidden: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    """The sum of the losses of ``hidden`` (tokens, hidden); see [Note: gradients in the forward]."""
    trainable = dict(tail.head.named_parameters()) if torch.is_grad_enabled() else {}
    trainable = {name: parameter for name, parameter in trainable.items() if parameter.requires_grad}
    # The parameters' own hooks must run once, on the sum of the chunks.
    stand_ins = {name: parameter.detach().requires_grad_() for name, parameter in trainable.items()}
    needed = torch.is_grad_enabled() and hidden.requires_grad
    gradient = torch.zeros_like(hidden, requires_grad=False) if needed else None
    sums: list[Tensor | None] = [None] * len(stand_ins)
    total = torch.zeros((), device=hidden.device)
    chunks = zip(hidden.detach().split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    for number, (rows, chunk_targets) in enumerate(chunks):
        loss, of_rows, of_head = _differentiate(tail, rows.requires_grad_(needed), chunk_targets, stand_ins)
        total += loss
        if gradient is not None and of_rows is not None:
            gradient[number * chunk_tokens :][: len(rows)] = of_rows
        sums = [_added(so_far, more) for so_far, more in zip(sums, of_head, strict=True)]
    result: Tensor = _Differentiated.apply(total, [gradient, *sums], hidden, *trainable.values())  # type: ignore[no-untyped-call]
    return result


def _differentiate(
    tail: _Tail, rows: Tensor, targets: Tensor, stand_ins: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None]]:
    """The loss of one chunk, its gradient for the rows if they need one, and those for the stand-ins.

    The chunk's graph, and with it all that is as large as its logits, is gone on return.
    """
    leaves = [leaf for leaf in (rows, *stand_ins.values()) if leaf.requires_grad]
    loss = tail.loss(rows, targets, stand_ins)
    if not loss.requires_grad:
        return loss, None, [None] * len(stand_ins)
    known = {id(leaf) for leaf in leaves}
    if any(id(leaf) not in known for leaf in graph_leaves([loss])):
        raise UnsupportedModelError(
            f"the head ({type(tail.head).__name__}) learns through a tensor that is not one of its own parameters, "
            "which would get no gradient from a loss in chunks. Use the model's own loss."
        )
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    of_rows, of_head = (gradients[0], gradients[1:]) if rows.requires_grad else (None, gradients)
    return loss.detach(), of_rows, of_head


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """The sum so far and one more chunk's, at least in float32."""
    if more is None:
        return total
    if total is None:
        return more.to(torch.promote_types(more.dtype, torch.float32))
    return total.add_(more)


class _Differentiated(torch.autograd.Function):
    """A value whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a graph that is retained is differentiated again.
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *(None if known is None else (known * grad).to(dtype) for known, dtype in gradients)


def _find_tail(model: nn.Module) -> _Tail:
    """Backbone and head of ``model``; :class:`UnsupportedModelError` if its loss is not the one computed here."""
    base: Any = model
    if not isinstance(model, PreTrainedModel) and callable(getattr(type(model), "get_base_model", None)):
        base = model.get_base_model()  # type: ignore[operator]
        _refuse_adapters(model)
    if not isinstance(base, PreTrainedModel):
        raise UnsupportedModelError(
            f"a {type(model).__name__} is no transformers model with or without PEFT adapters: pass the model itself, "
            "not something that wraps it (torch.compile, DistributedDataParallel)"
        )
    model_type = base.config.model_type
    text_family(model_type)
    name = type(base).__name__
    if model_type not in _CAPPED:
        raise UnsupportedModelError(
            f"what {name} (model_type {model_type!r}) does to its logits is not known to the chunked loss. Use the "
            "model's own loss."
        )
    head = base.get_output_embeddings()
    backbone = base.base_model
    if head is None or backbone is base:
        raise UnsupportedModelError(f"{name} has no language-model head: load it with AutoModelForCausalLM")
    if base.loss_function is not ForCausalLMLoss:
        raise UnsupportedModelError(
            f"{name} has a loss function of its own ({base.loss_function!r}), and the chunked loss is the next-token "
            "cross-entropy. Use the model's own loss."
        )
    text = base.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{name} adds a loss over its routers' logits (config.output_router_logits), which the chunked loss does "
            "not have. Set it to False, or use the model's own loss."
        )
    return _Tail(backbone, head, getattr(text, "final_logit_softcapping", None) if _CAPPED[model_type] else None)


def _refuse_adapters(model: Any) -> None:
    """Refuse those that act in the forward of PEFT's wrapper, not inside the model."""
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False) or getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModelError(
                f"the adapter {name!r} ({type(config).__name__}) acts in the forward of {type(model).__name__}, which "
                "the chunked loss does not call. Use the model's own loss."
            )
