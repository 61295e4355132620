"""--batch_size auto: the search, what it leaves behind, and where it is refused. See batch_size.py."""

import gc
import json
from pathlib import Path

import cli
import common
import pytest
import torch
from out_of_memory import Full

import strategies
import train
import trainer
from harness import batch_size
from harness.batch_size import largest_power_of_two, survives
from lowprec.errors import Refused

# ---- The search --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 3, 8, 127, 10**9])
@pytest.mark.parametrize("most", [1, 100, 128])
def test_the_largest_power_of_two_is_found(limit, most):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= limit

    found = largest_power_of_two(fits, most)
    powers = [2**k for k in range(40) if 2**k <= min(limit, most)]
    assert found == max(powers, default=0)
    assert len(tried) == len(set(tried)) and all(size <= most for size in tried)
    assert sum(size > limit for size in tried) <= 2, "it stops where memory does, and looks at one example"


def raising(error):
    def step():
        raise error

    return step


def test_a_step_that_runs_out_of_memory_does_not_fit():
    assert survives(lambda: None)
    assert not survives(raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")))
    assert not survives(raising(torch.cuda.OutOfMemoryError("no more than that")))
    assert not survives(raising(RuntimeError("CUDA error: out of memory")))
    assert not survives(raising(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")))


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ValueError("x"), Refused("no")])
def test_other_errors_are_their_own(error):
    with pytest.raises(type(error)):
        survives(raising(error))


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch):
    """torch.cuda.set_per_process_memory_fraction raises ValueError for torch.device("cuda")."""
    limited = []

    def set_fraction(share, device):
        limited.append(torch.cuda._utils._get_device_index(device))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8, 10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    with batch_size.TrialMemory(torch.device("cuda")):
        pass
    assert limited == [3, 3]


# ---- The command, where a CPU plays the GPU ----------------------------------------------------------------


def auto(*flags, name="auto", steps=4):
    quick = [word for word in cli.quick_words(flags) if word not in ("--batch_size", "8")]
    return cli.command(*quick, "--name", name, "--steps", steps, "--batch_size", "auto", *flags)


def steps_of(name):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in cli.metrics(name)]


FLAGS = {
    "stochastic": ("--pure_bf16", "--stochastic", "--accumulate", 3, "--checkpoint_every", 2),
    "dit": ("--model", "dit", "--average", "0.9:bf16", "--ema_warmup", "--workers", 1, "--validate_every", 2),
}
CASES = ("typed", "auto")


@pytest.mark.parametrize("name", FLAGS)
def test_the_run_has_the_bits_of_a_number_that_was_typed(name, monkeypatch, capsys):
    typed = cli.command(*cli.QUICK, "--name", "typed", "--steps", 4, *FLAGS[name], "--batch_size", 16)
    assert typed == 0
    with monkeypatch.context() as patch:
        full = Full(patch, 16, "after" if name == "dit" else "backward")
        assert auto(*FLAGS[name]) == 0
    said = capsys.readouterr().out
    assert "--batch_size auto: 16 (3.0 of 8.0 GiB with 16 examples here; twice as many do not fit)" in said
    assert said.count("--batch_size auto") == 1
    own = [full.sizes.index((n, True)) for n in (2, 4, 8, 16, 32)]
    assert own == sorted(own) and max(size for size, _ in full.sizes) == 32
    cli.assert_same(*(cli.checkpoint(name)["precision"] for name in ("typed", "auto")))
    assert steps_of("typed") == steps_of("auto")
    configs = [cli.checkpoint(name)["config"] for name in ("typed", "auto")]
    assert configs[0].pop("name") != configs[1].pop("name") and configs[0] == configs[1]
    assert configs[1]["batch_size"] == 16
    assert cli.summary("typed")["scores"] == cli.summary("auto")["scores"]
    listed = [{path.name for path in Path("runs", name).iterdir()} for name in CASES]
    assert len({frozenset(n for n in names if "events" not in n) for names in listed}) == 1


