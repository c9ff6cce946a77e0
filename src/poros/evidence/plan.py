"""What a run will take, before there is one: both memories term by term, and a bound on the time, from a configuration.

The bill is that of the bare loop: a batch of full rows, no padding, text only, AdamW over adapters
in float32, gradients cleared to nothing after each step, no key-value cache. The model runs without values on torch's
meta device (:mod:`poros.evidence.plan_terms`), and what it asks for goes through the rules of torch's allocator
(:mod:`poros.evidence.plan_allocator`), two steps long, because the optimizer's state comes with the first.

With recorded visits, the first step runs without them. What a recording needs while it works is reserved for it, in a
pool of its own, and in use by nobody else.

Not covered yet: the other loops (HF ``Trainer`` adds copies of its own), ``micro_batch_size``, and the mask that
padding brings; other allocators than torch's default; what is installed beside transformers (its fused kernels for
linear attention take other temporaries than the plain ones). Memory without recorded visits has been held against
measured rows of one card and family (``docs/validation``); the context of another card may take another 200 MiB more or
less.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig, PreTrainedConfig

from poros.config import RunConfig
from poros.errors import CheckpointError, ConfigError
from poros.evidence.plan_cards import CARDS
from poros.evidence.plan_result import Plan
from poros.evidence.plan_work import Run, Work
from poros.families import text_family
from poros.model.hub import locate
from poros.model.options import Precision
from poros.model.shapes import read_shape, shape_names
from poros.units import format_bytes, parse_bytes


def plan(
    model: str | Path | PreTrainedConfig,
    *,
    vram: str | int | None = None,
    ram: str | int | None = None,
    seq_len: int = 512,
    batch_size: int = 1,
    rank: int = 16,
    targets: str | Sequence[str] = "all-linear",
    quantization: Literal["nf4"] | None = "nf4",
    double_quant: bool = True,
    dtype: str | torch.dtype = torch.bfloat16,
    optimizer: Literal["adamw"] = "adamw",
    loss_chunk_tokens: int | None = None,
    replay: bool = True,
    card: str | None = None,
) -> Plan:
    """Plan a run from the configuration of ``model`` alone: what it takes, and which settings use ``vram`` best.

    The least memory comes first: blocks of one layer, three slots, two if three are too many. What is left of ``vram``
    goes to blocks that stay on the card. See this module's docstring for what is not covered.

    Args:
        model: a name from :func:`poros.model.shapes.shape_names`, a folder or hub id (of which nothing but small JSON
            files is fetched), or a configuration.
        vram, ram: the most that the process may take on the card and on the host: ``"11GiB"``, ``"24GB"``, or bytes.
            Without ``vram`` there are three slots, and nothing stays.
        seq_len, batch_size: of a batch, in tokens and rows, none of them padded.
        rank, targets: of the adapters, as for LoRA.
        quantization, double_quant, dtype: as for :func:`poros.load`.
        loss_chunk_tokens: tokens whose logits exist at once; None for the model's own loss.
        replay: whether visits are recorded as CUDA graphs and replayed.
        card: a name from the table of cards, for a bound on the time.

    Raises:
        UnsupportedModelError: the family is not supported, or its layers cannot be run without values.
        ConfigError: a setting is out of its limits. A plan that does not fit is no error: see :attr:`Plan.problems`.
    """
    numbers = {"seq_len": seq_len, "batch_size": batch_size, "rank": rank, "loss_chunk_tokens": loss_chunk_tokens}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if optimizer != "adamw":
        raise ConfigError(f"optimizer is {optimizer!r}; only 'adamw' can be planned")
    vram_bytes, ram_bytes = _limit("vram", vram), _limit("ram", ram)
    found = None if card is None else CARDS.get(card.lower())
    if card is not None and found is None:
        raise ConfigError(f"there is no card {card!r} in the table; there are {', '.join(CARDS)}")
    run = Run(
        *config_of(model),
        seq_len=seq_len,
        batch_size=batch_size,
        rank=rank,
        targets=targets if isinstance(targets, str) else list(targets),
        precision=Precision.of(quantization, double_quant, dtype, None),
        loss_chunk_tokens=loss_chunk_tokens,
    )
    work = Work(run)
    best = _choose(partial(work.bill, replay=replay, card=found), work, vram_bytes)
    best = replace(best, vram_bytes=vram_bytes, ram_bytes=ram_bytes, card=card)
    return replace(best, problems=_problems(best, work))


def planned(config: RunConfig) -> tuple[RunConfig, Plan]:
    """The settings of a run with the sizes of the window that suit ``model.vram``, and the plan they come from.

    Raises:
        ConfigError: nothing that the settings leave open makes the run fit; or there is no GPU.
    """
    model, data, train = config.model, config.data, config.train
    _limit("model.vram", model.vram)
    if model.device == "cpu" or not torch.cuda.is_available():
        raise ConfigError("model.vram is a limit for a GPU, and this run has none. Leave it out.")
    found = plan(
        config_of(model.path, model.revision)[1],
        vram=model.vram,
        seq_len=data.max_length,
        batch_size=train.batch_size,
        rank=config.lora.rank,
        targets=config.lora.target_modules,
        quantization=None if model.quantization == "none" else "nf4",
        double_quant=model.double_quant,
        dtype="bfloat16" if model.dtype == "auto" else model.dtype,
        loss_chunk_tokens=train.loss_chunk_tokens,
        replay=model.replay,
    )
    if found.problems:
        raise ConfigError(f"model.vram is {model.vram}: {' '.join(found.problems)}")
    sizes = {"block_size": found.block_size, "slots": found.slots, "resident_blocks": found.resident_blocks}
    return config.model_copy(update={"model": model.model_copy(update={**sizes, "vram": None})}), found


def hold_to(found: Plan) -> None:
    """Let torch refuse what would take this process over the plan's ``vram_bytes`` on the card."""
    if found.vram_bytes is not None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        fraction = (found.vram_bytes - found.context_bytes) / total
        torch.cuda.set_per_process_memory_fraction(max(0.0, min(1.0, fraction)))


