"""The archived poros-train package: blocks of layers moved to the card and back, its own way.

It imports under the name of this package. So the model is built with this one first; then all modules called ``poros``
are forgotten, and the archived ones take their name. See [Note: the archived package] in ``poros.evidence.cell``.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from poros.evidence.engines.base import CellRequest, Engine

ENGINE = Engine(
    name="poros-train",
    title="poros-train (archived)",
    changes=("attention: plain, deterministic algorithms",),  # it switches to both by itself when the base is NF4
    packages=("poros-train",),
    settings=("block_size",),
    launches=("eager",),
    folder=True,
)

_BLOCK_SIZE = 4  # its own default


def build(request: CellRequest, recorder: Any) -> Any:
    """The resident model, handed to the archived package.

    Raises:
        ModuleNotFoundError: the folder with the package was not given, or it is not in it.
    """
    folder = _folder(request)
    from poros.evidence.engines.qlora import build_resident

    model = build_resident(request, recorder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "poros"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    archived = import_module("poros")
    if Path(str(archived.__file__)).parent.parent != folder:
        raise ModuleNotFoundError(f"poros was imported from {archived.__file__}, not from {folder}")
    # What it checks is whether it was certified for this family and stack; that is not what is measured.
    model = archived.prepare(
        model,
        block_size=request.block_size or _BLOCK_SIZE,
        architecture="off",
        stack="off",
        guarantee="off",
        unsafe_allow_uncertified_stack=True,
        unsafe_allow_uncertified_adapter=True,
        verbose=False,
    )
    recorder.facts["block_size"] = int(model._poros_block_size)
    return model


def _folder(request: CellRequest) -> Path:
    folder = None if request.folder is None else Path(request.folder).resolve()
    if folder is None or not (folder / "poros" / "__init__.py").is_file():
        where = "no folder was given" if folder is None else f"there is no package poros in {folder}"
        raise ModuleNotFoundError(
            f"{where}: unpack poros-train 0.2.1 into a folder (pip install --target FOLDER --no-deps), and name it in "
            "environments.poros-train of the spec or in POROS_BENCH_POROS_TRAIN"
        )
    return folder
