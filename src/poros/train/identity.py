"""What the bits of a run depend on, so that a checkpoint is only resumed by the run that it belongs to."""

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from poros.config import RunConfig
from poros.errors import ConfigError
from poros.train.checkpoints import Checkpoint

_SHOWN = 10  # what fits an error message
_PADDING = 64  # tokens


def bits_depend_on(config: RunConfig, digest: str, device_type: str, dtype: str) -> dict[str, Any]:
    """Everything that a run must have in common with the one it resumes. Where the weights are kept is not in it.

    Args:
        digest: of the encoded rows.
        device_type: where the run computes; ``dtype``: in which precision.
    """
    model = config.model.model_dump(exclude={"stream", "block_size", "slots", "resident_blocks", "replay", "vram"}) | {
        "dtype": dtype,
        "device": device_type,
    }
    train = config.train.model_dump(exclude={"save_steps", "save_total_limit", "logging_steps", "eval_steps"})
    groups = {"model": model, "lora": config.lora.model_dump(), "train": train}
    groups["data"] = {"pad_to_multiple_of": padding_multiple(config, device_type)}
    settings = {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
    return settings | {"data (a hash of its tokens)": digest}


def padding_multiple(config: RunConfig, device_type: str) -> int:
    """The multiple that batches are padded to. On a GPU, few lengths let recorded visits serve most steps."""
    if config.data.pad_to_multiple_of is not None:
        return config.data.pad_to_multiple_of
    return _PADDING if device_type == "cuda" else 1


def check_same_run(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
    """Refuse to resume a run with settings that would have given it other bits from the start."""
    now = json.loads(json.dumps(dict(settings)))
    changed = [name for name in now if checkpoint.settings.get(name) != now[name]]
    if changed:
        lines = [f"  {name}: then {_shown(checkpoint.settings.get(name))}, now {_shown(now[name])}" for name in changed]
        raise ConfigError(
            f"{checkpoint.folder}: saved by a run with other settings or data:\n"
            + "\n".join(lines[:_SHOWN])
            + "\nResume with what the run was started with, or start a new one with --overwrite or another output."
        )


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 50 else f"{text[:24]}...{text[-8:]}"


def library_versions() -> dict[str, str]:
    """The versions of the libraries that compute a run's bits."""
    return {name: version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")}


def changed_versions(checkpoint: Checkpoint) -> Iterator[str]:
    """A note for each library that is not the one that the checkpoint was computed with."""
    for name, now in library_versions().items():
        then = checkpoint.versions.get(name)
        if then != now:
            yield f"note   {name} was {then} and is {now}: bits may differ from those of a run without the break"
