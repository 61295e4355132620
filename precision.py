"""The library as the command and tasks see it: `from precision import Precision, recipe`."""

from harness.flags import LARGEST_REAL, Flag, amount, checked, count, crowd, natural, positive
from lowprec.errors import Refused
from lowprec.layers.block_formats import asked_by
from lowprec.parts import finish
from lowprec.precision import Precision
from lowprec.recipes import SITES, Recipe, Site, recipe
from lowprec.view import View

__all__ = ["SITES", "Precision", "Recipe", "Refused", "Site", "View", "recipe"]


def precision_flag(name, default, help, to="recipe", **options):
    """A flag of the group precision, a keyword of precision.recipe() or of a method."""
    return Flag(name, default, help, "precision", to=to, **options)


def finish_of(text):
    """(kind, percent) of 'split:10'."""
    kind, _, percent = text.partition(":")
    return kind, float(percent)


def is_finish(text):
    kind, _, percent = text.partition(":")
    return kind in finish.KINDS and percent.replace(".", "", 1).isdigit() and 0 < float(percent) < 100


PRECISION_FLAGS = (
    precision_flag("bf16", False, "fp32 weights, bf16 matmuls and convolutions (autocast)", often=True),
    precision_flag(
        "fp16", False, "fp32 weights, fp16 matmuls and convolutions, dynamic loss scaling", often=True
    ),
    precision_flag(
        "pure_bf16",
        False,
        "bf16 weights, gradients and optimiser states; averages, sampler and loss stay fp32",
        often=True,
    ),
    precision_flag(
        "stochastic",
        False,
        "round writes in bf16 or codes up or down at random: small updates survive on average",
        often=True,
    ),
    precision_flag(
        "kahan", False, "with --pure_bf16: keep what rounding lost in a bf16 buffer (2 bytes a parameter)"
    ),
    precision_flag(
        "master",
        "none",
        "with --pure_bf16: split keeps the exact fp32 master as bf16 weight + int16 remainder; fp32 keeps a "
        "full copy; both keep fp32 states; split8 keeps 24 of the 32 bits, as bf16 weight + int8 remainder",
        choices=SITES["master"].values,
    ),
    precision_flag(
        "finish",
        None,
        "with --pure_bf16: percent of the steps, at the end, that are written exactly; split:10 does so with "
        "a master (there 14 bytes a parameter with AdamW), fp32:10 with all in fp32 (16 bytes)",
        to="",
        type=checked(str, is_finish, "split:PERCENT or fp32:PERCENT, above 0 and below 100"),
        of_steps="is a percentage of --steps",
    ),
    precision_flag("opt8bit", False, "optimiser states in 8 bits, with bitsandbytes' codes", often=True),
    precision_flag("opt4bit", False, "optimiser states in 4 bits, with torchao's codes"),
    precision_flag(
        "growth_interval",
        2000,
        "with --fp16: steps without overflow until the loss scale grows",
        to="scaler",
        type=natural,
    ),
    precision_flag(
        "init_loss_scale", 65536.0, "with --fp16: the first loss scale", to="scaler", type=positive
    ),
    precision_flag(
        "growth_factor",
        2.0,
        "with --fp16: what the loss scale is multiplied by when it grows",
        to="scaler",
        type=checked(float, lambda v: 1 < v <= LARGEST_REAL, "a number above 1"),
    ),
    precision_flag(
        "backoff_factor",
        0.5,
        "with --fp16: what it is multiplied by after an overflow",
        to="scaler",
        type=checked(float, lambda v: 0 < v < 1, "a number between 0 and 1"),
    ),
    precision_flag(
        "fp8",
        False,
        "FP8 matmuls in nn.Linear layers, all else as --bf16 or --pure_bf16",
        often=True,
    ),
    precision_flag(
        "fp8_backend",
        "auto",
        "te (Transformer Engine), torchao; ours: scaled_mm, emulate (fp32 products, anywhere)",
        choices=("auto", "te", "torchao", "scaled_mm", "emulate"),
    ),
    precision_flag(
        "fp8_format",
        "hybrid",
        "hybrid is e4m3, and e5m2 for gradients",
        choices=("hybrid", "e4m3", "e5m2"),
    ),
    precision_flag(
        "fp8_recipe",
        "tensorwise",
        "scales from the tensor's own amax, that of its rows, of past steps, or of blocks: of 32 (mxfp8) or "
        "128, with powers of two or fp32; runs with blocks are published with --fp8_format e4m3",
        choices=("delayed", "tensorwise", "rowwise", *asked_by("fp8_recipe")),
    ),
    precision_flag(
        "amax_history_len",
        1024,
        "with --fp8_recipe delayed: past steps a scale is taken from",
        type=crowd,
    ),
    precision_flag(
        "amax_compute_algo",
        "max",
        "with --fp8_recipe delayed: their largest amax, or the last",
        choices=("max", "most_recent"),
    ),
    precision_flag(
        "fp4",
        "none",
        "FP4 matmuls in nn.Linear layers, all else as --bf16; nvfp4, with scales of a wider range "
        "(nvfp4_ue5m3), or mxfp4",
        choices=("none", *asked_by("fp4")),
        titled=True,
    ),
    precision_flag(
        "fp4_hadamard",
        16,
        "with --fp4: size of the random rotation of what a weight's gradient sums over, 0 for none",
        type=count,
    ),
    precision_flag(
        "fp4_grads",
        "stochastic",
        "with --fp4: how gradients are rounded; eden is MS-EDEN of Quartet II",
        choices=("stochastic", "nearest", "eden"),
    ),
    precision_flag(
        "fp4_weights",
        "2d",
        "with --fp4: weights in square blocks, alike in forward and backward, or in blocks of a row",
        choices=("2d", "1d"),
    ),
    precision_flag("fp4_keep", "none", "with --fp4: last:2 leaves the last 2 blocks of the net in bf16"),
    precision_flag(
        "fp4_backend",
        "emulate",
        "with --fp4: fp32 products of the same operands, anywhere, or torchao's kernels on Blackwell",
        choices=("emulate", "torchao"),
    ),
    precision_flag(
        "fp4_finish",
        0.0,
        "with --fp4: percent of the steps, at the end, in which those layers compute in bf16",
        to="",
        type=checked(float, lambda v: 0 <= v < 100, "a percentage from 0 to below 100"),
        of_steps="is a percentage of --steps",
    ),
    precision_flag(
        "sparse24",
        "none",
        "2:4 sparse Linear layers: magnitude prunes a finished run (with --sample or --finetune), srste "
        "trains with the mask from the first step",
        kind="draw",
        choices=("none", "magnitude", "srste"),
        titled=True,
    ),
    precision_flag(
        "sparse24_decay",
        None,
        "with --sparse24 srste: decay of pruned weights, lambda in arXiv 2102.04010 (default: 0.0002)",
        to="method",
        type=amount,
    ),
    precision_flag(
        "lora",
        0,
        "with --finetune: train adapters of this rank beside the layers, which are frozen; --set frozen=bf16 "
        "halves the bytes of these",
        to="method",
        type=checked(int, lambda v: 0 <= v <= 4096, "a whole number, 0 to 4096"),
        needs="finetune",
    ),
    precision_flag(
        "set",
        [],
        "any one site, after the flags: --set ema=bf16 --set islands=norm+embed; --dry_run lists them",
        to="",
        kind="draw",
        metavar="SITE=VALUE",
    ),
)


