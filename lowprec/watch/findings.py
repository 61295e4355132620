"""What a Watch can find: a table with a row a kind of fault, and the findings that follow from it.

    python -m lowprec.watch.findings                    prints the table as Markdown
    python -m lowprec.watch.findings docs/doctor.md     writes it between the marks of a page

A new kind of fault is a row here and a function in a file of measures, or one more row of one that is there.
"""

import functools
import sys
from pathlib import Path

from . import measures, measures_of_averages, measures_of_net, measures_of_noise
from .faults import CHECK_ITS_SIGN, Fault, families, faults_table, findings_by_tensor, first_finding
from .measured import HARDLY_WRITTEN, Measured
from .verdicts import FINDING_LIMITS, Finding

ROUND_WITHOUT_LOSS = "{code}, or Kahan compensation, or an fp32 master"
FIND_WHAT_FREEZES_IT = (
    "find what freezes or restores it: the optimiser wants to move it, and it does not move"
)
UNWRITTEN_TEXT = (
    "{lost:.0%} of the wanted movement is not written[: {stuck:.0%} of the steps are under half an ulp of "
    "their weight][; {unmoved:.0%} of the entries have not moved since the first look]"
)
LOST_OF_ALL_TEXT = "{of_all:.0%} of all wanted movement of the weights is not written"
LOST_TO_NEAREST_TEXT = "rounding to nearest loses {of_all:.0%} of all wanted movement of the weights; {cost}"
GAINS_AT_ONE_TEXT = "{ones:.0%} of the gains are exactly 1.0; "
DECAY_WITHIN_THE_UPDATE = "let decay be part of the fp32 update that is rounded once"
UPDATE_FROM_THIS_NET = (
    "update it with the weights of this net, each with its own, as average.lerp_(weight, 1 - decay)"
)
MOVES_AWAY_TEXT = "the average moves away from its weight, by {rate:.2g} of the way a step"
OTHER_RATE_TEXT = "it goes {rate:.2g} of the way a step, and its decay {decay:g} says {said:.2g}"
YOUNG_TEXT = "young: {remains:.0%} of the start remains after {steps} steps of decay {decay:g}"
LESS_DECAY = "a decay of {less:.4g} or less, or more steps"
COUNT_EACH_STEP = "count each step: bias corrections go by it"
WIDEN_THE_COUNTER = "keep step counters in fp32 or as integers"
ADD_IT_TO_A_GROUP = "add it to the optimiser's groups, or tell Watch of the other optimiser: others=[...]"
CHECK_ITS_GROUP = "nothing, if it is frozen by plan; else check its group"
IS_IT_USED = "is it used and not detached?"
FIND_WHAT_WRITES_GRAD = "find what writes p.grad after backward"
AVOID_FP16 = (
    "fp32 weights and states, with the products under autocast, or bf16 ones: fp16 holds nothing below 6e-8"
)
RESTORE_SECOND_MOMENT = "restore exp_avg_sq at a resume"
NOTHING_IF_RESTARTED_BY_PLAN = "nothing, if it is a restart by plan as of ReLoRA"
DOES_IT_STEP = "does the loop step this optimiser? GradScaler leaves out steps whose gradients are not finite"
MEND_WHAT_OVERFLOWS = (
    "bf16 in place of fp16, or fp32 where it overflows: no loss scale mends a forward pass that is not finite"
)
FIND_WHAT_DIVIDES = (
    "is a loss scale taken off that was never put on, or twice? Else clip at a norm that is usual"
)
SAVE_THE_MASTERS = "save the fp32 weights, and load them: a bf16 copy lacks what many steps have added up"
DRAW_NEW_BITS = "draw new bits for each step and each entry"

# Rows of one site.
of_average = functools.partial(Fault, "ema")
of_update = functools.partial(Fault, "update")
of_v = functools.partial(Fault, "exp_avg_sq")
of_counter = functools.partial(Fault, "step")
of_gradients = functools.partial(Fault, "grads")
of_optimizer = functools.partial(Fault, "optimizer")
of_buffers = functools.partial(Fault, "buffers")
of_frozen = functools.partial(Fault, "frozen")


