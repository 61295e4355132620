"""What a task is: a loss with all its randomness from the generator it is handed, and an evaluation with scores and pictures.

    rflow    rectified flow (arXiv 2209.03003) with MONAI's RFlowScheduler: x_t = (1-s) clean + s noise, velocity = clean - noise
    reflow   rectified flow on pairs of noise and a teacher's image of it (see reflow.py): straight paths, for sampling in 1 to 4 steps
    ddpm     noise prediction (arXiv 2006.11239) with min-SNR weighting (arXiv 2303.09556) and DDIM sampling (arXiv 2010.02502)
    segment  Dice + cross-entropy on a U-Net, Dice and IoU per class

A new task is one more class here and an entry in STRATEGIES. `model` is a precision.Precision: called like a net, it returns fp32 (the
loss site's dtype); `recipe` says in which dtype timesteps, sampler state and noise schedule live. Under every flag they are fp32: bf16 is
there for experiments that show what it breaks.
"""

import torch
import torch.nn.functional as F
from monai.losses import DiceCELoss
from monai.networks.schedulers import DDIMScheduler, RFlowScheduler
from torchvision.utils import make_grid

import metrics

TIMESTEPS = 1000
BINS = 10
PREVIEW_ROWS = 6  # pictures a label in a preview


class Rng:
    """The randomness of one batch, a function of its generator alone.

    Every draw is made for the whole batch of `world` ranks on the CPU; a rank keeps its own rows. So a run on two processes draws what one
    process draws, and a CPU run what a GPU run draws.
    """

    def __init__(self, seed, rank=0, world=1, device="cpu"):
        self.generator, self.rank, self.world, self.device = torch.Generator().manual_seed(seed), rank, world, device

    def _own(self, x):
        n = len(x) // self.world
        return x[self.rank * n : (self.rank + 1) * n].to(self.device)

    def normal(self, n, *shape):
        """fp32 [n, *shape], standard normal."""
        return self._own(torch.randn(n * self.world, *shape, generator=self.generator))

    def uniform(self, n):
        """fp32 [n] in [0, 1)."""
        return self._own(torch.rand(n * self.world, generator=self.generator))


class Generation:
    """What rectified flow and DDPM share: label dropout, guidance, the loss by timestep, sampling and its scores."""

    def __init__(self, data, recipe, config):
        self.data, self.recipe, self.config = data, recipe, config
        self._reference = None

    # -- training

    def loss(self, model, batch, rng):
        """Mean loss of images [B,C,H,W] in [-1,1] with labels [B]; timestep, noise and label dropout are drawn from `rng`."""
        images, labels = batch
        n = len(images)
        dropped = rng.uniform(n) < self.config["label_dropout"]
        labels = torch.where(dropped, self.data.num_classes, labels)
        images, noise = self.with_noise(images, rng)
        return self.errors(model, images, labels, noise, self.draw_timesteps(rng, n)).mean()

    def with_noise(self, images, rng):
        """(images, noise) [B,C,H,W] to train on; here the two are independent."""
        return images, rng.normal(*images.shape)

    @torch.no_grad()
    def loss_by_timestep(self, model, images, labels, rng):
        """[BINS] mean unweighted loss in equal bins of the timestep, on the same noise at every call with the same rng."""
        bins = []
        for k in range(BINS):
            t = self.bin_timesteps((k + rng.uniform(len(images))) / BINS)
            bins.append(self.errors(model, images, labels, rng.normal(*images.shape), t, weighted=False).float().mean().item())
        return bins

    def predict(self, model, x, t, labels, guidance=1.0):
        """The net's prediction for x [B,C,H,W] at timesteps t [B], with classifier-free guidance (arXiv 2207.12598): null + w (label - null)."""
        t = t.to(self.recipe.dtype("timesteps"))
        if guidance == 1.0:
            return model(x, t, labels)
        null = torch.full_like(labels, self.data.num_classes)
        with_label, without = model(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, null])).chunk(2)
        return without + guidance * (with_label - without)

    # -- generation

    @torch.no_grad()
    def sample(self, model, labels, noise, steps, trace=None):
        """Images [B,C,H,W] fp32 from noise [B,C,H,W] in `steps` steps. trace: a list that receives a dict of ranges per step."""
        x = noise.to(self.recipe.dtype("sampler"))
        times = self.times(steps)
        for t, following in zip(times, times[1:] + [0]):
            prediction = self.predict(model, x.float(), torch.full((len(x),), float(t), device=x.device), labels, self.config["guidance"])
            prediction = prediction.to(x.dtype)
            if trace is not None:
                trace.append({"t": t, **_range("prediction", prediction), **_range("x", x)})
            x = self.advance(prediction, t, x, following)
        if trace is not None:
            trace.append({"t": 0, **_range("x", x)})
        return x.float()

    def preview(self, model, rng):
        """Picture grid [C,H,W] in [0,1]: a column a label, the same noise whenever the rng is the same."""
        columns = max(1, self.data.num_classes) if self.data.num_classes <= 20 else 10
        labels = torch.arange(columns).repeat(PREVIEW_ROWS).to(rng.device)
        noise = rng.normal(len(labels), self.data.channels, self.data.image_size, self.data.image_size)
        return {"samples": picture(self.sample(model, labels * (self.data.num_classes > 0), noise, self.config["sample_steps"]), columns)}

    def evaluate(self, model, rng):
        """(scores, pictures) of config['samples'] images against held-out real ones; scores also hold loss_by_timestep and the trace of ranges."""
        count, size = self.config["samples"], self.data.image_size
        labels = (torch.arange(count) % max(1, self.data.num_classes)).to(rng.device)
        images, trace = [], []
        for part in labels.split(self.config["sample_batch"]):
            noise = rng.normal(len(part), self.data.channels, size, size)
            images.append(self.sample(model, part, noise, self.config["sample_steps"], trace if not images else None).cpu())
        net, _, _, real = self._real(count)
        scores = metrics.generation_scores(net, torch.cat(images), labels.cpu() if self.data.num_classes else None, real)
        held_images, held_labels = self._heldout(rng.device)
        scores["loss_by_timestep"] = self.loss_by_timestep(model, held_images, held_labels, rng)
        scores["trace"] = trace
        return scores, {"samples": picture(torch.cat(images)[: 10 * PREVIEW_ROWS], 10)}

    def reference(self):
        """{"floor": scores of real training images, "ceiling": scores of noise}, both against the held-out ones and of the same count."""
        if self._reference is None:
            net, images, labels, real = self._real(self.config["samples"])
            self._reference = metrics.reference_scores(net, images, labels, real, count=self.config["samples"])
        return self._reference

    def _real(self, count):
        data = self.data
        part = lambda most: data.train[_some(len(data.train), most)]
        if data.name == "digits":
            net = metrics.digits_net()
        else:  # fitted on a number of images that no flag changes: the yardstick is one a data set
            images, labels = part(5000)
            net = metrics.cached_feature_net(data.name, data.fingerprint, images, labels if data.num_classes else None, data.num_classes,
                                             self.config["runs"] + "/feature_nets")
        images, labels = part(count)
        return net, images, labels if data.num_classes else None, data.heldout[_some(len(data.heldout), 5000)][0]

    def _heldout(self, device):
        images, labels = self.data.heldout[_some(len(self.data.heldout), 256)]
        return images.to(device), labels.to(device)


