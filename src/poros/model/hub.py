"""Where a model's files are: a folder, or a snapshot of a hub repository with only the files that are needed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poros.errors import CheckpointError
from poros.model.checkpoint import INDEX_FILE, SINGLE_FILE

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder, as far as it has been fetched."""

    name: str  # what the user wrote; ends up in the adapter's configuration
    folder: Path
    repository: str | None  # hub id; None for a folder of the user's own

    def config(self) -> dict[str, Any]:
        """``config.json``, unparsed; :class:`CheckpointError` if there is none."""
        file = self.folder / CONFIG_FILE
        try:
            config = json.loads(file.read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{self.name!r} has no {CONFIG_FILE}, so it is not a saved model") from None
        except ValueError as error:
            raise CheckpointError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(config, dict) or "model_type" not in config:
            raise CheckpointError(f"{file} does not say its model_type, so it is not the configuration of a model")
        return config

    def fetch_weights(self) -> None:
        """Download the safetensors files of a hub repository, unless they are in the cache already."""
        index = self.folder / INDEX_FILE
        wanted = [SINGLE_FILE]
        if index.exists():
            try:
                wanted = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError):
                return  # opening the checkpoint says what is wrong with its index
        self.fetch(wanted)

    def fetch(self, names: list[str]) -> None:
        """Download files by name into :attr:`folder`, unless they are there already."""
        if self.repository is not None:
            _snapshot(self.repository, self.folder.name, names)


def locate(model: str | Path, revision: str | None = None) -> ModelFiles:
    """Find a model's folder; of a hub repository, fetch its configuration and index only.

    Args:
        model: a folder, or a hub id such as ``"Qwen/Qwen2.5-32B"``.
        revision: branch, tag or commit of the hub repository.

    Raises:
        CheckpointError: there is no such folder, or the hub does not give the files.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return ModelFiles(str(model), folder, None)
    if isinstance(model, Path) or str(model).startswith((".", "/", "~")) or str(model).count("/") > 1:
        raise CheckpointError(
            f"there is no folder {str(model)!r}. Give the path of a folder that exists, or a hub id (owner/name)."
        )
    folder = _snapshot(model, revision, [CONFIG_FILE, GENERATION_FILE, INDEX_FILE])
    return ModelFiles(model, folder, model)


def _snapshot(repository: str, revision: str | None, names: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=names))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{repository!r} is not a folder, and the hub does not give it ({error}). Check the name and the revision, "
            "log in if the repository is gated, or download it once and give its folder."
        ) from error
