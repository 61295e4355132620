"""Faults that a person could make, placed by hand; mutations.py plants them."""

import ast
import re
from typing import NamedTuple

import mutations_by_rule
from mutations_by_rule import Mutation


class ByHand(NamedTuple):
    """old: text that stands once in `function` of `file`; new: what takes its place. function: a name as
    Class.method, by which it is found where it has moved since; "" for what stands in none.
    """

    name: str
    file: str
    function: str
    old: str
    new: str


LOWPREC = (
    ByHand(
        "half-the-noise",
        "lowprec/rounding.py",
        "stochastic_round",
        "(x.view(torch.int32) + (noise & 0xFFFF))",
        "(x.view(torch.int32) + (noise & 0x7FFF))",
    ),
    ByHand(
        "noise-without-step",
        "lowprec/rounding.py",
        "key_words",
        "key = hash64(seed, step, kind, position >> 32)",
        "key = hash64(seed, kind, position >> 32)",
    ),
    ByHand(
        "noise-without-kind",
        "lowprec/rounding.py",
        "key_words",
        "key = hash64(seed, step, kind, position >> 32)",
        "key = hash64(seed, step, position >> 32)",
    ),
    ByHand(
        "kahan-sign",
        "lowprec/rounding.py",
        "Kahan.held",
        "return p.float() + low.float()",
        "return p.float() - low.float()",
    ),
    ByHand(
        "ties-up",
        "lowprec/rounding.py",
        "on_grid",
        "(below >> 1) + ((bits >> lost) & 1)",
        "(below >> 1) + 1",
    ),
    ByHand(
        "average-noise-is-the-weights",
        "lowprec/optimizers/average.py",
        "EMA._move",
        "position, Noise.AVERAGE, ahead",
        "position, Noise.WEIGHT, ahead",
    ),
    ByHand(
        "betas-swapped",
        "lowprec/optimizers/rounded.py",
        "AdamW.numbers",
        'beta1, beta2 = group["betas"]',
        'beta2, beta1 = group["betas"]',
    ),
    ByHand(
        "bias-correction-a-step-late",
        "lowprec/optimizers/rounded.py",
        "AdamW.numbers",
        "(1 - beta1**step)",
        "(1 - beta1 ** (step + 1))",
    ),
    ByHand(
        "eps-under-the-root",
        "lowprec/optimizers/rounded.py",
        "adamw",
        "(n.rate * m) / (v.sqrt() / n.root_correction + n.eps)",
        "(n.rate * m) / ((v + n.eps).sqrt() / n.root_correction)",
    ),
    ByHand(
        "moments-share-noise",
        "lowprec/optimizers/rounded.py",
        "write_step",
        "[first >> 16, second, second >> 16]",
        "[second, second, second >> 16]",
    ),
    ByHand(
        "decay-twice",
        "lowprec/optimizers/rounded.py",
        "Rounded.plan",
        'decay = 1 - float(group["lr"])',
        'decay = 1 - 2 * float(group["lr"])',
    ),
    ByHand(
        "codes-share-noise",
        "lowprec/optimizers/rounded.py",
        "Rounded._writing",
        "tuple(Noise.EXP_AVG + self.moments.index(name) for",
        "tuple(Noise.EXP_AVG for",
    ),
    ByHand(
        "nesterov-without-momentum",
        "lowprec/optimizers/sgd.py",
        "SGD.numbers",
        "of_momentum=momentum if nesterov else 1.0",
        "of_momentum=1.0",
    ),
    ByHand(
        "lion-keeps-its-step",
        "lowprec/optimizers/lion.py",
        "lion",
        "(m + n.one_minus_beta2 * (g - m),)",
        "(m + n.one_minus_beta1 * (g - m),)",
    ),
    ByHand(
        "muon-scale-of-the-shorter-side",
        "lowprec/optimizers/muon.py",
        "",
        "0.2 * max(rows, columns)",
        "0.2 * min(rows, columns)",
    ),
    ByHand(
        "adafactor-rows-not-normalised",
        "lowprec/optimizers/adafactor.py",
        "Adafactor.update_tensor",
        '(new["row_var"] / new["row_var"].mean()).rsqrt()',
        'new["row_var"].rsqrt()',
    ),
    ByHand(
        "warm-up-of-the-average-off-by-one",
        "lowprec/optimizers/average.py",
        "EMA.decay",
        "min(self.full_decay, (1 + self.step) / (10 + self.step))",
        "min(self.full_decay, self.step / (9 + self.step))",
    ),
    ByHand(
        "clip-of-a-released-tensor-dropped",
        "lowprec/parts/release.py",
        "Release._look",
        "scale = {p: clip_factor(norms[p], self.clip)}",
        "scale = {p: 1.0}",
    ),
    ByHand(
        "offload-waits-for-the-other-room",
        "lowprec/parts/offload.py",
        "Offload.passing.fetch",
        "list(copy_pairs(on_device, states[n])), free_after[n % 2])",
        "list(copy_pairs(on_device, states[n])), free_after[(n + 1) % 2])",
    ),
    ByHand(
        "noise-of-a-last-block-starts-anew",
        "lowprec/formats.py",
        "Format.encode",
        "key[2] += cut",
        "key[2] += whole",
    ),
    ByHand(
        "second-moment-may-be-zero",
        "lowprec/formats.py",
        "stochastic_codes",
        "(y > 0) & (code == 0) & (table[0] == 0)",
        "(y < 0) & (code == 0) & (table[0] == 0)",
    ),
    ByHand(
        "float8-scale-not-multiplied",
        "lowprec/formats.py",
        "Float8._decode_rows",
        "return self.values(codes.view(self.dtype)) * scales[:, None]",
        "return self.values(codes.view(self.dtype))",
    ),
    ByHand(
        "scale-of-gradients-dropped",
        "lowprec/kernels/exact_step.py",
        "update_moments",
        "part = g[at].float() * row[PLACE_OF_SCALE]",
        "part = g[at].float()",
    ),
    ByHand(
        "zeros-may-be-raised-at-any-eps",
        "lowprec/kernels/exact_step.py",
        "smallest_root_vanishes",
        "return eps * (1 - beta2) ** 0.5 > 2.0**-37",
        "return eps > 0",
    ),
    ByHand(
        "loss-not-divided",
        "lowprec/parts/micro_batches.py",
        "MicroBatches.loss",
        "return loss / accumulate",
        "return loss",
    ),
    ByHand(
        "last-micro-batch-alone",
        "lowprec/parts/micro_batches.py",
        "MicroBatches.after_backward",
        "self.sums[p].add_(p.grad)",
        "self.sums[p].copy_(p.grad)",
    ),
    ByHand(
        "mask-becomes-infinite",
        "lowprec/cast.py",
        "narrowed",
        "torch.where(x.isfinite(), x.clamp(-top, top), x)",
        "torch.where(x.isfinite(), x, x.clamp(-top, top))",
    ),
    ByHand(
        "moments-of-an-exact-master",
        "lowprec/recipes.py",
        "_moments_beside",
        "return BF16_MOMENTS if torch.bfloat16 in way.loses else FP32_MOMENTS",
        "return BF16_MOMENTS",
    ),
    ByHand(
        "two-micro-batches-with-release",
        "lowprec/parts/release.py",
        "",
        "lambda run: run.options.accumulate > 1",
        "lambda run: run.options.accumulate > 2",
    ),
    ByHand(
        "bytes-of-sums-halved",
        "lowprec/parts/micro_batches.py",
        "MicroBatches.rows",
        "4.0 if self.keeps_sums",
        "2.0 if self.keeps_sums",
    ),
    ByHand(
        "second-moment-moves-with-gradients-alone",
        "lowprec/telemetry.py",
        "StepReport.written",
        "should_move = has_grad | (moment != 0)",
        "should_move = has_grad",
    ),
    ByHand(
        "history-of-amax-rolls-back",
        "lowprec/layers/fp8_product.py",
        "roll_history",
        "history.roll(-1, 0)",
        "history.roll(1, 0)",
    ),
    ByHand(
        "equal-magnitudes-both-lose",
        "lowprec/layers/sparsity.py",
        "two_of_four",
        "bc = b >= c",
        "bc = b > c",
    ),
    ByHand(
        "variance-of-a-write",
        "lowprec/watch/write_errors.py",
        "Errors.add",
        "variance = f * (1 - f)",
        "variance = f",
    ),
    ByHand(
        "norms-of-this-rank-alone",
        "lowprec/parts/ranks.py",
        "NetRanks.norms_of",
        "norms[p] = own if self.parts[p] is None else whole",
        "norms[p] = own",
    ),
)

