"""The doctor's figures, buffers, a task of one's own, the command."""

import copy
import hashlib
import math
from pathlib import Path

import pytest
import test_doctor
import torch

import doctor
import train
from lowprec import precision, rounding
from lowprec.rounding import Stream
from lowprec.watch import net_state, verdicts

QUICK = test_doctor.QUICK
STEPS = test_doctor.STEPS
deep = test_doctor.deep
examined = test_doctor.examined
in_a_folder_of_its_own = test_doctor.in_a_folder_of_its_own
named = test_doctor.named
sampler_alone = test_doctor.sampler_alone
saved = test_doctor.saved
text = test_doctor.text
trained = test_doctor.trained
waves = test_doctor.waves


# ---- Figures -----------------------------------------------------------------------------------------------


def at_rate(checkpoint, lr):
    """The checkpoint, going on at another learning rate."""
    checkpoint = copy.deepcopy(checkpoint)
    checkpoint["config"]["lr"] = lr
    for group in checkpoint["precision"]["optimizer"]["param_groups"]:
        group.update(lr=lr, initial_lr=lr)
    return checkpoint


def share(diagnosis, site, words):
    """The percentage before these words."""
    return int(text(diagnosis, site).split(f"% {words}")[0].split()[-1])


def test_the_figures_are_of_the_run(deep):
    checkpoint = trained("--pure_bf16", "--set", "exp_avg_sq=fp32")
    nearest = examined(checkpoint)
    assert "0% of them is written" in text(nearest, "update")
    slower = examined(at_rate(checkpoint, 1e-5))  # smaller updates: more of them are lost
    assert share(slower, "update", "of the wanted") > 80 > share(nearest, "update", "of the wanted")
    assert "507 values" in text(examined(trained(), set=["timesteps=bf16"]), "timesteps")
    losing = {"--pure_bf16": "% of the shrinking of v is lost", "--opt4bit": "v grows where it should shrink"}
    for flag, words in losing.items():
        assert words in text(examined(trained(*deep, flag)), "exp_avg_sq")


def test_a_schedule_that_has_ended_is_examined_at_the_full_rate(deep):
    flags = [*deep, "--pure_bf16", "--set", "exp_avg_sq=fp32", "--lr", "3e-3"]
    ended = examined(trained(*flags, "--lr_schedule", "cosine"))
    # at its own rate, which is 0 now, nothing would be written and nothing lost
    assert 0.005 < ended.sound["update"] < 0.05


LAGGING = {
    "after a spike": (1e-7, "fp8 zeroed", "non-zero values become zero"),
    "while values grow": (1e4, "fp8 clipped", "values are clipped"),
}


@pytest.mark.parametrize("factor, site, words", LAGGING.values(), ids=LAGGING)
def test_fp8_scales_that_lag_behind(factor, site, words, deep):
    delayed = ["--fp8_recipe", "delayed", "--amax_history_len", "16"]
    checkpoint = copy.deepcopy(trained(*deep, "--fp8", *delayed))
    for name, t in checkpoint["precision"]["model"].items():
        if name.endswith("scaling.scale"):
            t *= factor
        if name.endswith("scaling.amax_history"):
            t /= factor
    diagnosis = examined(checkpoint)
    assert set(named(diagnosis)) == {site} and words in text(diagnosis, site)
    assert "--fp8_recipe tensorwise" in next(f.remedy for f in diagnosis.findings if f.site == site)


def test_fp4_loses_what_shares_a_block_with_a_large_value(deep):
    checkpoint = copy.deepcopy(trained(*deep, "--fp4", "nvfp4"))
    for t in checkpoint["precision"]["model"].values():
        if t.dim() == 2:
            t[::16, ::16] = 1000 * t.abs().max()
    diagnosis = examined(checkpoint)
    said = text(diagnosis, "fp4 zeroed")
    assert named(diagnosis)["fp4 zeroed"] == "severe" and "weight operands of FP4 products" in said
    assert "--fp4_finish 15" in next(f.remedy for f in diagnosis.findings if f.site == "fp4 zeroed")


@pytest.mark.usefixtures("sampler_alone")
def test_a_bf16_schedule_ruins_a_sampler_that_meets_its_zeros():
    # t = 9, 19, ...; sigma is 0 up to t = 9
    diagnosis = examined(trained("--task", "ddpm"), set=["scheduler=bf16"], sample_steps=100)
    assert named(diagnosis) == {"scheduler": "severe"} and "0 at 10 timesteps" in text(diagnosis, "scheduler")
    assert "100% of their pixels are not finite" in text(diagnosis, "scheduler")