def config_of(model: str | Path | PreTrainedConfig, revision: str | None = None) -> tuple[str, PreTrainedConfig]:
    """A model's name and configuration; its family is refused by name before transformers sees it."""
    if isinstance(model, PreTrainedConfig):
        text_family(model.model_type)
        return model.name_or_path or model.model_type, copy.deepcopy(model)
    if str(model) in shape_names():
        shape = read_shape(str(model))
        text_family(shape["model_type"])
        return str(model), AutoConfig.for_model(**shape)
    files = locate(model, revision)
    model_type = files.config()["model_type"]
    text_family(model_type)
    try:
        return files.name, AutoConfig.from_pretrained(files.folder)
    except Exception as error:  # transformers has no common base for what a bad configuration raises
        raise CheckpointError(
            f"the config.json of {files.name!r} cannot be read as that of a {model_type} model: {error}"
        ) from error


def _limit(name: str, value: str | int | None) -> int | None:
    found = None if value is None else parse_bytes(value)
    if found is not None and found <= 0:
        raise ConfigError(f"{name} is {value!r}; it must be more than nothing")
    return found


def _choose(bill: Callable[..., Plan], work: Work, vram: int | None) -> Plan:
    """The plan that keeps most blocks on the card within ``vram``; the least one if even that is over."""
    least = bill(block_size=1, slots=3, resident_blocks=0)
    if vram is None:
        return least
    if least.process_bytes > vram:
        return bill(block_size=1, slots=2, resident_blocks=0)
    segment = -(-max(work.slabs) // 2**21) * 2**21
    count = min((vram - least.process_bytes) // segment, len(work.slabs))
    best = least
    while count > 0:
        best = bill(block_size=1, slots=3, resident_blocks=count)
        if best.process_bytes <= vram:
            return best
        count -= 1
    return least


def _problems(found: Plan, work: Work) -> list[str]:
    problems = []
    if found.vram_bytes is not None and found.process_bytes > found.vram_bytes:
        over = found.process_bytes - found.vram_bytes
        problems.append(
            f"the least that the process takes on the card is {format_bytes(found.process_bytes)}, "
            f"{format_bytes(over)} more than vram. {_ways_out(found, work)}"
        )
    if found.ram_bytes is not None and found.host_bytes > found.ram_bytes:
        problems.append(
            f"loading takes {format_bytes(found.host_bytes)} of host memory, "
            f"{format_bytes(found.host_bytes - found.ram_bytes)} more than ram. Give it more, or take a smaller model."
        )
    return problems


def _ways_out(found: Plan, work: Work) -> str:
    """The first of a few smaller runs that fits, in words."""
    run, limit = work.run, found.vram_bytes or 0
    tries = [("loss_chunk_tokens=256", replace(run, loss_chunk_tokens=256))] if run.loss_chunk_tokens is None else []
    chunked = tries[0][1] if tries else run
    prefix = "loss_chunk_tokens=256 and " if tries else ""
    for seq_len in (run.seq_len // 2, run.seq_len // 4, run.seq_len // 8):
        if seq_len >= 64:
            tries.append((f"{prefix}seq_len={seq_len}", replace(chunked, seq_len=seq_len)))
    tries += [(f"{prefix}rank={r}", replace(chunked, rank=r)) for r in (8, 4) if r < run.rank]
    needs = []
    for words, smaller in tries:
        least = Work(smaller).bill(block_size=1, slots=2, resident_blocks=0, replay=found.replay)
        need = least.process_bytes
        if need <= limit:
            return f"It would fit with {words} ({format_bytes(need)})."
        needs.append((need, words))
    if not needs:
        return f"Give it {format_bytes(found.process_bytes)}."
    need, words = min(needs)
    return f"Even {words} takes {format_bytes(need)}: give it more, or take a smaller model."
