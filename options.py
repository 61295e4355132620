"""The flags that all tasks have, a row each, in the order of --help and of run names.

A task brings rows of its own, which stand between BEFORE and AFTER: see tasks.Task.
"""

from harness.flags import (
    LARGEST,
    Flag,
    amount,
    checked,
    count,
    crowd,
    crowd_or_auto,
    few,
    fraction,
    inner,
    natural,
    path,
    positive,
    seed,
)
from lowprec.optimizers.by_tensor import OPTIMIZERS

# ---- What is trained ---------------------------------------------------------------------------------------

TASK = (
    Flag(
        "task",
        "rflow",
        "what is trained. Images: rflow (rectified flow), ddpm, reflow, distill, consistency, vae. Others: "
        "segment, classify, language, steve and slotcontrast (video). Or a task of your own (default: rflow)",
        kind="place",
        metavar="TASK|FILE.py:CLASS",
        may=("sample", "diagnose"),
        fits=True,
    ),
    Flag(
        "model",
        "unet",
        "the net: unet (MONAI's) or dit (diffusion transformer); for classify cnn, resnet18 or vit, for "
        "language gpt or bdh (default: the first of these)",
        fits=True,
    ),
    Flag(
        "size",
        None,
        "size of the net: tiny, small, base ...; dit: tiny, S/2, B/2, L/2, XL/2; language: tiny, 1M, 3M, "
        "25M, 100M (default: tiny)",
        fits=True,
    ),
    Flag(
        "data",
        None,
        "digits (default), synthetic (default for segment), folder:PATH, cifar10:PATH, mnist:PATH, "
        "fashion_mnist[:PATH], medmnist:FILE.npz, nifti:PATH; language: text:FILE; video: sprites",
        kind="place",
        may=("sample", "diagnose"),
        fits=True,
    ),
    Flag(
        "image_size",
        None,
        "resize images to this side (default: the data's own; 64 for folders and volumes)",
        type=natural,
    ),
)

# ---- Training ----------------------------------------------------------------------------------------------


RATES = ", ".join(  # own learning rates of optimisers, for --help
    f"{name} has {kind.flags['lr']:g}" for name, kind in OPTIMIZERS.items() if "lr" in kind.flags
)


def training(name, default, help, **options):
    """A flag of the group training."""
    return Flag(name, default, help, "training", **options)


TRAINING = (
    training("steps", 3000, "optimiser steps", kind="extent", type=natural),
    training(
        "epochs",
        0,
        "passes over the training data, in place of --steps; the held-out data are looked at after each",
        kind="extent",
        type=count,
    ),
    training(
        "batch_size",
        64,
        "images a micro-batch, over all processes; auto: the largest power of two whose steps fit into the "
        "memory of a GPU, found before the run",
        type=crowd_or_auto,
        titled=True,
    ),
    training("accumulate", 1, "micro-batches a step", type=natural),
    training("lr", 1e-3, f"learning rate; where it is not given {RATES}", type=positive),
    training("warmup", 100, "steps of linear warm-up, 0 for none", type=count),
    training(
        "lr_schedule",
        "constant",
        "learning rate after the warm-up; cosine and linear fall to zero at --steps, which is then fixed",
        choices=("constant", "cosine", "linear"),
    ),
    training("weight_decay", 0.0, "decoupled weight decay", type=amount),
    training(
        "weight_decay_on",
        "matrices",
        "what it shrinks: matrices spares norms, biases and embeddings",
        choices=("matrices", "all"),
        titled=True,
    ),
    training(
        "init_scale",
        1.0,
        "multiplies the initial matrices and kernels: rounding compares a step with its weight",
        type=positive,
    ),
    training(
        "perturb",
        0,
        "A/A control: move each initial weight to the next fp32 number, up or down by random pattern number "
        "N (0: not); runs that differ in nothing else show what chaos alone does to a score",
        type=few,
    ),
    training("beta2", 0.999, "decay of exp_avg_sq, and of lion's exp_avg (0.99 there)", type=fraction),
    training(
        "momentum",
        None,
        "decay of the momentum of sgd (default: 0.9) and muon (default: 0.95)",
        type=fraction,
    ),
    training(
        "nesterov",
        "auto",
        "whether sgd and muon look a step ahead along the momentum; auto: muon alone",
        choices=("auto", "on", "off"),
        titled=True,
    ),
    training("clip_grad", 1.0, "largest gradient norm, 0 for none", type=amount),
    training(
        "clip_tensor",
        0.0,
        "in place of --clip_grad: largest norm of each tensor's gradient by itself, 0 for none",
        type=amount,
    ),
    training(
        "loss_weight",
        1.0,
        "multiplies the loss before backward: Adam hardly minds, the range of fp16 gradients does",
        type=positive,
    ),
    training("ema_decay", 0.999, "decay of the averaged weights that generation reads", type=fraction),
    training(
        "ema_warmup",
        False,
        "decay min(ema_decay, (1 + t) / (10 + t)) at step t: after a few hundred steps the average holds "
        "nothing of the initial weights",
    ),
    training(
        "average",
        [],
        "keep a further average beside the recipe's, as DECAY:DTYPE[:UPDATE]: 0.9999:bf16; may be repeated",
    ),
    training(
        "validate_every",
        0,
        "steps between looks at the held-out data (default: an epoch with --epochs or --early_stop, else "
        "never)",
        type=count,
    ),
    training(
        "early_stop",
        0,
        "end after so many looks without a better held-out score, 0 for never; best.pt holds the best",
        kind="extent",
        type=count,
    ),
    training("seed", 0, "seed of weights, data order, noise and rounding", kind="draw", type=seed),
    training(
        "optimizer",
        "adamw",
        f"ours: {', '.join(OPTIMIZERS)} (matrices of hidden layers; adamw for the rest); torch, or a peer as "
        "published: torchastic, optimi, adamw_bf16, torchao; with --opt8bit bitsandbytes",
    ),
    training(
        "finetune",
        "",
        "start from the averaged weights of this run, trained in any recipe",
        kind="place",
        metavar="CHECKPOINT",
        titled=True,
    ),
)

