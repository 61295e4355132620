"""The doctor: looks at a finished or running run and names, with figures, the sites that are losing information.

    python train.py --diagnose runs/NAME        its checkpoint.pt, and metrics.jsonl where there is one; exit status 0 healthy, 1 findings

It reads the run and writes nothing. Nothing is concluded from the recipe: the run is loaded into memory and taken some steps further on its
own data, by its own code, and each write to a weight, second moment or average is compared with what fp32 arithmetic wanted to write. What
generation reads is measured as well: the net against an fp32 copy of itself, its prediction at timesteps as it receives them against exact
ones, images drawn with the run's sampler state against an fp32 one, and MONAI's noise schedule after it has been used as training uses it.

Kahan compensation mends the weights alone: its exp_avg_sq, rounded to nearest, is a finding (and none with --stochastic beside it). So is one
in 8-bit codes to nearest, and one in 4-bit codes.
Not examined: exp_avg, which loses nothing at beta1 = 0.9 (steps of 0.1 of the difference are far above a bf16 ulp), the all-reduce of several
processes, and FP8 casts by Transformer Engine or torchao.
"""

import copy
import dataclasses
import json
import math
import textwrap
from pathlib import Path

import torch

import precision as recipes
from strategies import STRATEGIES, TIMESTEPS, Rng
from trainer import BatchIndices, RunError, Trainer, read_checkpoint

MAY_DIFFER = {"device", "threads", "data"}  # flags beside --diagnose: where it runs and where the data lie now

WIDTH = 120
STEPS = 8  # further steps in memory
IMAGES = 16
WORK = 5e9  # parameters x pixels x images of one step; about a second on a CPU core. Beyond it the batch is cut

# When a figure becomes a finding, and when a severe one: one that can ruin samples by itself. Reasons beside them.
LIMITS = {
    # share of the wanted movement of the weights that is not written. fp32, stochastic, Kahan and split measure 0.00, nearest at lr 3e-4
    # half of it. Never severe: in experiment 001 such weights still draw digits
    "update": (0.05, math.inf),
    # the same for decay alone, which is either written or not
    "weight decay": (0.5, math.inf),
    # the same of an average, among entries more than 2 ulp from their weight: closer ones are as good as the format allows. From a quarter
    # on the average trails far behind its weights, whatever its decay says (decay 0.99 in bf16)
    "ema": (0.05, 0.25),
    # the same of the shrinking of v. At beta2 = 0.99 bf16 loses the last steps before v = g^2, and little is gained by them; at 0.999 all
    "exp_avg_sq": (0.3, math.inf),
    # share of the initial weights in an average when the run ends. 5 % remains after 3 / (1-decay) steps
    "arrival": (0.1, 0.3),
    # relative RMS change of the prediction; the images suffer when it nears the net's own error. Any timestep lost is a finding as well
    "timesteps": (0.001, 0.1),
    # relative RMS change of the images drawn. An fp32 state gives 0 exactly; 0.2 % is a fifth of a grey level in eight bits
    "sampler": (0.002, 0.1),
    # the same with the noise schedule as one use leaves it
    "scheduler": (0.002, 0.1),
    # relative RMS change of the prediction against an fp32 copy of the net. bf16 matmuls measure 0.01 and score as fp32 does
    "compute": (0.1, 0.5),
    # relative change of the mean loss: ten times the rounding of a bf16 number
    "loss": (0.03, math.inf),
    # relative error of the summed gradient. One rounding to bf16, which no recipe of bf16 gradients avoids, is 0.0017
    "accumulate": (0.004, 0.1),
    # shares of values that FP8 casts make zero or clip. Experiment 019 saw at most 0.005 and, at step 50 of delayed scaling, 0.0004; what is
    # clipped is what is largest
    "fp8 zeroed": (0.05, 0.5),
    "fp8 clipped": (0.001, 0.1),
    # share of recent steps that the loss scaler skipped: in good health one in 2000, plus a few at the start
    "skipped": (0.05, 0.5),
}
SCHEDULE = 0.01  # relative error of 1 - alphas_cumprod: 1e-4 at t = 0, which fp32 forms from a number next to 1 to 1e-3


