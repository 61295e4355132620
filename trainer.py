"""The loop. One step reads top to bottom in `Trainer.train_step`; around it: resume, logging, pictures, scores, several processes.

A run is a folder, runs/NAME/: config.json (command and resolved flags), ledger.json (the precision of every site), env.json (versions,
machine, commit), metrics.jsonl (a line a logged step), samples/*.png, TensorBoard events, checkpoint.pt (tensors and plain values, written
beside and renamed), summary.json (final scores). The same command run again resumes. All randomness is a function of (seed, step), noise of
rounding included, so on CPU an interrupted run equals an uninterrupted one bit for bit.
"""

import errno
import json
import os
import pickle
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save as safetensors_bytes
from torch.nn.parallel import DistributedDataParallel
from torchvision.utils import save_image
from tqdm import tqdm

import data as datasets
import models
from precision import FP8_FLAGS, Precision, check_machine, cpu_threads, device_facts, hash64, recipe
from strategies import STRATEGIES, TIMESTEPS, Rng

# Flags that may change between the runs of one folder: they say how long, how often and with what help, not what is computed.
FREE = {"steps", "log_every", "sample_every", "checkpoint_every", "workers", "device", "name", "runs", "export", "weights", "samples",
        "sample_batch", "threads", "teacher"}  # a teacher is told by its weights, not by its path


class RunError(ValueError):
    """A run that can't start or go on. The message is one line: what is wrong and what to do."""


class Stopped(Exception):
    """Asked to stop by a signal; the checkpoint is written. args: message, signal number."""


# ---------------------------------------------------------------------------------------------------------------------------------------
# Files of a run


def write_json(path, value):
    write_atomically(path, lambda file: file.write(json.dumps(value, indent=1, allow_nan=True).encode() + b"\n"))


def write_atomically(path, write):
    """Write a file beside `path` and rename it over: what was there stays whole until the new one is. Raises RunError when it can't."""
    path = Path(path)
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        beside.unlink(missing_ok=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or (path.parent.exists() and shutil.disk_usage(path.parent).free < 1 << 20)
        reason = "no space left on the device" if full else str(error).splitlines()[0]
        kept = "; the one written before is whole" if path.exists() else ""
        raise RunError(f"can't write {path}: {reason}{kept}; free some space or choose another --runs folder, then run the same command again") from None


def read_checkpoint(path):
    """The dict of a checkpoint file, loaded without running any code in it. Raises RunError for anything else."""
    path = Path(path)
    if path.is_dir():
        path = path / "checkpoint.pt"
    if not path.is_file():
        raise RunError(f"no checkpoint at {path}: give the checkpoint.pt of a run, or its folder")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(checkpoint, dict) and checkpoint["format"] == 1 and {"config", "step", "seconds", "interval", "since", "precision"} <= set(checkpoint):
            return checkpoint
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, LookupError, TypeError, ValueError, AttributeError):
        pass
    raise RunError(f"{path} is no checkpoint of this program, or is cut short: train again, or use another one")


def environment(device):
    """Versions, machine and commit of a run, for its env.json and for the log."""
    import monai
    import torchvision

    def git(*args):
        done = subprocess.run(["git", "-C", str(Path(__file__).parent), *args], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), cpu)
    status = git("status", "--porcelain", "--", ".", ":!experiments", ":!*.md")  # a log that grows while it runs is no change of the code
    kind, capability, features = device_facts(device)
    return {"python": platform.python_version(), "torch": torch.__version__, "torchvision": torchvision.__version__, "monai": monai.__version__,
            "cpu": cpu, "cores": cpu_threads(), "threads": torch.get_num_threads(), "bf16": sorted(features & {"avx512_bf16", "amx_bf16", "bf16"}),
            "gpu": torch.cuda.get_device_name(device) if kind in ("cuda", "rocm") else None, "capability": capability,
            "commit": git("rev-parse", "HEAD"), "clean": status == "" if status is not None else None}


def _ignore_interrupt(worker):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the trainer ends its own workers


