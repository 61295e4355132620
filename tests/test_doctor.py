"""The doctor: it names each planted fault and no other site, keeps silent on healthy runs, and reads without
writing.
"""

import functools
import json
from contextlib import nullcontext
from pathlib import Path

import cli
import pytest
import torch

import doctor
import strategies
import train
import trainer
from harness.batches import BatchIndices
from lowprec import compare
from lowprec.kernels import compiled
from tasks import diffusion

BRIEF = "--batch_size 8 --warmup 0".split()
QUICK = [*BRIEF, "--sample_steps", "5"]  # of a task that draws images
STEPS = 20


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli.shorten(monkeypatch.setattr)
    # building fused kernels takes longer than these runs
    monkeypatch.setattr(compiled, "_compiled", lambda kernel: (kernel, nullcontext))


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
    path = tmp_path / "waves.py"
    path.write_text(WAVES)
    return ["--task", f"{path}:{kind}", *flags]


# The doctor asks nothing of a net: what a recipe loses is planted in a small net of our own, and each kind of
# image net has a run or two. Words of a task come first: "deep" stands for DeepWaves, above.
HEALTHY = {
    "fp32": [],
    "stochastic": ["--pure_bf16", "--stochastic"],
    "islands, stochastic average": [
        "--pure_bf16",
        "--stochastic",
        "--set",
        "islands=norm+final",
        "--set",
        "ema=bf16",
        "--set",
        "ema_update=stochastic",
    ],
    "dit": ["--model", "dit", "--pure_bf16", "--stochastic"],
    "segment": ["--task", "segment", "--image_size", "16", "--pure_bf16", "--stochastic"],
    "bf16": ["deep", "--bf16"],
    "split": ["deep", "--pure_bf16", "--master", "split"],
    "kahan and stochastic": ["deep", "--pure_bf16", "--kahan", "--stochastic", "--weight_decay", "0.1"],
    "8-bit codes, stochastic": [
        "deep",
        "--pure_bf16",
        "--stochastic",
        "--opt8bit",
        "--weight_decay",
        "0.1",
    ],
    "fp8, delayed scaling": ["deep", "--pure_bf16", "--stochastic", "--fp8", "--fp8_recipe", "delayed"],
    "fp4": ["deep", "--fp4", "nvfp4"],
    "a peer with Kahan sums": ["deep", "--pure_bf16", "--optimizer", "optimi"],
    "a peer that hides gradients": ["deep", "--pure_bf16", "--optimizer", "torchastic", "--accumulate", "2"],
}


@pytest.fixture
def deep(tmp_path):
    """Flags of DeepWaves."""
    return waves(tmp_path, kind="DeepWaves")


def trained_in(deep, flags):
    """Checkpoint of a run with these flags, the word "deep" among them standing for those of DeepWaves."""
    return trained(*(deep if flags[:1] == ["deep"] else []), *[word for word in flags if word != "deep"])


@pytest.mark.parametrize("flags", HEALTHY.values(), ids=HEALTHY)
def test_it_is_silent_on_healthy_runs(flags, deep):
    diagnosis = examined(trained_in(deep, flags))
    assert named(diagnosis) == {} and diagnosis.status == 0
    assert str(diagnosis).endswith("healthy: nothing is losing information")
    generation = {"timesteps", "sampler", "path"} if not {"segment", "deep"} & {*flags} else set()
    casts = set()
    for kind in ("fp8", "fp4"):
        if f"--{kind}" in flags:
            casts |= {f"{kind} zeroed", f"{kind} clipped"}
    decay = {"weight decay"} if "--weight_decay" in flags else set()
    always = {"update", "exp_avg_sq", "ema", "compute", "loss"}
    assert always | generation | casts | decay <= set(diagnosis.sound), "a site was not examined"


CODES = ["deep", "--opt8bit", "--optimizer", "bitsandbytes", "--weight_decay", "0.1"]
LOOP = ["deep", "--pure_bf16", "--optimizer", "torch", "--set", "ema=bf16", "--weight_decay", "0.1"]
PLANTED = {  # flags of the training, sites set in the checkpoint afterwards, what must be named
    "nearest weights": (["--pure_bf16", "--set", "exp_avg_sq=fp32"], [], {"update": "moderate"}),
    "bf16 average": (["deep", "--set", "ema=bf16"], [], {"ema": "severe"}),
    "exp_avg_sq": (["deep", "--set", "exp_avg_sq=bf16"], [], {"exp_avg_sq": "moderate"}),
    # Kahan compensates the weights alone; the moments beside them are rounded to nearest
    "kahan": (["deep", "--pure_bf16", "--kahan"], [], {"exp_avg_sq": "moderate"}),
    "8-bit codes": (["deep", "--opt8bit"], [], {"exp_avg_sq": "moderate"}),
    # whatever the rounding, torchao's codes do not reach below a 16th of their block's largest
    "4-bit codes, stochastic": (["deep", "--opt4bit", "--stochastic"], [], {"exp_avg_sq": "moderate"}),
    # the library's own optimiser: its codes, and the weights that it steps from them
    "bitsandbytes on bf16 weights": (
        [*CODES, "--pure_bf16", "--lr", "1e-4"],
        [],
        {"update": "moderate", "exp_avg_sq": "moderate", "weight decay": "moderate"},
    ),
    "plain loop": (
        LOOP,
        [],
        {"update": "moderate", "ema": "severe", "exp_avg_sq": "moderate", "weight decay": "moderate"},
    ),
    "a peer's second moments": (
        ["deep", "--pure_bf16", "--optimizer", "torchao"],
        [],
        {"exp_avg_sq": "moderate"},
    ),
    "sampler": ([], ["sampler=bf16"], {"sampler": "moderate"}),
    "timesteps": ([], ["timesteps=bf16"], {"timesteps": "moderate"}),
    "scheduler": (["--task", "ddpm"], ["scheduler=bf16"], {"scheduler": "moderate"}),
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
    """What training writes is not looked at."""
    monkeypatch.setattr(doctor.Examination, "stepping", lambda exam: None)


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
    "ddpm in 100 steps": ["--task", "ddpm", "--sample_steps", "100"],
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