def rows_of_updates():
    """Gains of norms have a site of their own; what rounding loses has a remedy of its own."""
    low, severe = FINDING_LIMITS["update"]
    found = []
    for measure, remedy, whole in (
        (measures.lost_to_rounding, ROUND_WITHOUT_LOSS, LOST_TO_NEAREST_TEXT),
        (measures.not_written, FIND_WHAT_FREEZES_IT, LOST_OF_ALL_TEXT),
    ):
        for site, measured, text in (
            ("gains", measures.of_gains(measure), GAINS_AT_ONE_TEXT + UNWRITTEN_TEXT),
            ("update", measure, UNWRITTEN_TEXT),
        ):
            found.append(Fault(site, measured, text, remedy, low, severe=severe, whole=whole))
    return [
        *found,
        of_update(
            limit=0.5,
            measure=measures.weight_moves_too_far,
            text="it moves {times:.1f} times as far as the optimiser wants",
            remedy="find what else writes it",
            severity="severe",
        ),
    ]


def rows_of_noise(noise):
    site = "noise[ of {moment}]"
    return [
        Fault(
            site=site,
            measure=noise.in_lumps,
            text="the entries of this tensor round together: they share one noise value",
            remedy=DRAW_NEW_BITS,
        ),
        Fault(
            site=site,
            limit=0.05,
            measure=noise.biased,
            text="rounding errs {side} zero by {mean:.2g} ulp on average",
            remedy="noise must be uniform over all that is rounded away",
        ),
        Fault(
            site=site,
            limit=0.0,
            measure=noise.repeated,
            text="the same noise at every step: errors of two looks correlate by {value:.2f}",
            remedy=DRAW_NEW_BITS,
        ),
        Fault(
            site=site,
            limit=0.0,
            measure=noise.of_neighbours,
            text="neighbours share their noise: their errors correlate by {value:.2f}",
            remedy=DRAW_NEW_BITS,
        ),
    ]


def row_of_shared_noise(noise):
    return Fault(
        site="noise[ of {moment}]",
        limit=0.0,
        measure=noise.shared,
        text="shares its noise with {other}: errors correlate by {value:.2f}",
        remedy="noise by place or name of a tensor",
    )


NOISE_OF_WEIGHTS = measures_of_noise.NoiseOfWrites("weight")
NOISE_OF_MOMENTS = measures_of_noise.NoiseOfWrites("moment")

# Of an average of a tensor.
FAULTS_OF_AVERAGE = [
    of_average(
        limit=0.0,
        measure=measures_of_averages.average_not_finite,
        text="{count:,.0f} entries of its sample are not finite, and those of its weight are",
        remedy="begin the average anew from the weights, and find what wrote it",
        severity="severe",
        rank=9.0,
    ),
    of_average(
        limit=0.9,
        measure=measures_of_averages.average_of_other_sign,
        text="the average has the other sign than its weight",
        remedy=CHECK_ITS_SIGN,
        severity="severe",
        rank=3.5,
    ),
    of_average(
        limit=0.9,
        measure=measures_of_averages.average_goes_right_away,
        text=MOVES_AWAY_TEXT,
        remedy=CHECK_ITS_SIGN,
        severity="severe",
        rank=3.0,
    ),
    of_average(
        limit=0.25,
        measure=measures_of_averages.average_goes_away,
        text=MOVES_AWAY_TEXT,
        remedy=UPDATE_FROM_THIS_NET,
        severity="severe",
        rank=3.0,
    ),
    of_average(
        limit=1.1,
        measure=measures_of_averages.average_overshoots,
        text="the average goes {rate:.2g} of the way to its weight a step, beyond it",
        remedy="a rate of 1 - decay, between 0 and 1",
        severity="severe",
        rank=2.5,
    ),
    of_average(
        limit=10.0,
        measure=measures_of_averages.average_too_large,
        text="the average is {times:,.0f} times as large as its weight",
        remedy="check how the average is updated",
        severity="severe",
        rank=4.0,
    ),
    of_average(
        limit=0.0,
        measure=measures_of_averages.average_jumped,
        text="at once the average went {times:.3g} times as far as its weight was away",
        remedy="find what else writes the average",
        severity="severe",
        rank=2.2,
    ),
    of_average(
        limit=0.0,
        measure=measures_of_averages.average_overtaken,
        text="between two looks the average went {part:.0%} of the way to its weight, farther than its decay "
        "lets it: something wrote the weights over it",
        remedy="restore the average and its counter at a resume",
        rank=2.2,
    ),
    of_average(
        limit=0.5,
        measure=measures_of_averages.average_goes_elsewhere,
        text="the average moves, and not toward its weight",
        remedy=UPDATE_FROM_THIS_NET,
        severity="severe",
        rank=2.1,
    ),
    of_average(
        limit=0.99,
        measure=measures_of_averages.average_is_bf16,
        text="the average is fp32, and all its values are bf16 numbers: something rounds them",
        remedy="hold, move and compute it in fp32",
        severity="severe",
        rank=1.5,
    ),
    of_average(
        measure=measures_of_averages.average_is_its_weight,
        text="the average is the weight itself: they share their memory",
        remedy="clone the weights where the average is made",
        severity="severe",
        rank=2.3,
    ),
    of_average(
        limit=0.99,
        measure=measures_of_averages.average_copies,
        text="the average is a copy of its weight at each look: it averages nothing",
        remedy="is its decay applied?",
        rank=1.0,
    ),
    of_average(
        limit=0.5,
        measure=measures_of_averages.average_stood,
        text="the average has not moved between two looks, and is away from its weight",
        remedy="update it after each step, in fp32",
        severity="severe",
        rank=2.0,
    ),
    of_average(
        measure=measures_of_averages.narrow_average_stands,
        text="the average stands still in {dtype}: none of the wanted movement is written",
        remedy="hold and compute it in fp32",
        severity="severe",
        rank=1.5,
    ),
    of_average(
        measure=measures_of_averages.average_stands,
        text="the average stands still in {dtype}: none of the wanted movement is written",
        remedy="update all tensors of the average after each step",
        severity="severe",
        rank=1.5,
    ),
    of_average(
        limit=FINDING_LIMITS["ema"][0],
        measure=measures_of_averages.narrow_average,
        text="{stuck:.0%} of the entries away from their weight can't move in {dtype}, {lost:.0%} of the "
        "wanted movement is lost",
        remedy="hold and compute it in fp32, or round stochastically",
        severe=FINDING_LIMITS["ema"][1],
    ),
    of_average(
        limit=0.5,
        measure=measures_of_averages.average_slow,
        text=OTHER_RATE_TEXT,
        remedy="check how the average is updated",
        severe=0.9,
    ),
    of_average(
        limit=1.7,
        measure=measures_of_averages.average_fast,
        text=OTHER_RATE_TEXT,
        remedy="check how the average is updated: once a step?",
    ),
    of_average(measures_of_averages.average_young_in_a_long_run, YOUNG_TEXT, LESS_DECAY, limit=0.1),
    of_average(measures_of_averages.average_young, YOUNG_TEXT, LESS_DECAY, limit=0.1, severity="note"),
]

