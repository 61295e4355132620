"""The flags that all tasks have, but those of precision, a row each, in the order of --help and of run names.

strategies.flag_table puts them together with those of precision.py and of the tasks.
"""

from harness.flags import (
    Flag,
    amount,
    count,
    crowd_or_auto,
    few,
    fraction,
    inner,
    natural,
    path,
    positive,
    seed,
    side,
)
from lowprec.optimizers.build import OPTIMIZERS

# ---- What is trained ---------------------------------------------------------------------------------------

TASK_FLAGS = (
    Flag(
        "task",
        "rflow",
        "what is trained: rflow, segment, classify, language ... (--list), or your own (default: rflow)",
        kind="code",
        metavar="TASK|FILE.py:CLASS",
        fits=True,
        often=True,
    ),
    Flag(
        "model",
        "unet",
        "the net: --list names those of each task (default: the first of these)",
        kind="code",
        metavar="NET|FILE.py:build",
        fits=True,
        often=True,
    ),
    Flag(
        "size",
        None,
        "size of the net: --list names those of each net (default: tiny)",
        fits=True,
        often=True,
    ),
    Flag(
        "data",
        None,
        "digits, folder:PATH, nifti:PATH, text:FILE ... (--list; default: one of the task's that is here)",
        kind="place",
        may=("sample", "diagnose"),
        fits=True,
        often=True,
    ),
    Flag(
        "image_size",
        None,
        "resize images to this side (default: the data's own; 64 for folders and volumes)",
        type=side,
        often=True,
    ),
    Flag(
        "white",
        65535,
        "value of white in images of 16 bits; 4095 for a camera's 12",
        type=natural,
    ),
    Flag(
        "pages",
        "first",
        "which images of a file of several are read, as of a TIFF of many pages",
        choices=("first", "all"),
        titled=True,
    ),
    Flag(
        "labels",
        "folders",
        "of --data folder:PATH: folders in PATH are classes, or none: all images below it, without classes",
        choices=("folders", "none"),
        titled=True,
    ),
    Flag("skip_broken", False, "leave out image files and volumes that can't be read, and count them"),
)

# ---- Training ----------------------------------------------------------------------------------------------


OWN_LEARNING_RATES = ", ".join(  # own learning rates of optimisers, for --help
    f"{name} {kind.flags['lr']:g}" for name, kind in OPTIMIZERS.items() if "lr" in kind.flags
)


def training_flag(name, default, help, **options):
    """A flag of the group training."""
    return Flag(name, default, help, "training", **options)


TRAINING_FLAGS = (
    training_flag("steps", 3000, "optimiser steps", kind="extent", type=natural, often=True),
    training_flag(
        "epochs",
        0,
        "passes over the training data, in place of --steps, with held-out scores after each",
        kind="extent",
        type=count,
        often=True,
    ),
    training_flag(
        "batch_size",
        64,
        "images a micro-batch, over all processes; auto: as many as a GPU has memory for",
        type=crowd_or_auto,
        titled=True,
        often=True,
    ),
    training_flag("accumulate", 1, "micro-batches a step", type=natural),
    training_flag(
        "lr", 1e-3, f"learning rate (default: 0.001; {OWN_LEARNING_RATES})", type=positive, often=True
    ),
    training_flag("warmup", 100, "steps of linear warm-up, 0 for none", type=count),
    training_flag(
        "lr_schedule",
        "constant",
        "learning rate after the warm-up; cosine and linear fall to zero at --steps, which is then fixed",
        choices=("constant", "cosine", "linear"),
        of_steps="ends at --steps",
    ),
    training_flag("weight_decay", 0.0, "decoupled weight decay", type=amount),
    training_flag(
        "weight_decay_on",
        "matrices",
        "what it shrinks: matrices spares norms, biases and embeddings",
        choices=("matrices", "all"),
        titled=True,
        needs="weight_decay",
    ),
    training_flag(
        "init_scale",
        1.0,
        "multiplies the initial matrices and kernels; the larger a weight, the more of a step is lost to "
        "rounding",
        type=positive,
    ),
    training_flag(
        "perturb",
        0,
        "A/A control: move each initial weight to the next fp32 number, up or down by random pattern number "
        "N (0: not); runs that differ in nothing else show how far scores lie apart by chance",
        type=few,
    ),
    training_flag("beta2", 0.999, "decay of exp_avg_sq, and of lion's exp_avg (0.99 there)", type=fraction),
    training_flag(
        "eps",
        None,
        "what adamw, alone or beside muon, adds to the root of exp_avg_sq (default: the optimiser's own, "
        "1e-8 for adamw)",
        type=positive,
    ),
    training_flag(
        "least_rms",
        None,
        "a step of adafactor is a share of its tensor's root mean square, and a smaller one counts as this: "
        "a larger number lets layers that start at zero grow sooner (default: 1e-3)",
        type=positive,
    ),
    training_flag(
        "momentum",
        None,
        "decay of the momentum of sgd (default: 0.9) and muon (default: 0.95)",
        type=fraction,
    ),
    training_flag(
        "nesterov",
        "auto",
        "whether sgd and muon look a step ahead along the momentum; auto: muon alone",
        choices=("auto", "on", "off"),
        titled=True,
    ),
    training_flag("clip_grad", 1.0, "largest gradient norm, 0 for none", type=amount),
    training_flag(
        "clip_tensor",
        0.0,
        "in place of --clip_grad: largest norm of each tensor's gradient by itself, 0 for none",
        type=amount,
    ),
    training_flag(
        "loss_weight",
        1.0,
        "multiplies the loss before backward: Adam's steps stay as they are, fp16 gradients may leave "
        "their range",
        type=positive,
    ),
    training_flag("ema_decay", 0.999, "decay of the averaged weights that generation reads", type=fraction),
    training_flag(
        "ema_warmup",
        False,
        "decay min(ema_decay, (1 + t) / (10 + t)) at step t: after a few hundred steps the average holds "
        "nothing of the initial weights",
    ),
    training_flag(
        "average",
        [],
        "keep a further average beside the recipe's, as DECAY:DTYPE[:UPDATE]: 0.9999:bf16; may be repeated",
    ),
    training_flag(
        "validate_every",
        0,
        "steps between looks at the held-out data (default: an epoch with --epochs or --early_stop, else "
        "never)",
        type=count,
    ),
    training_flag(
        "early_stop",
        0,
        "end after that many looks without a better held-out score, 0 for never; best.pt holds the best",
        kind="extent",
        type=count,
    ),
    training_flag(
        "seed", 0, "seed of weights, data order, noise and rounding", kind="draw", type=seed, often=True
    ),
    training_flag(
        "noise_seed", None, "seed of the noise of rounding alone (default: that of --seed)", type=seed
    ),
    training_flag(
        "optimizer",
        "adamw",
        f"{', '.join(OPTIMIZERS)}, or one as others publish it: torch ... (--list)",
        kind="code",
        metavar="NAME|FILE.py:CLASS",
        often=True,
    ),
    training_flag(
        "finetune",
        "",
        "start from the averaged weights of this run, trained in any recipe",
        kind="place",
        metavar="CHECKPOINT",
        titled=True,
        often=True,
    ),
)