def recipe_of_run(config, table, sites):
    """The Recipe of a run. table: of its flags; sites: of its task."""
    return recipe(sites=config.set, more=sites, optimizer=config.optimizer, **table.pick(config, "recipe"))


# {flag: (what it is without effect, the site that it belongs to, the value of that, flags that ask for it)}
FLAGS_OF_METHODS = {
    "fp4_finish": (0.0, "compute", "fp4", "--fp4 nvfp4"),
    "sparse24_decay": (None, "sparse24", "srste", "--sparse24 srste"),
}


def check_options(wanted, config):
    """Raise Refused for an option of a method that recipe `wanted` does not train with."""
    for flag, (idle, site, value, owner) in FLAGS_OF_METHODS.items():
        given = getattr(config, flag)
        if given != idle and wanted[site] != value:
            raise Refused(f"--{flag} {given:g} belongs to {owner}: add that, or drop it")


def check_origin(wanted, before, said="", draws=False):
    """Raise Refused where a run of recipe `wanted` can't start from weights trained in recipe `before`,
    None for new ones, or draw from them.

    said: the flag that names them.
    """
    # (whether it draws, what is wanted): (what the weights may not be trained with, None for new ones, why)
    lines = {
        (True, "srste"): (
            (None, "none", "magnitude"),
            "--sparse24 srste trains with the mask: --sample takes --sparse24 magnitude",
        ),
        (False, "magnitude"): (
            (None,),
            "--sparse24 magnitude prunes trained weights: add --finetune RUN, or --sample RUN to draw; "
            "--sparse24 srste trains from the first step",
        ),
        (False, "none"): (
            ("srste",),
            f"{said} was trained with --sparse24 srste, whose forward reads two of four weights: "
            "add --sparse24 magnitude or srste",
        ),
    }
    refused, line = lines.get((draws, wanted.sparse24), ((), ""))
    trained = before.sparse24 if before else None
    if trained in refused:
        raise Refused(line)