# ---- Precision ---------------------------------------------------------------------------------------------


def precision(name, default, help, to="recipe", **options):
    """A flag of the group precision, a keyword of precision.recipe() or of a method."""
    return Flag(name, default, help, "precision", to=to, **options)


PRECISION = (
    precision("bf16", False, "fp32 weights, bf16 matmuls and convolutions (autocast)"),
    precision("fp16", False, "fp32 weights, fp16 matmuls and convolutions, dynamic loss scaling"),
    precision(
        "pure_bf16",
        False,
        "bf16 weights, gradients and optimiser states; EMA, timesteps, sampler and loss stay fp32",
    ),
    precision(
        "stochastic",
        False,
        "with --pure_bf16, --opt8bit or --opt4bit: round writes up or down at random, so that small updates "
        "survive on average",
    ),
    precision(
        "kahan", False, "with --pure_bf16: keep what rounding lost in a bf16 buffer (2 bytes a parameter)"
    ),
    precision(
        "master",
        "none",
        "with --pure_bf16: split keeps the exact fp32 master as bf16 weight + int16 remainder; fp32 keeps a "
        "full copy; both keep fp32 states",
        choices=("none", "split", "fp32"),
    ),
    precision("opt8bit", False, "optimiser states in 8 bits, by the blockwise functions of bitsandbytes"),
    precision("opt4bit", False, "optimiser states in 4 bits, by those of torchao"),
    precision(
        "growth_interval",
        2000,
        "with --fp16: steps without overflow until the loss scale grows",
        to="scaler",
        type=natural,
    ),
    precision("init_loss_scale", 65536.0, "with --fp16: the first loss scale", to="scaler", type=positive),
    precision(
        "growth_factor",
        2.0,
        "with --fp16: what the loss scale is multiplied by when it grows",
        to="scaler",
        type=checked(float, lambda v: 1 < v <= LARGEST, "a number above 1"),
    ),
    precision(
        "backoff_factor",
        0.5,
        "with --fp16: what it is multiplied by after an overflow",
        to="scaler",
        type=checked(float, lambda v: 0 < v < 1, "a number between 0 and 1"),
    ),
    precision(
        "fp8", False, "FP8 matmuls in nn.Linear layers, all else as --bf16; with --pure_bf16 on bf16 weights"
    ),
    precision(
        "fp8_backend",
        "auto",
        "te (Transformer Engine), torchao; ours: scaled_mm, emulate (fp32 products, anywhere)",
        choices=("auto", "te", "torchao", "scaled_mm", "emulate"),
    ),
    precision(
        "fp8_format",
        "hybrid",
        "hybrid is e4m3, and e5m2 for gradients",
        choices=("hybrid", "e4m3", "e5m2"),
    ),
    precision(
        "fp8_recipe",
        "tensorwise",
        "scales from the tensor's own amax, that of its rows, or of past steps",
        choices=("delayed", "tensorwise", "rowwise"),
    ),
    precision(
        "amax_history_len",
        1024,
        "with --fp8_recipe delayed: past steps a scale is taken from",
        type=crowd,
    ),
    precision(
        "amax_compute_algo",
        "max",
        "with --fp8_recipe delayed: their largest amax, or the last",
        choices=("max", "most_recent"),
    ),
    precision(
        "sparse24",
        "none",
        "2:4 sparse Linear layers: magnitude prunes a finished run (with --sample or --finetune), srste "
        "trains with the mask from the first step",
        kind="draw",
        choices=("none", "magnitude", "srste"),
        titled=True,
    ),
    precision(
        "sparse24_decay",
        None,
        "with --sparse24 srste: decay of pruned weights, lambda in arXiv 2102.04010 (default: 0.0002)",
        to="method",
        type=amount,
    ),
    precision(
        "set",
        [],
        "any one site, after the flags: --set ema=bf16 --set islands=norm+embed; --dry_run lists them",
        to="",
        kind="draw",
        metavar="SITE=VALUE",
    ),
)

