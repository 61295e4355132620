"""Faults of a run of this repository, which doctor.py examines: what its log says, what its net computes, and
what its next steps write. exam: doctor.Examination, which measures.
"""

import math

from ...formats import FORMATS, Format
from ..fault import Faults, Figure
from ..verdicts import FINDING_LIMITS

DEFAULT_DECAY = 0.999  # of the average

# ---- What the run has written down -------------------------------------------------------------------------

of_records = Faults()  # Examination of any run
of_finite_run = Faults()  # Examination of a run whose numbers are all finite


@of_records("grads", "{count} gradient entries were not finite, last at step {step}",
            "lower --lr, --clip_grad 1 or --warmup", severity="severe", rank=9.0)
def logged_gradients_not_finite(exam):
    """Rows of the log whose gradients are not finite, of a run without a loss scale."""
    rows = [row for row in exam.metrics if row.get("nonfinite_grads")]
    if not rows or exam.recipe.compute == "fp16":
        return None
    return Figure(count=sum(row["nonfinite_grads"] for row in rows), step=rows[-1]["step"])


@of_records("loss", "the loss was {loss} at step {step}", "lower --lr, --clip_grad 1 or --bf16",
            severity="severe", rank=9.0)
def logged_loss_not_finite(exam):
    """The last loss of the log is not finite."""
    last = exam.metrics[-1] if exam.metrics else {}
    bad = not math.isfinite(last.get("loss", 0.0))
    return Figure(loss=last["loss"], step=last["step"]) if bad else None


# in good health one in 2000, plus a few at the start
@of_records("grads", "the loss scaler skipped {share:.0%} of the last steps; the scale is {scale:g}",
            "--bf16, or lower --lr", above=0.05, severe_above=0.5)
def steps_skipped(exam):
    """Share of the last steps that the loss scaler skipped; any where the scale is below 1."""
    if exam.recipe.compute != "fp16":
        return None
    share, scale = exam.skipped
    # below 1 the scaler shrinks gradients: they overflow as they are
    return Figure(math.inf if scale < 1 else share, whole=share, share=share, scale=scale)


@of_records("weights", "{figure:,.0f} entries are not finite",
            "train again with a lower --lr, --clip_grad 1 or --bf16", severity="severe", rank=9.0)
def entries_not_finite(exam):
    """Entries that are not finite, of the weights, of an average and of a state."""
    return [Figure(number, site=site) for site, number in exam.not_finite.items() if number]


# ---- What the net computes ---------------------------------------------------------------------------------


# bf16 matmuls measure 0.01, and score as fp32 does
@of_finite_run("compute", "the net's output differs by {figure:.1%} from that of an fp32 copy of itself",
               "--bf16, or no flag", above=0.1, severe_above=0.5)
def output_off(exam):
    """Relative RMS change of the output against that of an fp32 copy of the net."""
    return exam.output_change


# ten times the rounding of a bf16 number
@of_finite_run("loss", "the loss is {own:.4g} and in fp32 {exact:.4g}", "--set loss=fp32", above=0.03)
def loss_off(exam):
    """Relative change of the mean loss against that in fp32."""
    own, exact = exam.losses
    return Figure(abs(own - exact) / max(abs(exact), 1e-300), own=own, exact=exact)


# a bf16 rounding of the DiT's positions measures 0.001, and harms nothing
@of_finite_run("buffers", "{count} of {all} buffers hold bf16 values, {name} the first; with fp32 ones the "
               "net's output {changes} by {change:.1%}", "--set buffers=fp32", above=0.01, severe_above=0.5)
def buffers_rounded(exam):
    """Relative RMS change of the output with the values that buffers in bf16 have rounded away; any where the
    recipe says fp32.
    """
    change, told = exam.rounded_buffers
    if not told:
        return change
    return Figure(math.inf if exam.recipe.buffers == "fp32" else change, whole=change, change=change, **told)


# ---- What training writes ----------------------------------------------------------------------------------


@of_finite_run("accumulate", "the sum of {count} micro-batches of gradients is {figure:.2%} off",
               "--set accumulate=fp32", above=FINDING_LIMITS["accumulate"][0],
               severe_above=FINDING_LIMITS["accumulate"][1])
def accumulation_off(exam):
    """Relative error of the sum of a step's micro-batches, against their sum in float64."""
    return Figure(exam.accumulated[0], count=exam.accumulated[1]) if exam.accumulated else None


# severe where hardly anything arrives: nearest at lr 3e-4 loses half of it, and in experiment 001 such
# weights still draw digits
@of_finite_run("update", "{stuck:.0%} of the updates are under half an ulp of their weight, and {kept:.0%} "
               "of them is written: {figure:.0%} of the wanted movement is lost", "{remedy}",
               above=FINDING_LIMITS["update"][0], severe_above=0.9)
def updates_lost(exam):
    """Share of the wanted movement of all weights that is lost."""
    tally = exam.writes.weights
    if not tally.entries:
        return None
    return Figure(tally.lost, stuck=tally.stuck, kept=tally.kept, remedy=exam.writing())


