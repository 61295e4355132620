"""The command: flags -> Trainer.

    python train.py --pure_bf16 --stochastic       digits out of noise, bf16 weights, gradients and states, in a few minutes on 2 cores
    python train.py --check                        what this machine runs natively, and the flags to start with
    python train.py --dry_run --pure_bf16          the resolved flags and the precision of every tensor; trains nothing
    python train.py --sample runs/NAME             draw again from a run's weights
    python train.py --diagnose runs/NAME           which tensors of a run are losing information, finished or not
    torchrun --nproc_per_node=2 train.py           the same run on two processes

The same command again resumes an interrupted run. Bad input ends with one line and exit status 2.
"""

import argparse
import errno
import logging
import os
import re
import sys
import textwrap
import warnings

DEFAULTS = {}  # flag -> value, filled by build_parser in the order of --help
UNNAMED = {"name", "runs", "device", "threads", "workers", "compile", "log_every", "sample_every", "checkpoint_every", "export", "sample_batch"}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def build_parser():
    parser = Parser(prog="train.py", formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS,
                    allow_abbrev=False, description=textwrap.dedent(__doc__))

    def add(group, name, default, help, **options):
        DEFAULTS[name] = default
        if default is False:
            options["action"] = "store_true"
        elif default not in (None, [], ""):
            help += f" (default: {default})"
        group.add_argument(f"--{name}", help=help, **options)

    g = parser.add_argument_group("task")
    add(g, "task", "rflow", "rectified flow, reflow from a --teacher, denoising diffusion, or segmentation", choices=["rflow", "reflow", "ddpm", "segment"])
    add(g, "model", "unet", "MONAI's U-Net, or the diffusion transformer", choices=["unet", "dit"])
    add(g, "size", None, "size of the net: tiny, small, base ...; dit: tiny, S/2, B/2, L/2, XL/2 (default: tiny)")
    add(g, "data", None, "digits (default), synthetic (default for segment), folder:PATH, cifar10:PATH, mnist:PATH, medmnist:FILE.npz, nifti:PATH")
    add(g, "image_size", None, "resize images to this side (default: the data's own; 64 for folders and volumes)", type=natural)

    g = parser.add_argument_group("training")
    add(g, "steps", 3000, "optimiser steps", type=natural)
    add(g, "batch_size", 64, "images a micro-batch, over all processes", type=natural)
    add(g, "accumulate", 1, "micro-batches a step", type=natural)
    add(g, "lr", 1e-3, "learning rate", type=positive)
    add(g, "warmup", 100, "steps of linear warm-up, 0 for none", type=count)
    add(g, "weight_decay", 0.0, "decoupled weight decay", type=amount)
    add(g, "init_scale", 1.0, "multiplies the initial matrices and kernels: rounding compares a step with its weight", type=positive)
    add(g, "beta2", 0.999, "decay of exp_avg_sq", type=fraction)
    add(g, "clip_grad", 1.0, "largest gradient norm, 0 for none", type=amount)
    add(g, "loss_weight", 1.0, "multiplies the loss before backward: Adam hardly minds, the range of fp16 gradients does", type=positive)
    add(g, "ema_decay", 0.999, "decay of the averaged weights that generation reads", type=fraction)
    add(g, "average", [], "keep a further average beside the recipe's, as DECAY:DTYPE[:UPDATE]: 0.9999:bf16; may be repeated", action="append")
    add(g, "seed", 0, "seed of weights, data order, noise and rounding", type=count)
    add(g, "optimizer", "adamw", "adamw (ours), torch, or a peer as published: torchastic, optimi, adamw_bf16, torchao; with --opt8bit bitsandbytes")
    add(g, "finetune", "", "start from the averaged weights of this run, trained in any recipe", metavar="CHECKPOINT")

    g = parser.add_argument_group("precision", "without a flag: fp32 everywhere")
    add(g, "bf16", False, "fp32 weights, bf16 matmuls and convolutions (autocast)")
    add(g, "fp16", False, "fp32 weights, fp16 matmuls and convolutions, dynamic loss scaling")
    add(g, "pure_bf16", False, "bf16 weights, gradients and optimiser states; EMA, timesteps, sampler and loss stay fp32")
    add(g, "stochastic", False, "with --pure_bf16, --opt8bit or --opt4bit: round writes up or down at random, so that small updates survive on average")
    add(g, "kahan", False, "with --pure_bf16: keep what rounding lost in a bf16 buffer (2 bytes a parameter)")
    add(g, "master", "none", "with --pure_bf16: split keeps the exact fp32 master as bf16 weight + int16 remainder; fp32 keeps a full copy; "
                             "both keep fp32 states", choices=["none", "split", "fp32"])
    add(g, "opt8bit", False, "optimiser states in 8 bits, by the blockwise functions of bitsandbytes")
    add(g, "opt4bit", False, "optimiser states in 4 bits, by those of torchao")
    add(g, "growth_interval", 2000, "with --fp16: steps without overflow until the loss scale doubles", type=natural)
    add(g, "fp8", False, "FP8 matmuls in nn.Linear layers, all else as --bf16; with --pure_bf16 on bf16 weights")
    add(g, "fp8_backend", "auto", "te (Transformer Engine), torchao; ours: scaled_mm, emulate (fp32 products, anywhere)", choices=["auto", "te", "torchao", "scaled_mm", "emulate"])
    add(g, "fp8_format", "hybrid", "hybrid is e4m3, and e5m2 for gradients", choices=["hybrid", "e4m3", "e5m2"])
    add(g, "fp8_recipe", "tensorwise", "scales from the tensor's own amax, that of its rows, or of past steps", choices=["delayed", "tensorwise", "rowwise"])
    add(g, "amax_history_len", 1024, "with --fp8_recipe delayed: past steps a scale is taken from", type=natural)
    add(g, "amax_compute_algo", "max", "with --fp8_recipe delayed: their largest amax, or the last", choices=["max", "most_recent"])
    add(g, "sparse24", "none", "2:4 sparse Linear layers: magnitude prunes a finished run (with --sample or --finetune), srste trains with the mask from "
                               "the first step", choices=["none", "magnitude", "srste"])
    add(g, "sparse24_decay", None, "with --sparse24 srste: decay of pruned weights, lambda in arXiv 2102.04010 (default: 0.0002)", type=amount)
    add(g, "set", [], "any one site, after the flags: --set ema=bf16 --set islands=norm+embed; --dry_run lists them", action="append", metavar="SITE=VALUE")

    g = parser.add_argument_group("generation")
    add(g, "timestep_sampling", "uniform", "how training draws rectified-flow timesteps", choices=["uniform", "logit-normal"])
    add(g, "velocity", "clean-noise", "sign of the rectified-flow velocity, in training and sampling alike", choices=["clean-noise", "noise-clean"])
    add(g, "teacher", "", "for --task reflow: checkpoint or run folder of the rectified flow whose images the student learns; --model, --size, "
                          "--data, --image_size and --velocity are the teacher's", metavar="CHECKPOINT")
    add(g, "pairs", 8192, "for --task reflow: pairs of noise and image that the teacher draws before training", type=natural)
    add(g, "teacher_steps", 50, "for --task reflow: steps in which it draws them", type=thousand)
    add(g, "min_snr", 5.0, "gamma of min-SNR weighting for ddpm, 0 for none", type=amount)
    add(g, "label_dropout", 0.1, "share of labels dropped, for classifier-free guidance", type=share)
    add(g, "guidance", 1.0, "classifier-free guidance weight; 1 is none and costs half", type=amount)
    add(g, "sample_steps", 50, "sampling steps", type=thousand)
    add(g, "samples", 1000, "images drawn for the final scores", type=several)
    add(g, "weights", "ema", "which weights are scored: the average, the last ones, both, or all: every --average too", choices=["ema", "raw", "both", "all"])

    g = parser.add_argument_group("machine")
    add(g, "device", "auto", "where to run", choices=["auto", "cpu", "cuda"])
    add(g, "compile", False, "torch.compile the net")
    add(g, "threads", 0, "CPU threads, 0 for torch's choice", type=count)
    add(g, "workers", 0, "processes that read data", type=count)
    add(g, "sample_batch", 250, "images drawn at once", type=natural)

    g = parser.add_argument_group("run")
    add(g, "name", "", "folder under --runs (default: made of the flags that differ from the defaults)")
    add(g, "runs", "runs", "where runs are kept")
    add(g, "log_every", 50, "steps between lines of metrics.jsonl, with what rounding did", type=natural)
    add(g, "sample_every", 500, "steps between pictures, 0 for none", type=count)
    add(g, "checkpoint_every", 500, "steps between checkpoints, 0 for only the last", type=count)
    add(g, "export", "", "write the averaged weights here at the end (with --sample: those of the checkpoint)", metavar="FILE.safetensors")

    g.add_argument("--config", metavar="FILE.yaml", help="flags as keys of a YAML file; the command line wins")

    g = parser.add_argument_group("instead of training").add_mutually_exclusive_group()
    g.add_argument("--dry_run", action="store_true", help="print the resolved flags and the precision ledger, and stop")
    g.add_argument("--check", action="store_true", help="print what this machine runs natively, emulates or can't, and stop")
    g.add_argument("--diagnose", metavar="CHECKPOINT", help="examine a checkpoint or run folder, finished or running, and name what is losing information; "
                                                            "exit status 0: healthy, 1: findings; --device, --threads and --data may differ")
    g.add_argument("--sample", metavar="CHECKPOINT", help="draw and score from a checkpoint or run folder; --set, --sparse24 magnitude, --sample_steps, "
                                                          "--guidance, --samples, --weights and --device may differ from its training; --name labels its pictures and scores")
    return parser