def test_it_resumes_with_its_number_and_without_a_search(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        full = Full(patch, 8)
        assert auto(steps=2) == 0
        full.limit = 64  # more memory now: the number stays
        patch.setattr(batch_size, "largest_tried", lambda *_: pytest.fail("it searched"))
        capsys.readouterr()
        assert auto() == 0
    assert "--batch_size auto: 8, with which the run in runs/auto began" in capsys.readouterr().out
    assert cli.quick(name="typed") == 0
    cli.assert_same(*(cli.checkpoint(name)["precision"] for name in CASES))
    assert cli.quick(name="auto", steps=6) == 0, "the number itself goes on too"
    assert auto(steps=6) == 0, "on a CPU as well, and where it has ended"
    assert auto("--dry_run") == 0 and "--batch_size=8" in capsys.readouterr().out.split()
    assert cli.quick("--batch_size", 16, name="auto", steps=8) == 2
    assert "--batch_size was 8 and is 16" in cli.one_line(capsys)


def test_a_run_without_a_name_is_found_again(monkeypatch, capsys):
    quick = [word for word in cli.QUICK if word not in ("--batch_size", "8")]
    with monkeypatch.context() as patch:
        Full(patch, 4)
        assert cli.command(*quick, "--steps", 2, "--batch_size", "auto") == 0
    (folder,) = [path for path in Path("runs").iterdir() if (path / "config.json").exists()]
    assert "batch_size_auto" in folder.name
    assert json.loads((folder / "config.json").read_text())["flags"]["batch_size"] == 4
    assert cli.command(*quick, "--steps", 2, "--batch_size", "auto") == 0
    assert f"the run in {folder} began" in capsys.readouterr().out
    assert cli.command("--sample", folder, "--samples", 20) == 0


def test_the_trial_leaves_nothing_in_memory_and_no_state_of_torch(monkeypatch):
    full = Full(monkeypatch, 8)
    before = torch.random.get_rng_state()
    run = strategies.settle({"name": "run", "batch_size": "auto"}, typed=True)
    values = dict(vars(run.config))
    assert batch_size.chosen_batch_size(trainer.Trainer, run) == 8
    assert vars(run.config) == values and torch.equal(before, torch.random.get_rng_state())
    gc.collect()
    assert not full.trainers and full.sizes and not Path("runs").exists()


def test_no_batch_is_larger_than_the_data(monkeypatch, capsys):
    Full(monkeypatch, 10**6)
    cli.plant_folder("photos", 40)  # of these some are held out
    given = dict(name="run", batch_size="auto", data="folder:photos", image_size=8)
    run = strategies.settle(given, typed=True)
    assert batch_size.chosen_batch_size(trainer.Trainer, run) == 32
    assert "32 (3.0 of 8.0 GiB with 32 examples here; there are no more" in capsys.readouterr().out
    assert batch_size.largest_tried(trainer.Trainer, run, torch.device("cpu"), world=2)[0] == 16


# ---- Where it is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, said",
    [
        ((), "memory of a CPU is shared"),
        (("--device", "cpu"), "--accumulate"),
        (("--dry_run",), "memory of a CPU"),
    ],
)
def test_a_cpu_is_refused(flags, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert auto(*flags) == 2
    assert said in cli.one_line(capsys) and not list(tmp_path.iterdir())


def test_what_a_gpu_refuses():
    cuda, config = torch.device("cuda"), train.FLAGS.typed({"batch_size": "auto"})
    common.refused(lambda: batch_size.check_search(config, cuda, True), "--dry_run", "give a number")
    common.refused(lambda: batch_size.check_search(config.replaced(fsdp=True), cuda, False), "--fsdp")
    assert batch_size.check_search(config, cuda, False) is None


# ---- On a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_search_on_cuda(capsys):
    total = torch.cuda.get_device_properties(0).total_memory
    taken = torch.empty(int(torch.cuda.mem_get_info()[0] - (3 << 30)), dtype=torch.uint8, device="cuda")
    assert auto("--image_size", 64, "--data", "synthetic", "--task", "segment", "--size", "small") == 0
    said = capsys.readouterr().out
    assert "--batch_size auto: " in said and f"of {total / 2**30:.1f} GiB" in said
    number = cli.checkpoint("auto")["config"]["batch_size"]
    assert number >= 2 and number & (number - 1) == 0
    assert torch.cuda.max_memory_reserved() < taken.nbytes + (3 << 30)
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")  # the fraction of the search is gone