HARNESS = (
    ByHand(
        "schedule-without-its-end",
        "harness/flags.py",
        "FlagTable._of_steps",
        "if row.of_steps and value != row.default:",
        'if row.of_steps and value != row.default and row.name != "lr_schedule":',
    ),
    ByHand(
        "checksum-not-compared",
        "harness/checkpoints.py",
        "verify_checkpoint",
        "if tail[len(DIGEST_MARK) :] != digest(file, size - DIGEST_BYTES).encode():",
        'if tail[len(DIGEST_MARK) :] == b"":',
    ),
    ByHand(
        "steps-that-were-never-done",
        "harness/checkpoints.py",
        "check_optimizer",
        "if not 0 <= done <= step:",
        "if not 0 <= done:",
    ),
    ByHand(
        "last-row-of-metrics-lost",
        "harness/run_folder.py",
        "Folder.begin",
        'row["step"] <= step]',
        'row["step"] < step]',
    ),
    ByHand(
        "new-shards-removed-too",
        "harness/shards.py",
        "_remove_folders_but",
        "if old != kept and written.fullmatch(old.name)",
        "if written.fullmatch(old.name)",
    ),
    ByHand(
        "resume-forgets-micro-batches",
        "harness/batches.py",
        "read_batches",
        "start = step * config.accumulate",
        "start = step",
    ),
    ByHand(
        "every-epoch-alike",
        "harness/batches.py",
        "BatchIndices.__iter__",
        "stream(self.seed, Stream.ORDER, epoch)",
        "stream(self.seed, Stream.ORDER, 0)",
    ),
    ByHand(
        "losses-of-an-interval-forgotten",
        "trainer.py",
        "Trainer.load_state_dict",
        'state["seconds"], state["interval"]',
        'state["seconds"], 0',
    ),
    ByHand(
        "ranks-share-noise",
        "harness/reduction.py",
        "StochasticMean.mean",
        "hash64(self.seed, 1 + rank)",
        "hash64(self.seed, 1)",
    ),
    ByHand(
        "smallest-for-largest",
        "harness/ranks.py",
        "Processes.any",
        "op=dist.ReduceOp.MAX",
        "op=dist.ReduceOp.MIN",
    ),
    ByHand(
        "patience-one-look-longer",
        "harness/validation.py",
        "Validation.exhausted",
        "self.waited >= self.patience",
        "self.waited > self.patience",
    ),
    ByHand(
        "warm-up-starts-at-zero",
        "lowprec/trials/schedule.py",
        "lr_factor",
        "min(1.0, (step + 1) / config.warmup)",
        "min(1.0, step / config.warmup)",
    ),
)