def peak_memory(device):
    """Peak bytes: of the CUDA allocator, or the process's largest resident set (libraries included) on a CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Order of the data


class BatchIndices:
    """Index lists, one a micro-batch, from `start` on: shuffled epochs laid end to end, each a function of (seed, epoch); a rank's own rows."""

    def __init__(self, n, batch_size, seed, start=0, rank=0, world=1):
        self.n, self.batch_size, self.seed, self.start, self.rank, self.world = n, batch_size, seed, start, rank, world

    def __iter__(self):
        own = self.batch_size // self.world
        position, epoch, order = self.start * self.batch_size, None, None
        while True:
            batch = []
            for at in range(position + self.rank * own, position + (self.rank + 1) * own):
                if at // self.n != epoch:
                    epoch = at // self.n
                    order = torch.randperm(self.n, generator=torch.Generator().manual_seed(hash64(self.seed, epoch, 1) >> 1)).tolist()
                batch.append(order[at % self.n])
            position += self.batch_size
            yield batch


# ---------------------------------------------------------------------------------------------------------------------------------------


def sparse24_of(flags):
    """The value of the sparse24 site that the flags of a run resolve to; runs older than the flag have none."""
    return [flags.get("sparse24", "none"), *(s.removeprefix("sparse24=") for s in flags["set"] if s.startswith("sparse24="))][-1]