# -- values of flags


def _checked(kind, test, what):
    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not test(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return convert


natural = _checked(int, lambda v: v > 0, "a whole number above 0")
count = _checked(int, lambda v: v >= 0, "a whole number, 0 or more")
positive = _checked(float, lambda v: 0 < v < float("inf"), "a number above 0")
amount = _checked(float, lambda v: 0 <= v < float("inf"), "a number, 0 or more")
several = _checked(int, lambda v: v > 1, "a whole number above 1")
share = _checked(float, lambda v: 0 <= v <= 1, "a number from 0 to 1")
thousand = _checked(int, lambda v: 0 < v <= 1000, "a whole number from 1 to 1000")
fraction = _checked(float, lambda v: 0 <= v < 1, "a number from 0 to below 1")


def read_config(path, parser):
    """Flags of a YAML file, converted and checked as if typed. An unknown key is an error."""
    import yaml

    try:
        with open(path) as file:
            values = yaml.safe_load(file) or {}
    except OSError as error:
        parser.error(f"--config {path}: {error.strerror}; give the path of a YAML file")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"--config {path} is not YAML: {' '.join(str(error).split())}")
    if not isinstance(values, dict):
        parser.error(f"--config {path}: expected lines 'flag: value'")
    arguments = []
    for key, value in values.items():
        if key not in DEFAULTS:
            parser.error(f"--config {path}: unknown key '{key}'; the keys are the flags of train.py without their dashes")
        if value is None:  # 'data:' with nothing after it
            continue
        if isinstance(DEFAULTS[key], bool):
            if not isinstance(value, bool):
                parser.error(f"--config {path}: {key} is true or false, not {value!r}")
            arguments += [f"--{key}"] if value else []
        elif isinstance(DEFAULTS[key], list):
            on = {True: "on", False: "off"}  # YAML reads the value of 'kahan: on' as true
            pairs = [f"{k}={on.get(v, v) if isinstance(v, bool) else v}" for k, v in value.items()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
            arguments += [f"--{key}={pair}" for pair in pairs]
        else:
            arguments.append(f"--{key}={value}")
    return vars(parser.parse_args(arguments))


def run_name(config):
    """A folder name made of the flags that differ from the defaults: 'pure_bf16-stochastic', 'default'."""
    parts = []
    for flag, default in DEFAULTS.items():
        if flag in UNNAMED or config[flag] == default:
            continue
        value = config[flag]
        if flag == "data" and ":" in value:
            kind, _, path = value.partition(":")
            value = f"{kind}_{os.path.basename(os.path.normpath(path))}"
        if flag in ("teacher", "finetune"):
            value = f"{flag}_{os.path.basename(os.path.normpath(value.removesuffix('checkpoint.pt')))}"
        if flag == "sparse24":
            value = "sparse24_" + value
        parts += [flag] if value is True else value if isinstance(value, list) else [value] if isinstance(value, str) else [f"{flag}{value:g}"]
    return "-".join(re.sub(r"[^A-Za-z0-9._+-]+", "_", part).strip("_") for part in parts)[:200] or "default"


# -- what a person reads


def table(rows):
    """Lines of left-aligned first and right-aligned further columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip() for row in rows)


def score_table(scores, reference):
    """Scores of each source of weights beside the floor (real images) and the ceiling (noise)."""
    columns = {**scores, **({"real (floor)": reference["floor"], "noise (ceiling)": reference["ceiling"]} if reference else {})}
    rows = [["score", *columns]]
    for key, value in next(iter(scores.values())).items():
        if key in ("trace", "loss_by_timestep"):
            continue
        for i in range(len(value) if isinstance(value, list) else 1):
            cells = [c.get(key) for c in columns.values()]
            cells = [c[i] if isinstance(c, list) else c for c in cells]
            rows.append([f"{key} of class {i}" if isinstance(value, list) else key, *("-" if c is None else f"{c:.4f}" for c in cells)])
    return table(rows)


def print_check():
    import torch

    from precision import device_facts, recommended_flags, support

    devices = ["cuda"] if torch.cuda.is_available() else []
    devices += ["mps"] if torch.backends.mps.is_available() else []
    for device in [*devices, "cpu"]:
        kind, capability, features = device_facts(device)
        capabilities = support(kind, capability, features)
        print(f"{device}: {torch.cuda.get_device_name() if device == 'cuda' else kind}")
        flags = {"fp32": "(none)", "tf32": "--set compute=tf32", "bf16": "--bf16, --pure_bf16", "fp16": "--fp16", "fp8": "--fp8", "opt8bit": "--opt8bit",
                 "opt4bit": "--opt4bit", "sparse24": "--sparse24 (kernels)"}
        print(table([["", "flag", "here", "why"]] + [["  " + flags[k], k, level, why] for k, (level, why) in capabilities.items() if k in flags]))
        flag, why = recommended_flags(capabilities)
        print(f"  start with: python train.py {flag}\n  {why}\n")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    given = vars(parser.parse_args(argv))
    # messages of libraries about things that this machine does not have
    warnings.filterwarnings("ignore", module="torchao|bitsandbytes|monai")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    special = {k: given.pop(k) for k in ("config", "dry_run", "check", "sample", "diagnose") if k in given}
    if special.get("check"):
        return print_check()
    flags = {**(read_config(special["config"], parser) if "config" in special else {}), **given}

    import data
    import models
    from precision import RecipeError
    from trainer import RunError, Stopped

    try:
        return run(special, flags, ["train.py", *argv])
    except Stopped as stopped:
        print(stopped.args[0], file=sys.stderr)
        return 128 + stopped.args[1]
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    except (RunError, RecipeError, data.DataError, models.ModelError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whatever read the output has ended, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to print goes nowhere, not into a second error
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print("train.py: no space left on the device: free some, then run the same command again; the last checkpoint is whole", file=sys.stderr)
        return 2


def run(special, flags, command):
    import torch

    from trainer import RunError, Trainer, read_checkpoint, sparse24_of

    if "diagnose" in special:
        import doctor

        diagnosis = doctor.diagnose(special["diagnose"], DEFAULTS, flags)
        print(diagnosis)
        return diagnosis.status

    if "sample" in special:
        checkpoint = read_checkpoint(special["sample"])
        changed = {k: v for k, v in flags.items() if k not in ("export", "runs", "name", "device")}
        fixed = set(changed) - {"set", "sample_steps", "guidance", "samples", "sample_batch", "weights", "seed", "threads", "data", "sparse24"}
        if fixed:
            raise RunError(f"--sample draws from trained weights: --{sorted(fixed)[0]} can't differ from their training; drop it")
        config = {**DEFAULTS, **checkpoint["config"], "device": "auto", "export": "", **flags}
        config["set"] = checkpoint["config"]["set"] + flags.get("set", [])
        trainer = Trainer(config, command, draws=True)
        if trainer.recipe.sparse24 == "srste" and sparse24_of(checkpoint["config"]) != "srste":
            raise RunError("--sparse24 srste trains with the mask: --sample takes --sparse24 magnitude")
        path = special["sample"]
        trainer.folder = trainer.folder.__class__(path if os.path.isdir(path) else os.path.dirname(path) or ".")
        label = flags.get("name") or "-".join([f"step{checkpoint['step']:06d}", *([run_name({**DEFAULTS, **changed})] if changed else [])])
        scores = trainer.draw(checkpoint, label)
        if trainer.precision.sparse or trainer.precision.quantised:
            print(f"{trainer.precision.ledger()}\n")
        print(score_table(scores, trainer.strategy.reference()))
        print(f"pictures: {trainer.folder}/samples/{label}-*.png   scores: {trainer.folder}/samples/{label}.json")
        return 0

    config, teacher = {**DEFAULTS, **flags}, None
    if config["task"] == "reflow" and config["teacher"]:
        from reflow import Teacher

        teacher = Teacher(config["teacher"], flags, DEFAULTS)
        config.update(teacher.shared)
    config["name"] = config["name"] or run_name(config)
    if special.get("dry_run"):
        trainer = Trainer(config, command, dry=True)
        print("\n".join(f"--{key} {value}" for key, value in config.items()) + "\n")
    else:
        trainer = Trainer(config, command, teacher=teacher, defaults=DEFAULTS)
    if trainer.rank == 0:
        print(f"{trainer.data}\n{config['model']} on {trainer.device}\n{trainer.precision.ledger()}")
        for note in trainer.notes:
            print(f"warning: {note}")
        print(flush=True)
    if special.get("dry_run"):
        return 0
    summary = trainer.fit()
    if trainer.rank == 0:
        print(score_table(summary["scores"], summary["reference"]))
        print(f"\n{summary['step']} steps in {summary['seconds']:.0f} s + {summary['scoring_seconds']:.0f} s of scoring, "
              f"{summary['images_per_second']:.0f} images a second, peak memory {summary['peak_memory'] / 2**20:.0f} MiB"
              + (" (the process, libraries included)" if trainer.device.type == "cpu" else "")
              + (f", {summary['skipped_steps']} steps skipped by the loss scaler" if summary["skipped_steps"] else ""))
        print(f"pictures: {trainer.folder}/samples/   curves: tensorboard --logdir {config['runs']}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