TASKS = (
    ByHand(
        "min-snr-upside-down",
        "tasks/diffusion.py",
        "DDPM.errors",
        "weight = snr.clamp(max=gamma) / snr",
        "weight = snr / snr.clamp(max=gamma)",
    ),
    ByHand(
        "guidance-from-the-label",
        "tasks/generation.py",
        "Generation.predict",
        "without_label + guidance * (with_label - without_label)",
        "with_label + guidance * (with_label - without_label)",
    ),
    ByHand(
        "frechet-cross-term-once",
        "tasks/metrics.py",
        "frechet_distance",
        "cov_b.trace() - 2 * cross",
        "cov_b.trace() - cross",
    ),
    ByHand(
        "kid-biased",
        "tasks/metrics.py",
        "kid.within",
        "/ (len(x) * (len(x) - 1))",
        "/ len(x) ** 2",
    ),
    ByHand(
        "one-slice-less-held-out",
        "tasks/data.py",
        "_held_slices",
        "torch.arange(len(owners)) >= len(owners) - count",
        "torch.arange(len(owners)) > len(owners) - count",
    ),
    ByHand(
        "bdh-reads-its-own-position",
        "tasks/language.py",
        "Hatchling.forward",
        "(turned @ turned.mT).tril(-1)",
        "(turned @ turned.mT).tril()",
    ),
    ByHand(
        "right-answers-for-errors",
        "tasks/classify.py",
        "Classify._confusion",
        "labels[answer != labels]",
        "labels[answer == labels]",
    ),
    ByHand(
        "last-batch-of-masks-alone",
        "tasks/segment.py",
        "Segment._confusion",
        "counts = counts + metrics.confusion(predicted, masks",
        "counts = metrics.confusion(predicted, masks",
    ),
    ByHand(
        "kl-sign-of-the-logarithm",
        "tasks/vae.py",
        "kl",
        "- 1 - variance.log()",
        "- 1 + variance.log()",
    ),
    ByHand(
        "shares-sum-over-slots",
        "tasks/slots.py",
        "SlotAttention.compete",
        "weights / weights.sum(1, keepdim=True)",
        "weights / weights.sum(2, keepdim=True)",
    ),
    ByHand(
        "noise-and-image-swapped",
        "tasks/reflow.py",
        "Reflow.with_noise",
        "return images.chunk(2, dim=1)",
        "return images.chunk(2, dim=1)[::-1]",
    ),
    ByHand(
        "second-step-from-the-first-time",
        "tasks/distillation.py",
        "Distill.wanted",
        "self.teach(halfway, labels, middle, end)",
        "self.teach(halfway, labels, t, end)",
    ),
    ByHand(
        "target-at-the-later-time",
        "tasks/consistency.py",
        "Consistency.loss",
        "wanted = self.end(self.target(model), nearer, labels, earlier)",
        "wanted = self.end(self.target(model), nearer, labels, later)",
    ),
)

