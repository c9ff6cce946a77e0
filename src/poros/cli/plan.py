"""``poros plan``: what a run will take, from a model's configuration alone."""

import logging
from typing import Annotated

import typer

from poros.cli.screen import Debug

STATUS_TOO_LARGE = 1


def plan(
    model: Annotated[str, typer.Argument(help="Shape such as qwen2.5-72b, folder, or hub id.", metavar="MODEL")],
    vram: Annotated[str | None, typer.Option(help="Most that the process may take on the card: 11GiB, 24GB.")] = None,
    ram: Annotated[str | None, typer.Option(help="Most that it may take on the host.")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens a row.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Rows a batch.")] = 1,
    rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 16,
    loss_chunk_tokens: Annotated[int | None, typer.Option(help="Tokens whose logits exist at once.")] = None,
    replay: Annotated[bool, typer.Option(help="Visits recorded as CUDA graphs and replayed.")] = True,
    card: Annotated[str | None, typer.Option(help="Card, such as rtx4090, for a bound on the time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show what training MODEL takes on the card and on the host, before anything is downloaded.

    Ends with status 1 if that is more than --vram or --ram, and then says what would fit.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of optional parts when it is imported
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of fused kernels that a plan does not run
    from poros.evidence.plan import plan as make_plan

    found = make_plan(
        model,
        vram=vram,
        ram=ram,
        seq_len=seq_len,
        batch_size=batch_size,
        rank=rank,
        loss_chunk_tokens=loss_chunk_tokens,
        replay=replay,
        card=card,
    )
    typer.echo(found.to_json() if as_json else str(found))
    if not found.fits:
        raise typer.Exit(STATUS_TOO_LARGE)