@dataclasses.dataclass
class Finding:
    site: str
    severity: str  # severe: can ruin samples by itself; moderate: costs quality; note: nothing is lost
    text: str
    remedy: str

    @property
    def beside(self):
        """Whether it is a further average (--average), which generation reads only when asked to."""
        return self.site.startswith("average ")


@dataclasses.dataclass
class Diagnosis:
    """findings: list of Finding, the one to blame first. sound: {site: share lost, or relative change} of what else was examined."""

    head: str
    findings: list
    sound: dict

    @property
    def status(self):
        return int(any(f.severity != "note" for f in self.findings))

    @property
    def verdict(self):
        losing = [f for f in self.findings if f.severity != "note"]
        read = [f for f in losing if not f.beside]
        if not losing:
            return "healthy: nothing is losing information"
        if not read:
            return "what generation reads is healthy; the findings are in averages kept beside it"
        if read[0].severity == "severe":
            return f"most likely to blame for bad samples: {read[0].site}"
        return f"nothing found here ruins samples by itself; most likely to blame for lost quality: {read[0].site}"

    def __str__(self):
        rows = [(f.site, f.severity, f"{f.text} -> {f.remedy}") for f in self.findings]
        rows = [("site", "severity", "finding"), *rows] if rows else []
        site, severity = (max((len(row[i]) for row in rows), default=0) + 2 for i in (0, 1))
        lines = []
        for row in rows:
            lines += textwrap.wrap(f"{row[0]:<{site}}{row[1]:<{severity}}{row[2]}", WIDTH, subsequent_indent=" " * (site + severity))
        sound = ", ".join(f"{name} {share:.2%}" for name, share in self.sound.items())
        lines += textwrap.wrap(f"sound (share lost, or relative change): {sound}", WIDTH, subsequent_indent="  ") if sound else []
        return "\n".join([self.head, *lines, self.verdict])


def diagnose(path, defaults, flags):
    """Diagnosis of a checkpoint file or a run's folder. defaults: train.DEFAULTS; flags: those typed beside --diagnose.

    Raises RunError for what is no checkpoint of this program, and what Trainer raises (data that have moved, a GPU that is not here).
    """
    for flag in sorted(set(flags) - MAY_DIFFER):
        raise RunError(f"--diagnose examines a run as it was trained: --{flag} can't differ; drop it")
    checkpoint = read_checkpoint(path)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    config = {**defaults, **checkpoint["config"], "device": "auto", "threads": 0, "export": "", **flags}
    with torch.compiler.set_stance("force_eager"):  # compiling a peer's step costs more than these few
        return _Examination(config, checkpoint, folder).diagnosis()


