"""The doctor: it names each planted fault and no other site, keeps silent on healthy runs, and reads without
writing.
"""

import copy
import functools
import json
import math
from pathlib import Path

import cli
import pytest
import torch

import doctor
import strategies
import train
import trainer
from harness.batches import BatchIndices
from lowprec import compare, precision, rounding
from lowprec.rounding import Stream
from lowprec.watch import fault, verdicts
from lowprec.watch.faults import runs
from tasks import diffusion

BRIEF = "--batch_size 8 --warmup 0".split()
QUICK = [*BRIEF, "--sample_steps", "5"]  # of a task that draws images
STEPS = 20
in_a_folder_of_its_own = cli.in_a_folder_of_its_own


@functools.cache
def trained(*flags):
    """Checkpoint (a dict) after STEPS real steps of the tiny net with these flags."""
    name = train.task_flag_of(list(flags)) or "rflow"
    table, draws = strategies.flag_table(name), issubclass(strategies.find_task(name), diffusion.Generation)
    words = QUICK if draws else BRIEF
    given = vars(train.build_parser(table).parse_args([*words, "--steps", str(STEPS), *flags]))
    run = trainer.Trainer(strategies.settle(given))
    c, data = run.config, run.task.train_set(run)
    run.batches = (data[i] for i in BatchIndices(len(data), c.batch_size, c.seed))
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        for _ in range(STEPS):
            run.train_step(measure=False)
    facts = {"step": STEPS, "seconds": 0.0, "interval": 0, "since": 0.0}
    return {"format": 1, "config": vars(c), **facts, "precision": run.precision.state_dict()}


def saved(checkpoint, lines=(), **changes):
    """Folder of a run with this checkpoint, its config changed, and these lines of metrics.jsonl."""
    folder = Path("runs/run")
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({**checkpoint, "config": {**checkpoint["config"], **changes}}, folder / "checkpoint.pt")
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    (folder / "metrics.jsonl").write_text("".join(texts))
    return folder


def examined(checkpoint, *args, **kwargs):
    table = strategies.flag_table(checkpoint["config"]["task"])
    return doctor.diagnose(saved(checkpoint, *args, **kwargs), table, {})


def named(diagnosis):
    """{site: severity} of what is losing information."""
    return {f.site: f.severity for f in diagnosis.findings if f.severity != "note"}


def text(diagnosis, site):
    return next(f.text for f in diagnosis.findings if f.site == site)


WAVES = """
import torch
from torch import nn
from tasks import Flag, Site, Task


class Positions:
    name, image_size = "positions", None

    def __init__(self, start):
        self.x = (torch.arange(512)[:, None] * 8 + start)  # [512, 1]
        self.train = self.heldout = self

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], torch.sin(self.x[i] / 300.0)


class Net(nn.Module):
    def __init__(self, statistics):
        super().__init__()
        frequencies = 10_000.0 ** -(torch.arange(16) / 16)
        if statistics:
            self.frequencies = frequencies
        else:
            self.register_buffer("frequencies", frequencies)
        self.register_buffer("ones", torch.ones(4))  # which lose nothing
        self.norm = nn.BatchNorm1d(32) if statistics else nn.Identity()
        self.linear = nn.Linear(32, 1)

    def forward(self, x):
        angles = x.float() * self.frequencies.float()  # [B, 1] -> [B, 16]
        waves = torch.cat([angles.sin(), angles.cos()], dim=1).to(self.linear.weight.dtype)
        return {"wave": self.linear(self.norm(waves))}


class Deep(Net):
    def __init__(self, statistics):
        super().__init__(statistics)
        self.first = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU())
        self.linear = nn.Linear(128, 1)

    def forward(self, x):
        angles = x.float() * self.frequencies.float()
        waves = torch.cat([angles.sin(), angles.cos()], dim=1).to(self.linear.weight.dtype)
        return {"wave": self.linear(self.first(waves))}


class Waves(Task):
    flags = (Flag("statistics", False, "normalise by running statistics"),)
    implied = {"data": "positions"}
    sites = {"angles": Site(("fp32", "bf16"), {"fp32": "exact", "bf16": "lost"})}
    limits = {"angles": (0.1, 0.2)}

    @classmethod
    def load(cls, config, index=None):
        return Positions(0)

    def net(self):
        return Net(self.config.statistics)

    def loss(self, model, batch, rng, step):
        x, y = batch
        return (model(x=x)["wave"] - y).square().mean()

    def probes(self, exam):
        lost = {"fp32": 0.0, "bf16": 1.0}[self.recipe.angles]
        exam.judge("angles", lost, "angles are lost", "--set angles=fp32")


class DeepWaves(Waves):
    def net(self):
        return Deep(False)
"""


