"""The loop. One step reads top to bottom in `Trainer.train_step`; around it are resume, log and scores.

All randomness is a function of (seed, step), noise of rounding included. So an interrupted run equals an
uninterrupted one, on a CPU bit for bit; the same command again resumes it. What a run leaves in its folder is
told in harness/run_folder.py, what it trains in tasks.py, and what several processes do together in ranks.py.
"""

import math
import shlex
import signal
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from harness import shards
from harness.batches import SIGNALS, BatchIndices, ignore_signals
from harness.checkpoints import check_optimizer
from harness.ending import Stopped
from harness.flags import MOST
from harness.profiling import Profile
from harness.ranks import Ranks, lost, part
from harness.run_folder import (
    CHECKPOINT,
    Folder,
    check_export,
    export,
    peak_memory,
    start_peak_memory,
    write_json,
)
from harness.validation import BEST, Validation, steps_an_epoch
from lowprec import fsdp, ledger
from lowprec.activations import Meter, blocks, recompute
from lowprec.cast import exact_modules
from lowprec.errors import Refused, first_line
from lowprec.fsdp import policy_note, share_buffers
from lowprec.optimizers.buckets import local
from lowprec.precision import Precision
from lowprec.rounding import Stream, stream
from lowprec.rules import COMMAND, RunFacts, check_machine, refuse, refuse_optimizer
from precision import check_origin, recipe_of
from strategies import settled
from tasks.task import Rng, to_device

# ---- Learning rate -----------------------------------------------------------------------------------------


def lr_factor(config, step):
    """What the learning rates are multiplied by at `step`, a function of the step alone: linear warm-up, then
    --lr_schedule.
    """
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.lr_schedule == "constant":
        return warm
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    done = min(1.0, max(0.0, done))
    falling = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return warm * falling


# ---- A/A control -------------------------------------------------------------------------------------------


@torch.no_grad()
def perturb(net, pattern):
    """Move each fp32 weight of `net` that is trained to its neighbour, in place: by 6e-8 to 1.2e-7 of itself,
    up or down by a fixed random pattern of this number. Zeros stay.

    Runs from such weights differ by chaos alone, so their spread is what no recipe can be blamed for. To flip
    the last bit would not do: torch draws uniform weights with 24 bits, whose last bit is nearly always 0.
    """
    draw = torch.Generator().manual_seed(pattern)
    for p in net.parameters():
        if p.requires_grad and p.dtype == torch.float32:
            up = torch.randint(0, 2, p.shape, generator=draw, dtype=torch.int32).to(p.device)
            neighbour = (p.view(torch.int32) + (2 * up - 1)).view(torch.float32)  # of larger size, or smaller
            p.copy_(torch.where(p == 0, p, neighbour))


# ---- Trainer -----------------------------------------------------------------------------------------------


