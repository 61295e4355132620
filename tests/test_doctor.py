"""The doctor: it names each planted fault and no other site, keeps silent on healthy runs, and reads without writing."""

import copy
import functools
import hashlib
import json
import math
from pathlib import Path

import pytest
import torch

import doctor
import precision
import train
import trainer

QUICK = "--batch_size 8 --sample_steps 5 --warmup 0".split()
STEPS = 20


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(precision, "_compiled", lambda kernel: kernel)  # building fused kernels takes longer than these runs


@functools.cache
def trained(*flags):
    """Checkpoint (a dict) after STEPS real steps of the tiny net with these flags."""
    given = vars(train.build_parser().parse_args([*QUICK, "--steps", str(STEPS), *flags]))
    config = {**train.DEFAULTS, **given}
    run = trainer.Trainer(config)
    run.batches = (run.data.train[i] for i in trainer.BatchIndices(len(run.data.train), config["batch_size"], config["seed"]))
    for _ in range(STEPS):
        run.train_step(measure=False)
    return {"format": 1, "config": config, "step": STEPS, "seconds": 0.0, "interval": 0, "since": 0.0,
            "precision": run.precision.state_dict()}


def saved(checkpoint, lines=(), **changes):
    """Folder of a run with this checkpoint, its config changed, and these lines of metrics.jsonl."""
    folder = Path("runs/run")
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({**checkpoint, "config": {**checkpoint["config"], **changes}}, folder / "checkpoint.pt")
    (folder / "metrics.jsonl").write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return folder


def examined(*args, **kwargs):
    return doctor.diagnose(saved(*args, **kwargs), train.DEFAULTS, {})


def named(diagnosis):
    """{site: severity} of what is losing information."""
    return {f.site: f.severity for f in diagnosis.findings if f.severity != "note"}


def text(diagnosis, site):
    return next(f.text for f in diagnosis.findings if f.site == site)


HEALTHY = {
    "fp32": [], "bf16": ["--bf16"], "stochastic": ["--pure_bf16", "--stochastic"], "split": ["--pure_bf16", "--master", "split"],
    "kahan and stochastic": ["--pure_bf16", "--kahan", "--stochastic", "--weight_decay", "0.1"],
    "kahan, beta2 0.99": ["--pure_bf16", "--kahan", "--beta2", "0.99"],
    "islands, stochastic average": ["--pure_bf16", "--stochastic", "--set", "islands=norm+final", "--set", "ema=bf16",
                                    "--set", "ema_update=stochastic"],
    "ddpm": ["--task", "ddpm"], "dit": ["--model", "dit", "--pure_bf16", "--stochastic"],
    "8-bit codes, stochastic": ["--model", "dit", "--pure_bf16", "--stochastic", "--opt8bit", "--weight_decay", "0.1"],
    "fp8": ["--model", "dit", "--fp8"], "fp8, delayed scaling": ["--model", "dit", "--pure_bf16", "--stochastic", "--fp8", "--fp8_recipe", "delayed"],
    "segment": ["--task", "segment", "--image_size", "16", "--pure_bf16", "--stochastic"],
}


@pytest.mark.parametrize("flags", HEALTHY.values(), ids=HEALTHY)
def test_it_is_silent_on_healthy_runs(flags):
    diagnosis = examined(trained(*flags))
    assert named(diagnosis) == {} and diagnosis.status == 0 and str(diagnosis).endswith("healthy: nothing is losing information")
    generation = {"timesteps", "sampler", "loss"} if "segment" not in flags else set()
    casts = {"fp8 zeroed", "fp8 clipped"} if "--fp8" in flags else set()
    decay = {"weight decay"} if "--weight_decay" in flags else set()
    assert {"update", "exp_avg_sq", "ema", "compute"} | generation | casts | decay <= set(diagnosis.sound), "a site was not examined"


PLANTED = {  # flags of the training, sites set in the checkpoint afterwards, what must be named
    "nearest weights": (["--pure_bf16", "--set", "exp_avg_sq=fp32"], [], {"update": "moderate"}),
    "bf16 average": (["--set", "ema=bf16"], [], {"ema": "severe"}),
    "exp_avg_sq": (["--set", "exp_avg_sq=bf16"], [], {"exp_avg_sq": "moderate"}),
    # Kahan compensates the weights alone; the moments beside them are rounded to nearest
    "kahan": (["--pure_bf16", "--kahan"], [], {"exp_avg_sq": "moderate"}),
    "8-bit codes": (["--model", "dit", "--opt8bit"], [], {"exp_avg_sq": "moderate"}),
    "4-bit codes": (["--model", "dit", "--opt4bit"], [], {"exp_avg_sq": "moderate"}),
    # whatever the rounding, torchao's codes do not reach below a 16th of their block's largest
    "4-bit codes, stochastic": (["--model", "dit", "--opt4bit", "--stochastic"], [], {"exp_avg_sq": "moderate"}),
    # the library's own optimiser: its codes, and the weights that it steps from them
    "bitsandbytes": (["--model", "dit", "--opt8bit", "--optimizer", "bitsandbytes", "--weight_decay", "0.1"], [], {"exp_avg_sq": "moderate"}),
    "bitsandbytes on bf16 weights": (["--model", "dit", "--pure_bf16", "--opt8bit", "--optimizer", "bitsandbytes", "--weight_decay", "0.1", "--lr", "1e-4"],
                                     [], {"update": "moderate", "exp_avg_sq": "moderate", "weight decay": "moderate"}),
    "plain loop": (["--pure_bf16", "--optimizer", "torch", "--set", "ema=bf16", "--weight_decay", "0.1"], [],
                   {"update": "moderate", "ema": "severe", "exp_avg_sq": "moderate", "weight decay": "moderate"}),
    "sampler": ([], ["sampler=bf16"], {"sampler": "moderate"}),
    "timesteps": ([], ["timesteps=bf16"], {"timesteps": "moderate"}),
    "scheduler": (["--task", "ddpm"], ["scheduler=bf16"], {"scheduler": "moderate"}),
}


