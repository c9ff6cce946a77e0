"""Whatever is wrong with the input of ``poros train``: one screen that says the way out, status 2, nothing written."""

import errno
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from poros.train.checkpoints import complete_checkpoints
from poros.train.output import claimed_output
from tests import tiny_run


@dataclass
class World:
    """A folder in which one run is set up, right at first; a case then breaks something."""

    folder: Path
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def data(self) -> Path:
        return self.folder / "rows.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / "out"

    @property
    def yaml(self) -> Path:
        return self.folder / "run.yaml"

    def change(self, section: str, **settings: Any) -> None:
        self.sections.setdefault(section, {}).update(settings)
        self.write()

    def write(self) -> None:
        run = tiny_run.settings(self.model, self.data, self.output, **self.sections)
        tiny_run.write_settings(self.yaml, run)

    def train(self, *options: str) -> Any:
        return tiny_run.poros("train", self.yaml, *options)


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.model_folder(tmp_path_factory.mktemp("base"), shard_bytes=100_000)


@pytest.fixture
def world(tmp_path: Path, base_model: Path) -> World:
    made = World(tmp_path)
    shutil.copytree(base_model, made.model)
    tiny_run.write_rows(made.data, tiny_run.some_rows())
    made.write()
    return made


def edit(world: World, old: str, new: str) -> None:
    text = world.yaml.read_text()
    assert old in text
    world.yaml.write_text(text.replace(old, new, 1))


def rows(world: World, *rows: dict[str, Any]) -> None:
    tiny_run.write_rows(world.data, rows)


def shard(world: World) -> Path:
    return sorted(world.model.glob("model-*.safetensors"))[0]


def model_config(world: World, **changes: Any) -> None:
    file = world.model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# --- settings


def settings_missing(world: World) -> None:
    world.yaml.unlink()


def settings_a_folder(world: World) -> None:
    world.yaml.unlink()
    world.yaml.mkdir()


def settings_not_utf8(world: World) -> None:
    world.yaml.write_bytes(b"output: caf\xe9\n")


def settings_empty(world: World) -> None:
    world.yaml.write_text("")


def yaml_broken(world: World) -> None:
    edit(world, "output:", "output: [")


def yaml_tab(world: World) -> None:
    edit(world, "  batch_size", "\tbatch_size")


def key_unknown(world: World) -> None:
    edit(world, "learning_rate", "learing_rate")


def key_in_the_wrong_group(world: World) -> None:
    edit(world, "output:", "rank: 4\noutput:")


def key_twice(world: World) -> None:
    edit(world, "output:", "output: a\noutput:")


def key_missing(world: World) -> None:
    edit(world, "output:", "# output:")


def type_wrong(world: World) -> None:
    world.change("train", batch_size="two")


def group_wrong(world: World) -> None:
    world.yaml.write_text(f"model: {world.model}\ndata: {{train: {world.data}}}\noutput: {world.output}\n")


def length_zero(world: World) -> None:
    world.change("data", max_length=0)


def rate_negative(world: World) -> None:
    world.change("train", learning_rate=-1e-4)


def rate_infinite(world: World) -> None:
    world.change("train", learning_rate=float("inf"))


def dropout_one(world: World) -> None:
    world.change("lora", dropout=1.0)


def steps_and_epochs(world: World) -> None:
    world.change("train", epochs=1.0)


def warm_up_never_ends(world: World) -> None:
    world.change("train", warmup_steps=3)


def evaluation_of_nothing(world: World) -> None:
    world.change("train", eval_steps=2)


def dtype_unknown(world: World) -> None:
    world.change("model", dtype="bf16")


def quantization_unknown(world: World) -> None:
    world.change("model", quantization="int4")


def slots_zero(world: World) -> None:
    world.change("model", slots=0)


# --- data


def data_missing(world: World) -> None:
    world.data.unlink()


def data_a_folder(world: World) -> None:
    world.data.unlink()
    world.data.mkdir()


def data_empty(world: World) -> None:
    rows(world)


def row_without_fields(world: World) -> None:
    rows(world, {"text": "yes"}, {"question": "is it?", "answer": "no"})


def role_misspelt(world: World) -> None:
    said = [{"role": "user", "content": "is it?"}, {"role": "assitant", "content": "yes"}]
    rows(world, {"text": "yes"}, {"messages": said})


