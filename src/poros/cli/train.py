"""``poros train``: data file in, PEFT adapter out."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from poros.cli.screen import Debug

if TYPE_CHECKING:
    from poros.config import RunConfig


def _show_settings(wanted: bool) -> None:
    if wanted:
        from poros.config import describe_settings

        for name, kind, default, description in describe_settings():
            typer.echo(f"{name}  ({kind}; {default})\n    {description}")
        raise typer.Exit


def _within_budget(config: "RunConfig") -> "RunConfig":
    from poros.evidence.plan import hold_to, planned

    logging.getLogger("transformers").setLevel(logging.ERROR)  # of fused kernels that a plan does not run
    config, plan = planned(config)
    typer.echo(str(plan), err=True)
    hold_to(plan)
    return config


def train(
    settings: Annotated[Path, typer.Argument(help="YAML file of settings.", metavar="RUN.YAML")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete what an earlier run left in output.")] = False,
    list_settings: Annotated[
        bool,
        typer.Option("--settings", callback=_show_settings, is_eager=True, help="List every setting and exit."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train an adapter, and save it in the folder "adapter" of the run's output.

    A run that was stopped, or killed at any instant, resumes with --resume to the same bits as one that was not.
    """
    from poros.config_file import load_config

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of optional parts when it is imported
    config = load_config(settings)
    if config.model.vram is not None:
        config = _within_budget(config)
    from poros.train.run import run  # imports torch: only for settings that can be read

    result = run(config, resume=resume, overwrite=overwrite)
    typer.echo(f"adapter of {result.num_steps} steps saved in {result.adapter}")