@of_finite_run("exp_avg_sq", "{what}", "{remedy}", above=FINDING_LIMITS["exp_avg_sq"][0])
def shrinking_lost(exam):
    """Share of the shrinking of v that is lost."""
    tally = exam.writes.moments
    if not tally.entries:
        return None
    # no rounding helps 4-bit codes below the least one, a 16th of the largest of their block
    remedy = FORMATS.get(exam.recipe.exp_avg_sq, Format).remedy
    what = f"{tally.lost:.0%} of the shrinking of v is lost: it can grow and not shrink"
    if tally.lost > 1:  # a block's scale that moves moves all of its values
        what = "v grows where it should shrink"
    return Figure(tally.lost, what=what, remedy=exam.writing(remedy))


@of_finite_run("ema", "{stuck:.0%} of the entries away from their weight can't move, {figure:.0%} of the "
               "wanted movement is lost[; it is {back:.0%} of the way back to the initial weights, and an "
               "exact one of decay {decay:g} is {steady:.0%} back when the weights move steadily]",
               "{remedy}", "average",
               above=FINDING_LIMITS["ema"][0], severe_above=FINDING_LIMITS["ema"][1])
def average_lost(exam):
    """Share of the wanted movement of an average that is lost."""
    done = exam.checkpoint["step"]
    for name, writes in exam.averages.items():
        tally, average, site = writes.taken, writes.average, exam.title(name)
        q = average.decay
        remedy = f"--set {site}=fp32, or {site}_update=stochastic"
        if site.startswith("average "):
            remedy = f"--average {q:g}:fp32"
        told = {}
        if exam.start:
            told = dict(back=exam.way_back(average), steady=(1 - q**done) / (done * (1 - q)))
        yield Figure(tally.lost, site=site, stuck=tally.stuck, decay=q, remedy=remedy, **told)


# 5 % remains after 3 / (1-decay) steps
@of_finite_run("ema", "the average has not arrived: exp(-(1-decay) steps) = {figure:.0%} of the start "
               "remains after {steps} steps of decay {decay:g}; nothing is lost by rounding",
               "a decay of {less:.4g} or less, or more --steps", "average", severe_above=0.3)
def average_not_arrived(exam):
    """More than a tenth of the initial weights is left in an average that loses nothing when the run ends; a
    note of a run so short that the default decay has not arrived either: it is young, not ill.
    """
    steps = max(exam.checkpoint["step"], exam.config.steps)
    for name, writes in exam.averages.items() if exam.start else ():
        decay = writes.average.decay
        remains = decay**steps
        if remains > 0.1:
            told = dict(steps=steps, decay=decay, less=max(0.0, 1 - 3 / steps))
            if DEFAULT_DECAY**steps > 0.1:
                told.update(severity="note", whole=0.0)
            yield Figure(remains, site=exam.title(name), **told)


def of_casts(site, telemetry, effect, above, severe_above):
    """Declare what our casts of one kind lose. telemetry: how the names of their shares begin, before that of
    an operand. effect: what becomes of so much.
    """
    format_of_site = "FP4" if site.startswith("fp4") else "FP8"
    text = f"{{figure:.1%}} of the {effect}, {{operand}} operands of {format_of_site} products"

    @of_finite_run(site, text, "{remedy}", family=site, above=above, severe_above=severe_above)
    def worst_cast(exam):
        """Share of the operand that lost most, the mean over the steps."""
        shares = {}  # {operand: its share}
        for name in exam.reports[0]:
            if name.startswith(telemetry):
                of_steps = [report.get(name, 0.0) for report in exam.reports]
                shares[name.removeprefix(telemetry)] = sum(of_steps) / len(of_steps)
        if not shares:
            return None
        operand = max(shares, key=shares.get)
        remedy = "--set attention=compute" if site == "attention" else exam.casting(operand)
        return Figure(shares[operand], operand=operand, remedy=remedy)


# FP8: experiment 019 saw at most 0.005 and, at step 50 of delayed scaling, 0.0004; what is clipped is what is
# largest. FP4 makes more of them zero: at most 12 % of an operand of a GPT that NVFP4 cost 0.7 % of its loss
# (experiment 067), 18 % of a DiT that it cost 4.5 %, and 22 % under MXFP4, which cost that DiT 11 % (064) and
# clips 1 %
of_casts("fp8 zeroed", "fp8_underflow_", "non-zero values become zero", above=0.05, severe_above=0.5)
of_casts("fp8 clipped", "fp8_saturated_", "values are clipped", above=0.001, severe_above=0.1)
of_casts("fp4 zeroed", "fp4_underflow_", "non-zero values become zero", above=0.15, severe_above=0.5)
of_casts("fp4 clipped", "fp4_saturated_", "values are clipped", above=0.05, severe_above=0.3)
of_casts("attention", "attention_underflow_", "magnitude becomes zero", above=0.01, severe_above=0.2)


# last, for it spoils the state
@of_finite_run("weight decay", "a weight should shrink by lr*wd = {wanted:.1g} of itself a step; "
               "{figure:.0%} of that is lost", "{remedy}", above=FINDING_LIMITS["weight decay"][0])
def decay_alone_lost(exam):
    """Share of the weight decay that is lost in steps without gradient or momentum."""
    tally, c = exam.decayed, exam.config
    if tally is None or not tally.entries:
        return None
    return Figure(tally.lost, wanted=c.lr * c.weight_decay, remedy=exam.writing())
