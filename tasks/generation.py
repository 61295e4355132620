"""What the tasks that generate images share: label dropout, guidance, the loss, sampling and its scores.

diffusion.py holds the two kinds, rectified flow and DDPM; generation_probes.py what the doctor asks of them.
Three sites are these tasks' own: in which dtype timesteps, sampler state and noise schedule live. Under every
flag they are fp32; bf16 is there for experiments that show what it breaks.
"""

import functools
from typing import NamedTuple

import torch
from tqdm import tqdm

from harness.flags import Flag, amount, several, share, thousand
from lowprec.errors import Refused
from lowprec.layers.flops import module_flops
from lowprec.recipes import Site
from lowprec.rules import Rule
from tasks import data as datasets
from tasks import latent_space, metrics, perceptual, vae_halves
from tasks.condition import (
    CONDITION_FLAG,
    channels,
    condition_of,
    condition_picture,
    given,
    mean_psnr,
    taking,
)
from tasks.feature_net import flops_of_fitting
from tasks.generation_probes import TIMESTEPS, examine
from tasks.task import Task, picture, two_of_each

__all__ = ["BINS", "TIMESTEPS", "Generation"]
BINS = 10
LABEL_DROPOUT = 0.1
PREVIEW_ROWS = 6  # pictures a label in a preview
HELDOUT_IMAGES = 256  # held-out images that loss_by_timestep is taken on

GENERATION_SITES = {
    "timesteps": Site(
        ("fp32", "bf16"),
        {"fp32": "bf16 holds only 507 of the values 0..999", "bf16": "0..999 collapse to 507 values"},
        {
            "bf16": "timesteps=bf16: 0..999 become 507 distinct values, up to 2 apart; "
            "use --set timesteps=fp32 (default)"
        },
    ),
    "sampler": Site(
        ("fp32", "bf16"),
        {"fp32": "x + v dt: small steps need the bits", "bf16": "x + v dt loses dt below half an ulp of x"},
        {
            "bf16": "sampler=bf16: x + v dt rounds at every step; with 100 steps a constant velocity misses "
            "its end by several percent; use --set sampler=fp32 (default)"
        },
    ),
}