def test_rounding_in_the_sum_of_micro_batches(deep):
    flags = [*deep, "--pure_bf16", "--stochastic"]
    assert set(named(examined(trained(*flags), accumulate=32, batch_size=2))) == {"accumulate"}
    assert named(examined(trained(*flags), accumulate=32, batch_size=2, set=["accumulate=fp32"])) == {}


def test_further_averages_are_examined_and_not_blamed(deep):
    diagnosis = examined(trained(*deep, "--average", "0.999:bf16", "--average", "0.9:fp32"))
    assert named(diagnosis) == {"average 0.999:bf16": "severe"} and "average 0.9:fp32" in diagnosis.sound
    assert diagnosis.status == 1 and "what generation reads is healthy" in diagnosis.verdict


def test_an_average_that_has_not_arrived_is_no_rounding_loss(deep):
    checkpoint = trained(*deep)
    young = examined(checkpoint)
    assert [(f.site, f.severity) for f in young.findings] == [("ema", "note")] and young.status == 0
    slow = examined({**checkpoint, "step": 3000}, steps=3000, ema_decay=0.9999)
    assert named(slow) == {"ema": "severe"} and "ema" not in slow.sound
    said = text(slow, "ema")
    assert "= 74% of the start remains" in said and "nothing is lost by rounding" in said
    assert named(examined({**checkpoint, "step": 3000}, steps=3000)) == {}
    assert examined(checkpoint, steps=5000).findings == []  # still running: it will have arrived


