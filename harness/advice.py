"""Flags that don't go together on these processes, and the warnings before a run. c: its flags.Config."""

import types

from harness.run_folder import check_export
from lowprec.optimizers.build import classes_of
from lowprec.parts.ranks import policy_note
from lowprec.precision import Options, wanted_parts
from lowprec.rules import Rule, check_machine, refuse

LATE_AVERAGE = 0.1  # of the initial weights in an average: more shows in what it draws


BATCH_OF_A_RUN = Rule(  # asked of flags that no search has gone through
    lambda c: c.batch_size == "auto",
    "--batch_size auto is a number once a run begins, and this is none yet: give a number",
)
PROCESS_RULES = (
    Rule(
        lambda here: here.c.batch_size % here.world,
        lambda here: f"--batch_size {here.c.batch_size} can't be shared by {here.world} processes: use a "
        f"multiple of {here.world}",
    ),
    Rule(
        lambda here: here.spread and here.c.compile,
        "--compile with --fsdp: torch's compiler stops at each hook of fully_shard, so little is compiled; "
        "leave one of them out",
    ),
)


def check_processes(c, recipe, ranks, draws):
    """Raise Refused for flags that these processes can't follow. draws: whether nothing is trained."""
    spread = c.fsdp and not draws
    refuse((BATCH_OF_A_RUN,), c)
    refuse(PROCESS_RULES, types.SimpleNamespace(c=c, world=ranks.world, spread=spread))
    options = Options(grad_release=c.grad_release, average_on=c.average_on, states_on=c.states_on)
    asked_for: dict = dict(recipe=recipe, options=options, spread=spread, compiled=c.compile)
    # of a net that is not there yet
    asked_for.update(convolves_on_cpu=False, quantised_base=False, processes=ranks.world)
    wanted_parts(types.SimpleNamespace(**asked_for))
    if c.export:
        check_export(c.export)


def recipe_notes(c, recipe, device, world, table):
    """What this machine only emulates, what the recipe loses, and flags that change nothing: a line each."""
    found = list(check_machine(recipe, device))
    found += recipe.warnings(
        beta2=c.beta2,
        ema_decay=c.ema_decay,
        lr=c.lr,
        weight_decay=c.weight_decay,
        micro_batches=c.accumulate,
        optimizer=c.optimizer,
    )
    if device.type == "cpu":
        for name in ("average_on", "states_on"):
            if getattr(c, name) == "cpu":
                found.append(f"--{name} cpu changes nothing: the weights are on the CPU too")
    if c.noise_seed is not None and not _draws_noise(c, recipe):
        found.append(f"--noise_seed {c.noise_seed} changes nothing: this recipe rounds nothing at random")
    if recipe.loss_scale != "dynamic":
        for name, value in table.pick(c, "scaler").items():
            if value != table[name].default:
                found.append(f"--{name} {value:g} changes nothing: --fp16 alone scales the loss")
    if world == 1 and (recipe.reduce, recipe.reduce_update) != ("fp32", "nearest"):
        found.append("--set reduce and reduce_update change nothing: this is one process")
    if c.fsdp and policy_note(recipe):
        found.append(policy_note(recipe))
    return found


def _draws_noise(config, recipe):
    """Whether anything is rounded at random. Other people's optimisers may do so."""
    if not classes_of(config.optimizer):
        return True
    writes = (recipe.update, recipe.ema_update, recipe.reduce_update)
    gradients_of_fp4 = recipe.fp4 is not None and recipe.fp4.grads != "nearest"
    return "stochastic" in writes or recipe.master == "split8" or gradients_of_fp4


def smaller_run(c, image_size):
    """Flags with which a step takes less, as a text. image_size: of the data, 0 where they are no images."""
    words = []
    if image_size > 32:
        words.append("--image_size 32")
    if c.size not in (None, "tiny"):
        words.append("--size tiny")
    if c.batch_size > 16:
        words.append("--batch_size 16")
    return f"try {' '.join(words) or '--steps 1000'}"


def late_average(c):
    """The share of the initial weights in the average that is scored, where it is large; else 0."""
    share = c.ema_decay**c.steps
    late = share > LATE_AVERAGE and not c.ema_warmup
    return share if late else 0.0


def advice_lines(c, recipe, device, first_look, params):
    """What would make a run faster or its result better: a line each. first_look: steps until the first look
    at held-out data, 0 for none; params: of the net.
    """
    found = []
    if recipe.fp8 and device.type == "cuda" and not c.compile:
        slow = "each cast is kernels of its own, which can be slower than --bf16"
        found.append(f"--fp8 without --compile: {slow}")
    if c.warmup >= c.steps:
        late = f"--warmup {c.warmup} does not end before --steps {c.steps}"
        found.append(f"--lr {c.lr:g} is never reached: {late}")
    if first_look > c.steps:
        flag = "--early_stop" if c.early_stop else "--validate_every"
        late = f"the first look is after {first_look:,} steps, and --steps is {c.steps:,}"
        found.append(f"{flag} never looks at held-out data: {late}; use a smaller --validate_every")
    if share := late_average(c):
        late = f"after {c.steps:,} steps the average holds {share:.0%} of the initial weights"
        found.append(f"--ema_decay {c.ema_decay:g}: {late}, so the last ones are drawn too; add --ema_warmup")
    if c.optimizer == "adafactor" and c.least_rms is None:
        zeros = _matrices_of_zeros(params)
        if zeros:
            late = f"{zeros} matrices start at zero and grow late, for a step is a share of a tensor's size"
            found.append(f"--optimizer adafactor: {late}; --least_rms 0.05 or 0.1 lets them grow sooner")
    return found


def _matrices_of_zeros(params):
    """How many matrices and kernels hold zeros alone; none on the meta device, as in a dry run."""
    zeros = 0
    for p in params:
        if p.dim() > 1 and not p.is_meta and not p.any():
            zeros += 1
    return zeros