def _read_metrics(path):
    """Lines of metrics.jsonl as dicts; a running run may have written half of its last one."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


class Tally:
    """Of the entries of a site: the movement wanted, and what was written of that part of it which rounding to nearest would lose.

    A write is judged by sums, not entry by entry: stochastic rounding leaves most entries where they are and is right on average.
    """

    def __init__(self):
        self.wanted = self.threatened = self.written = self.error = 0.0
        self.entries = self.threatened_entries = 0

    def add(self, stays, old, target, new, among=True, scale=1.0):
        """stays: whether rounding the target to nearest may lose the move; old, target, new: fp32 values held before, wanted, held after. All [n]."""
        step, moved = (target - old) / scale, (new - old) / scale
        among = among & (step != 0) & step.isfinite() & moved.isfinite()
        threatened = among & stays
        self.entries += int(among.sum())
        self.threatened_entries += int(threatened.sum())
        self.wanted += float(step[among].double().abs().sum())
        step, moved = step[threatened].double(), moved[threatened].double()
        self.threatened += float(step.abs().sum())
        self.written += float((moved * step.sign()).sum())
        self.error += float((moved - step).square().sum())

    @property
    def lost(self):
        """Share of the wanted movement that was lost for sure: less 3 standard errors of what noise leaves uncertain."""
        return max(0.0, self.threatened - self.written - 3 * math.sqrt(self.error)) / max(self.wanted, 1e-300)

    @property
    def stuck(self):
        """Share of the entries whose wanted step is under half an ulp."""
        return self.threatened_entries / max(1, self.entries)

    @property
    def kept(self):
        """Share of those steps, by size, that was written all the same."""
        return self.written / max(self.threatened, 1e-300)


def _stays(stored, target):
    """Whether `target`, rounded to nearest in the dtype of `stored`, is the same."""
    return target.to(stored.dtype) == stored


def _sample(t):
    t = t.detach().reshape(-1)
    return t[:: max(1, t.numel() // 65536)]


def _samples(tensors):
    """A flat copy: tensors of one dtype, sampled."""
    return torch.cat([_sample(t) for t in tensors])


def _relative(a, b):
    """Relative RMS difference of a from b; inf where either is not finite."""
    value = float((a.double() - b.double()).square().mean().sqrt() / b.double().square().mean().sqrt().clamp_min(1e-300))
    return value if value == value else math.inf


class _Examination:
    def __init__(self, config, checkpoint, folder):
        self.config, self.checkpoint, self.metrics = config, checkpoint, _read_metrics(folder / "metrics.jsonl")
        self.found, self.sound = [], {}
        self.trainer = Trainer({**config, "warmup": 0}, draws=True)  # with warmup 0 the steps are of full size, as in most of the run
        self.precision, self.recipe, self.data = self.trainer.precision, self.trainer.recipe, self.trainer.data
        self.train = self._pairs(folder) if config["task"] == "reflow" else self.data.train
        # of a run that started from another one's weights nothing is known about them
        fresh = not (config["finetune"] or config["teacher"])
        self.start = {name: _sample(value).clone() for name, value in self.precision.weights("raw").items()} if fresh else None
        self.trainer.restore(checkpoint)
        self.pixels = self.data.image_size**2 * sum(p.numel() for p in self.precision.params)
        self.work = WORK * (100 if self.trainer.device.type == "cuda" else 1)
        for part in (self.precision.optimizer, *self.precision.averages.values()):
            part.compiled = False

    @staticmethod
    def _pairs(folder):
        import reflow

        if not (folder / reflow.PAIRS).exists():
            raise RunError(f"--diagnose takes a student some steps further on its teacher's pairs, and {folder}/{reflow.PAIRS} is not there: give the run's own folder")
        return reflow.read_pairs(folder)

    def diagnosis(self):
        self.logged()
        if self.finite():
            if self.config["task"] != "segment":
                self.generation()
            self.computing()
            self.accumulation()
            self.stepping()
        self.found.sort(key=lambda f: (f.beside, ["severe", "moderate", "note"].index(f.severity)))
        head = f"step {self.checkpoint['step']} of {self.config['steps']}, {self.config['model']} on {self.data.name}"
        return Diagnosis(head, self.found, self.sound)

    def judge(self, limit, figure, text, remedy, site=None, certain=False):
        """A finding if `figure` is beyond LIMITS[limit] or `certain`, else a line of `sound`. Returns whether it is one."""
        low, high = LIMITS[limit]
        if certain or figure > low:
            self.found.append(Finding(site or limit, "severe" if figure > high else "moderate", text, remedy))
            return True
        self.sound[site or limit] = figure
        return False

    def strategy(self, **sites):
        """The run's task with some sites changed, and a noise schedule that nobody has used yet."""
        return STRATEGIES[self.config["task"]](self.data, dataclasses.replace(self.recipe, **sites), self.config)

    def net(self, **sites):
        """The net with its last weights, frozen: they tell what a site does even where the average is ruined."""
        view = copy.copy(self.precision)
        view.recipe = dataclasses.replace(self.recipe, **sites)
        return view.generator("raw")

    def rng(self, *words):
        return Rng(recipes.hash64(self.config["seed"], 6, *words) >> 1, device=self.trainer.device)

    # -- what the run has written down

    def logged(self):
        rows, scaled = self.metrics, self.recipe.compute == "fp16"
        overflows = [row for row in rows if row.get("nonfinite_grads")]
        if overflows and not scaled:
            text = f"{sum(r['nonfinite_grads'] for r in overflows)} gradient entries were not finite, last at step {overflows[-1]['step']}"
            self.found.append(Finding("grads", "severe", text, "lower --lr, --clip_grad 1 or --warmup"))
        if rows and not math.isfinite(rows[-1].get("loss", 0.0)):
            text = f"the loss was {rows[-1]['loss']} at step {rows[-1]['step']}"
            self.found.append(Finding("loss", "severe", text, "lower --lr, --clip_grad 1 or --bf16"))
        if not scaled:
            return
        scale = rows[-1].get("loss_scale") if rows else None
        scale = self.precision.scaler.get_scale() if scale is None else scale
        recent = [(row["step"], row["skipped_steps"]) for row in rows if "skipped_steps" in row][-11:]
        steps, skips = (last - first for first, last in zip(recent[0], recent[-1])) if recent else (0, 0)
        skipped = skips / max(1, steps)
        text = f"the loss scaler skipped {skipped:.0%} of the last steps; the scale is {scale:g}"
        # below 1 the scaler shrinks gradients: they overflow as they are
        self.judge("skipped", skipped, text, "--bf16, or lower --lr", site="grads", certain=scale < 1)

    def finite(self):
        """Whether all weights, averages and states are; a finding for each kind that is not."""
        saved, bad = self.checkpoint["precision"], {}

        def count(site, value):
            if isinstance(value, dict):
                for key, inner in value.items():
                    count(site or (key if isinstance(key, str) and torch.is_tensor(inner) else ""), inner)
            elif torch.is_tensor(value) and value.is_floating_point() and value.numel() > 1:
                bad[site] = bad.get(site, 0) + int((~value.isfinite()).sum())

        count("weights", saved["model"])
        count("", saved["optimizer"]["state"])
        for name, average in saved["averages"].items():
            count(_title(name), average)
        for site, number in bad.items():
            if number:
                remedy = "train again with a lower --lr, --clip_grad 1 or --bf16"
                self.found.append(Finding(site, "severe", f"{number:,} entries are not finite", remedy))
        return not any(bad.values())

    # -- what generation reads

    @torch.no_grad()
    def generation(self):
        images, labels = (t[:IMAGES] for t in self.strategy()._heldout(self.trainer.device))
        exact, rng = self.strategy(timesteps="fp32", scheduler="fp32"), self.rng(1)
        noise, seen = rng.normal(*images.shape), []
        spy = lambda x, t, labels: (seen.append((x, t)), torch.zeros_like(x))[1]
        exact.errors(spy, images, labels, noise, exact.draw_timesteps(rng, len(images)))
        x, t = seen[0]
        net = self.net()
        self.plain = lambda model: exact.predict(model, x, t, labels)

        every = torch.arange(TIMESTEPS, dtype=torch.float32, device=x.device)
        self.strategy().predict(spy, x[:1].expand(TIMESTEPS, -1, -1, -1), every, labels[:1].expand(TIMESTEPS))
        received = seen[-1][1].double()
        change = _relative(self.strategy().predict(net, x, t.float(), labels), exact.predict(net, x, t.float(), labels))
        distinct, error = received.unique().numel(), float((received - every.double()).abs().max())
        text = f"0..999 reach the net as {distinct} values, up to {error:g} off; its prediction changes by {change:.2%}"
        self.judge("timesteps", change, text, "--set timesteps=fp32", certain=distinct < TIMESTEPS)

        steps, size = self.config["sample_steps"], x.shape[1:]
        count = int(max(2, min(len(x), self.work / (self.pixels * steps))))
        noise = rng.normal(count, *size)
        draw = lambda **sites: self.strategy(**sites).sample(net, labels[:count], noise, steps)
        reference = draw(sampler="fp32", scheduler="fp32")
        change = _relative(draw(scheduler="fp32"), reference)
        text = f"{count} images drawn in {steps} steps differ by {change:.1%} from those of an fp32 state"
        self.judge("sampler", change, text, "--set sampler=fp32")
        if self.config["task"] == "ddpm":
            used = self.strategy(sampler="fp32")
            # as training uses it: MONAI's add_noise may leave its buffer in the dtype of the images
            used.loss(net, (images, labels), self.rng(2))
            self.schedule(used, used.sample(net, labels[:count], noise, steps), reference)

    def schedule(self, used, drawn, reference):
        buffer = used.scheduler.alphas_cumprod
        before, after = 1 - used.schedule, 1 - buffer.double().cpu()
        error, zeros = float(((after - before) / before).abs().max()), int((after == 0).sum())
        change, nan = _relative(drawn, reference), float((~drawn.isfinite()).float().mean())
        text = (f"after one add_noise alphas_cumprod is {recipes.NAMES.get(buffer.dtype)}: sigma^2 is up to {error:.0%} off and 0 at "
                f"{zeros} timesteps, where a sampler divides by it; images drawn in {self.config['sample_steps']} steps differ by "
                f"{change:.1%}, {nan:.0%} of their pixels are not finite")
        self.judge("scheduler", change, text, "--set scheduler=fp32", certain=error > SCHEDULE)

    @torch.no_grad()
    def computing(self):
        if self.config["task"] == "segment":
            images = self.data.heldout[list(range(min(4, len(self.data.heldout))))][0].to(self.trainer.device)
            self.plain = lambda model: model(images)
        full, own = (self.plain(self.net(loss="fp32", **more)) for more in ({"generation": "fp32"}, {}))
        change = _relative(own, full)
        self.judge("compute", change, f"the net's output differs by {change:.1%} from that of an fp32 copy of itself", "--bf16, or no flag")
        if self.config["task"] != "segment":
            images, labels = (t.to(self.trainer.device) for t in self.train[list(range(min(IMAGES, len(self.train))))])
            loss = lambda **sites: float(self.strategy().loss(self.net(**sites), (images, labels), self.rng(3)))
            own, full = loss(), loss(loss="fp32")
            change = abs(own - full) / max(abs(full), 1e-300)
            self.judge("loss", change, f"the loss is {own:.4g} and in fp32 {full:.4g}", "--set loss=fp32")

    # -- what training writes

    def batches(self, size, micro):
        for indices in BatchIndices(len(self.train), size, self.config["seed"], self.trainer.step * micro):
            yield self.train[indices]

    def accumulation(self):
        c, precision = self.config, self.precision
        if c["accumulate"] == 1 or not self.recipe.low_weights or c["optimizer"] == "torchastic":  # its hooks take gradients away
            return
        precision.accumulate = count = min(64, c["accumulate"])
        size = int(max(1, min(c["batch_size"], 8, self.work / (self.pixels * count))))

        def gradients():
            for micro, batch in zip(range(count), self.batches(size, 1)):
                images, target = (t.to(self.trainer.device) for t in batch)
                precision.backward(self.trainer.strategy.loss(precision, (images, target), self.rng(4, micro)))
                yield

        def take():
            grads = precision.sums or {p: p.grad for p in precision.params if p.grad is not None}
            precision.sums = {}
            precision.optimizer.zero_grad(set_to_none=True)
            return grads

        exact = {}
        for _ in gradients():
            for p, g in take().items():
                exact[p] = exact.get(p, 0) + g.double()
        for _ in gradients():
            pass
        summed = take()
        off = sum(float((summed[p].double() - g).square().sum()) for p, g in exact.items())
        error = math.sqrt(off / max(sum(float(g.square().sum()) for g in exact.values()), 1e-300))
        self.judge("accumulate", error, f"the sum of {count} micro-batches of gradients is {error:.2%} off", "--set accumulate=fp32")

    def stepping(self):
        """The run's own next steps, in memory; what each wrote against what fp32 wanted."""
        trainer, precision, c = self.trainer, self.precision, self.trainer.config
        images = c["batch_size"] * c["accumulate"]
        c["accumulate"] = max(1, min(c["accumulate"], STEPS, int(self.work / (self.pixels * c["batch_size"]))))
        c["batch_size"] = int(max(1, min(c["batch_size"], self.work / self.pixels)))
        whole = images == c["batch_size"] * c["accumulate"]  # else gradients are noisier than those that v has seen
        precision.accumulate = c["accumulate"]
        trainer.batches = self.batches(c["batch_size"], c["accumulate"])
        updates, moments, averages = Tally(), Tally(), {name: Tally() for name in precision.averages}
        groups, squares, before, casts = {}, {}, {}, []
        for p in precision.params:  # tensors alike are judged as one
            v = self.second_moment(p)
            groups.setdefault((p.dtype, None if v is None else v.dtype, self.coded(p)), []).append(p)
        names = {p: name for name, p in precision.named_params}

        def look(optimizer, args, kwargs):
            grads = kwargs.get("grads") or {p: p.grad for p in precision.params}
            for key, params in groups.items():
                own = [p for p in params if grads.get(p) is not None]
                if own:
                    g = [_sample(grads[p]).float() * kwargs.get("grad_scale", 1.0) for p in own]
                    v = None if key[1] is None else [_sample(self.second_moment(p)) for p in own]
                    before[key] = own, _samples(own), self.held(own), self.wanted(own, g, v), self.shrinking(own, g, v), torch.cat(g)

        hook = precision.optimizer.register_step_pre_hook(look)
        for _ in range(STEPS // c["accumulate"] if whole else 2):
            before.clear()
            shadows = {(name, key): _samples(average.shadow[names[p]] for p in params)
                       for name, average in precision.averages.items() for key, params in groups.items()}
            casts.append(trainer.train_step(measure=precision.fp8 is not None)[1])
            for key, (params, stored, held, step, v, g) in before.items():
                step = self.intended(params, held) if step is None else step
                if step is not None:
                    updates.add(_stays(stored, held + step), held, held + step, self.held(params))
                if v is not None:
                    old, target, stays = v
                    new = _samples(self.second_moment(p) for p in params).float()
                    moments.add(stays, old, target, new, among=(target < old) & (old > 1e-30), scale=old.clamp_min(1e-30))
                    squares.setdefault(key, (params, []))[1].append(g.double().square())
            for (name, key), old in shadows.items():
                average, value = precision.averages[name], old.float()
                gap, new = self.held(groups[key]) - value, _samples(average.shadow[names[p]] for p in groups[key])
                # within 2 ulp the average is as near its weight as its format lets it be
                far = gap.abs() > 2 * torch.finfo(old.dtype).eps * value.abs()
                target = value + (1 - average.decay) * gap
                averages[name].add(_stays(old, target), value, target, new.float(), among=far)
        hook.remove()
        if updates.entries:
            text = (f"{updates.stuck:.0%} of the updates are under half an ulp of their weight, and {updates.kept:.0%} of them is written: "
                    f"{updates.lost:.0%} of the wanted movement is lost")
            self.judge("update", updates.lost, text, self.writing())
        if moments.entries:
            ratio = self.too_large(squares.values()) if whole else None
            size = f"; v is {ratio:.1f} times the mean of g^2 over {STEPS} batches" if ratio else ""
            # no rounding helps 4-bit codes below the least one, a 16th of the block's largest
            remedy = {"int8": "--stochastic", "int4": "--stochastic --opt8bit"}.get(self.recipe.exp_avg_sq, "--set exp_avg_sq=fp32, or --beta2 0.99")
            # codes may carry v the wrong way: a block's scale that moves moves all of its values
            lost = f"{moments.lost:.0%} of the shrinking of v is lost: it can grow and not shrink" if moments.lost <= 1 else "v grows where it should shrink"
            self.judge("exp_avg_sq", moments.lost, lost + size,
                       remedy if c["optimizer"] == "adamw" else self.writing())
        for name, tally in averages.items():
            self.average(name, precision.averages[name], tally)
        self.fp8(casts)
        self.decay()

    def fp8(self, reports):
        """What FP8 casts made zero and clipped in the steps of these reports, the worst operand of each; the casts of other libraries don't tell."""
        options = self.recipe.fp8
        for site, kind in (("fp8 zeroed", "underflow"), ("fp8 clipped", "saturated")):
            shares = {name: sum(report.get(name, 0.0) for report in reports) / len(reports) for name in reports[0] if name.startswith(f"fp8_{kind}_")}
            if not shares:
                return
            worst = max(shares, key=shares.get)
            operand = worst.removeprefix(f"fp8_{kind}_")
            if options.recipe == "delayed":  # a scale from past amaxes: too small after a spike, too large while values grow
                remedy = "--fp8_recipe tensorwise, or a shorter --amax_history_len"
            elif operand == "grad" and options.format == "e4m3":
                remedy = "--fp8_format hybrid"
            else:
                remedy = "--fp8_recipe rowwise" if options.recipe == "tensorwise" else "train without --fp8"
            what = "non-zero values become zero" if kind == "underflow" else "values are clipped"
            self.judge(site, shares[worst], f"{shares[worst]:.1%} of the {what}, {operand} operands of FP8 products", remedy)

    def group(self, p):
        return next(g for g in self.precision.optimizer.param_groups if any(p is q for q in g["params"]))

    def decays(self, p):
        """(beta1, beta2, steps for the bias correction) of AdamW's next or last step on `p`."""
        group, step = self.group(p), float(self.precision.optimizer.state[p].get("step", self.precision.ema.step))
        if "beta1" not in group:
            return *group["betas"], step
        # torch-optimi keeps its moments corrected: its decays approach the betas, and nothing is left to correct
        step = float(self.precision.ema.step)
        return *(1 - (1 - beta) / (1 - beta**step) for beta in (group["beta1"], group["beta2"])), math.inf

    def writing(self):
        """The remedy for writes that lose something."""
        if self.config["optimizer"] != "adamw":
            return f"--stochastic without --optimizer {self.config['optimizer']}"
        return "--stochastic without --opt8bit" if self.recipe.exp_avg == "int8" else "--stochastic, --kahan or --master split"

    def held(self, params):
        """Flat fp32 sample of the values that the optimiser holds for `params`, a peer's compensation included."""
        values = []
        for p in params:
            low, state = self.precision.low_part(p), self.precision.optimizer.state.get(p, {})
            for name in ("kahan_comp", "shift"):  # torch-optimi, adamw-bf16
                low = state.get(name) if low is None else low
            values.append(recipes.exact_weight(_sample(p), None if low is None else _sample(low)))
        return torch.cat(values)

    def second_moment(self, p):
        return self.precision.moment(p, "exp_avg_sq")

    def first_moment(self, p):
        return self.precision.moment(p, "exp_avg")

    def coded(self, p):
        """Whether exp_avg_sq of `p` is held in codes, by our AdamW or by bitsandbytes'."""
        return not {"exp_avg_sq_scale", "absmax2"}.isdisjoint(self.precision.optimizer.state.get(p, {}))

    def wanted(self, params, grads, moments):
        """The fp32 update that the next step wants for `params`, flat; None where only the moments it leaves tell. grads and moments (exp_avg_sq): samples."""
        if moments is None:
            return None
        steps = [self.precision._intended(p, g, self.held([p]), v.float()) for p, g, v in zip(params, grads, moments)]
        return None if steps[0] is None else torch.cat(steps)

    def shrinking(self, params, grads, moments):
        """(held, wanted, may stay) of exp_avg_sq at the next step, flat; None for moments None. What rounding to nearest would leave where it
        is may stay. Of codes all may: with its block's scale a code moves although it stays the same, as the block's largest wants."""
        if moments is None:
            return None
        held, g, beta2 = torch.cat(moments), torch.cat(grads), self.decays(params[0])[1]
        target = beta2 * held.float() + (1 - beta2) * g * g
        return held.float(), target, torch.ones_like(g, dtype=torch.bool) if self.coded(params[0]) else _stays(held, target)

    def intended(self, params, held):
        """The fp32 update of a peer's AdamW, its last step's, from the moments it left; None where they are not plain numbers."""
        moments = [(self.first_moment(p), self.second_moment(p)) for p in params]
        if any(m is None or v is None for m, v in moments):
            return None
        (beta1, beta2, step), group = self.decays(params[0]), self.group(params[0])
        m, v = (_samples(column).float() for column in zip(*moments))
        denominator = (v / (1 - beta2**step)).sqrt() + group["eps"]
        return -float(group["lr"]) * (m / (1 - beta1**step) / denominator + group["weight_decay"] * held)

    def too_large(self, squares):
        """v against the mean of g^2: geometric mean of the tensors' ratios, weighted by size. Single entries are too noisy."""
        logs, weights = 0.0, 0
        for params, of_steps in squares:
            means = torch.stack(of_steps).mean(0).split([_sample(p).numel() for p in params])
            for p, g in zip(params, means):
                _, beta2, step = self.decays(p)
                v, g = float(_sample(self.second_moment(p)).double().mean()) / (1 - beta2**step), float(g.mean())
                if v > 0 and g > 0:
                    logs, weights = logs + p.numel() * math.log(v / g), weights + p.numel()
        return math.exp(logs / weights) if weights else None

    def average(self, name, average, tally):
        c, site, q, done = self.config, _title(name), average.decay, self.checkpoint["step"]
        text = f"{tally.stuck:.0%} of the entries away from their weight can't move, {tally.lost:.0%} of the wanted movement is lost"
        if self.start:
            gap = toward = 0.0
            for key, p in self.precision.named_params:
                w, s = self.held([p]).double(), _sample(average.shadow[key]).double()
                way = self.start[key].double() - w
                gap, toward = gap + float(((s - w) * way).sum()), toward + float(way.square().sum())
            held, steady = gap / max(toward, 1e-300), (1 - q**done) / (done * (1 - q))
            text += (f"; it is {held:.0%} of the way back to the initial weights, and an exact one of decay {q:g} is {steady:.0%} back when the "
                     f"weights move steadily")
        remedy = "--set ema=fp32, or ema_update=stochastic" if name == "ema" else f"--average {q:g}:fp32"
        if self.judge("ema", tally.lost, text, remedy, site=site):
            return
        planned = max(done, c["steps"])
        remains = q**planned
        if self.start and remains > LIMITS["arrival"][0]:
            # a run so short that the default decay has not arrived either is young, not ill
            young = 0.999**planned > LIMITS["arrival"][0]
            severity = "note" if young else "severe" if remains > LIMITS["arrival"][1] else "moderate"
            if not young:
                del self.sound[site]
            text = (f"the average has not arrived: exp(-(1-decay) steps) = {remains:.0%} of the start remains after {planned} steps of "
                    f"decay {q:g}; nothing is lost by rounding")
            self.found.append(Finding(site, severity, text, f"a decay of {max(0.0, 1 - 3 / planned):.4g} or less, or more --steps"))

    def decay(self):
        """Weight decay alone: steps without gradient or momentum. Last, for it spoils the state."""
        precision, tally = self.precision, Tally()
        if not self.config["weight_decay"]:
            return
        for p in precision.params:
            state = precision.optimizer.state[p]
            scale = next((state[name] for name in ("exp_avg_scale", "absmax1") if name in state), None)
            m = self.first_moment(p) if scale is None else scale  # codes are zero where their scale is
            if m is None or "accumulated_decay" in state:  # adamw-bf16 saves its decay up for one large step
                return
            m.zero_()
        for _ in range(STEPS):
            before = [(_sample(p).clone(), self.held([p])) for p in precision.params]
            for p in precision.params:
                p.grad = torch.zeros_like(p)
            precision.optimizer.step()
            for p, (stored, held) in zip(precision.params, before):
                target = held * (1 - float(self.group(p)["lr"]) * self.group(p)["weight_decay"])
                tally.add(_stays(stored, target), held, target, self.held([p]))
        rate = self.config["lr"] * self.config["weight_decay"]
        text = f"a weight should shrink by lr*wd = {rate:.1g} of itself a step; {tally.lost:.0%} of that is lost"
        self.judge("weight decay", tally.lost, text, self.writing())


def _title(name):
    return name if name == "ema" else f"average {name}"