BY_HAND = (*LOWPREC, *HARNESS, *TASKS)


# ---- Where they are ----------------------------------------------------------------------------------------


def found(row, folder):
    """A Mutation where the text of a ByHand stands in a copy of the repository; None where it is not to be
    found. It is looked for in its function, in a function of that name elsewhere, and anywhere.
    """
    files = [path for room in mutations_by_rule.ROOMS for path in (folder / room).rglob("*.py")]
    files += folder.glob("*.py")
    own = [path for path in files if path == folder / row.file]
    for paths, function in ((own, row.function), (files, row.function), (files, "")):
        places = [(path, start) for path in paths for start in starts_in(row.old, function, path)]
        if len(places) == 1:
            return placed(row, *places[0], folder)
    return None


def starts_in(old, function, path):
    """Where a text starts, in bytes, within the functions of a name; "" for a whole file."""
    text = path.read_bytes()
    if old.encode() not in text:
        return []
    lines = text.splitlines(keepends=True)
    found = []
    for first, last in ranges(ast.parse(text), function, len(lines)):
        start = sum(map(len, lines[: first - 1]))
        part = b"".join(lines[first - 1 : last])
        found += [start + at.start() for at in re.finditer(re.escape(old.encode()), part)]
    return found


def ranges(tree, function, length):
    """[(first line, last)] of the functions whose name ends so: a method may get another class."""
    if not function:
        return [(1, length)]
    name = function.rpartition(".")[2]
    kinds = ast.FunctionDef, ast.ClassDef
    return [(n.lineno, n.end_lineno) for n in ast.walk(tree) if isinstance(n, kinds) and n.name == name]


def placed(row, path, start, folder):
    text = path.read_bytes()
    first = text[:start].count(b"\n") + 1
    lines = first, first + row.old.count("\n")
    end = start + len(row.old.encode())
    file = str(path.relative_to(folder))
    return Mutation(row.name, file, row.function, " ".join(row.old.split()), start, end, row.new, lines)
