"""``poros parity``: does a streamed model train to the bits of its resident twin?"""

import logging
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poros.cli.rows import require_writable, spare_file
from poros.cli.screen import Debug
from poros.cli.troubles import no_verdict
from poros.errors import PorosError
from poros.evidence.limits import MAX_BATCH, MAX_LAYERS, MAX_RANK, MAX_SEED, MAX_SEQ_LEN, MAX_STEPS

if TYPE_CHECKING:
    from poros.evidence.lockstep import Step
    from poros.evidence.parity import ParityResult


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
    name: Annotated[
        str | None, typer.Option(help="What rows call the model, such as a spec's name for it; MODEL if left out.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Optimizer steps.")] = 5,
    path: Annotated[
        list[_Route] | None,
        typer.Option(
            help="Attention: strict (flash wherever it can) or math (the plain one), both reproducible; give both to "
            "build the models once.  [default: strict]"
        ),
    ] = None,
    dropout: Annotated[float, typer.Option(min=0.0, help="Of the adapters; less than 1.")] = 0.05,
    accumulate: Annotated[int, typer.Option(min=1, max=MAX_BATCH, help="Batches a step.")] = 1,
    seq_len: Annotated[int, typer.Option(min=2, max=MAX_SEQ_LEN, help="Tokens a row.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, max=MAX_BATCH, help="Rows a batch.")] = 1,
    block_size: Annotated[int, typer.Option(min=1, max=MAX_LAYERS, help="Layers a block.")] = 1,
    slots: Annotated[int | None, typer.Option(min=1, max=MAX_LAYERS, help="Blocks in the window.")] = None,
    resident_blocks: Annotated[
        int, typer.Option(min=0, max=MAX_LAYERS, help="Blocks of the streamed model that stay on the device.")
    ] = 0,
    replay: Annotated[bool, typer.Option(help="On a GPU, record visits as CUDA graphs and replay them.")] = True,
    rank: Annotated[int, typer.Option(min=1, max=MAX_RANK, help="Of the adapters; alpha is twice as much.")] = 16,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of data, adapters and dropout.")] = 1,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default CUDA if there is one.")] = None,
    quantization: Annotated[_Quantization, typer.Option(help="Of the frozen base.")] = _Quantization.nf4,
    double_quant: Annotated[bool, typer.Option(help="Quantise the scales as well.")] = True,
    dtype: Annotated[
        _Number | None,
        typer.Option(help="Of what is not quantised; by default float32 on a CPU and bfloat16 on a GPU."),
    ] = None,
    poison: Annotated[bool, typer.Option("--poison", help="Overwrite slots before they are refilled.")] = False,
    control_steps: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_STEPS, help="Repeat the resident run for so many steps; by default for all."),
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

    The last line is PASS, FAIL or INCONCLUSIVE with the reason, and the exit status 0, 1 or 3. Of two paths the worst
    verdict decides: FAIL, then INCONCLUSIVE, then PASS. Status 2 is an error, whatever the verdict. On a CPU one thread
    computes, and both paths are reproducible.
    """
    settings: dict[str, Any] = {
        "model": model,
        "name": name,
        "steps": steps,
        "dropout": dropout,
        "accumulation": accumulate,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "block_size": block_size,
        "slots": slots,
        "resident_blocks": resident_blocks,
        "replay": replay,
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
    with no_verdict(debug=debug):
        if rows is not None:
            require_writable(rows, "--rows")
        status = _check_all([one.value for one in dict.fromkeys(path or [_Route.strict])], settings, rows)
    if status:
        raise typer.Exit(status)


def _check_all(paths: list[str], settings: dict[str, Any], rows: Path | None) -> int:
    """Check one path after the other, with the same models; returns the exit status of the worst verdict."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of optional parts when it is imported
    from poros.evidence import parity as evidence
    from poros.evidence.artifact import WORST_FIRST

    checks = [evidence.ParitySettings(path=path, **settings) for path in paths]
    results = []
    spare: Path | None = None  # where rows go that cannot go to their file
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(peft|transformers)\.")  # of names that one of them has changed
        twins = evidence.build_twins(checks[0])
        for check in checks:
            typer.echo(f"{check.model}, {twins.weights} weights, {twins.device}, path {check.path}")
            result = evidence.check(check, twins, on_step=_show)
            results.append(result)
            typer.echo(str(result))
            if rows is not None:
                spare = _add_row(result, rows, spare)
    if spare is not None:
        raise PorosError(f"{rows} could not be written to the end. What is missing from it is in {spare}.")
    return min(results, key=lambda result: WORST_FIRST.index(result.verdict)).exit_status


def _add_row(result: "ParityResult", rows: Path, spare: Path | None) -> Path | None:
    """Add the result to its file, or to a spare one if that fails, which is returned then."""
    from poros.evidence.artifact import append_row

    if spare is None:
        try:
            append_row(rows, result.row())
            return None
        except OSError:
            spare = spare_file()
    append_row(spare, result.row())
    return spare


def _show(number: int, step: "Step") -> None:
    """A line for a step: the loss, and on how many surfaces each model was equal."""
    counts = [
        f"{name} {sum(not verdict.num_different for verdict in verdicts.values())} of {len(verdicts)} surfaces equal"
        for name, verdicts in step.verdicts.items()
    ]
    typer.echo(f"step {number}  loss {step.loss:.6f}  {', '.join(counts)}")
