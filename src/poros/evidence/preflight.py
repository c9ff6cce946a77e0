"""What can be refused before anything is measured: a device, data or a model that is not there."""

import hashlib
import os
from pathlib import Path

from poros.errors import CheckpointError, ConfigError
from poros.evidence.spec import BenchSpec, ModelSpec
from poros.model.shapes import shape_names


def require_runnable(spec: BenchSpec) -> None:
    """Refuse a spec that no method could run here.

    Raises:
        ConfigError: the GPU, the dataset or a model is missing.
    """
    if spec.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("device is 'cuda', but torch sees no CUDA device; set device: cpu, or run it with a GPU")
    if spec.dataset.path is not None:
        _require_rows(Path(spec.dataset.path))
    for model in spec.models:
        _require_model(model)


def fingerprints(spec: BenchSpec) -> dict[str, str]:
    """Name -> hash of each file that a run depends on beside its spec: the dataset, and what folders of models hold.

    Weights are taken by name and size.
    """
    found = {}
    if spec.dataset.path is not None:
        with Path(spec.dataset.path).open("rb") as file:
            found[f"dataset {spec.dataset.path}"] = hashlib.file_digest(file, "sha256").hexdigest()
    for model in spec.models:
        folder = Path(model.source).expanduser()
        if model.source not in shape_names() and folder.is_dir():
            digest = hashlib.sha256((folder / "config.json").read_bytes())
            for weights in sorted(folder.glob("*.safetensors")):
                digest.update(f"{weights.name} {weights.stat().st_size}\n".encode(errors="surrogateescape"))
            found[f"model {model.source}"] = digest.hexdigest()
    return found


def _require_rows(path: Path) -> None:
    try:
        with path.open("rb") as file:
            if not any(line.strip() for line in file):
                raise ConfigError(
                    f"dataset.path is {str(path)!r}, which holds no rows; put one JSON object on each line"
                )
    except OSError as error:
        raise ConfigError(
            f"dataset.path is {str(path)!r}, which cannot be read: {error.strerror}. Give a JSONL file, or write "
            f"dataset: synthetic. (Relative paths start at {os.getcwd()}.)"
        ) from None


def _require_model(model: ModelSpec) -> None:
    if model.source in shape_names():
        return
    folder = Path(model.source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model {model.name}: {folder} has no config.json, so it is not a saved model")
        if not model.are_random and not any(folder.glob("*.safetensors")):
            raise ConfigError(f"model {model.name}: weights is 'real', but {folder} has no *.safetensors files")
        return
    from poros.model.hub import locate

    try:
        locate(model.source).config()
    except CheckpointError as error:
        names = ", ".join(shape_names())
        raise ConfigError(f"model {model.name}: {error}\nShapes with random weights: {names}.") from None