def row_broken(world: World) -> None:
    world.data.write_text('{"text": "yes"}\n\n{"text": "no"\n')


def data_one_json_list(world: World) -> None:
    world.data.write_text('[{"text": "yes"}]\n')


def data_not_utf8(world: World) -> None:
    world.data.write_bytes(b'{"text": "caf\xe9"}\n')


def data_utf16(world: World) -> None:
    world.data.write_text('{"text": "yes"}\n', encoding="utf-16")


def all_masked(world: World) -> None:
    rows(world, {"prompt": "is it? " * 50, "completion": " yes"}, {"messages": []})


def row_too_long(world: World) -> None:
    world.change("data", max_length=5, truncation="error")


def eval_missing(world: World) -> None:
    world.change("data", eval=str(world.folder / "eval.jsonl"))


def no_chat_template(world: World) -> None:
    (world.model / "chat_template.jinja").unlink()


def chat_template_missing(world: World) -> None:
    world.change("data", chat_template=str(world.folder / "chat.jinja"))


def chat_template_broken(world: World) -> None:
    (world.folder / "chat.jinja").write_text("{% for message in messages %}")
    world.change("data", chat_template=str(world.folder / "chat.jinja"))


# --- model


def model_missing(world: World) -> None:
    world.change("model", path=str(world.folder / "nowhere"))


def model_a_hub_id_offline(world: World) -> None:
    world.change("model", path="nobody/nothing")


def model_without_config(world: World) -> None:
    (world.model / "config.json").unlink()


def config_broken(world: World) -> None:
    (world.model / "config.json").write_text("{")


def architecture_unsupported(world: World) -> None:
    model_config(world, model_type="mamba", architectures=["MambaForCausalLM"])


def no_tokenizer(world: World) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (world.model / name).unlink()


def tokenizer_of_another_model(world: World) -> None:
    other = tiny_run.tokenizer()
    other.add_tokens([f"extra{i}" for i in range(100)])
    other.save_pretrained(world.model)
    rows(world, {"text": "extra99"})


def targets_match_nothing(world: World) -> None:
    world.change("lora", target_modules=["c_attn"])


def shard_corrupt(world: World) -> None:
    shard(world).write_bytes(b"\xff" * 1000)


def shard_truncated(world: World) -> None:
    content = shard(world).read_bytes()
    shard(world).write_bytes(content[: len(content) - 100])


def shard_missing(world: World) -> None:
    shard(world).unlink()


def tensor_missing(world: World) -> None:
    with safe_open(shard(world), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    gone = next(name for name in tensors if "proj" in name)
    del tensors[gone]
    save_file(tensors, shard(world), metadata={"format": "pt"})
    index = world.model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][gone]
    index.write_text(json.dumps(content))


def gguf_missing(world: World) -> None:
    world.change("model", gguf_file="model.gguf")


def device_missing(world: World) -> None:
    world.change("model", device="cuda")


# --- output


def output_in_use(world: World) -> None:
    world.output.mkdir()
    (world.output / "notes.txt").write_text("mine")


def output_a_file(world: World) -> None:
    world.output.write_text("mine")


def output_below_a_file(world: World) -> None:
    world.output.write_text("mine")
    edit(world, f"output: {world.output}", f"output: {world.output}/run")


def output_cannot_be_made(world: World) -> None:
    edit(world, f"output: {world.output}", "output: /proc/poros/out")


def nothing(world: World) -> None:
    pass