class Trainer:
    """A run, set up from its flags: `fit()` trains and scores it, `draw()` samples from its weights.

    config: {flag: value} or a flags.Config; a flag that is missing has its default. dry: shapes without
    memory, to print. draws: the weights will come from a checkpoint, nothing is trained. folder: where the
    run lies, when that is not --runs/--name. ranks: the processes, when these are not all that were started.
    Raises Refused before anything is written.
    """

    def __init__(self, config, command=(), dry=False, draws=False, folder=None, ranks=None):
        self.kind, self.table, self.config = settled(config)
        c, self.command, self.draws = self.config, list(command), draws
        self.ranks = ranks or Ranks()
        self.device = self.ranks.device(c.device)
        self.spreads = c.fsdp and not draws
        self.ranks.spread = self.spreads and not dry  # drawing and printing need no other rank
        if c.threads:
            torch.set_num_threads(c.threads)
        self.recipe = recipe_of(c, self.table, self.kind.sites).on(self.device)
        self.notes = self._notes()
        self._check()
        self.folder = Folder(folder or Path(c.runs) / c.name)
        self.data = self.kind.load(c, None if dry else self._index())
        self.task = self.kind(self.data, self.recipe, c)
        self.validation = self._validation()
        if c.init_scale != 1 and self.task.starts_elsewhere:
            brought = "scales new weights, and these come from a checkpoint"
            raise Refused(f"--init_scale {c.init_scale:g} {brought}: drop it, or train from scratch")
        self.step, self.seconds, self.peak = 0, 0.0, None
        self.interval, self.since = 0, 0.0  # steps and sum of their losses since the last logged line
        self.train = self.batches = self.stop = None
        start = None if draws else self.task.start(self)
        self.precision = self._precision(torch.device("meta") if dry else self.device, start)
        self.rates = [float(group["lr"]) for group in self.precision.optimizer.param_groups]

    # -- setting up

    def _notes(self):
        """What this machine only emulates, and what the recipe loses: a line each."""
        c = self.config
        rates = dict(beta2=c.beta2, ema_decay=c.ema_decay, lr=c.lr, weight_decay=c.weight_decay)
        lost = self.recipe.warnings(**rates, micro_batches=c.accumulate, optimizer=c.optimizer)
        for name in ("average_on", "states_on") if self.device.type == "cpu" else ():
            there = f"--{name} cpu changes nothing: the weights are on the CPU too"
            lost += [there] if getattr(c, name) == "cpu" else []
        for name, value in self.table.pick(c, "scaler").items():
            if self.recipe.loss_scale != "dynamic" and value != self.table[name].default:
                lost.append(f"--{name} {value:g} changes nothing: --fp16 alone scales the loss")
        if self.ranks.world == 1 and (self.recipe.reduce, self.recipe.reduce_update) != ("fp32", "nearest"):
            lost.append("--set reduce and reduce_update change nothing: this is one process")
        lost += [policy_note(self.recipe)] if c.fsdp and policy_note(self.recipe) else []
        return check_machine(self.recipe, self.device) + lost

    def _check(self):
        c, world = self.config, self.ranks.world
        if c.batch_size % world:
            shared = f"--batch_size {c.batch_size} can't be shared by {world} processes"
            raise Refused(f"{shared}: use a multiple of {world}")
        if self.ranks.spread and not self.ranks.started:
            raise Refused("--fsdp spreads a net over processes: torchrun --nproc_per_node N train.py --fsdp")
        asked_for = RunFacts(
            self.recipe,
            spread=self.spreads,
            compiled=c.compile,
            processes=world,
            grad_release=c.grad_release,
            average_on=c.average_on,
            states_on=c.states_on,
        )
        refuse(COMMAND, asked_for)
        if c.export:
            check_export(c.export)

    def _index(self):
        """The folder that remembers what data sets hold, where there is a place for it."""
        runs = Path(self.config.runs)
        return runs / "indexes" if runs.is_dir() else None

    def _validation(self):
        """When the held-out data are looked at. Settles --steps where --epochs says it."""
        c, epoch = self.config, steps_an_epoch(self.config, self.task.train_count())
        if c.epochs * epoch > MOST:
            raise Refused(f"--epochs {c.epochs}: an epoch is {epoch} steps; use {MOST // epoch} or fewer")
        if c.epochs:
            c.steps = c.epochs * epoch
        every = c.validate_every or (epoch if c.epochs or c.early_stop else 0)
        return Validation(self.task.watched, every, c.early_stop)

    @property
    def finished(self):
        return self.step >= self.config.steps or self.validation.exhausted

    def new_net(self, device="cpu"):
        """The net in fp32 as a new run has it. Initial weights are drawn on the CPU: the same on every
        machine.
        """
        torch.manual_seed(stream(self.config.seed, Stream.INIT))
        with torch.device(device):
            net = self.task.net()
        scale = self.config.init_scale
        if scale != 1:
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(scale if p.dim() > 1 else 1)
        return net

    def _precision(self, device, start):
        c, meta = self.config, device.type == "meta"
        net = self.new_net("meta" if meta else "cpu")
        if start:
            self._load(net, start)
        if c.perturb and not meta:
            perturb(net, c.perturb)
        net = self._spread(net) if self.ranks.spread else net.to(device)
        run = Precision(
            net, self.recipe, groups=self.task.groups(net), optimizer=c.optimizer, lr=c.lr,
            betas=(0.9, c.beta2), weight_decay=c.weight_decay, clip_grad=c.clip_grad,
            momentum=c.momentum, nesterov={"on": True, "off": False}.get(c.nesterov),
            clip_tensor=c.clip_tensor, grad_release=c.grad_release, average_on=c.average_on,
            states_on=c.states_on, accumulate=c.accumulate, ema_decay=c.ema_decay, ema_warmup=c.ema_warmup,
            averages=[*c.average, *self.task.averages().values()], seed=c.seed, blank=self.new_net,
            **self.table.pick(c, "scaler"), **self.table.pick(c, "method"),
        )  # fmt: skip
        if self.spreads:
            refuse_optimizer(run.optimizer, run.optimizer_name, spread=True)
        run.example = self.task.example()
        if c.checkpoint_activations:
            recompute(run.model)
        if self.ranks.world > 1 and any(p._post_accumulate_grad_hooks for p in run.params):
            hooked = f"--optimizer {c.optimizer} takes gradients away by hooks before several processes can"
            raise Refused(f"{hooked} sum them: use --optimizer adamw --stochastic")
        return run

    def _spread(self, net):
        """`net` over all ranks, each of which has built all of it."""
        self._meet()
        islands, whole = exact_modules(net, self.recipe) if self.recipe.low_weights else ((), ())
        net = fsdp.spread(net, self.recipe, self.device, blocks(net), [*islands, *whole])
        share_buffers(net)
        return net

    def told_of_a_rank(self):
        """What a rank of --fsdp is to hold, a line: of as many as were started, or of several numbers of them
        where this is one.
        """
        world, run = self.ranks.world, self.precision
        return ledger.of_a_rank(run, blocks(run.model), [world] if world > 1 else ledger.WORLDS)

    def _meet(self):
        c = self.config
        self.ranks.meet(self.device, self.table.shared(c), alone=self.ranks.spread)

    def _load(self, net, checkpoint):
        """Give `net`, still fp32, the averaged weights of a checkpoint of any recipe."""
        saved, wanted = checkpoint["precision"], net.state_dict()
        average, first = saved["averages"]["ema"]["shadow"], {p: name for name, p in net.named_parameters()}
        # tied weights have several names, and the average knows them by the first
        named = net.named_parameters(remove_duplicate=False)
        state = {**saved["model"], **{name: average[first[p]] for name, p in named if first[p] in average}}
        # what layers of a recipe hold beside weights, scales for one, stays behind
        state = {name: value for name, value in state.items() if name in wanted}
        if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in wanted.items()}:
            source = self.config.finetune or checkpoint["config"].get("name")
            other = f"{source} holds a net of other shapes (other channels, labels or --size)"
            raise Refused(f"{other}: use another checkpoint")
        if next(net.parameters()).device.type != "meta":
            net.load_state_dict(state)

    # -- the loop

    def train_step(self, measure):
        """One optimiser step: `accumulate` micro-batches, then the update.

        Returns (mean loss as a tensor, what rounding did).
        """
        c, run, ranks, total = self.config, self.precision, self.ranks, 0.0
        run.observe(measure)
        self._set_rates(lr_factor(c, self.step))
        self._seed(ranks.rank)  # dropout: each rank its own
        for micro in range(c.accumulate):
            batch = to_device(next(self.batches), self.device)
            rng = Rng(stream(c.seed, Stream.BATCH, self.step, micro), ranks.rank, ranks.world, self.device)
            with ranks.synchronised(run, last=micro == c.accumulate - 1):
                with self._metered():
                    loss = self.task.loss(run, batch, rng, self.step)
                run.backward(loss * c.loss_weight)
            total = total + loss.detach().float() / c.accumulate
        self._seed(0)  # peers that round by the global generator: alike on every rank
        report = run.step(measure=measure)
        self.step += 1
        return total, report

    @contextmanager
    def _metered(self):
        """The first micro-batch of a process tells what is kept for backward; the ledger gets that row."""
        if self.precision.kept is not None:
            yield
            return
        with Meter(self.precision.model) as meter:
            yield
        self.precision.kept = meter
        if self.ranks.main and self.folder.open:
            write_json(self.folder / "ledger.json", self.precision.ledger().json())

    def _set_rates(self, factor):
        for group, rate in zip(self.precision.optimizer.param_groups, self.rates, strict=True):
            group["initial_lr"] = rate  # torch's name for it
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def _seed(self, rank):
        own = (rank,) if rank else ()
        seed = stream(self.config.seed, Stream.GLOBAL, self.step, *own)
        # torch.manual_seed seeds every kind of device; without a GPU it queues a call and a traceback a time
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def fit(self):
        """Train to config.steps, score, write everything; returns the summary dict, on the main rank.

        Goes on from the run's checkpoint if there is one.
        """
        self._meet()
        try:
            summary = self._fit()
        except Stopped:
            part()  # all of them have agreed to
            raise
        except (RuntimeError, ConnectionResetError, EOFError) as error:
            said = lost(error, self.ranks.world)
            if said is None:
                raise
            raise Refused(f"{said}; the last checkpoint in {self.folder} is whole") from None
        finally:
            self._end_workers()
            self.folder.close()
        part()
        return summary

    def _fit(self):
        c, main = self.config, self.ranks.main
        finished = self._open_folder()
        if finished:
            if c.export and (main or self.ranks.spread):
                self.export(c.export)
            return finished
        self.ready()
        if main:
            self.folder.log_to(self.step)
        with self._stoppable():
            self._train()
        return self._finish() if main or self.ranks.spread else None

    def ready(self):
        """What the first step needs: training data, and the net as it is called."""
        net = self.precision.model
        self.train = self.task.train_set(self)
        net = torch.compile(net) if self.config.compile else net
        self.precision.forward = self.ranks.wrap(self.precision, net, self.config.seed, lambda: self.step)
        self.batches = self._read()

    def _read(self):
        """The run's next micro-batches, this rank's rows of them."""
        c, ranks, done = self.config, self.ranks, self.step * self.config.accumulate
        indices = BatchIndices(len(self.train), c.batch_size, c.seed, done, ranks.rank, ranks.world)
        options = dict(num_workers=c.workers, worker_init_fn=ignore_signals)
        loader = torch.utils.data.DataLoader(self.train, sampler=indices, batch_size=None, **options)
        # workers start with this mask, so that no signal reaches one before it ignores them
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [*SIGNALS, signal.SIGCHLD])
        try:
            return iter(loader)
        finally:
            if c.workers:
                # torch's handler raises for a worker that was killed, wherever the process is just then.
                # Without it the loader says so, up to 5 seconds later, where it waits for a batch
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _end_workers(self):
        workers, self.batches = self.batches, None
        if hasattr(workers, "_shutdown_workers"):
            workers._shutdown_workers()

    def _train(self):
        c, main, begun, shown = self.config, self.ranks.main, self.step, {}
        start_peak_memory(self.device)
        timer = time.perf_counter()
        traced = Profile(c.profile if main else 0, self.folder / "profile.json", self.device)
        with self._bar() as bar, closing(traced):
            while not self.finished:
                looking = self.validation.due(self.step + 1)
                logged = looking or (self.step + 1) % c.log_every == 0 or self.step + 1 == c.steps
                loss, report = self.train_step(measure=logged)
                traced.step()
                self.since, self.interval = self.since + loss, self.interval + 1
                self._tick(bar, first=self.step == begun + 1)
                if logged:
                    mean = self.ranks.mean(self.since / self.interval).item()
                    self.interval, self.since = 0, 0.0
                    self.seconds += time.perf_counter() - timer
                    heldout = self._look() if looking else {}
                    timer = time.perf_counter()
                    if main:
                        lr = float(self.precision.optimizer.param_groups[0]["lr"])
                        self._log(dict(step=self.step, loss=mean, lr=lr, **report, **heldout))
                        shown.update(loss=mean, **heldout)
                        bar.set_postfix({name: f"{value:.4f}" for name, value in shown.items()})
                    self._check_finite(mean, report)
                pause = time.perf_counter()
                stopping = self.ranks.any(self.stop, self.device)
                if c.sample_every and self.step % c.sample_every == 0 and not self.finished:
                    model = self._drawing(self._sources()[0])
                    if main:
                        self._show(self.task.preview(model, self._fixed_rng()), f"step{self.step:06d}")
                due = c.checkpoint_every and self.step % c.checkpoint_every == 0
                if stopping or self.finished or due:
                    since = float(self.ranks.mean(self.since.clone())) if self.interval else 0.0
                    self._check_finite(since, report)  # a good checkpoint is not replaced by one full of NaN
                    self._check_weights()
                    if main or self.ranks.spread:
                        self._save(self.seconds + pause - timer, since)
                timer += time.perf_counter() - pause  # pictures and files are not training
                if stopping:
                    said = f"stopped at step {self.step} of {c.steps}; the same command resumes from there"
                    raise Stopped(said, stopping)
        if self.step > begun:
            self.peak = peak_memory(self.device)

    def _look(self):
        """Scores on held-out data, as {"heldout_<name>": number}; a checkpoint of the best so far is kept."""
        scores, improved, model = {}, False, self._drawing(self._sources()[0])
        if self.ranks.main:
            scores = self.task.validate(model, self._fixed_rng())
            improved = self.validation.take(scores, self.step)
        own = self.validation.waited if self.ranks.main else 0
        self.validation.waited = self.ranks.any(own, self.device) or 0  # all ranks end together
        if self.ranks.spread:
            improved = bool(self.ranks.any(int(improved), self.device))
        if improved:
            self._save(self.seconds, 0.0, BEST)
        return {f"heldout_{name}": value for name, value in scores.items()}

    def _drawing(self, source):
        """The net that draws, on the main rank; None on the others, which give it their rows where a net is
        spread.
        """
        return self.precision.generator(source) if self.ranks.main or self.ranks.spread else None

    def _bar(self):
        c, hidden = self.config, not self.ranks.main
        options = dict(unit="step", disable=hidden, dynamic_ncols=True, desc=c.name)
        bar = tqdm(total=c.steps, initial=self.step, **options)
        if self.precision.optimizer.compiled:
            bar.set_postfix_str("compiling the optimiser step, once")
        return bar

    @staticmethod
    def _tick(bar, first):
        bar.update()
        if first:  # it compiled: the clock of the rate starts here
            bar.initial = bar.n
            bar.start_t = bar.last_print_t = time.time()
            bar.set_postfix_str("")

    @contextmanager
    def _stoppable(self):
        """SIGINT, SIGTERM and SIGHUP ask the loop to stop after its step."""
        heard = list(SIGNALS)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup leaves it
            heard.remove(signal.SIGHUP)
        handlers = {signum: signal.signal(signum, self._asked_to_stop) for signum in heard}
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def _asked_to_stop(self, signum, frame):
        # asked twice: at once. But torchrun passes on the Ctrl-C that its processes have had already
        if self.stop and time.monotonic() - self.asked > 1:
            raise KeyboardInterrupt
        self.stop, self.asked = signum, time.monotonic()

    def _check_finite(self, loss, report):
        if math.isfinite(loss):
            return
        bad = report.get("nonfinite_grads")
        grads = f", {bad} gradient entries are not finite" if bad else ""
        remedy = "lower --lr, add --clip_grad 1 or --warmup, or use a wider format (--bf16 for --fp16)"
        kept = f"metrics.jsonl and the last checkpoint in {self.folder} are kept"
        raise Refused(f"the loss is {loss} at step {self.step}{grads}: {remedy}; {kept}")

    def _check_weights(self):
        """The last step's loss was taken before it wrote the weights."""
        named = ((name, local(p.detach())) for name, p in self.precision.named_params)
        bad = next((name for name, w in named if not w.isfinite().all()), "")
        if not self.ranks.any(int(bool(bad)), self.device):
            return
        what = f"weights are not finite after step {self.step}{f', {bad} for one' if bad else ''}"
        kept = f"metrics.jsonl and the checkpoint before, if there is one, in {self.folder} are kept"
        raise Refused(f"{what}: lower --lr, or add --clip_grad 1 or --warmup; {kept}")

    # -- the folder

    def _open_folder(self):
        """Create or resume the run's folder. Returns its summary if the run is finished."""
        c, folder = self.config, self.folder

        def differences(old):
            return self.table.differences(old, c)

        folder.check(differences)
        self.ranks.first(folder.lock, self.device)
        if folder.has_checkpoint:
            checkpoint = self._checkpoint(differences)
            if checkpoint.get("data") and self._content() not in ("", checkpoint["data"]):
                other = f"{folder} holds a run on other data than --data {c.data} is now"
                raise Refused(f"{other}: give this one another --name")
            self.restore(checkpoint)
        if self.step > c.steps:
            longer = f"{folder} has {self.step:,} steps behind it, and --steps is {c.steps:,}"
            raise Refused(f"{longer}: give a shorter run another --name")
        before = folder.summary() if self.finished else None
        if before and self._scored_alike():
            return before
        self.ranks.wait()  # every rank has read the folder before one writes
        if self.ranks.main:
            folder.begin(self.command, vars(c), self.precision.ledger(), self.device, self.step)
        self.peak = before and before.get("peak_memory")
        return None

    def _checkpoint(self, differences):
        """What the folder's checkpoint holds, of a net that is spread this rank's rows alone."""
        path = self.folder / CHECKPOINT
        if not (self.ranks.spread and shards.is_there(path)):
            return self.folder.checkpoint(differences)
        found = shards.read_parts(path, self.precision, self.ranks, self.device)
        return self.folder.checked(found, differences)

    def _scored_alike(self):
        """Whether the run in the folder was scored as this one is to be."""
        old = self.table.config(self.folder.flags())
        names = [row.name for row in self.table.rows if row.kind == "extent" and row.name != "steps"]
        return all(getattr(old, name) == getattr(self.config, name) for name in names)

    def _save(self, seconds, since, name=CHECKPOINT):
        # the losses of a half-finished logging interval belong to the state: a resumed run logs what an
        # uninterrupted one logs
        progress = dict(step=self.step, seconds=seconds, interval=self.interval, since=since)
        progress["validation"] = self.validation.state_dict()
        state = {"config": vars(self.config), **progress, "precision": self.precision.state_dict()}
        state["data"] = self._content()
        if self.ranks.spread:
            shards.write(self.folder / name, state, self.ranks, self.device)
        else:
            self.folder.save(state, name)

    def _content(self):
        """What stands for the content of the data; "" where a task of a file does not tell."""
        return str(getattr(self.data, "fingerprint", ""))

    def restore(self, checkpoint):
        """Continue from a checkpoint's step. Raises Refused when it belongs to another model or recipe."""
        state, run = checkpoint["precision"], self.precision
        try:
            check_optimizer(state["optimizer"], run.optimizer.state_dict(), checkpoint["step"])
            run.load_state_dict(state)
        except (LookupError, RuntimeError, ValueError, TypeError, AttributeError, OverflowError) as error:
            other = f"the checkpoint belongs to another model or recipe ({first_line(error)})"
            raise Refused(f"{other}: use the flags it was trained with") from None
        self.step, self.seconds = checkpoint["step"], checkpoint["seconds"]
        self.interval = checkpoint["interval"]
        self.since = torch.tensor(checkpoint["since"], device=self.device)
        if "validation" in checkpoint:
            self.validation.load_state_dict(checkpoint["validation"])

    def _log(self, row):
        self.folder.log(row)

    def _show(self, pictures, name):
        self.folder.show(pictures, name, self.step)

    # -- scores

    def _sources(self):
        every = {"both": ["ema", "raw"], "all": [*self.precision.averages, "raw"]}
        return every.get(self.config.weights, [self.config.weights])

    def _fixed_rng(self):
        return Rng(stream(self.config.seed, Stream.FIXED), device=self.device)

    def _fixed_loss(self, model):
        """The loss of `model` on the first images of the data, one rank's micro-batch, with the same noise at
        every call.
        """
        count = min(len(self.train), self.config.batch_size // self.ranks.world)
        batch = to_device(self.train[list(range(count))], self.device)
        probe = stream(self.config.seed, Stream.PROBE)
        torch.manual_seed(probe)  # dropout: the same at each call
        rng = Rng(probe, device=self.device)
        return self.task.loss(model, batch, rng, self.step)

    def _score(self, prefix=""):
        """{source: scores}; pictures go to samples/."""
        scores, sources = {}, self._sources()
        for source in sources:
            model = self._drawing(source)
            if not self.ranks.main:
                continue
            scores[source], pictures = self.task.evaluate(model, self._fixed_rng())
            several = len(sources) > 1 or prefix
            self._show(pictures, f"{prefix}{source.replace(':', '_')}" if several else "final")
        return scores

    def _finish(self):
        """Score, export, write the summary; then what the methods add to it, which may fail."""
        c, run, started = self.config, self.precision, time.perf_counter()
        if not self.ranks.main:  # gives its rows to the nets that are scored and exported
            self._score()
            if c.export:
                self.export(c.export)
            return None
        print("scoring ...", file=sys.stderr, flush=True)
        images = self.step * c.batch_size * c.accumulate
        summary = {
            "step": self.step,
            "parameters": sum(p.numel() for p in run.params),
            "seconds": self.seconds,
            "images_per_second": images / max(self.seconds, 1e-9),
            "skipped_steps": run.skipped,
            "bytes_per_parameter": run.ledger().state_bytes,
            "scores": self._score(),
            "reference": self.task.reference(),
            "peak_memory": self.peak or peak_memory(self.device),
            "scoring_seconds": time.perf_counter() - started,
        }
        if run.kept:
            summary["activations"] = run.kept.json()
        kind, number = self.task.items
        summary[f"{kind}_per_second"] = summary["images_per_second"] * number
        if self.validation.every:
            summary["validation"] = self.validation.json()
        if c.export:
            self.export(c.export)
        self.folder.close()
        write_json(self.folder / "summary.json", summary)
        found = self._figures()
        if found:
            summary.update(found)
            write_json(self.folder / "summary.json", summary)
        return summary

    def _figures(self):
        """What the methods tell of a finished run. Memory that does not suffice costs that figure alone."""
        found = {}
        for method in self.precision.methods:
            try:
                found.update(method.finish(self.precision, self._fixed_loss))
            except torch.OutOfMemoryError:
                name = type(method).__name__
                print(f"no memory left for the last figures of {name}; all else is written", file=sys.stderr)
        return found

    def draw(self, checkpoint, label):
        """Score and picture the weights of a checkpoint; returns {source: scores}, which samples/<label>.json
        holds too.
        """
        theirs = recipe_of(self.table.obeyed(checkpoint["config"]), self.table, self.kind.sites)
        check_origin(self.recipe, theirs, draws=True)
        self.restore(checkpoint)
        if self.config.export:
            self.export(self.config.export)
        started = time.perf_counter()
        facts = {
            "command": shlex.join(self.command),
            "step": self.step,
            "ledger": self.precision.ledger().json(),
            "scores": self._score(prefix=f"{label}-"),
            "reference": self.task.reference(),
            "scoring_seconds": time.perf_counter() - started,
        }
        write_json(self.folder / "samples" / f"{label}.json", facts)
        return facts["scores"]

    def export(self, path):
        """Write the averaged weights as safetensors, in the average's dtype."""
        weights = self.precision.weights("ema")
        if self.ranks.main:
            export(path, weights, vars(self.config), self.step)