class RFlow(Generation):
    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        self.scheduler = RFlowScheduler(TIMESTEPS, use_discrete_timesteps=True)  # whole steps when sampling; training draws its own
        self.sign = 1.0 if config["velocity"] == "clean-noise" else -1.0

    def draw_timesteps(self, rng, n):
        if self.config["timestep_sampling"] == "logit-normal":  # arXiv 2403.03206, section 3.1
            return torch.sigmoid(rng.normal(n)) * TIMESTEPS
        return rng.uniform(n) * TIMESTEPS

    def bin_timesteps(self, fraction):
        return fraction * TIMESTEPS

    def times(self, steps):
        self.scheduler.set_timesteps(steps)
        return self.scheduler.timesteps.tolist()

    def errors(self, model, images, labels, noise, t, weighted=True):
        """Squared velocity errors [B,C,H,W] at timesteps t [B] in [0, TIMESTEPS); 0 is clean. Rectified flow weighs all timesteps alike."""
        t = t.to(self.recipe.dtype("timesteps"))
        velocity = self.predict(model, self.scheduler.add_noise(images, noise, t), t, labels)
        return F.mse_loss(velocity, (self.sign * (images - noise)).to(velocity.dtype), reduction="none")

    def advance(self, velocity, t, x, following):
        return self.scheduler.step(self.sign * velocity, t, x, following)[0]


class Reflow(RFlow):
    """Rectified flow whose noise comes with its image: a training batch is [B,2C,H,W], clean images and their noise."""

    def with_noise(self, images, rng):
        return images.chunk(2, dim=1)

    @torch.no_grad()
    def loss_by_timestep(self, model, images, labels, rng):
        """[BINS] mean loss on pairs of noise and the model's own image of it, of as many labels as `images` has: 0 where the paths are
        straight (the straightness of arXiv 2209.03003, section 2.2). Real images with independent noise, the measure for rflow, are not
        what this task learns; nor does this need the teacher."""
        noise = rng.normal(*images.shape)
        own = self.sample(model, labels, noise, self.config["sample_steps"])
        times = [self.bin_timesteps((k + rng.uniform(len(own))) / BINS) for k in range(BINS)]
        return [self.errors(model, own, labels, noise, t).float().mean().item() for t in times]