CASES: list[tuple[Callable[[World], None], str] | tuple[Callable[[World], None], str, list[str]]] = [
    (settings_missing, r"run.yaml: no such file"),
    (settings_a_folder, r"run.yaml: cannot be read: Is a directory"),
    (settings_not_utf8, r"run.yaml: not UTF-8 text"),
    (settings_empty, r"run.yaml: holds nothing, not settings"),
    (yaml_broken, r"run.yaml:\d+:\d+: not valid YAML"),
    (yaml_tab, r"run.yaml:\d+:\d+: not valid YAML: found character '\\t'"),
    (key_unknown, r"run.yaml:\d+: train.learing_rate is not a setting. Did you mean train.learning_rate\?"),
    (key_in_the_wrong_group, r"run.yaml:\d+: rank is not a setting. Did you mean lora.rank\?"),
    (key_twice, r"run.yaml:\d+: output is given twice, first on line \d+"),
    (key_missing, r"run.yaml: output is missing"),
    (type_wrong, r"run.yaml:\d+: train.batch_size is 'two'; expected a valid integer"),
    (group_wrong, r"run.yaml:1: model is '.*; it should be a group of settings"),
    (length_zero, r"data.max_length is 0; expected greater than or equal to 2"),
    (rate_negative, r"train.learning_rate is -0.0001; expected greater than 0"),
    (rate_infinite, r"train.learning_rate is inf; expected a finite number"),
    (dropout_one, r"lora.dropout is 1.0; expected less than 1"),
    (steps_and_epochs, r"train: steps is 3 and epochs is 1.0: give one of the two"),
    (warm_up_never_ends, r"train: warmup_steps is 3 of 3 steps, so learning_rate would never be reached"),
    (evaluation_of_nothing, r"train.eval_steps is set, but there is nothing to evaluate on: set data.eval"),
    (dtype_unknown, r"model.dtype is 'bf16'; expected 'auto', 'float32', 'bfloat16' or 'float16'"),
    (quantization_unknown, r"model.quantization is 'int4'; expected 'nf4' or 'none'"),
    (slots_zero, r"model.slots is 0; expected greater than or equal to 1"),
    (data_missing, r"rows.jsonl: no such file. Set data.train"),
    (data_a_folder, r"rows.jsonl: cannot be read: Is a directory"),
    (data_empty, r"rows.jsonl: no rows. Put one JSON object on each line"),
    (row_without_fields, r"rows.jsonl:2: a row needs 'messages'.*'question', 'answer'"),
    (role_misspelt, r"rows.jsonl:2: message 2 has the role 'assitant'; did you mean 'assistant'\?"),
    (row_broken, r"rows.jsonl:3: not valid JSON"),
    (data_one_json_list, r"rows.jsonl:1: a JSON list, not an object"),
    (data_not_utf8, r"rows.jsonl:1: not UTF-8 .*save the file as UTF-8"),
    (data_utf16, r"rows.jsonl:1: not UTF-8 .*save the file as UTF-8"),
    (all_masked, r"of 2 rows none is left to train on: .*raise data.max_length"),
    (
        row_too_long,
        r"rows.jsonl:1: \d+ tokens, and data.max_length is 5; raise it, or set data.truncation to keep_start",
    ),
    (eval_missing, r"eval.jsonl: no such file. Set data.train or data.eval"),
    (no_chat_template, r"no chat template.*Set data.chat_template"),
    (chat_template_missing, r"chat.jinja: the chat template cannot be read"),
    (chat_template_broken, r"chat.jinja:1: the chat template is not valid Jinja"),
    (model_missing, r"there is no folder '.*nowhere'"),
    (model_a_hub_id_offline, r"'nobody/nothing' is not a folder, and the hub does not give it"),
    (model_without_config, r"model' has no config.json"),
    (config_broken, r"config.json is not valid JSON"),
    (architecture_unsupported, r"model_type 'mamba' is not supported.*Supported: "),
    (no_tokenizer, r"no tokenizer can be loaded.*tokenizer.json"),
    (tokenizer_of_another_model, r"a row has token id \d+, but .* has only 320 embeddings"),
    (targets_match_nothing, r"c_attn.*target_modules"),
    (shard_corrupt, r"model-00001.*safetensors is corrupt.*again"),
    (shard_truncated, r"model-00001.*safetensors is corrupt.*again"),
    (shard_missing, r"model-00001.*safetensors"),
    (tensor_missing, r"proj"),
    (gguf_missing, r"model: no file model.gguf. Set model.gguf_file"),
    (device_missing, r"model.device is 'cuda', but torch sees no CUDA device. Set it to 'auto' or 'cpu'"),
    (output_in_use, r"out: is not empty \(notes.txt\). Add --resume .*--overwrite"),
    (output_a_file, r"out: is a file, and the output has to be a folder"),
    (output_below_a_file, r"out is a file, so there can be no folder below it"),
    (output_cannot_be_made, r"/proc/poros/out: cannot be created|/proc may not be written to"),
    (nothing, r"out: nothing to resume.*Run without --resume", ["--resume"]),
    (nothing, r"--resume goes on with a run and --overwrite deletes it", ["--resume", "--overwrite"]),
]


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_one_screen(result: Any, says: str) -> None:
    """Status 2 and a message on stderr that a person can act on."""
    assert result.exit_code == 2, result.output
    message = result.stderr[result.stderr.index("error: ") :]  # after what was said of the data and the model
    assert re.search(says, message, re.DOTALL), message
    assert "Traceback" not in result.output
    assert len(result.stderr.splitlines()) <= 24
    assert len(result.stderr) <= 24 * 80