# Of each tensor. Of the rows of one list the first that finds something speaks.
FAULTS_OF_TENSOR = families(
    [
        of_update(
            measure=measures.rate_always_zero,
            text="its learning rate was 0 at each look",
            remedy=CHECK_ITS_GROUP,
            severity="note",
            rank=1.0,
        ),
        of_update(
            measure=measures.rate_at_zero,
            text="its learning rate has been 0 since step {since}",
            remedy=CHECK_ITS_GROUP,
            severity="note",
            rank=1.0,
        ),
    ],
    rows_of_updates(),
    [
        of_update(
            limit=0.99,
            measure=measures.weights_are_bf16,
            text="the weight is fp32, and all its values are bf16 numbers after each step: something rounds "
            "them",
            remedy="find what casts the weights to bf16 and back, or restores them",
            severity="severe",
        ),
        of_update(
            limit=measures.MOST_GAINS_AT_ONE,
            measure=measures.weight_put_back,
            text="{back:.0%} of the entries that a step moved were put back before the next step",
            remedy="find what restores this weight",
            severity="severe",
        ),
    ],
    [
        of_update(
            limit=0.5,
            measure=measures.weight_goes_back,
            text="something moves it back after the step, by {times:.2g} of the step itself",
            remedy="nothing, if it is a plan as Lookahead",
            severity="note",
        ),
        of_update(
            limit=0.5,
            measure=measures.weight_drifts,
            text="something else moves it after the step, by {times:.2g} of the step itself",
            remedy="find what else writes it: another optimiser (others=[...] tells Watch of it), or a decay "
            "or a cast by hand",
        ),
    ],
    [
        of_v(
            limit=0.99,
            measure=measures.moments_are_bf16,
            text="{moment} is fp32, and all its values are bf16 numbers: something rounds them between steps",
            remedy="save and move states as they are, in fp32",
        ),
        of_v(
            limit=0.5,
            measure=measures.moments_rewritten,
            text="something else changes {moment} between two steps",
            remedy="find what writes the optimiser's states",
        ),
    ],
    Fault(
        site="weight decay",
        limit=FINDING_LIMITS["weight decay"][0],
        measure=measures.decay_not_written,
        text="{lost:.0%} of its weight decay is lost",
        remedy=DECAY_WITHIN_THE_UPDATE,
    ),
    [
        of_v(
            limit=0.0,
            measure=measures.v_below_zero,
            text="{count:,.0f} second moments are below 0, which no mean of squares is",
            remedy="load the states as they were saved: were exp_avg and exp_avg_sq swapped?",
            severity="severe",
            rank=10.5,
        ),
        of_v(
            limit=0.0,
            measure=measures.weights_burst_in_fp16,
            text="{count:,.0f} weights became not finite in a step whose gradients are finite: in fp16 the "
            "optimiser's eps is 0, and so are small squares, and it divides by 0",
            remedy=AVOID_FP16,
            severity="severe",
            rank=10.0,
        ),
        of_v(
            measure=measures.eps_lost_in_fp16,
            text="its eps of {eps:g} is 0 in fp16[, and so are {share:.0%} of the squares of its gradients]: "
            "the step divides by 0 where a gradient is small",
            remedy=AVOID_FP16,
            severe=0.01,
            rank=9.9,
        ),
        of_update(
            limit=0.0,
            measure=measures.weights_burst,
            text="{count:,.0f} weights became not finite in a step whose gradients are finite",
            remedy="look at the optimiser's states and its eps, and at what is 0 in their dtype",
            severity="severe",
            rank=10.0,
        ),
        Fault(
            site="weights",
            limit=0.0,
            measure=measures.broken_weights,
            text="weights of its sample were not finite before a step",
            remedy="watch with every=1 from an earlier checkpoint, to see what makes them so",
            severity="severe",
            rank=9.0,
        ),
    ],
    [
        of_v(
            limit=0.0,
            measure=measures.v_burst,
            text="{count:,.0f} second moments became not finite in a step whose gradients are finite[: "
            "{dtype} holds no squares above 65,504]",
            remedy="fp32 states, or take the loss scale off before the step",
            severity="severe",
            rank=9.5,
        ),
        of_v(
            measure=measures.v_cast,
            text="cast from {old} to {new} by step {step}",
            remedy="load_state_dict of torch casts states to the weight's dtype: put them back as they were "
            "saved",
        ),
        of_v(
            measure=measures.all_begun_anew,
            text="its second moment began anew before step {step}, as weights did",
            remedy=NOTHING_IF_RESTARTED_BY_PLAN,
            severity="note",
            rank=0.5,
        ),
        of_v(
            measure=measures.v_begun_anew,
            text="both moments were 0 at step {step}, after steps with gradients: they began anew",
            remedy="restore the optimiser's state at a resume; nothing, if it is a restart by plan",
            rank=1.0,
        ),
        of_v(
            measure=measures.v_all_zero_in_fp16,
            text="all zero at step {step}: fp16 holds no squares so small",
            remedy=AVOID_FP16,
            severity="severe",
            rank=2.0,
        ),
        of_v(
            limit=0.05,
            measure=measures.v_gone,
            text="{share:.0%} of the second moments are 0 in {dtype}, where squares of gradients are not: "
            "steps there are too long",
            remedy="fp32 or bf16 states, which hold small squares",
            severity="severe",
            rank=1.7,
        ),
        of_v(
            measure=measures.v_all_zero,
            text="all zero at step {step}, after steps with gradients: it was reset",
            remedy=RESTORE_SECOND_MOMENT,
            severity="severe",
            rank=2.0,
        ),
        of_v(
            limit=0.1,
            measure=measures.v_fell,
            text="{share:.0%} of it is less at step {step} than beta2 leaves of it: it was reset",
            remedy=RESTORE_SECOND_MOMENT,
            severity="severe",
            rank=2.0,
        ),
        of_v(
            limit=1 - HARDLY_WRITTEN,
            measure=measures.v_stands,
            text="it stands still: neither growth nor shrinking is written",
            remedy="find what freezes the second moment",
            severity="severe",
            rank=1.5,
        ),
        of_v(
            limit=1.0,
            measure=measures.v_grows,
            text="it grows where it should shrink: entries with small gradients take too short steps",
            remedy="fp32 or 8-bit exp_avg_sq, or beta2 0.99",
        ),
        of_v(
            limit=FINDING_LIMITS["exp_avg_sq"][0],
            measure=measures.v_not_shrinking,
            text="{lost:.0%} of the shrinking of v is lost: it can grow and not shrink",
            remedy="fp32 or stochastically rounded exp_avg_sq, or beta2 0.99",
        ),
    ],
    FAULTS_OF_AVERAGE,
    [
        of_counter(
            limit=0.0,
            measure=measures.counter_fell_with_weights,
            text="its step counter fell from {before:g} to {after:g}, and weights began anew with it",
            remedy=NOTHING_IF_RESTARTED_BY_PLAN,
            severity="note",
            rank=3.0,
        ),
        of_counter(
            limit=0.0,
            measure=measures.counter_put_back,
            text="its step counter fell from {before:g} to {after:g}: an earlier state was put back",
            remedy="nothing, if the weights were put back with it",
            severity="note",
            rank=3.0,
        ),
        of_counter(
            limit=0.0,
            measure=measures.counter_fell_with_moments,
            text="its step counter fell from {before:g} to {after:g}, and its moments began anew with it",
            remedy="restore the optimiser's state at a resume; nothing, if it is a restart by plan",
            rank=3.0,
        ),
        of_counter(
            limit=0.0,
            measure=measures.counter_fell,
            text="its step counter fell from {before:g} to {after:g}: the state was lost or replaced",
            remedy="restore the optimiser's state at a resume",
            severity="severe",
            rank=3.0,
        ),
        of_counter(
            measure=measures.counted_without_gradients,
            text="a step without gradients was counted before the first one, as torch.distributed.checkpoint "
            "does to make states: the first steps are up to {times:.2f} times too short",
            remedy="load the states after that, or set their `step` to 0",
            severity="note",
            rank=0.5,
        ),
        of_counter(
            limit=0.0,
            measure=measures.narrow_counter_stuck,
            text="its step counter stands at {value:g}: {dtype} holds no {next:g}",
            remedy=WIDEN_THE_COUNTER,
            rank=2.0,
        ),
        of_counter(
            limit=0.0,
            measure=measures.counter_stuck,
            text="its step counter did not count at {stuck} of {looks} looks; it says {value:g}",
            remedy=COUNT_EACH_STEP,
            rank=1.0,
        ),
        of_counter(
            measure=measures.narrow_counter,
            text="its step counter is {dtype}, which can't count beyond {most}",
            remedy=WIDEN_THE_COUNTER,
            rank=0.5,
        ),
        of_counter(
            limit=0.1,
            measure=measures.counter_behind,
            text="its step counter is {behind:g} behind the {steps} steps done",
            remedy="expected where it has no gradient at some steps",
            severity="note",
            rank=0.1,
        ),
    ],
    Fault(
        site="momentum",
        limit=0.05,
        measure=measures.momentum_in_codes,
        text="its codes are {error:.0%} off, and the step makes small parts as large as the large ones",
        remedy="8-bit codes or bf16",
    ),
    rows_of_noise(NOISE_OF_WEIGHTS),
    rows_of_noise(NOISE_OF_MOMENTS),
    of_gradients(
        limit=0.0,
        measure=measures_of_net.gradient_not_finite,
        text="{count:,.0f} gradients of its sample are not finite",
        remedy="a lower learning rate, clipping or bf16",
        severity="severe",
        rank=9.0,
    ),
    [
        of_gradients(
            limit=1.0,
            measure=measures_of_net.never_graded,
            text="never has a gradient",
            remedy=IS_IT_USED,
            severity="note",
            rank=0.0,
        ),
        of_gradients(
            limit=2.0,
            measure=measures_of_net.zero_gradient_of_zeros,
            text="its gradient is 0 at each look, and it is 0 itself",
            remedy="begin one of two factors with other values than 0",
            rank=0.5,
        ),
        of_gradients(
            limit=2.0,
            measure=measures_of_net.zero_gradient,
            text="its gradient is 0 at each look",
            remedy=IS_IT_USED + " In some nets it is so by design",
            severity="note",
            rank=0.5,
        ),
    ],
    [
        of_gradients(
            limit=0.02,
            measure=measures_of_net.gradient_partly_negated,
            text="{share:.0%} of the entries of its gradient change their sign between backward and the step",
            remedy=FIND_WHAT_WRITES_GRAD,
            severity="severe",
        ),
        of_gradients(
            limit=0.02,
            measure=measures_of_net.gradient_partly_zeroed,
            text="{share:.0%} of the entries of its gradient are set to 0 between backward and the step",
            remedy=FIND_WHAT_WRITES_GRAD,
        ),
        of_gradients(
            limit=0.02,
            measure=measures_of_net.gradient_masked,
            text="{share:.0%} of the entries of its gradient are set to 0 between backward and the step",
            remedy="nothing, if it is a mask by plan",
            severity="note",
        ),
    ],
    of_gradients(
        limit=0.5,
        measure=measures_of_net.gradient_subnormal,
        text="{share:.0%} of its gradients are below fp16's normal range",
        remedy="scale the loss (torch.amp.GradScaler), or bf16",
    ),
    Fault(
        site="accumulate",
        limit=FINDING_LIMITS["accumulate"][0],
        measure=measures_of_net.gradients_wrongly_summed,
        text="the sum of {count} micro-batches of gradients is {error:.2%} off",
        remedy="sum in fp32: keep the gradients in fp32, or accumulate outside of p.grad",
        severe=FINDING_LIMITS["accumulate"][1],
    ),
)

