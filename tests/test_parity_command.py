"""``poros parity``: right when nothing is wrong, and right about what is wrong; one screen whatever it is given."""

import re
import sys
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from scripts import validation_tables

from poros.errors import ConfigError
from poros.evidence import parity, twins
from poros.evidence.artifact import append_row, read_rows
from poros.evidence.parity import ParityResult, ParitySettings, build_twins, check
from poros.evidence.verify import verify_file
from poros.residency.attachment import attachment_of
from poros.residency.discover import find_decoder
from tests import tiny, tiny_run

QUICK = {"steps": 2, "seq_len": 24, "rank": 4, "accumulation": 2, "slots": 2}
QUICK_OPTIONS = ["--steps", "2", "--seq-len", "24", "--rank", "4", "--slots", "2"]


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """Makes a folder that holds the configuration of a tiny model and no weights."""
    folder = tmp_path_factory.mktemp("shapes")

    def make(family, num_layers=None):
        config = tiny.build(family, quant=None, lora=False, num_layers=num_layers).config
        config.save_pretrained(folder / family)
        return str(folder / family)

    return make


@pytest.fixture(scope="module")
def llama(shape):
    return shape("llama", num_layers=4)


@pytest.fixture
def models(llama):
    """The settings of a quick check, and its models to plant faults in."""
    settings = ParitySettings(llama, **QUICK)
    return settings, build_twins(settings)


def flip_a_bit(models, layer, tensor):
    """In the host master of one streamed tensor."""
    streamed = attachment_of(models.streamed).layers[layer]
    master = streamed.masters[streamed.names.index(tensor)]
    master.view(-1).view(torch.uint8)[100] ^= 1
    return streamed.name


def make_unrepeatable(models, layer=1):
    """Add to a layer's output what no two runs have alike."""
    calls = count(1)

    def disturb(module, args, output):
        return output + 1e-6 * next(calls)

    for model in (models.resident, models.control, models.streamed):
        find_decoder(model).layers[layer][1].mlp.register_forward_hook(disturb)


def test_a_streamed_model_passes_on_both_paths_and_leaves_rows(llama, tmp_path):
    rows = tmp_path / "rows.jsonl"
    paths = ["--path", "strict", "--path", "math"]
    ended = tiny_run.poros(
        "parity", llama, *QUICK_OPTIONS, *paths, "--accumulate", "2", "--rows", str(rows), "--poison"
    )
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.splitlines()[-1] == "PASS (0.00e+00)"
    assert ended.stdout.count("PASS (0.00e+00)") == 2
    assert verify_file(rows) == []
    strict, math = read_rows(rows)
    assert (strict.path, math.path) == ("strict", "math")
    for row in (strict, math):
        assert (row.model, row.family, row.weights, row.verdict) == (llama, "llama", "random", "PASS")
        assert row.num_gradients == 4 * 7 * 2
        assert len(row.losses) == row.steps == row.control_steps == 2
        assert (row.block_size, row.slots, row.options) == (1, 2, {"poison": True})
        assert all(dict(row.surfaces.streamed).values())
        assert row.dtype == "float32"
    table = validation_tables.parity_table([row.model_dump() for row in (strict, math)])
    assert table.count("PASS") == 2


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_multimodal_class_passes_on_text_with_adapters_on_its_decoder_only(shape, family):
    settings = ParitySettings(shape(family), **QUICK, block_size=2)
    models = build_twins(settings)
    result = check(settings, models)
    assert result.verdict == "PASS", str(result)
    assert result.row().family == family
    assert result.row().lora.targets == "all-linear of the decoder layers"
    trained = [name for name, p in models.resident.named_parameters() if p.requires_grad]
    assert trained
    assert all(".language_model.layers." in name for name in trained)


def test_a_checkpoint_with_weights_is_checked_with_them_unless_told_otherwise(tmp_path):
    tiny.build("llama", quant=None, lora=False, num_layers=2).save_pretrained(tmp_path)
    settings = ParitySettings(str(tmp_path), **QUICK)
    models = build_twins(settings)
    assert models.weights == "real"
    assert check(settings, models).row().weights == "real"
    assert twins.weights_of(ParitySettings(str(tmp_path), random_weights=True)) == "random"


def test_a_flipped_bit_in_host_memory_fails_and_is_named(models):
    settings, three = models
    layer = flip_a_bit(three, 3, "mlp.up_proj.weight")
    result = check(settings, three)
    assert (result.verdict, result.exit_status) == ("FAIL", 1)
    assert f"weights differ in host block 3, layer {layer}, mlp.up_proj.weight" in result.reason
    first = result.row().first_difference
    assert (first.step, first.surface, first.tensor, first.index) == (0, "loss", "0", [])
    assert first.expected != first.found
    assert int(first.expected_bits, 16) != int(first.found_bits, 16)
    assert result.max_abs_difference > 0
    assert all(result.equal["control"].values())
    assert str(result).startswith("FAIL (")
    assert not result.equal["streamed"]["gradients"]