# ---- Scores, machine, folder -------------------------------------------------------------------------------

SCORING = (
    Flag(
        "weights",
        "ema",
        "which weights are scored: the average, the last ones, both, or all: every --average too",
        "generation",
        kind="extent",
        choices=("ema", "raw", "both", "all"),
        may=("sample",),
    ),
)


def machine(name, default, help, group="machine", **options):
    """A flag that changes no result: where and with what help a run is computed, and what it says."""
    return Flag(name, default, help, group, kind="machine", **options)


MACHINE = (
    machine("device", "auto", "where to run", choices=("auto", "cpu", "cuda"), may=("sample", "diagnose")),
    machine("compile", False, "torch.compile the net"),
    machine(
        "checkpoint_activations",
        False,
        "keep the input of each block alone for backward, and compute the rest again: less memory, same bits",
    ),
    machine(
        "grad_release",
        False,
        "update each parameter within backward and free its gradient: less memory, same bits; with "
        "--clip_tensor or --clip_grad 0",
    ),
    machine(
        "average_on",
        "device",
        "where averages are kept: cpu takes no memory of a GPU, and copies while that goes on",
        choices=("device", "cpu"),
    ),
    machine(
        "states_on",
        "device",
        "where the optimiser's moments are kept: cpu takes memory of a GPU for two buckets of them at once; "
        "same bits, and a slower step",
        choices=("device", "cpu"),
    ),
    machine(
        "fsdp",
        False,
        "under torchrun: spread weights, gradients and states over all processes (fully_shard); the same "
        "gradients give the same bits on any number of them",
    ),
    machine(
        "profile", 0, "trace so many steps, after five: profile.json, and what takes longest", type=count
    ),
    machine("threads", 0, "CPU threads, 0 for torch's choice", type=few, may=("sample", "diagnose")),
    machine("workers", 0, "processes that read data", type=few),
    machine("sample_batch", 250, "images drawn at once", type=natural, may=("sample",)),
)

RUN = (
    machine(
        "name",
        "",
        "folder under --runs (default: made of the flags that differ from the defaults)",
        "run",
        type=inner,
        may=("sample",),
    ),
    machine("runs", "runs", "where runs are kept", "run", type=path, may=("sample",)),
    machine(
        "log_every", 50, "steps between lines of metrics.jsonl, with what rounding did", "run", type=natural
    ),
    machine("sample_every", 500, "steps between pictures, 0 for none", "run", type=count),
    machine("checkpoint_every", 500, "steps between checkpoints, 0 for only the last", "run", type=count),
    machine(
        "export",
        "",
        "write the averaged weights here at the end (with --sample: those of the checkpoint)",
        "run",
        metavar="FILE.safetensors",
        may=("sample",),
    ),
)

# a task's own rows stand between the two
BEFORE = TASK + TRAINING + PRECISION
AFTER = SCORING + MACHINE + RUN