# Of the run as a whole. Of the rows of one list the first speaks of a tensor.
FAULTS_OF_RUN = families(
    of_optimizer(
        limit=2.0,
        measure=measures_of_net.none_graded,
        text="none of its parameters ever has a gradient",
        remedy="make the optimiser of the parameters that the net has once it is loaded, moved and cast",
        severity="severe",
        rank=6.0,
    ),
    of_update(
        limit=0.0,
        measure=measures.rate_below_zero,
        text="the learning rate was below 0 at {looks} of its looks: the weights go up the loss",
        remedy="check the schedule: one that goes on beyond its last step, say",
        severity="severe",
        rank=8.0,
    ),
    of_optimizer(
        limit=1.0,
        measure=measures_of_net.betas_swapped,
        text="its betas are {one:g} and {two:g}: the second moment forgets faster than the first",
        remedy="are they swapped? Usual are 0.9 and 0.999",
    ),
    of_average(
        measure=measures_of_averages.average_lacks,
        text="it has no average of {count} of the {all} tensors that train, as {name}",
        remedy="average all that trains, buffers aside",
        rank=1.2,
    ),
    [
        of_average(
            limit=0.0,
            measure=measures_of_averages.average_counter_fell,
            text="the counter of the average fell from {before:g} to {after:g}: its warm-up begins anew",
            remedy="restore the average's counter at a resume",
            severity="severe",
            rank=2.5,
        ),
        of_average(
            limit=2.0,
            measure=measures_of_averages.average_never_updated,
            text="the average was never updated: its counter says 0",
            remedy="update it after each step",
            rank=1.0,
        ),
        of_average(
            limit=2.0,
            measure=measures_of_averages.average_not_begun,
            text="the average was not updated yet: its counter says 0",
            remedy="nothing, if it begins later, as SWA",
            severity="note",
            rank=1.0,
        ),
        of_average(
            limit=2.0,
            measure=measures_of_averages.average_counter_stands,
            text="the counter of the average stands at {count:g}, while the average moves",
            remedy="count each update: the average's warm-up goes by it",
            rank=1.0,
        ),
    ],
    [
        of_update(
            measure=measures.all_rates_always_zero,
            text="the learning rate was 0 at each look",
            remedy="check the schedule, and what steps it",
            rank=0.0,
        ),
        of_update(
            measure=measures.all_rates_at_zero,
            text="the learning rate has been 0 since step {since}",
            remedy="check the schedule, and what steps it",
            rank=0.0,
        ),
    ],
    Fault(
        site="weight decay",
        limit=FINDING_LIMITS["weight decay"][0],
        measure=measures.decay_of_all,
        text="{lost:.0%} of the weight decay of all tensors is lost, which shows most here",
        remedy=DECAY_WITHIN_THE_UPDATE,
    ),
    Fault(
        site="{state}",
        limit=FINDING_LIMITS["exp_avg_sq"][0],
        measure=measures.accumulators_not_written,
        text="{share:.0%} of what it should take over is not written",
        remedy="fp32 states",
    ),
    Fault(
        site="{state}",
        measure=measures.narrow_states,
        text="held in {dtype} for {count} tensors; lost of what it should take over: {most}",
        remedy="fp32 states, where it decays slowly",
        severity="note",
        rank=0.0,
    ),
    [
        of_counter(
            limit=0.5,
            measure=measures.states_begin_anew,
            text="the optimiser's states were empty at {share:.0%} of the looks after the first",
            remedy="keep the states from step to step: find what clears them or makes the optimiser anew",
            severity="severe",
            rank=3.5,
        ),
        of_counter(
            limit=0.25,
            measure=measures.all_counters_behind,
            text="the step counters of all tensors are {behind:g} or more behind the {steps} steps done",
            remedy=COUNT_EACH_STEP,
            rank=1.0,
        ),
    ],
    [
        of_update(
            measure=measures.masters_at_first,
            text="the weight is fp32, and all its values were bf16 numbers when the watch began, beside "
            "moments of earlier steps: it was rebuilt from a bf16 copy",
            remedy=SAVE_THE_MASTERS,
            rank=1.0,
        ),
        of_update(
            limit=0.0,
            measure=measures.masters_rebuilt,
            text="the weight is fp32, and all its values became bf16 numbers before step {step}, {times} "
            "times in all: it was rebuilt from a bf16 copy",
            remedy=SAVE_THE_MASTERS,
            rank=1.0,
        ),
    ],
    of_counter(
        limit=40.0,
        measure=measures_of_net.passes_without_step,
        text="no step was done in the last {passes} backward passes: gradients are not finite",
        remedy=MEND_WHAT_OVERFLOWS,
        severity="severe",
        rank=9.2,
    ),
    row_of_shared_noise(NOISE_OF_WEIGHTS),
    row_of_shared_noise(NOISE_OF_MOMENTS),
    [
        of_gradients(
            limit=0.5,
            measure=measures_of_net.below_eps_by_division,
            text="{share:.0%} of the second moments are below the optimiser's eps: steps are too short, as "
            "gradients are divided by {by:,.0f} between backward and the step",
            remedy=FIND_WHAT_DIVIDES,
            severity="severe",
        ),
        of_gradients(
            limit=0.5,
            measure=measures_of_net.below_eps,
            text="{share:.0%} of the second moments are below the optimiser's eps: steps are too short",
            remedy="a larger clipping norm or loss scale, or a smaller eps",
            severity="severe",
        ),
    ],
    [
        of_gradients(
            limit=0.999,
            measure=measures_of_net.gradients_unscaled,
            text="gradients are divided by {by:,.0f} between backward and the step, which is {step:.1g} of "
            "the weights then: the net stands still",
            remedy=FIND_WHAT_DIVIDES,
            severity="severe",
            rank=1.5,
        ),
        of_gradients(
            limit=0.999,
            measure=measures_of_net.gradients_clipped,
            text="clipping leaves {left:.1g} of the gradient's norm",
            remedy="clip at the norm that is usual, not far below it",
            rank=1.0,
        ),
    ],
    [
        of_gradients(
            limit=0.0,
            measure=measures_of_net.gradients_mended,
            text="{whose} not finite after backward, and finite when the step begins, at {share:.0%} of the "
            "looks",
            remedy="leave out such a step, and find what overflows: what was not finite says nothing of the "
            "others",
            severe=0.25,
            rank=9.4,
        ),
        of_gradients(
            limit=0.0,
            measure=measures_of_net.gradients_spoilt,
            text="{whose} finite after backward, and not finite when the step begins",
            remedy="check the norm and the factor that clipping computes: one of them is not finite",
            severity="severe",
            rank=9.5,
        ),
        of_gradients(
            limit=0.0,
            measure=measures_of_net.gradients_negated,
            text="{whose} multiplied by {factor:.2g} between backward and the step",
            remedy="check the norm and the factor that clipping computes: neither is below 0",
            severity="severe",
            rank=8.5,
        ),
        of_gradients(
            limit=0.0,
            measure=measures_of_net.gradients_zeroed,
            text="{whose} set to 0 between backward and the step, at {share:.0%} of the looks",
            remedy="check the clipping norm: an infinite one, as of fp16, makes a factor of 0. And find what "
            "clears gradients before the step",
            severe=0.5,
            rank=8.0,
        ),
    ],
    of_gradients(
        limit=2.0,
        measure=measures_of_net.all_zero_gradients,
        text="the gradients of all tensors are 0 at each look",
        remedy="does the loss depend on the net? In fp16 small gradients are 0: scale the loss",
        severity="severe",
        rank=7.0,
    ),
    Fault(
        site="accumulate",
        measure=measures_of_net.gradients_forgotten,
        text="of {count} backward passes before a step the first {cleared} are forgotten",
        remedy="clear gradients after the step alone",
        severity="severe",
        rank=1.0,
    ),
    [
        of_gradients(
            limit=0.2,
            measure=measures_of_net.stepped_again,
            text="{share:.0%} of the steps read the gradients of the step before once more",
            remedy="call optimizer.step() once for each backward pass",
            rank=8.2,
        ),
        of_gradients(
            measure=measures_of_net.gradients_not_cleared,
            text="gradients of earlier steps are still there when a step begins",
            remedy="call optimizer.zero_grad() once a step",
            severity="severe",
            rank=8.0,
        ),
    ],
    of_gradients(
        measure=measures_of_net.dead_parts,
        text="{part} never have a gradient",
        remedy=IS_IT_USED,
        rank=0.4,
    ),
    of_optimizer(
        limit=0.5,
        measure=measures_of_net.copies_apart,
        text="the optimiser steps copies, and {share:.0%} of the weights differ from them",
        remedy="make the optimiser from the model that trains, or copy its weights back",
        severity="severe",
        rank=5.0,
    ),
    [
        of_optimizer(
            measure=measures_of_net.parameters_graded_and_ungrouped,
            text="it has gradients, and is in no group of the optimiser",
            remedy=ADD_IT_TO_A_GROUP,
            severity="severe",
            rank=4.0,
        ),
        of_optimizer(
            measure=measures_of_net.parameters_ungrouped,
            text="it is trained by requires_grad, and is in no group of the optimiser",
            remedy=ADD_IT_TO_A_GROUP,
            severity="note",
            rank=4.0,
        ),
    ],
    of_frozen(
        measure=measures_of_net.frozen_alone,
        text="requires_grad is False, while others of its kind train",
        remedy="requires_grad_(True), if it should train",
    ),
    of_frozen(
        measure=measures_of_net.frozen_parts,
        text="{count} parameters don't train: {some}",
        remedy="nothing, if that is the plan",
        severity="note",
        rank=0.0,
    ),
    of_buffers(
        limit=0.0,
        measure=measures_of_net.broken_buffers,
        text="{count:,} entries of its sample are not finite; they were when the watch began",
        remedy="find what writes it",
        severity="severe",
        rank=9.0,
    ),
    [
        of_buffers(
            limit=1.0,
            measure=measures_of_net.counting_buffers,
            text="a buffer in {dtype} that something adds to: it is {largest:,.0f}, and above {most} {dtype} "
            "does not hold all whole numbers",
            remedy="count in integers or in fp32",
        ),
        of_buffers(
            measure=measures_of_net.rounded_buffers,
            text="a buffer {what}[, {error:.2%} off its fp32 values]",
            remedy="keep buffers in fp32 when the model is cast: RoPE's frequencies, BatchNorm's statistics",
        ),
    ],
)