def test_the_first_difference_is_that_of_the_step_in_which_it_came(models):
    settings, three = models

    def plant(models, step):
        if step == 1:
            adapter = next(
                p for name, p in models.streamed.named_parameters() if ".layers.3.mlp.down_proj.lora_B" in name
            )
            adapter.data.view(-1)[37] += 0.5

    result = check(settings, three, before_step=plant)
    assert result.verdict == "FAIL"
    assert result.first_difference.step == 1
    assert "all weights in host memory are the resident ones" in result.reason


def test_a_difference_after_the_last_repetition_is_told_as_such(models):
    settings, three = models
    settings = ParitySettings(**{**vars(settings), "control_steps": 1})
    result = check(
        settings, three, before_step=lambda models, step: step and flip_a_bit(models, 0, "mlp.up_proj.weight")
    )
    assert result.verdict == "FAIL"
    assert "repeated for 1 steps only" in result.reason


def test_a_layer_that_does_not_repeat_itself_is_inconclusive(models):
    settings, three = models
    make_unrepeatable(three)
    result = check(settings, three)
    assert (result.verdict, result.exit_status) == ("INCONCLUSIVE", 3)
    assert result.reason.startswith("the resident run does not reproduce itself: step 0, loss '0'")
    assert not result.equal["control"]["loss"]
    assert result.row().first_difference.step == 0


def test_zero_gradients_are_inconclusive(models):
    settings, three = models
    for name, parameter in three.resident.named_parameters():
        if ".layers.2.mlp.up_proj.lora_B" in name:
            parameter.data.zero_()
    result = check(settings, three)
    assert result.verdict == "INCONCLUSIVE"
    assert result.reason.startswith("vacuous: 1 of 56 gradients are zero at step 0")
    assert "layers.2.mlp.up_proj.lora_A" in result.reason
    assert all(result.equal["streamed"].values())


def test_a_loss_that_is_no_number_ends_the_check(models):
    settings, three = models
    for name, parameter in three.resident.named_parameters():
        if ".layers.2.mlp.up_proj.lora_B" in name:
            parameter.data.fill_(float("inf"))
    result = check(settings, three)
    assert result.verdict == "INCONCLUSIVE"
    assert "loss is nan at step 0" in result.reason
    assert result.row().losses == []


def test_a_check_leaves_the_process_as_it_was(models):
    settings, three = models
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    check(settings, three)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_experts_of_a_mixture_are_named_too(shape):
    settings = ParitySettings(shape("qwen3_moe", num_layers=3), **QUICK, dropout=0.0)
    models = build_twins(settings)
    assert twins.differing_weight(models.resident, models.streamed) is None
    flip_a_bit(models, 1, "mlp.experts.down_proj")
    assert "layers.1, mlp.experts.down_proj" in twins.differing_weight(models.resident, models.streamed)