@pytest.mark.parametrize("flags, sites, expected", PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_named_and_nothing_else(flags, sites, expected):
    checkpoint = trained(*flags)
    diagnosis = examined(checkpoint, set=checkpoint["config"]["set"] + sites)
    assert named(diagnosis) == expected and diagnosis.status == 1
    blamed = min(expected, key=lambda site: expected[site] != "severe")
    assert str(diagnosis).splitlines()[-1].endswith(f": {blamed}")


def test_the_figures_are_of_the_run():
    nearest = examined(trained("--pure_bf16", "--set", "exp_avg_sq=fp32"))
    assert "0% of them is written" in text(nearest, "update")
    slower = examined(trained("--pure_bf16", "--set", "exp_avg_sq=fp32"), lr=1e-5)  # smaller updates: more of them are lost
    lost = lambda d: int(text(d, "update").split("% of the wanted")[0].split()[-1])
    assert lost(slower) > 80 > lost(nearest)
    assert "507 values" in text(examined(trained(), set=["timesteps=bf16"]), "timesteps")
    for flags, words in ((["--pure_bf16"], "% of the shrinking of v is lost"), (["--model", "dit", "--opt4bit"], "v grows where it should shrink")):
        assert words in text(examined(trained(*flags)), "exp_avg_sq")


@pytest.mark.parametrize("factor, site, words", [(1e-7, "fp8 zeroed", "non-zero values become zero"), (1e4, "fp8 clipped", "values are clipped")],
                         ids=["after a spike", "while values grow"])
def test_fp8_scales_that_lag_behind(factor, site, words):
    checkpoint = copy.deepcopy(trained("--model", "dit", "--fp8", "--fp8_recipe", "delayed", "--amax_history_len", "16"))
    for name, t in checkpoint["precision"]["model"].items():
        if name.endswith("scaling.scale"):
            t *= factor
        if name.endswith("scaling.amax_history"):
            t /= factor
    diagnosis = examined(checkpoint)
    assert set(named(diagnosis)) == {site} and words in text(diagnosis, site)
    assert "--fp8_recipe tensorwise" in next(f.remedy for f in diagnosis.findings if f.site == site)


def test_a_bf16_schedule_ruins_a_sampler_that_meets_its_zeros():
    diagnosis = examined(trained("--task", "ddpm"), set=["scheduler=bf16"], sample_steps=100)  # t = 9, 19, ...; sigma is 0 up to t = 9
    assert named(diagnosis) == {"scheduler": "severe"} and "0 at 10 timesteps" in text(diagnosis, "scheduler")
    assert "100% of their pixels are not finite" in text(diagnosis, "scheduler")


def test_rounding_in_the_sum_of_micro_batches():
    flags = ["--pure_bf16", "--stochastic"]
    assert set(named(examined(trained(*flags), accumulate=32, batch_size=2))) == {"accumulate"}
    assert named(examined(trained(*flags), accumulate=32, batch_size=2, set=["accumulate=fp32"])) == {}


def test_further_averages_are_examined_and_not_blamed():
    diagnosis = examined(trained("--average", "0.999:bf16", "--average", "0.9:fp32"))
    assert named(diagnosis) == {"average 0.999:bf16": "severe"} and "average 0.9:fp32" in diagnosis.sound
    assert diagnosis.status == 1 and "what generation reads is healthy" in diagnosis.verdict


def test_an_average_that_has_not_arrived_is_no_rounding_loss():
    checkpoint = trained()
    young = examined(checkpoint)
    assert [(f.site, f.severity) for f in young.findings] == [("ema", "note")] and young.status == 0
    slow = examined({**checkpoint, "step": 3000}, steps=3000, ema_decay=0.9999)
    assert named(slow) == {"ema": "severe"} and "ema" not in slow.sound
    assert "= 74% of the start remains" in text(slow, "ema") and "nothing is lost by rounding" in text(slow, "ema")
    assert named(examined({**checkpoint, "step": 3000}, steps=3000)) == {}
    assert examined(checkpoint, steps=5000).findings == []  # still running: it will have arrived


def test_what_the_run_has_logged():
    row = dict(step=10, loss=0.5, nonfinite_grads=0, skipped_steps=0)
    running = [row, {**row, "step": 20}, '{"step": 30, "loss": 0.4, "nonf']
    assert named(examined(trained(), running, steps=5000)) == {}
    assert named(examined(trained(), [{**row, "nonfinite_grads": 3}])) == {"grads": "severe"}
    assert named(examined(trained(), ['{"step": 10, "loss": NaN}\n'])) == {"loss": "severe"}
    log = doctor._Examination.logged  # fp16 is emulated on most CPUs, slowly: its log alone
    examination = doctor._Examination.__new__(doctor._Examination)
    examination.recipe, examination.found, examination.sound = precision.recipe(fp16=True), [], {}
    examination.metrics = [{**row, "step": s, "skipped_steps": min(s, 20) // 10, "loss_scale": 1024.0} for s in range(10, 200, 10)]
    log(examination)
    assert not examination.found
    examination.metrics += [{**row, "step": s, "skipped_steps": s // 2, "loss_scale": 2.0**-9} for s in range(200, 400, 10)]
    log(examination)
    assert [(f.site, f.severity) for f in examination.found] == [("grads", "moderate")] and "0.00195312" in examination.found[0].text


def test_entries_that_are_not_finite():
    checkpoint = trained("--pure_bf16", "--stochastic")
    state = checkpoint["precision"]
    shadow, moments = dict(state["averages"]["ema"]["shadow"]), {**state["optimizer"], "state": dict(state["optimizer"]["state"])}
    key = next(iter(shadow))
    shadow[key] = torch.full_like(shadow[key], math.nan)
    moments["state"][0] = {**moments["state"][0], "exp_avg_sq": torch.full_like(moments["state"][0]["exp_avg_sq"], math.inf)}
    averages = {"ema": {**state["averages"]["ema"], "shadow": shadow}}
    diagnosis = examined({**checkpoint, "precision": {**state, "averages": averages, "optimizer": moments}})
    assert named(diagnosis) == {"ema": "severe", "exp_avg_sq": "severe"} and f"{shadow[key].numel():,} entries" in text(diagnosis, "ema")


def test_the_tally_forgives_noise_and_not_loss():
    torch.manual_seed(0)
    stored = (torch.rand(20_000) + 0.5).bfloat16()
    old, target = stored.float(), stored.float() * 1.0002  # a tenth of half an ulp
    tallies = {}
    noise = torch.randint(1 << 16, (20_000,), dtype=torch.int32)
    for name, new in {"nearest": target.bfloat16(), "exact": target, "stochastic": precision.stochastic_round(target, noise),
                      "half": precision.stochastic_round(old + (target - old) / 2, noise)}.items():
        tallies[name] = doctor.Tally()
        tallies[name].add(doctor._stays(stored, target), old, target, new.float())
    assert tallies["nearest"].lost > 0.95 and 0.2 < tallies["half"].lost < 0.5
    assert tallies["exact"].lost == tallies["stochastic"].lost == 0.0
    assert all(t.stuck == 1.0 for t in tallies.values())


def test_the_command_reads_only_and_tells_by_its_status(capsys):
    quick = [*QUICK, "--samples", "20", "--sample_every", "0", "--log_every", "2", "--name", "run"]
    assert train.main([*quick, "--steps", "4", "--set", "ema=bf16", "--set", "sampler=bf16"]) == 0
    content = lambda: {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path("runs").rglob("*") if p.is_file()}
    before = content()
    capsys.readouterr()
    assert train.main(["--diagnose", "runs/run/checkpoint.pt"]) == 1
    out = capsys.readouterr().out
    assert content() == before and {p.name for p in Path().iterdir()} == {"runs"}
    assert "sampler" in out and "--set sampler=fp32" in out and max(map(len, out.splitlines())) <= doctor.WIDTH
    saved(trained())
    assert train.main(["--diagnose", "runs/run"]) == 0
    assert "healthy: nothing is losing information" in capsys.readouterr().out


def test_bad_input_is_one_line_and_status_2(capsys):
    def fails(*words):
        capsys.readouterr()
        assert train.main(["--diagnose", *words]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("train.py: "), said
        return said.err

    assert "no checkpoint at nowhere" in fails("nowhere")
    folder = saved(trained())
    path = folder / "checkpoint.pt"
    assert "--lr can't differ" in fails(str(folder), "--lr", "1")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "cut short" in fails(str(folder))
    torch.save({"weights": torch.zeros(3)}, path)
    assert "no checkpoint of this program" in fails(str(folder))
    saved(trained(), size="small")
    assert "belongs to another model" in fails(str(folder))


@pytest.mark.gpu
def test_a_planted_fault_is_named_on_a_gpu():
    folder = saved(trained("--pure_bf16", "--set", "exp_avg_sq=fp32"), device="auto")
    assert named(doctor.diagnose(folder, train.DEFAULTS, {"device": "cuda"})) == {"update": "moderate"}
