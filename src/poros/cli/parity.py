"""``poros parity``: does a streamed model train to the bits of its resident twin?"""

import logging
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poros.cli.screen import Debug
from poros.errors import ConfigError

if TYPE_CHECKING:
    from poros.evidence.lockstep import Step


class _Route(StrEnum):
    strict = "strict"
    math = "math"


class _Quantization(StrEnum):
    nf4 = "nf4"
    none = "none"


class _Number(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def parity(
    model: Annotated[str, typer.Argument(help="Folder, hub id, or name of a shape (random weights).", metavar="MODEL")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 5,
    path: Annotated[
        list[_Route] | None,
        typer.Option(
            help="Attention: strict (flash wherever it can) or math (the plain one), both reproducible; give both to "
            "build the models once.  [default: strict]"
        ),
    ] = None,
    dropout: Annotated[float, typer.Option(min=0.0, help="Of the adapters; less than 1.")] = 0.05,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches a step.")] = 1,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens a row.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows a batch.")] = 1,
    block_size: Annotated[int, typer.Option(min=1, help="Layers a block.")] = 1,
    slots: Annotated[int | None, typer.Option(min=1, help="Blocks in the window.")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapters; alpha is twice as much.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of data, adapters and dropout.")] = 1,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default CUDA if there is one.")] = None,
    quantization: Annotated[_Quantization, typer.Option(help="Of the frozen base.")] = _Quantization.nf4,
    double_quant: Annotated[bool, typer.Option(help="Quantise the scales as well.")] = True,
    dtype: Annotated[
        _Number | None,
        typer.Option(help="Of what is not quantised; by default float32 on a CPU and bfloat16 on a GPU."),
    ] = None,
    poison: Annotated[bool, typer.Option("--poison", help="Overwrite slots before they are refilled.")] = False,
    control_steps: Annotated[
        int | None, typer.Option(min=1, help="Repeat the resident run for so many steps; by default for all.")
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Random weights where there are real ones.")] = False,
    rows: Annotated[
        Path | None, typer.Option(help="File of JSON lines that the result is appended to.", metavar="FILE")
    ] = None,
    debug: Debug = False,
) -> None:
    """Check that a streamed model trains to the bits of its resident twin.

    A resident model, its repetition (the control) and the streamed model step side by side on random text. After every
    step all bits of loss, gradients, gradient norm, adapters, optimizer and random state are compared.

    The last line is PASS, FAIL or INCONCLUSIVE with the reason, and the exit status 0, 1 or 3 (2 after an error). On a
    CPU one thread computes, and both paths are reproducible.
    """
    if rows is not None and (rows.is_dir() or not rows.parent.is_dir()):
        raise ConfigError(f"--rows {str(rows)!r} cannot be written: give a file in a folder that exists")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of optional parts when it is imported
    from poros.evidence import parity as evidence
    from poros.evidence.artifact import append_row

    settings: dict[str, Any] = {
        "model": model,
        "steps": steps,
        "dropout": dropout,
        "accumulation": accumulate,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "block_size": block_size,
        "slots": slots,
        "rank": rank,
        "seed": seed,
        "device": device,
        "quantization": None if quantization == _Quantization.none else quantization.value,
        "double_quant": double_quant,
        "dtype": dtype and dtype.value,
        "poison": poison,
        "control_steps": control_steps,
        "random_weights": random,
    }
    checks = [evidence.ParitySettings(path=one.value, **settings) for one in dict.fromkeys(path or [_Route.strict])]
    status = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(peft|transformers)\.")  # of names that one of them has changed
        twins = evidence.build_twins(checks[0])
        for check in checks:
            typer.echo(f"{check.model}, {twins.weights} weights, {twins.device}, path {check.path}")
            result = evidence.check(check, twins, on_step=_show)
            if rows is not None:
                append_row(rows, result.row())
            typer.echo(str(result))
            status = status or result.exit_status
    if status:
        raise typer.Exit(status)


def _show(number: int, step: "Step") -> None:
    """A line for a step: the loss, and on how many surfaces each model was equal."""
    counts = [
        f"{name} {sum(not verdict.num_different for verdict in verdicts.values())} of {len(verdicts)} surfaces equal"
        for name, verdicts in step.verdicts.items()
    ]
    typer.echo(f"step {number}  loss {step.loss:.6f}  {', '.join(counts)}")