@pytest.mark.parametrize(
    ("plant", "status", "said"),
    [
        (lambda models: flip_a_bit(models, 1, "self_attn.q_proj.weight"), 1, "layers.1, self_attn.q_proj.weight"),
        (make_unrepeatable, 3, "INCONCLUSIVE: the resident run does not reproduce itself"),
    ],
    ids=["FAIL", "INCONCLUSIVE"],
)
def test_the_exit_status_is_the_verdict(llama, monkeypatch, tmp_path, plant, status, said):
    def planted(settings):
        models = twins.build_twins(settings)
        plant(models)
        return models

    monkeypatch.setattr(parity, "build_twins", planted)
    rows = tmp_path / "rows.jsonl"
    ended = tiny_run.poros("parity", llama, *QUICK_OPTIONS, "--rows", str(rows))
    assert ended.exit_code == status, ended.output
    assert said in ended.stdout.splitlines()[-1]
    assert verify_file(rows) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "0"], "greater than or equal to 1|x>=1"),
        (["--block-size", "0"], "greater than or equal to 1|x>=1"),
        (["--seq-len", "1"], "greater than or equal to 2|x>=2"),
        (["--path", "fast"], "'strict', *│?\\s*│? *'math'"),
        (["--dropout", "1"], "dropout is 1.0; it must be at least 0 and less than 1"),
        (["--device", "tpu"], "device 'tpu' is not a device"),
        (["--rank", "100000000"], "65536"),
        (["--seq-len", "100000000"], "1048576"),
        (["--batch-size", "1000000000000"], "65536"),
        (["--steps", "100000000000000000000"], "1000000"),
        (["--seed", "4294967296"], "4294967295"),
        (["--seq-len", "1000000", "--batch-size", "60000"], "tokens .* needs 6.5 TiB of host memory"),
        (["--name", ""], "name is empty"),
        (["--rows", "/tmp"], "--rows '/tmp' cannot be written: Is a directory"),
        (["--rows", "/nowhere/rows.jsonl"], "Give a file in a folder that exists"),
        pytest.param(
            ["--device", "cuda"],
            "torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_ends_on_one_screen(llama, options, said):
    assert_one_screen(tiny_run.poros("parity", llama, *options), said)


def test_a_full_memory_is_an_error_and_no_verdict(llama, monkeypatch):
    said = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
    for error in (RuntimeError(said), MemoryError(), OSError(12, "Cannot allocate memory"), torch.OutOfMemoryError()):
        monkeypatch.setattr(parity, "step_together", raising(error))
        assert_one_screen(tiny_run.poros("parity", llama, *QUICK_OPTIONS), "memory is full|Cannot allocate memory")


@pytest.mark.parametrize("options", [[], ["--debug"]])
@pytest.mark.parametrize("error", [KeyError("surprise"), ConfigError("surprise")], ids=repr)
def test_no_error_has_the_exit_status_of_a_verdict(llama, monkeypatch, error, options):
    monkeypatch.setattr(parity, "build_twins", raising(error))
    ended = tiny_run.poros("parity", llama, *options)
    assert ended.exit_code == 2
    assert "surprise" in ended.output
    assert ("Traceback" in ended.output) == (options != [] or isinstance(error, KeyError))


def raising(error):
    def fail(*args, **options):
        raise error

    return fail


def test_of_two_paths_the_worst_verdict_decides(llama, monkeypatch):
    for verdicts, status in ((["INCONCLUSIVE", "FAIL"], 1), (["PASS", "INCONCLUSIVE"], 3), (["FAIL", "PASS"], 1)):
        coming = iter(verdicts)
        monkeypatch.setattr(parity, "build_twins", lambda settings: SimpleNamespace(weights="random", device="cpu"))
        monkeypatch.setattr(
            parity, "check", lambda *_, coming=coming, **__: ParityResult(next(coming), None, {}, None, 0.0, [], 1, {})
        )
        assert tiny_run.poros("parity", llama, "--path", "strict", "--path", "math").exit_code == status


def test_the_row_has_the_name_that_a_spec_gives_the_model_and_a_line_of_its_own(llama, tmp_path):
    rows = tmp_path / "rows.jsonl"
    options = [*QUICK_OPTIONS, "--steps", "1", "--name", "one", "--rows", rows]
    assert tiny_run.poros("parity", llama, *options).exit_code == 0
    rows.write_text(rows.read_text().rstrip("\n"))
    assert tiny_run.poros("parity", llama, *options).exit_code == 0
    assert [(row.model, row.cell) for row in read_rows(rows)] == [("one", "one/parity-strict-bs1x2-acc1")] * 2


def test_a_verdict_is_told_and_kept_though_its_file_cannot_be_written(llama, tmp_path, monkeypatch):
    command = sys.modules["poros.cli.parity"]  # the package's attribute of that name is the function
    monkeypatch.setattr(command, "spare_file", lambda: tmp_path / "spare.jsonl")
    writable = append_row

    def full(path, row):
        if path.name == "rows.jsonl":
            raise OSError(28, "No space left on device")
        writable(path, row)

    monkeypatch.setattr("poros.evidence.artifact.append_row", full)
    paths = ["--path", "strict", "--path", "math", "--rows", tmp_path / "rows.jsonl"]
    ended = tiny_run.poros("parity", llama, *QUICK_OPTIONS, *paths)
    assert ended.exit_code == 2
    assert ended.stdout.count("PASS (0.00e+00)") == 2
    assert f"What is missing from it is in {tmp_path / 'spare.jsonl'}" in ended.stderr
    assert [row.path for row in read_rows(tmp_path / "spare.jsonl")] == ["strict", "math"]


def test_a_verdict_says_when_every_block_fits_the_window(llama, models):
    note = "every block fits the window, so nothing was reloaded"
    wide = ParitySettings(llama, **{**QUICK, "slots": 4})
    result = check(wide)
    assert str(result) == f"PASS (0.00e+00); {note}"
    assert result.row().options == {"poison": False, "note": note}
    assert check(*models).note is None


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nonsense", "Shapes with random weights: .*qwen2.5-72b"),
        ("no/such-model", "the hub does not give it"),
        ("/no/such/folder", "there is no folder"),
        ("", ""),
    ],
)
def test_an_unknown_model_ends_on_one_screen(model, said):
    assert_one_screen(tiny_run.poros("parity", model), said)


def assert_one_screen(ended, said):
    assert ended.exit_code == 2
    assert re.search(said, ended.output), ended.output
    assert "Traceback" not in ended.output
    assert len(ended.output.splitlines()) < 24


def test_settings_out_of_their_limits_are_refused_in_python_too():
    for wrong in ({"steps": 0}, {"block_size": 0}, {"slots": 0}, {"path": "fast"}, {"dropout": -0.1}, {"rank": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ParitySettings("llama", **wrong)