class DDPM(Generation):
    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        # One object adds noise and samples, as MONAI's tutorials do. Its add_noise casts alphas_cumprod to the dtype of the images and keeps
        # it so: one call with bf16 images leaves sigma = 0 at the first timesteps and NaN in every later sample, in whatever precision.
        self.scheduler = DDIMScheduler(num_train_timesteps=TIMESTEPS, clip_sample=True)
        self.schedule = self.scheduler.alphas_cumprod.double().clone()  # ours, for weights: out of reach of that cast

    def draw_timesteps(self, rng, n):
        return self.bin_timesteps(rng.uniform(n))

    def bin_timesteps(self, fraction):
        return (fraction * TIMESTEPS).long().clamp(max=TIMESTEPS - 1)

    def times(self, steps):
        # MONAI spaces its timesteps from 999 to 0, but each of its steps goes from t to t - 1000 // steps; these agree with the steps
        self.scheduler.set_timesteps(steps)
        stride = TIMESTEPS // steps
        return list(range(TIMESTEPS - 1, -1, -stride))

    def add_noise(self, images, noise, t):
        """x_t [B,C,H,W] fp32. scheduler=fp32 hands MONAI fp32 images only; scheduler=bf16 shows what a bf16 call does to its buffers."""
        dtype = self.recipe.dtype("scheduler")
        return self.scheduler.add_noise(images.to(dtype), noise.to(dtype), t).float()

    def errors(self, model, images, labels, noise, t, weighted=True):
        """Squared noise errors [B,C,H,W] at integer timesteps t [B], weighted by min(SNR, gamma) / SNR unless gamma is 0."""
        predicted = self.predict(model, self.add_noise(images, noise, t), t, labels)
        error = F.mse_loss(predicted, noise.to(predicted.dtype), reduction="none")
        gamma = self.config["min_snr"]
        if weighted and gamma:
            alpha = self.schedule.to(t.device)[t]
            snr = alpha / (1 - alpha)
            error = error * (snr.clamp(max=gamma) / snr).to(error.dtype)[:, None, None, None]
        return error

    def advance(self, noise, t, x, following):
        return self.scheduler.step(noise, t, x)[0].to(x.dtype)


class Segment:
    def __init__(self, data, recipe, config):
        self.data, self.config = data, config
        self.criterion = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)

    def loss(self, model, batch, rng):
        """Dice + cross-entropy of images [B,C,H,W] against masks [B,H,W]. Nothing in it is random."""
        images, masks = batch
        return self.criterion(model(images), masks[:, None])

    def preview(self, model, rng):
        """Picture grid [3,H,W] in [0,1]: held-out images, their masks, the predictions."""
        images, masks = self.data.heldout[list(range(min(8, len(self.data.heldout))))]
        with torch.no_grad():
            predicted = model(images.to(rng.device)).argmax(1).cpu()
        palette = torch.tensor([[0, 0, 0], [230, 80, 60], [60, 160, 230], [240, 200, 60], [90, 200, 120], [180, 100, 220]]) / 255
        colour = lambda classes: palette[classes % len(palette)].permute(0, 3, 1, 2)
        grey = (images.mean(1, keepdim=True).repeat(1, 3, 1, 1) + 1) / 2
        rows = torch.cat([grey, colour(masks), colour(predicted)])
        return {"segmentation": picture(rows * 2 - 1, len(images))}

    @torch.no_grad()
    def evaluate(self, model, rng):
        """(scores, pictures): mean Dice and IoU of the foreground classes and each class's, over all held-out images."""
        counts = 0
        for start in range(0, len(self.data.heldout), 64):
            images, masks = self.data.heldout[list(range(start, min(start + 64, len(self.data.heldout))))]
            counts = counts + metrics.confusion(model(images.to(rng.device)).float().cpu(), masks, self.data.num_classes)
        return metrics.dice_and_iou(counts), self.preview(model, rng)

    def reference(self):
        return {}


STRATEGIES = {"rflow": RFlow, "reflow": Reflow, "ddpm": DDPM, "segment": Segment}


def _some(n, count):
    # folders come sorted by class: a fixed shuffle, so that a subset holds all of them
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))[:count].tolist()


def _range(name, x):
    x = x.float()
    return {f"{name}_min": x.min().item(), f"{name}_max": x.max().item(), f"{name}_mean": x.mean().item()}


def picture(images, columns):
    """Grid [C,H,W] in [0,1] of images [N,C,H,W] in [-1,1], each at least 48 pixels wide so that a person sees it."""
    scale = max(1, -(-48 // images.shape[-1]))
    images = ((images + 1) / 2).nan_to_num(0.5).clamp(0, 1)  # a NaN shows as mid-grey; the scores count it
    return make_grid(F.interpolate(images, scale_factor=scale, mode="nearest"), nrow=columns, padding=4, pad_value=0.5)