class Generation(Task):
    """What rectified flow and DDPM share: label dropout, guidance, the loss by timestep, sampling and its
    scores.
    """

    flags = (
        Flag(
            "label_dropout",
            LABEL_DROPOUT,
            "share of labels dropped, for classifier-free guidance",
            "generation",
            type=share,
        ),
        Flag(
            "guidance",
            1.0,
            "classifier-free guidance weight; 1 is none and costs half",
            "generation",
            kind="draw",
            type=amount,
        ),
        Flag("sample_steps", 50, "sampling steps", "generation", kind="draw", type=thousand),
        Flag(
            "samples",
            1000,
            "images drawn for the final scores",
            "generation",
            kind="extent",
            type=several,
            may=("sample",),
        ),
        Flag(
            "scores",
            "auto",
            "final scores: full; fast ones need no net that is fitted to the data; none; auto: fast where "
            "that net would take longer than the training",
            "generation",
            kind="extent",
            choices=("auto", "full", "fast", "none"),
            may=("sample",),
            titled=True,
        ),
        perceptual.PERCEPTUAL,
        *latent_space.LATENT_FLAGS,
        CONDITION_FLAG,
    )
    sites = {**GENERATION_SITES, "perceptual": perceptual.PERCEPTUAL_SITE, **latent_space.LATENT_SITES}
    limits = {
        # relative RMS change of the prediction; the images suffer when it nears the net's own error. Any
        # timestep lost is a finding as well
        "timesteps": (0.001, 0.1),
        # relative RMS change of the images drawn. An fp32 state gives 0 exactly; 0.2 % is a fifth of a grey
        # level in eight bits
        "sampler": (0.002, 0.1),
        # how far the sampler's states are from where their timesteps say, in units of the noise. A right one
        # gives 0.00, one that noises anew the spread of its noise; one that stands still 1, a wrong sign 2
        "path": (0.15, 0.5),
        **vae_halves.HALF_LIMITS,
    }
    rules = (
        Rule(
            lambda c: c.vae and c.perceptual,
            "--perceptual compares images, and --vae trains in latents: drop one of the two, or train the "
            "vae with --perceptual",
        ),
        Rule(
            lambda c: c.vae and c.condition != "none",
            "--condition shows the net pixels, and --vae trains in latents: drop one of the two",
        ),
        Rule(
            lambda c: c.guidance != 1 and c.label_dropout == 0,
            lambda c: f"--guidance {c.guidance:g} reads the net without a label, which --label_dropout 0 "
            "never trains: train with --label_dropout 0.1",
        ),
    )
    needs = {"perceptual": "perceptual", **dict.fromkeys(latent_space.LATENT_SITES, "vae")}
    implied = {"size": "tiny", "data": "digits"}
    unprinted = ("trace", "loss_by_timestep")
    distances = ("frechet", "kid", "sliced_wasserstein")
    guard = {}  # sites of one kind of generation that the doctor keeps exact where it asks of another
    answer = noised = None  # of tasks that don't tell them, the sampler's path isn't examined

    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        self.space = latent_space.space_of_run(data, recipe, config)  # what the net sees: pixels, or latents
        # made when they are asked for first
        self._judge = self._scorer = None
        self._reference = None
        self._perceptual = None

    @classmethod
    def settle(cls, table, given):
        return latent_space.settle_latents(cls, table, given)

    @classmethod
    def load(cls, config):
        data = cls._load(config)
        if not data.num_classes and config.guidance != 1:
            idle = f"--guidance {config.guidance:g} steers by labels, and here the net has none"
            raise Refused(f"{idle}: give --guidance 1")
        return data

    @classmethod
    def _load(cls, config):
        c = config
        if c.condition not in ("masks", "inputs"):
            return two_of_each(super().load(c))
        spec = c.data or ("synthetic" if c.condition == "masks" else cls.implied["data"])
        data = two_of_each(datasets.load_by_flags(c, spec, c.condition))
        data.condition_channels, data.num_classes = data.num_classes, 0
        return data

    def notes(self):
        found = super().notes()
        dropout = self.config.label_dropout
        if dropout != LABEL_DROPOUT and not self.data.num_classes:
            found.append(f"--label_dropout {dropout:g} changes nothing: the net is given no labels")
        if self.config.scores == "auto" and not self.scored_in_full:
            found.append(
                "the final scores are the fast ones: fitting a net to these images first would take longer "
                "than this training; --scores full does it"
            )
        count = len(self.data.train) + len(self.data.heldout)
        samples = self.config.samples
        if samples > 4 * count:
            found.append(
                f"{samples:,} images are drawn for the scores, and the data hold {count}: scoring may take "
                f"longer than training; --samples {max(50, 2 * count)} draws fewer"
            )
        return found

    @classmethod
    def sizes_of_nets(cls):
        from models import DIFFUSION_UNETS, DITS

        return {"unet": DIFFUSION_UNETS, "dit": DITS}

    def nets(self):
        from models import GENERATIVE  # MONAI takes seconds to import, which --help does not wait for

        nets = self.space.nets({**GENERATIVE, **self.own_net()})
        return taking(nets, channels(self.config.condition, self.data))

    def example(self):
        count, *sides = self.space.shape
        count += channels(self.config.condition, self.data)
        images = torch.empty(2, count, *sides, device="meta")
        return (images, images.new_empty(2), images.new_empty(2, dtype=torch.int64)), {}

    def train_set(self, run):
        return self.space.train_set(self.data.train, run.device)

    # -- training

    def loss(self, model, batch, rng, step):
        """Mean loss of images [B, C, H, W] in [-1, 1] with labels [B]. Timestep, noise and label dropout
        are drawn from `rng`.
        """
        images, targets = batch
        labels, condition = self.labels_and_condition(images, targets)
        model = given(model, condition)
        weight = self.config.perceptual
        n = len(images)
        dropped = rng.uniform(n) < self.config.label_dropout
        labels = torch.where(dropped, self.data.num_classes, labels)
        values = self.space.draw(images, rng)
        values, noise = self.with_noise(values, rng)
        t = self.draw_timesteps(rng, n)
        if not weight:
            return self.errors(model, values, labels, noise, t).mean()
        recorded = Recorded(model)
        loss = self.errors(recorded, values, labels, noise, t).mean()
        clean, share = self.clean(recorded.x.float(), recorded.answer.float(), t)
        distance = self.perceptual_distance(clean, values)  # [B]
        return loss + weight * (share * distance).mean()

    def labels_and_condition(self, images, targets):
        """(labels int64 [B], condition or None) of images [B, C, H, W] and what the data have beside them."""
        return condition_of(self.config.condition, images, targets, self.data.condition_channels)

    def with_noise(self, images, rng):
        """(images, noise) [B, C, H, W] to train on; here the two are independent."""
        return images, rng.normal(*images.shape)

    def perceptual_distance(self, a, b):
        """fp32 [B]: perceptual distance of images [B, C, H, W], in the dtype of its site."""
        if self._perceptual is None:
            net = self.scorer(a.device)
            self._perceptual = perceptual.Perceptual(net, self.recipe.dtype("perceptual")).to(a.device)
        return self._perceptual(a, b)

    @torch.no_grad()
    def loss_by_timestep(self, model, images, labels, rng):
        """[BINS] mean unweighted loss in equal bins of the timestep, on the same noise at every call with
        the same rng.
        """
        bins = []
        for k in range(BINS):
            t = self.bin_timesteps((k + rng.uniform(len(images))) / BINS)
            noise = rng.normal(*images.shape)
            errors = self.errors(model, images, labels, noise, t, weighted=False)
            bins.append(errors.float().mean().item())
        return bins

    def predict(self, model, x, t, labels, guidance=1.0):
        """The net's prediction for x [B, C, H, W] at timesteps t [B], with classifier-free guidance: null +
        w (label - null).

        arXiv 2207.12598. A weight of 1 needs no second half.
        """
        t = t.to(self.recipe.dtype("timesteps"))
        if guidance == 1.0:
            return model(x, t, labels)
        null = torch.full_like(labels, self.data.num_classes)
        both = model(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, null]))  # [2 B, C, H, W]
        with_label, without_label = both.chunk(2)
        return without_label + guidance * (with_label - without_label)

    # -- generation

    @torch.no_grad()
    def sample(self, model, labels, noise, steps, trace=None):
        """Images [B, C, H, W] fp32 from noise [B, C, H, W] in `steps` steps. trace: a list that receives a
        dict of ranges a step.
        """
        x = noise.to(self.recipe.dtype("sampler"))
        times = self.times(steps)
        for t, following in zip(times, [*times[1:], 0], strict=True):
            at = torch.full((len(x),), float(t), device=x.device)
            prediction = self.predict(model, x.float(), at, labels, self.config.guidance).to(x.dtype)
            if trace is not None:
                trace.append({"t": t, **_range("prediction", prediction), **_range("x", x)})
            x = self.advance(prediction, t, x, following)
        if trace is not None:
            trace.append({"t": 0, **_range("x", x)})
        return x.float()

    def preview(self, model, rng):
        """A column a label, or a square without labels; the same noise whenever the rng is the same. The last
        row is real.
        """
        if self.config.condition != "none":
            return self._preview_of_conditions(model, rng)
        classes = self.data.num_classes
        columns = (classes or PREVIEW_ROWS) if classes <= 20 else 10
        labels = torch.arange(columns).repeat(PREVIEW_ROWS).to(rng.device)
        if not classes:
            labels = torch.zeros_like(labels)
        noise = rng.normal(len(labels), *self.space.shape)
        drawn = self.sample(model, labels, noise, self.config.sample_steps)
        return {"samples": self._beside_real(self.space.decode(drawn).cpu(), columns)}

    def _beside_real(self, images, columns):
        """Images [N, C, H, W] as a picture, above a row of held-out ones: of the columns' labels where these
        come in turn.
        """
        count = min(columns, len(self.data.heldout))
        real, labels = metrics.subset(self.data.heldout, HELDOUT_IMAGES)
        first = [int((labels == label).int().argmax()) for label in range(count)]
        row = real[first] if columns == self.data.num_classes else real[:count]
        gap = images.new_ones(-len(images) % columns, *images.shape[1:])  # white
        return picture(torch.cat([images, gap, row]), columns)

    def _preview_of_conditions(self, model, rng):
        """Conditions of held-out images, below them what is drawn from them, below those the images."""
        real, targets = self.heldout_images(rng.device, 10)
        labels, condition = self.labels_and_condition(real, targets)
        noise = rng.normal(*real.shape)
        drawn = self.sample(given(model, condition), labels, noise, self.config.sample_steps)
        rows = [condition_picture(condition), drawn, real]
        channels = max(row.shape[1] for row in rows)  # grey images may have coloured conditions
        rows = [row.expand(-1, channels, -1, -1).cpu() for row in rows]
        return {"samples": picture(torch.cat(rows), len(real))}

    def evaluate(self, model, rng):
        """(scores, pictures) of config.samples images against held-out real ones; with --condition one for
        each held-out image in turn, whose labels and conditions they have.

        Scores also hold loss_by_timestep and the trace of ranges of the first images.
        """
        c = self.config
        if c.scores == "none":
            return {}, self.preview(model, rng)
        wanted, condition, originals = self._asked_for(rng.device)
        labels = wanted
        # drawn at once: torch's generator goes on elsewhere after a count that is no multiple of 16
        noise = rng.normal(c.samples, *self.space.shape, device="cpu")
        images = []
        first = None  # what the net drew in the first batch
        trace = []
        starts = range(0, c.samples, c.sample_batch)
        for start in tqdm(starts, "drawing", leave=False, unit="batch", dynamic_ncols=True):
            part = slice(start, start + c.sample_batch)
            traced = trace if first is None else None
            net = given(model, None if condition is None else condition[part])
            drawn = self.sample(net, labels[part], noise[part].to(rng.device), c.sample_steps, traced)
            if first is None:
                first = drawn
            images.append(self.space.decode(drawn).cpu())
        images = torch.cat(images)  # [samples, C, H, W]

        judge = self.judge(rng.device)
        wanted = labels.cpu() if self.data.num_classes else None
        scores = metrics.generation_scores(judge.net, images, wanted, judge.heldout_images)
        if originals is not None:
            scores["psnr"] = mean_psnr(images, originals)
        if originals is not None and self.scored_in_full:
            scores["distance"] = self.perceptual_distance(images, originals).mean().item()
        real, targets = self.heldout_images(rng.device)
        scores.update(self.space.scores(first, real))
        real_labels, condition = self.labels_and_condition(real, targets)
        scores["loss_by_timestep"] = self.loss_by_timestep(
            given(model, condition), self.space.mean(real), real_labels, rng
        )
        scores["trace"] = trace
        return scores, {"samples": self._beside_real(images[: 10 * PREVIEW_ROWS], 10)}

    def _asked_for(self, device):
        """(labels, conditions, originals) of the images to score, the last two None without --condition."""
        count = self.config.samples
        if self.config.condition == "none":
            return self.wanted_labels(count, device), None, None
        real, targets = metrics.subset(self.data.heldout, count)
        again = torch.arange(count) % len(real)  # more samples than held-out images
        labels, condition = self.labels_and_condition(real, targets)
        return labels[again].to(device), condition[again].to(device), real[again]

    def reference(self):
        """{"floor": scores of real training images, "ceiling": scores of noise}, against the held-out ones,
        with the labels of the samples.
        """
        if self.config.scores == "none":
            return {}
        if self._reference is None:
            wanted = self.wanted_labels(self.config.samples, "cpu")
            judge = self.judge()
            self._reference = metrics.reference_scores(
                judge.net, judge.train_images, judge.train_labels, judge.heldout_images, wanted=wanted
            )
        return self._reference

    @functools.cached_property
    def scored_in_full(self):
        """Whether a net that is fitted to the data scores what is drawn. --scores auto: where it is there, or
        takes no more FLOPs than the training.
        """
        c, data = self.config, self.data
        if c.scores != "auto":
            return c.scores == "full"
        if data.yardstick or c.perceptual:
            return True
        with torch.device("meta"):
            net = self.net()
        args, kwargs = self.example()
        try:
            flops, _ = module_flops(net, args, kwargs)
        except RuntimeError:  # a net of somebody's own that looks at values: its FLOPs can't be told
            return True
        trained = c.steps * c.batch_size * c.accumulate
        fitting = flops_of_fitting(data.channels, data.image_size)
        return trained * flops[""] / len(args[0]) >= fitting

    def judge(self, device="cpu"):
        """The Judge of this task's data: read once, for all scores of a run."""
        if self._judge is None:
            c = self.config
            data = self.data
            net = self.scorer(device) if self.scored_in_full else None
            train_images, train_labels = metrics.subset(data.train, 2 * c.samples)  # enough of each class
            if not data.num_classes:
                train_labels = None
            self._judge = Judge(net, train_images, train_labels, *metrics.subset(data.heldout))
        return self._judge

    def scorer(self, device="cpu"):
        """The feature net of this task's data."""
        if self._scorer is None:
            net = metrics.yardstick(self.data, f"{self.config.runs}/feature_nets")
            self._scorer = net.to(metrics.device_of_scores(device))
        return self._scorer

    def wanted_labels(self, count, device):
        """int64 [count]: labels to draw, in the held-out images' proportions."""
        labels = self.judge(device).heldout_labels
        return metrics.labels_like(labels, self.data.num_classes, count).to(device)

    def heldout_images(self, device, count=None):
        """(images [count, C, H, W], their labels), the same each time; HELDOUT_IMAGES of them by default."""
        images, labels = metrics.subset(self.data.heldout, count or HELDOUT_IMAGES)
        return images.to(device), labels.to(device)

    # -- what the sites lose

    def probes(self, exam):
        examine(self, exam)

    def probe_schedule(self, exam, net, batch, start, reference):
        """What using the noise schedule does to it; here it holds nothing that could change.

        start: labels, noise and steps of the images `reference`, drawn in fp32.
        """


class Judge(NamedTuple):
    """What samples are scored with: a feature net, and real images [N, C, H, W] with labels int64 [N]."""

    net: metrics.FeatureNet | None  # of full scores
    train_images: torch.Tensor
    train_labels: torch.Tensor | None  # of a set without classes
    heldout_images: torch.Tensor
    heldout_labels: torch.Tensor


class Recorded:
    """A net that keeps what it was called with last, x [B, C, H, W], and what it answered."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x, t, labels):
        self.x = x
        self.answer = self.model(x, t, labels)
        return self.answer


def _range(name, x):
    """{name_min, name_max, name_mean} of a tensor."""
    x = x.float()
    return {f"{name}_min": x.min().item(), f"{name}_max": x.max().item(), f"{name}_mean": x.mean().item()}