def waves(tmp_path, *flags, kind="Waves"):
    """Flags of a task that no part of this repository knows: its net takes keywords and returns a dict."""
    path = tmp_path.parent / "waves.py"  # one for all tests, as `trained` remembers runs by their flags
    path.write_text(WAVES)
    return ["--task", f"{path}:{kind}", *flags]


# The doctor asks nothing of a net: what a recipe loses is planted in a small net of our own, and each kind of
# image net has a run or two. Words of a task come first: "deep" stands for DeepWaves, above.
HEALTHY = {
    "fp32": "",
    "islands, stochastic average": "--pure_bf16 --stochastic --set islands=norm+final --set ema=bf16 "
    "--set ema_update=stochastic",
    "dit": "--model dit --pure_bf16 --stochastic",
    "segment": "--task segment --image_size 16 --pure_bf16 --stochastic",
    "kahan and stochastic": "deep --pure_bf16 --kahan --stochastic --weight_decay 0.1",
    "8-bit codes, stochastic": "deep --pure_bf16 --stochastic --opt8bit --weight_decay 0.1",
    "fp8, delayed scaling": "deep --pure_bf16 --stochastic --fp8 --fp8_recipe delayed",
    "fp4": "deep --fp4 nvfp4",
    "a peer that hides gradients": "deep --pure_bf16 --optimizer torchastic --accumulate 2",
}


@pytest.fixture
def deep(tmp_path):
    """Flags of DeepWaves."""
    return waves(tmp_path, kind="DeepWaves")


def trained_in(deep, flags):
    """Checkpoint of a run with these flags, the word "deep" among them standing for those of DeepWaves."""
    words = flags.split()
    return trained(*(deep if "deep" in words else []), *[word for word in words if word != "deep"])


@pytest.mark.parametrize("flags", HEALTHY.values(), ids=HEALTHY)
def test_it_is_silent_on_healthy_runs(flags, deep):
    diagnosis = examined(trained_in(deep, flags))
    assert named(diagnosis) == {} and diagnosis.status == 0
    assert str(diagnosis).endswith("healthy: nothing is losing information")
    generation = {"timesteps", "sampler", "path"} if not {"segment", "deep"} & {*flags.split()} else set()
    casts = set()
    for kind in ("fp8", "fp4"):
        if f"--{kind}" in flags:
            casts |= {f"{kind} zeroed", f"{kind} clipped"}
    decay = {"weight decay"} if "--weight_decay" in flags else set()
    always = {"update", "exp_avg_sq", "ema", "compute", "loss"}
    assert always | generation | casts | decay <= set(diagnosis.sound), "a site was not examined"


CODES = "deep --opt8bit --optimizer bitsandbytes --weight_decay 0.1"
LOOP = "deep --pure_bf16 --optimizer torch --set ema=bf16 --weight_decay 0.1"
ALL_BUT_EMA = {"update": "moderate", "exp_avg_sq": "moderate", "weight decay": "moderate"}
PLANTED = {  # flags of the training, sites set in the checkpoint afterwards, what must be named
    "nearest weights": ("--pure_bf16 --set exp_avg_sq=fp32", [], {"update": "moderate"}),
    "bf16 average": ("deep --set ema=bf16", [], {"ema": "severe"}),
    "exp_avg_sq": ("deep --set exp_avg_sq=bf16", [], {"exp_avg_sq": "moderate"}),
    # Kahan compensates the weights alone; the moments beside them are rounded to nearest
    "kahan": ("deep --pure_bf16 --kahan", [], {"exp_avg_sq": "moderate"}),
    "8-bit codes": ("deep --opt8bit", [], {"exp_avg_sq": "moderate"}),
    # whatever the rounding, torchao's codes do not reach below a 16th of their block's largest
    "4-bit codes, stochastic": ("deep --opt4bit --stochastic", [], {"exp_avg_sq": "moderate"}),
    # the library's own optimiser: its codes, and the weights that it steps from them
    "bitsandbytes on bf16 weights": (f"{CODES} --pure_bf16 --lr 1e-4", [], ALL_BUT_EMA),
    "plain loop": (LOOP, [], ALL_BUT_EMA | {"ema": "severe"}),
    "a peer's second moments": ("deep --pure_bf16 --optimizer torchao", [], {"exp_avg_sq": "moderate"}),
    "sampler": ("", ["sampler=bf16"], {"sampler": "moderate"}),
    "timesteps": ("", ["timesteps=bf16"], {"timesteps": "moderate"}),
    "scheduler": ("--task ddpm", ["scheduler=bf16"], {"scheduler": "moderate"}),
}