def test_what_the_run_has_logged(deep):
    checkpoint = trained(*deep)
    row = dict(step=10, loss=0.5, nonfinite_grads=0, skipped_steps=0)
    running = [row, {**row, "step": 20}, '{"step": 30, "loss": 0.4, "nonf']
    assert named(examined(checkpoint, running, steps=5000)) == {}
    assert named(examined(checkpoint, [{**row, "nonfinite_grads": 3}])) == {"grads": "severe"}
    assert named(examined(checkpoint, ['{"step": 10, "loss": NaN}\n'])) == {"loss": "severe"}
    log = doctor.Examination.logged  # fp16 is emulated on most CPUs, slowly: its log alone
    examination = doctor.Examination.__new__(doctor.Examination)
    examination.recipe, examination.found, examination.sound = precision.recipe(fp16=True), [], {}
    examination.limits = doctor.DIAGNOSIS_LIMITS
    started = {**row, "loss_scale": 1024.0}
    examination.metrics = [
        {**started, "step": s, "skipped_steps": min(s, 20) // 10} for s in range(10, 200, 10)
    ]
    log(examination)
    assert not examination.found
    overflowing = {**row, "loss_scale": 2.0**-9}
    examination.metrics += [{**overflowing, "step": s, "skipped_steps": s // 2} for s in range(200, 400, 10)]
    log(examination)
    assert [(f.site, f.severity) for f in examination.found] == [("grads", "moderate")]
    assert "0.00195312" in examination.found[0].text


def test_entries_that_are_not_finite():
    checkpoint = trained("--pure_bf16", "--stochastic")
    state = checkpoint["precision"]
    state = copy.deepcopy(state)
    shadow = state["averages"]["ema"]["shadow"]
    key = next(iter(shadow))
    shadow[key].fill_(math.nan)
    state["optimizer"]["state"][0]["exp_avg_sq"].fill_(math.inf)
    next(iter(state["model"].values()))[0] = math.nan
    diagnosis = examined({**checkpoint, "precision": state})
    assert named(diagnosis) == {"weights": "severe", "ema": "severe", "exp_avg_sq": "severe"}
    assert f"{shadow[key].numel():,} entries" in text(diagnosis, "ema")


# ---- Buffers, and a task of one's own ----------------------------------------------------------------------

BUFFERS = {
    "frequencies": ([], "1 of 1 buffers hold bf16 values, frequencies the first", "changes by"),
    "statistics": (["--statistics"], "2 of 2 buffers hold bf16 values, norm.running_mean", "may change by"),
}


@pytest.mark.parametrize("own, what, effect", BUFFERS.values(), ids=BUFFERS)
def test_buffers_in_bf16_are_named(tmp_path, own, what, effect):
    flags = waves(tmp_path, "--pure_bf16", "--stochastic", *own)
    exact = examined(trained(*flags))
    assert named(exact) == {} and exact.sound["buffers"] == 0.0
    rounded = examined(trained(*flags, "--set", "buffers=bf16"))
    assert set(named(rounded)) == {"buffers"}
    finding = next(f for f in rounded.findings if f.site == "buffers")
    assert finding.remedy == "--set buffers=fp32" and what in finding.text and effect in finding.text


def test_a_buffer_is_known_to_be_rounded():
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    fresh = copy.deepcopy(net)
    for _ in range(50):
        net(torch.randn(64, 4) * 3 + 1)
    made = dict(fresh.named_buffers())
    own = {name: b for name, b in net.named_buffers() if b.is_floating_point()}
    assert list(own) == ["1.running_mean", "1.running_var"]
    for name, b in own.items():
        assert not net_state.rounded_to_bf16(b, made[name])
        assert net_state.rounded_to_bf16(b.bfloat16(), made[name])
        assert net_state.rounded_to_bf16(b.bfloat16().float(), made[name])
        # zeros and ones, which a new net holds, lose nothing
        assert not net_state.rounded_to_bf16(made[name].bfloat16(), made[name])


def test_buffers_that_came_rounded_are_named_whatever_the_recipe_says(tmp_path):
    checkpoint = copy.deepcopy(trained(*waves(tmp_path, "--pure_bf16", "--stochastic")))
    frequencies = checkpoint["precision"]["model"]["frequencies"]
    assert frequencies.dtype == torch.float32
    frequencies.copy_(frequencies.bfloat16())
    diagnosis = examined(checkpoint)
    assert set(named(diagnosis)) == {"buffers"} and "1 of 1 buffers" in text(diagnosis, "buffers")


def test_a_task_of_ones_own_is_examined_by_its_own_probes(tmp_path):
    checkpoint = trained(*waves(tmp_path))
    sound = examined(checkpoint).sound
    assert {"angles", "compute", "loss", "update", "exp_avg_sq", "ema", "buffers"} <= set(sound)
    diagnosis = examined(checkpoint, set=["angles=bf16"])
    assert named(diagnosis) == {"angles": "severe"}
    assert str(diagnosis).startswith(f"step {STEPS} of {STEPS}, Waves on positions")


def test_what_the_doctor_draws_is_no_stream_of_the_training():
    stream, examination = rounding.stream, doctor.Examination.__new__(doctor.Examination)
    examination.config, examination.device = train.FLAGS.config({}), "cpu"
    probes = (1,), (2,), (3,), (4, 0), (4, 1), (5,)
    seeds = [examination.rng(*words).generator.initial_seed() for words in probes]
    used = {stream(0, kind, step) for kind in Stream if kind != Stream.DOCTOR for step in range(1000)}
    used |= {stream(0, kind) for kind in Stream} | {stream(0, Stream.BATCH, step, 0) for step in range(1000)}
    assert len(set(seeds)) == len(seeds) and not used.intersection(seeds)


# ---- The command -------------------------------------------------------------------------------------------


def test_the_command_reads_only_and_tells_by_its_status(capsys):
    quick = [*QUICK, "--samples", "20", "--sample_every", "0", "--log_every", "2", "--name", "run"]
    assert train.main([*quick, "--steps", "4", "--set", "ema=bf16", "--set", "sampler=bf16"]) == 0

    def content():
        files = [path for path in Path("runs").rglob("*") if path.is_file()]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = content()
    capsys.readouterr()
    assert train.main(["--diagnose", "runs/run/checkpoint.pt"]) == 1
    out = capsys.readouterr().out
    assert content() == before and {p.name for p in Path().iterdir()} == {"runs"}
    assert "sampler" in out and "--set sampler=fp32" in out
    assert max(map(len, out.splitlines())) <= verdicts.LINE_WIDTH
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
    (folder / "metrics.jsonl").write_bytes(b"\x80\x00\n")
    assert "metrics.jsonl, line 1 is no JSON object" in fails(str(folder))
    (folder / "metrics.jsonl").unlink()
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
    assert named(doctor.diagnose(folder, train.FLAGS, {"device": "cuda"})) == {"update": "moderate"}
