"""``poros data``: what a run would learn from, without loading the model."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poros.cli.screen import Debug

if TYPE_CHECKING:
    from poros.train.encode import Encoded


def data(
    settings: Annotated[Path, typer.Argument(help="YAML file of settings.", metavar="RUN.YAML")],
    rows: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 2,
    debug: Debug = False,
) -> None:
    """Show what a run would learn from: the first rows' tokens and labels, the counts, and the rows left out."""
    from poros.config_file import load_config

    config = load_config(settings)
    from poros.train.run_data import read_data  # imports transformers: only for settings that can be read

    read = read_data(config)
    for place, example in zip(read.train.places[:rows], read.train.examples, strict=False):
        typer.echo(f"{place}  {len(example.input_ids)} tokens, {example.num_trained} trained")
        for line in _describe(example, read.tokenizer):
            typer.echo(f"  {line}")
    for name, dataset in ("train", read.train), ("eval", read.eval):
        if dataset is not None:
            for line in dataset.summary(config.train.batch_size):
                typer.echo(f"{name}  {line}")


def _describe(example: "Encoded", tokenizer: Any) -> Iterator[str]:
    """A line for each stretch of tokens that are learnt, or only read: its text and its ids."""
    from poros.train.encode import IGNORED

    pairs = zip(example.input_ids, example.labels, strict=True)
    for learnt, stretch in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        ids = [token for token, _ in stretch]
        yield f"{'learn' if learnt else 'read '}  {tokenizer.decode(ids)!r}  {' '.join(map(str, ids))}"