@pytest.mark.parametrize(
    ("break_it", "says", "options"),
    [(case[0], case[1], case[2] if len(case) > 2 else []) for case in CASES],
    ids=[f"{case[0].__name__}{''.join(case[2]) if len(case) > 2 else ''}" for case in CASES],
)
def test_bad_input(world: World, break_it: Callable[[World], None], says: str, options: list[str]) -> None:
    if break_it is device_missing:
        _skip_with_a_gpu()
    break_it(world)
    before = contents(world.folder)
    assert_one_screen(world.train(*options), says)
    assert contents(world.folder) == before


def test_an_output_that_cannot_be_made_is_found_before_the_model_is_loaded(world: World) -> None:
    output_cannot_be_made(world)
    assert world.train().stderr.startswith("error: ")


def test_two_runs_do_not_write_to_one_folder(world: World) -> None:
    assert world.train().exit_code == 0
    with claimed_output(world.output, resume=True, overwrite=False):
        for option in ("--resume", "--overwrite"):
            assert_one_screen(world.train(option), r"out: another run is writing to it now")
    assert world.train("--resume").exit_code == 0
    assert not list(world.output.glob(".*"))


def test_data_command_reports_in_the_same_way(world: World) -> None:
    row_without_fields(world)
    assert_one_screen(tiny_run.poros("data", world.yaml), r"rows.jsonl:2: a row needs")


def test_debug_shows_where_an_error_comes_from(world: World) -> None:
    settings_missing(world)
    result = world.train("--debug")
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "ConfigError"


def test_resume_with_other_settings_or_data_is_refused(world: World) -> None:
    assert world.train().exit_code == 0
    before = contents(world.output)
    world.change("train", learning_rate=0.5)
    world.change("lora", rank=4)
    assert_one_screen(world.train("--resume"), r"lora.rank: then 2, now 4\n  train.learning_rate: then 0.01, now 0.5\n")
    world.change("train", learning_rate=1e-2)
    world.change("lora", rank=2)
    rows(world, {"text": "another row"})
    assert_one_screen(world.train("--resume"), r"data \(a hash of its tokens\): then")
    assert contents(world.output) == before


@pytest.mark.parametrize("call", ["save_pretrained", "mkdir", "fsync"])
def test_a_full_disk_leaves_nothing_half_written(world: World, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "save_pretrained":
        monkeypatch.setattr("peft.PeftModel.save_pretrained", full)
    elif call == "fsync":
        monkeypatch.setattr("os.fsync", full)
    else:
        mkdir = Path.mkdir
        monkeypatch.setattr(
            Path, "mkdir", lambda path, *a, **k: full() if "checkpoint" in path.name else mkdir(path, *a, **k)
        )
    before = contents(world.folder)
    assert_one_screen(world.train(), r"checkpoint-1: could not be written: No space left on device.*Free some space")
    monkeypatch.undo()
    assert contents(world.folder) == before


@pytest.mark.parametrize("size_kb", [60, 120, 240])
def test_a_disk_that_is_really_full_leaves_nothing_half_written(world: World, size_kb: int) -> None:
    """The adapter, the tokenizer or the optimizer does not fit: each library says so in its own way."""
    world.output.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", world.output], check=False
    ).returncode:
        pytest.skip("a file system of that size needs the right to mount one")
    try:
        result = world.train()
        left = {path.name for path in world.output.iterdir()}
        complete = {checkpoint.folder.name for checkpoint in complete_checkpoints(world.output)}
    finally:
        subprocess.run(["umount", "--lazy", world.output], check=True)  # lazy: the error's traceback holds a file open
    assert_one_screen(result, r"checkpoint-\d: could not be written: .*Free some space")
    assert left == complete


def _skip_with_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