# ---- Scores, machine, folder -------------------------------------------------------------------------------

SCORING_FLAGS = (
    Flag(
        "weights",
        "ema",
        "which weights are scored: the average, beside the last ones where it does not arrive; raw: the last "
        "ones; both; or all: every --average too",
        "generation",
        kind="extent",
        choices=("ema", "raw", "both", "all"),
        may=("sample",),
    ),
)


def machine_flag(name, default, help, group="machine", **options):
    """A flag that changes no result: where and with what help a run is computed, and what it says."""
    return Flag(name, default, help, group, kind="machine", **options)


MACHINE_FLAGS = (
    machine_flag(
        "device",
        "auto",
        "where to run",
        choices=("auto", "cpu", "cuda"),
        may=("sample", "diagnose"),
        often=True,
    ),
    machine_flag("compile", False, "torch.compile the net", often=True),
    machine_flag(
        "checkpoint_activations",
        False,
        "keep only the input of each block for backward, and compute the rest again: less memory, same bits",
    ),
    machine_flag(
        "grad_release",
        False,
        "update each parameter within backward and free its gradient: less memory, same bits; with "
        "--clip_tensor or --clip_grad 0",
    ),
    machine_flag(
        "average_on",
        "device",
        "where averages are kept: cpu takes no memory of a GPU, and copies while that goes on",
        choices=("device", "cpu"),
    ),
    machine_flag(
        "states_on",
        "device",
        "where the optimiser's moments are kept: cpu takes memory of a GPU for two buckets of them at once; "
        "same bits, and a slower step",
        choices=("device", "cpu"),
    ),
    machine_flag(
        "fsdp",
        False,
        "under torchrun: spread weights, gradients and states over all processes (fully_shard); the same "
        "gradients give the same bits on any number of them",
    ),
    machine_flag(
        "profile",
        0,
        "trace that many steps, after the first five: profile.json, and what takes longest",
        type=count,
    ),
    machine_flag("threads", 0, "CPU threads, 0 for torch's choice", type=few, may=("sample", "diagnose")),
    machine_flag("workers", 0, "processes that read data", type=few),
    machine_flag("sample_batch", 250, "images drawn at once", type=natural, may=("sample",)),
)

RUN_FLAGS = (
    machine_flag(
        "name",
        "",
        "folder under --runs (default: made of the flags that differ from the defaults)",
        "run",
        type=inner,
        may=("sample",),
        often=True,
    ),
    machine_flag("runs", "runs", "where runs are kept", "run", type=path, may=("sample",)),
    machine_flag(
        "log_every", 50, "steps between lines of metrics.jsonl, with what rounding did", "run", type=natural
    ),
    machine_flag("sample_every", 500, "steps between pictures, 0 for none", "run", type=count),
    machine_flag(
        "checkpoint_every", 500, "steps between checkpoints, 0 for only the last", "run", type=count
    ),
    machine_flag(
        "export",
        "",
        "write the averaged weights here at the end (with --sample: those of the checkpoint)",
        "run",
        type=path,
        metavar="FILE.safetensors",
        may=("sample",),
    ),
)