TOLD = {
    "to nearest": ([], True),
    "stochastic, with sites of its own": (["--stochastic", "--set", "exp_avg_sq=bf16"], False),
}


@pytest.mark.parametrize("flags, found", TOLD.values(), ids=TOLD)
def test_two_checkpoints_of_a_run_tell_how_its_states_were_rounded(flags, found):
    for name, steps in (("early", 3), ("late", 6)):
        assert cli.quick("--pure_bf16", *flags, name=name, steps=steps) == 0
    findings = compare("runs/early/checkpoint.pt", "runs/late/checkpoint.pt").findings
    assert found == any(f.site == "exp_avg_sq" and f.severity != "note" for f in findings)


@pytest.mark.parametrize("flags, sites, expected", PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_named_and_nothing_else(flags, sites, expected, deep):
    checkpoint = trained_in(deep, flags)
    diagnosis = examined(checkpoint, set=checkpoint["config"]["set"] + sites)
    assert named(diagnosis) == expected and diagnosis.status == 1
    blamed = min(expected, key=lambda site: expected[site] != "severe")
    assert str(diagnosis).splitlines()[-1].endswith(f": {blamed}")


# ---- Where the sampler goes --------------------------------------------------------------------------------


def negated(kind):
    advance = kind.advance
    return "advance", lambda self, answer, *more: advance(self, -answer, *more)


def halved(kind):
    advance = kind.advance
    return "advance", lambda self, answer, t, x, *more: (x + advance(self, answer, t, x, *more)) / 2


def backwards(kind):
    times = kind.times
    return "times", lambda self, steps: times(self, steps)[::-1]


def told_the_other_end(kind):
    sample = kind.sample

    def wrong(self, model, *more):
        return sample(self, lambda x, t, labels: model(x, diffusion.TIMESTEPS - t, labels), *more)

    return "sample", wrong


@pytest.fixture
def sampler_alone(monkeypatch):
    """What the net computes and training writes is not looked at."""
    monkeypatch.setattr(doctor, "of_finite_run", fault.Faults())


@pytest.mark.usefixtures("sampler_alone")
@pytest.mark.parametrize(
    "wrong, task",
    [(negated, "rflow"), (backwards, "ddpm"), (told_the_other_end, "rflow"), (halved, "ddpm")],
)
def test_a_sampler_that_goes_the_wrong_way(wrong, task, monkeypatch):
    checkpoint = trained("--task", task)
    monkeypatch.setattr(strategies.TASKS[task], *wrong(strategies.TASKS[task]))
    diagnosis = examined(checkpoint)
    severity, verdict = ("moderate", "lost quality") if wrong is halved else ("severe", "bad samples")
    assert named(diagnosis)["path"] == severity and "path" not in diagnosis.sound
    assert str(diagnosis).splitlines()[-1].endswith(f"to blame for {verdict}: path")


WAYS = {
    "the other sign, with guidance": ["--velocity", "noise-clean", "--guidance", "2"],
    "in one step": ["--sample_steps", "1"],
    "consistency, which noises anew": ["--task", "consistency"],
}


@pytest.mark.usefixtures("sampler_alone")
@pytest.mark.parametrize("flags", WAYS.values(), ids=WAYS)
def test_ways_that_lead_to_the_image(flags):
    diagnosis = examined(trained(*flags))
    assert named(diagnosis) == {} and diagnosis.sound["path"] < 0.05


ANCESTRAL = """
import torch
from tasks.diffusion import DDPM, RFlow


class Ancestral(DDPM):
    def advance(self, noise, t, x, following):  # arXiv 2010.02502, equation 12 with eta = 1
        a, b = self.schedule[t], self.schedule[following] if following else torch.tensor(1.0).double()
        clean = (x - (1 - a).sqrt() * noise) / a.sqrt()
        fresh = ((1 - b) / (1 - a) * (1 - a / b)).sqrt()
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(t))
        return (b.sqrt() * clean + (1 - b - fresh**2).sqrt() * noise + fresh * drawn).float()


class Clean(RFlow):  # its net answers with the clean image
    def errors(self, model, images, labels, noise, t, weighted=True):
        return (self.predict(model, self.scheduler.add_noise(images, noise, t), t, labels) - images) ** 2

    def advance(self, clean, t, x, following):
        return x + (t - following) / t * (clean - x)
"""


@pytest.mark.usefixtures("sampler_alone")
@pytest.mark.parametrize("name", ["Ancestral", "Clean"])
def test_a_sampler_of_ones_own_is_no_false_alarm(name, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(ANCESTRAL)
    diagnosis = examined(trained("--task", f"{path}:{name}", "--sample_steps", "50"))
    assert named(diagnosis) == {}
    if name == "Clean":
        assert "not known" in text(diagnosis, "path")
    else:
        assert diagnosis.sound["path"] < 0.08


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
    # fp16 is emulated on most CPUs, slowly: its log alone
    examination = doctor.Examination.__new__(doctor.Examination)
    examination.recipe, examination.found, examination.sound = precision.recipe(fp16=True), [], {}
    examination.not_finite = {}
    started = {**row, "loss_scale": 1024.0}
    examination.metrics = [
        {**started, "step": s, "skipped_steps": min(s, 20) // 10} for s in range(10, 200, 10)
    ]
    examination.look(runs.of_records)
    assert not examination.found
    overflowing = {**row, "loss_scale": 2.0**-9}
    examination.metrics += [{**overflowing, "step": s, "skipped_steps": s // 2} for s in range(200, 400, 10)]
    examination.look(runs.of_records)
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
    "frequencies": ([], "1 of 2 buffers hold bf16 values, frequencies the first", "changes by"),
    "statistics": (["--statistics"], "2 of 3 buffers hold bf16 values, norm.running_mean", "may change by"),
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


def test_buffers_that_came_rounded_are_named_whatever_the_recipe_says(tmp_path):
    checkpoint = copy.deepcopy(trained(*waves(tmp_path, "--pure_bf16", "--stochastic")))
    frequencies = checkpoint["precision"]["model"]["frequencies"]
    assert frequencies.dtype == torch.float32
    frequencies.copy_(frequencies.bfloat16())
    diagnosis = examined(checkpoint)
    assert set(named(diagnosis)) == {"buffers"} and "1 of 2 buffers" in text(diagnosis, "buffers")


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
    assert cli.quick("--sample_steps", 5, "--set", "ema=bf16", "--set", "sampler=bf16") == 0
    before = cli.content("runs")
    capsys.readouterr()
    assert train.main(["--diagnose", "runs/run/checkpoint.pt"]) == 1
    out = capsys.readouterr().out
    assert cli.content("runs") == before and {p.name for p in Path().iterdir()} == {"runs"}
    assert "sampler" in out and "--set sampler=fp32" in out
    assert max(map(len, out.splitlines())) <= verdicts.LINE_WIDTH
    saved(trained())
    assert train.main(["--diagnose", "runs/run"]) == 0
    assert "healthy: nothing is losing information" in capsys.readouterr().out


def test_a_checkpoint_of_another_model_is_one_line(capsys):
    folder = saved(trained(), size="small")
    capsys.readouterr()
    assert train.main(["--diagnose", str(folder)]) == 2
    assert "belongs to another model" in cli.one_line(capsys)


@pytest.mark.gpu
def test_a_planted_fault_is_named_on_a_gpu():
    folder = saved(trained("--pure_bf16", "--set", "exp_avg_sq=fp32"), device="auto")
    assert named(doctor.diagnose(folder, train.FLAGS, {"device": "cuda"})) == {"update": "moderate"}