def no_step_was_done(watch):
    """The finding of a watch that has seen no step."""
    passes, spoilt = watch.passes.most()
    text, remedy = "no step was done since this watch began", DOES_IT_STEP
    if passes >= 10:
        text += f", in {passes} backward passes"
    if spoilt >= 10:
        text, remedy = f"{text}: gradients are not finite", MEND_WHAT_OVERFLOWS
    return Finding("step", "severe" if passes >= 10 else "moderate", text, remedy, cause=text)


# ---- Findings ----------------------------------------------------------------------------------------------


def findings(watch):
    """(list of Finding, worst first; {site: share lost, summed over all tensors})."""
    if not watch.steps:
        return [no_step_was_done(watch)], {}
    if not watch.looks:
        return [], {}
    seen = Measured(watch)
    found = []
    for one in seen.tensors:
        for rows in FAULTS_OF_TENSOR:
            found += first_finding(rows, one, one.name)
    # a target that is copied now and then, as of Q-learning, is no average
    copied = (measures_of_averages.average_copies, measures_of_averages.average_overtaken)
    of_teachers = [fault for fault in FAULTS_OF_AVERAGE if fault.measure not in copied]
    for one in watch.teachers.tensors(seen):
        found += first_finding(of_teachers, one, one.name)
    for rows in FAULTS_OF_RUN:
        found += findings_by_tensor(rows, seen)
    sites = {finding.site for finding in found if finding.severity != "note"}
    sound = {site: share for site, share in seen.total().items() if site not in sites}
    return sorted(found, key=lambda finding: finding.rank), sound


def shares(watch):
    """{tensor: {site: share of what was wanted that was not written}}."""
    if not watch.looks:
        return {}
    return {one.name: one.shares() for one in Measured(watch).tensors}


# ---- The table ---------------------------------------------------------------------------------------------

BEGIN_OF_TABLE, END_OF_TABLE = "<!-- findings -->\n", "<!-- end of findings -->\n"


def main(argv):
    if not argv:
        print(faults_table([*FAULTS_OF_TENSOR, *FAULTS_OF_RUN]), end="")
        return
    page = Path(argv[0])
    before, _, rest = page.read_text().partition(BEGIN_OF_TABLE)
    _, _, after = rest.partition(END_OF_TABLE)
    page.write_text(
        f"{before}{BEGIN_OF_TABLE}{faults_table([*FAULTS_OF_TENSOR, *FAULTS_OF_RUN])}{END_OF_TABLE}{after}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