class Trainer:
    """A run, set up from resolved flags (train.DEFAULTS): `fit()` trains and scores it, `draw()` samples from its weights.

    teacher: a reflow.Teacher, which `fit()` needs for --task reflow. dry: shapes without memory, to print. draws: only draw() will be called,
    whose checkpoint brings the weights. defaults: of all flags, for folders written before some of them existed.
    Raises RunError, precision.RecipeError, data.DataError, models.ModelError, all before anything is written.
    """

    def __init__(self, config, command=(), dry=False, draws=False, teacher=None, defaults=None):
        self.config, self.command, self.teacher, self.defaults = config, list(command), teacher, defaults or {}
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = self._device(config["device"])
        if config["threads"]:
            torch.set_num_threads(config["threads"])
        flags = ("bf16", "fp16", "pure_bf16", "stochastic", "kahan", "master", "opt8bit", "opt4bit", "sparse24", "fp8", *FP8_FLAGS)
        self.recipe = recipe(sites=config["set"], **{k: config[k] for k in flags}).on(self.device)
        self.notes = check_machine(self.recipe, self.device) + self.recipe.warnings(
            beta2=config["beta2"], ema_decay=config["ema_decay"], lr=config["lr"], weight_decay=config["weight_decay"], micro_batches=config["accumulate"])
        if config["task"] == "ddpm" and TIMESTEPS % config["sample_steps"]:
            fits = [n for n in range(1, TIMESTEPS + 1) if TIMESTEPS % n == 0]
            near = min(fits, key=lambda n: abs(n - config["sample_steps"]))
            raise RunError(f"--sample_steps {config['sample_steps']}: MONAI's DDIM steps are {TIMESTEPS} // steps apart, so ddpm needs a divisor; use {near}")
        if (config["task"] == "reflow") != bool(config["teacher"]):
            raise RunError("--task reflow learns from a teacher's images: add --teacher CHECKPOINT, of a run with --task rflow" if not config["teacher"] else
                           f"--teacher is for --task reflow, and this is --task {config['task']}: add --task reflow, or drop it")
        if config["batch_size"] % self.world:
            raise RunError(f"--batch_size {config['batch_size']} can't be shared by {self.world} processes: use a multiple of {self.world}")
        if self.world > 1 and config["optimizer"] == "torchastic":
            raise RunError("--optimizer torchastic takes gradients away by hooks before several processes can sum them: use --optimizer adamw --stochastic")
        self.data = datasets.load(config["data"], config["task"], config["image_size"], config["seed"])
        if self.data.kind == "generation" and min(len(self.data.train), len(self.data.heldout)) < 2:
            raise RunError(f"{self.data.name} has {len(self.data.train)} images to train on and {len(self.data.heldout)} held out, and the scores need two of "
                           f"each: add images, 30 or more")
        self.strategy = STRATEGIES[config["task"]](self.data, self.recipe, config)
        self.folder = Path(config["runs"]) / config["name"]
        self.precision = self._precision(torch.device("meta") if dry else self.device, None if draws else self._start())
        if config["export"] and not Path(config["export"]).absolute().parent.is_dir():
            raise RunError(f"--export {config['export']}: there is no folder {Path(config['export']).parent}; make it, or name another")
        self.step, self.seconds, self.stop, self.ddp = 0, 0.0, None, None
        self.interval, self.since = 0, 0.0  # steps and sum of their losses since the last logged line

    def _device(self, name):
        local = int(os.environ.get("LOCAL_RANK", 0))
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda":
            if not torch.cuda.is_available():
                raise RunError("--device cuda: torch finds no CUDA device here; use --device cpu, or a torch build with CUDA on a machine with a GPU")
            torch.cuda.set_device(local)
            name = f"cuda:{local}"
        return torch.device(name)

    def _net(self, device):
        c, d = self.config, self.data
        torch.manual_seed(hash64(c["seed"], 2) >> 1)
        with torch.device(device if device.type == "meta" else "cpu"):  # initial weights are drawn on the CPU: the same on every machine
            net = models.build(c["model"], c["task"], d.channels, d.num_classes, d.image_size, c["size"])
        if c["init_scale"] != 1:
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(c["init_scale"] if p.dim() > 1 else 1)
        return net

    def _precision(self, device, start=None):
        c, d, net = self.config, self.data, self._net(device)
        if start:
            self._load(net, start)
        run = Precision(net.to(device), self.recipe, lr=c["lr"], betas=(0.9, c["beta2"]), weight_decay=c["weight_decay"], optimizer=c["optimizer"],
                        ema_decay=c["ema_decay"], averages=c["average"], clip_grad=c["clip_grad"], accumulate=c["accumulate"],
                        growth_interval=c["growth_interval"], seed=c["seed"], sparse24_decay=c["sparse24_decay"])
        images = torch.empty(2, d.channels, d.image_size, d.image_size, device="meta")
        run.example = (images,) if c["task"] == "segment" else (images, images.new_empty(2), images.new_empty(2, dtype=torch.int64))
        if run.sparse:
            with torch.device("meta"):
                run.sparse.count_flops(self._net(torch.device("meta")), torch.empty(1, d.channels, d.image_size, d.image_size), torch.empty(1),
                                       torch.zeros(1, dtype=torch.long))
        return run

    # -- starting from another run

    def _start(self):
        """The checkpoint that training starts from, --finetune's or a teacher's; None without, or where this run has one of its own. Raises RunError
        when it does not fit."""
        c = self.config
        if c["sparse24_decay"] is not None and self.recipe.sparse24 != "srste":
            raise RunError(f"--sparse24_decay {c['sparse24_decay']:g} belongs to --sparse24 srste: add that, or drop it")
        if self.teacher:
            if c["finetune"]:
                raise RunError("--finetune with --task reflow: a student starts from its teacher's weights; drop --finetune, or give that run as --teacher")
            return None if (self.folder / "checkpoint.pt").exists() else self.teacher.checkpoint
        if not c["finetune"]:
            if self.recipe.sparse24 == "magnitude":
                raise RunError("--sparse24 magnitude prunes trained weights: add --finetune RUN, or --sample RUN to draw; "
                               f"--sparse24 srste trains from the first step")
            return None
        if (self.folder / "checkpoint.pt").exists():
            return None
        checkpoint = read_checkpoint(c["finetune"])
        theirs = checkpoint["config"]
        full = lambda flags: {**flags, "size": flags["size"] or "tiny", "data": flags["data"] or ("synthetic" if flags["task"] == "segment" else "digits")}
        for key in ("task", "model", "size", "data", "velocity"):
            if full(theirs)[key] != full(c)[key]:
                raise RunError(f"--finetune {c['finetune']} was trained with --{key} {full(theirs)[key]}, and this run has --{key} {full(c)[key]}: "
                               f"use the same, or another checkpoint")
        if sparse24_of(theirs) == "srste" and self.recipe.sparse24 == "none":
            raise RunError(f"--finetune {c['finetune']} was trained with --sparse24 srste, whose forward reads two of four weights: "
                           f"add --sparse24 magnitude or srste")
        return checkpoint

    def _load(self, net, checkpoint):
        """Give `net`, still fp32, the averaged weights of a checkpoint, whatever recipe they were trained in."""
        state, wanted = {**checkpoint["precision"]["model"], **checkpoint["precision"]["averages"]["ema"]["shadow"]}, net.state_dict()
        state = {name: value for name, value in state.items() if name in wanted}  # scales of FP8 layers stay behind
        if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in wanted.items()}:
            raise RunError(f"{self.config['finetune'] or self.config['teacher']} holds a net of other shapes (other channels, labels or --size): use another checkpoint")
        if next(net.parameters()).device.type != "meta":
            net.load_state_dict(state)

    # -- the loop

    def train_step(self, measure):
        """One optimiser step: `accumulate` micro-batches, then the update. Returns (mean loss as a tensor, what rounding did)."""
        c, total = self.config, 0.0
        self.precision.observe(measure)
        torch.manual_seed(hash64(c["seed"], self.step, 3) >> 1)  # for peers that round by the global generator: alike on every rank
        lr = c["lr"] * min(1.0, (self.step + 1) / c["warmup"]) if c["warmup"] else c["lr"]
        for group in self.precision.optimizer.param_groups:
            if torch.is_tensor(group["lr"]):  # torchao's
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        for micro in range(c["accumulate"]):
            images, target = (t.to(self.device, non_blocking=True) for t in next(self.batches))
            rng = Rng(hash64(c["seed"], self.step, 4, micro) >> 1, self.rank, self.world, self.device)
            with self._synchronised(last=micro == c["accumulate"] - 1):
                loss = self.strategy.loss(self.precision, (images, target), rng)
                self.precision.backward(loss * c["loss_weight"])
            total = total + loss.detach().float() / c["accumulate"]
        report = self.precision.step(measure=measure)
        self.step += 1
        return total, report

    def fit(self):
        """Train to config['steps'], score, write everything; returns the summary dict. Resumes from the run's checkpoint if there is one."""
        c = self.config
        if self.teacher:
            self.teacher.check(self.folder)
        self._start_processes()
        finished = self._open_folder()
        if finished:
            if c["export"] and self.rank == 0:
                self.export(c["export"])
            return finished
        train = self.teacher.prepare(self) if self.teacher else self.data.train
        self._wrap()
        self.train = train
        indices = BatchIndices(len(train), c["batch_size"], c["seed"], self.step * c["accumulate"], self.rank, self.world)
        loader = torch.utils.data.DataLoader(train, sampler=indices, batch_size=None, num_workers=c["workers"],
                                             worker_init_fn=_ignore_interrupt)
        self.batches = iter(loader)
        main, metrics_file = self.rank == 0, None
        if main:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(self.folder, purge_step=self.step + 1)
            metrics_file = open(self.folder / "metrics.jsonl", "a")
        handlers = {signum: signal.signal(signum, self._asked_to_stop) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            with tqdm(total=c["steps"], initial=self.step, unit="step", disable=not main, dynamic_ncols=True, desc=c["name"]) as bar:
                self._train(bar, metrics_file)
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        return self._finish() if main else None

    def _train(self, bar, metrics_file):
        c, main = self.config, self.rank == 0
        timer = time.perf_counter()
        while self.step < c["steps"]:
            logged = (self.step + 1) % c["log_every"] == 0 or self.step + 1 == c["steps"]
            loss, report = self.train_step(measure=logged)
            self.since, self.interval = self.since + loss, self.interval + 1
            bar.update()
            if logged:
                mean = self._mean_over_ranks(self.since / self.interval).item()
                self.interval, self.since = 0, 0.0
                self.seconds += time.perf_counter() - timer
                timer = time.perf_counter()
                if main:
                    self._log(metrics_file, dict(step=self.step, loss=mean, lr=float(self.precision.optimizer.param_groups[0]["lr"]), **report))
                    bar.set_postfix(loss=f"{mean:.4f}")
                self._check_finite(mean, report)
            pause = time.perf_counter()
            stopping = self._any_rank_stops()
            if main and c["sample_every"] and self.step % c["sample_every"] == 0 and self.step < c["steps"]:
                self._show(self.strategy.preview(self.precision.generator(self._sources()[0]), self._fixed_rng()), f"step{self.step:06d}")
            if stopping or self.step == c["steps"] or (c["checkpoint_every"] and self.step % c["checkpoint_every"] == 0):
                since = float(self._mean_over_ranks(self.since.clone())) if self.interval else 0.0
                self._check_finite(since, report)  # a good checkpoint is not replaced by one full of NaN
                if main:
                    self._save(self.seconds + pause - timer, since)
            timer += time.perf_counter() - pause  # pictures and files are not training
            if stopping:
                raise Stopped(f"stopped at step {self.step} of {c['steps']}; the same command resumes from there", stopping)

    def _asked_to_stop(self, signum, frame):
        # asked twice: at once. But torchrun passes on the Ctrl-C that its processes have had already
        if self.stop and time.monotonic() - self.asked > 1:
            raise KeyboardInterrupt
        self.stop, self.asked = signum, time.monotonic()

    def _any_rank_stops(self):
        if self.world == 1:
            return self.stop
        flag = torch.tensor([self.stop or 0], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag.item() or None

    def _check_finite(self, loss, report):
        if loss == loss and abs(loss) != float("inf"):
            return
        grads = f", {report['nonfinite_grads']} gradient entries are not finite" if report.get("nonfinite_grads") else ""
        raise RunError(f"the loss is {loss} at step {self.step}{grads}: lower --lr, add --clip_grad 1 or --warmup, or use a wider format (--bf16 for --fp16); "
                       f"metrics.jsonl and the last checkpoint in {self.folder} are kept")

    # -- several processes

    def _start_processes(self):
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def _wrap(self):
        net = self.precision.model
        if self.config["compile"]:
            net = torch.compile(net)
        if self.world > 1:
            net = self.ddp = DistributedDataParallel(net)
            dtype = self.recipe.dtype("reduce")

            def reduce(state, bucket):
                buffer = bucket.buffer()
                sent = buffer.to(dtype).div_(self.world)
                return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: buffer.copy_(done.value()[0]))

            def reduce_sums(sums):
                for total in sums:
                    sent = total.to(dtype).div_(self.world)
                    dist.all_reduce(sent)
                    total.copy_(sent)

            self.ddp.register_comm_hook(None, reduce)
            self.precision.reduce_sums = reduce_sums
        self.precision.forward = net

    def _synchronised(self, last):
        # fp32 sums of bf16 gradients are reduced once, after the last micro-batch; else DDP reduces p.grad during the last backward
        return self.ddp.no_sync() if self.ddp and (not last or self.precision.keeps_sums) else nullcontext()

    def _mean_over_ranks(self, value):
        if self.world > 1:
            dist.all_reduce(value)
            value = value / self.world
        return value

    # -- the folder

    def _open_folder(self):
        """Create or resume the run's folder. Returns its summary if the run is finished."""
        c, folder = self.config, self.folder
        fixed = {k: v for k, v in c.items() if k not in FREE}
        if (folder / "config.json").exists():
            try:
                old = {**self.defaults, **json.loads((folder / "config.json").read_text())["flags"]}
            except (ValueError, KeyError, TypeError):
                raise RunError(f"{folder}/config.json can't be read: move the folder away, or choose another --name") from None
            changed = [k for k in fixed if old.get(k) != fixed[k]]
            if changed:
                what = ", ".join(f"--{k} was {old.get(k)} and is {fixed[k]}" for k in changed)
                raise RunError(f"{folder} holds a run with other flags ({what}): give this one another --name")
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder} exists and holds no run of this program: choose another --name")
        if (folder / "checkpoint.pt").exists():
            self.restore(read_checkpoint(folder))
        summary = folder / "summary.json"
        if self.step >= c["steps"] and summary.exists() and all(old.get(k) == c[k] for k in ("weights", "samples")):
            return json.loads(summary.read_text())
        if self.world > 1:
            dist.barrier()  # every rank has read the folder before one writes
        if self.rank == 0:
            summary.unlink(missing_ok=True)  # scores of fewer steps or other samples
            write_json(folder / "config.json", {"command": shlex.join(self.command), "flags": c})
            write_json(folder / "ledger.json", self.precision.ledger().json())
            write_json(folder / "env.json", environment(self.device))
            self._forget_after(self.step)
        return None

    def _forget_after(self, step):
        """Drop lines of metrics.jsonl that lie after the checkpoint (and a half-written last one): they will be written again."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return
        kept = []
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except ValueError:
                continue
        write_atomically(path, lambda file: file.write("".join(kept).encode()))

    def _save(self, seconds, since):
        # the losses of a half-finished logging interval belong to the state: a resumed run logs what an uninterrupted one logs
        state = {"format": 1, "config": self.config, "step": self.step, "seconds": seconds, "interval": self.interval, "since": since,
                 "precision": self.precision.state_dict()}
        write_atomically(self.folder / "checkpoint.pt", lambda file: torch.save(state, file))

    def restore(self, checkpoint):
        """Continue from a checkpoint's step. Raises RunError when it belongs to another model or recipe."""
        try:
            self.precision.load_state_dict(checkpoint["precision"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise RunError(f"the checkpoint belongs to another model or recipe ({str(error).splitlines()[0]}): use the flags it was trained with") from None
        self.step, self.seconds = checkpoint["step"], checkpoint["seconds"]
        self.interval, self.since = checkpoint["interval"], torch.tensor(checkpoint["since"], device=self.device)

    def _log(self, file, row):
        file.write(json.dumps(row) + "\n")
        file.flush()
        for name, value in row.items():
            if name != "step":
                self.board.add_scalar(name, value, row["step"])

    def _show(self, pictures, name):
        for title, grid in pictures.items():
            (self.folder / "samples").mkdir(parents=True, exist_ok=True)
            save_image(grid, self.folder / "samples" / f"{name}.png")
            if hasattr(self, "board"):
                self.board.add_image(title, grid, self.step)

    # -- scores

    def _sources(self):
        every = {"both": ["ema", "raw"], "all": [*self.precision.averages, "raw"]}
        return every.get(self.config["weights"], [self.config["weights"]])

    def _fixed_rng(self):
        return Rng(hash64(self.config["seed"], 5) >> 1, device=self.device)

    def _fixed_loss(self, model):
        """The loss of `model` on the first images of the data, with the same noise at every call: one micro-batch."""
        images, target = (t.to(self.device) for t in self.train[list(range(min(len(self.train), self.config["batch_size"])))])
        return self.strategy.loss(model, (images, target), Rng(hash64(self.config["seed"], 6) >> 1, device=self.device))

    def _score(self, prefix=""):
        """{source: scores}; pictures go to samples/."""
        scores = {}
        for source in self._sources():
            try:
                scores[source], pictures = self.strategy.evaluate(self.precision.generator(source), self._fixed_rng())
            except OSError as error:  # the feature net of a new data set is kept under --runs
                raise RunError(f"can't score: {error}; free some space or choose another --runs folder, then run the same command again") from None
            self._show(pictures, f"{prefix}{source.replace(':', '_')}" if len(self._sources()) > 1 or prefix else "final")
        return scores

    def _finish(self):
        print("scoring ...", file=sys.stderr, flush=True)
        started = time.perf_counter()
        images = self.step * self.config["batch_size"] * self.config["accumulate"]
        summary = {"step": self.step, "parameters": sum(p.numel() for p in self.precision.params), "seconds": self.seconds,
                   "images_per_second": images / max(self.seconds, 1e-9), "skipped_steps": self.precision.skipped,
                   "bytes_per_parameter": self.precision.ledger().state_bytes, "scores": self._score(), "reference": self.strategy.reference(),
                   "peak_memory": peak_memory(self.device)}
        if self.recipe.compute == "fp8":
            summary["gradient_snr"] = self.precision.gradient_snr(self._fixed_loss)
        summary["scoring_seconds"] = time.perf_counter() - started
        if self.config["export"]:
            self.export(self.config["export"])
        self.board.close()
        write_json(self.folder / "summary.json", summary)
        return summary

    def draw(self, checkpoint, label):
        """Score and picture the weights of a checkpoint; returns {source: scores}, also written to samples/<label>.json beside the pictures."""
        self.restore(checkpoint)
        if self.config["export"]:
            self.export(self.config["export"])
        started = time.perf_counter()
        scores = self._score(prefix=f"{label}-")
        write_json(self.folder / "samples" / f"{label}.json", {
            "command": shlex.join(self.command), "step": self.step, "ledger": self.precision.ledger().json(), "scores": scores, "reference": self.strategy.reference(),
            "scoring_seconds": time.perf_counter() - started})
        return scores

    def export(self, path):
        """Write the averaged weights as safetensors, in the average's dtype."""
        flags = json.dumps(self.config)
        tensors = {name: value.contiguous() for name, value in self.precision.weights("ema").items()}
        content = safetensors_bytes(tensors, metadata={"flags": flags, "step": str(self.step)})
        write_atomically(path, lambda file: file.write(content))
