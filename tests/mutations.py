"""Do the tests find faults? Plants one fault after another in a copy of the repository and runs the tests.

    python tests/mutations.py                      all of them: some five minutes on one core
    python tests/mutations.py --only NAME NAME     these alone
    python tests/mutations.py --list               their names and files
    python tests/mutations.py --sound              run the chosen tests without any fault: all must pass
    python tests/mutations.py --whole              where the chosen tests pass, run the whole rooms too

A fault is one that a person could make: a sign, a bound, a line too few. It is caught when a test fails, or
hangs. The exit status is 1 if more than ALLOWED survive. Nothing is written outside a temporary folder.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
ROOMS = "tests/lowprec", "tests/watch", "tests/harness", "tests/tasks"
ALLOWED = 5  # faults that may survive
LIMIT = 180  # seconds that one file of tests may take
WHOLE_LIMIT = 1800  # the same of all rooms
NOTHING_RAN = pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR


class Mutation(NamedTuple):
    """old: text of `file` that stands there once; new: what takes its place.

    tests: files of tests/ that should catch it, each followed by what `pytest -k` chooses of it, if not all:
    "lowprec/test_adamw.py scale".
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple


# ---- The faults --------------------------------------------------------------------------------------------

LOWPREC = (
    Mutation(
        "half-the-noise",
        "lowprec/rounding.py",
        "(x.view(torch.int32) + (noise & 0xFFFF))",
        "(x.view(torch.int32) + (noise & 0x7FFF))",
        ("lowprec/test_rounding.py unbiased or every_noise",),
    ),
    Mutation(
        "noise-without-step",
        "lowprec/rounding.py",
        "key = hash64(seed, step, kind, position >> 32)",
        "key = hash64(seed, kind, position >> 32)",
        ("lowprec/test_rounding.py unrelated",),
    ),
    Mutation(
        "noise-without-kind",
        "lowprec/rounding.py",
        "key = hash64(seed, step, kind, position >> 32)",
        "key = hash64(seed, step, position >> 32)",
        ("lowprec/test_rounding.py unrelated", "lowprec/test_average.py share_noise"),
    ),
    Mutation(
        "kahan-sign",
        "lowprec/rounding.py",
        "return p.float() + low.float()",
        "return p.float() - low.float()",
        ("lowprec/test_rounding.py exact_weight",),
    ),
    Mutation(
        "ties-up-in-the-average",
        "lowprec/rounding.py",
        "(below >> 1) + ((bits >> count) & 1)",
        "(below >> 1) + 1",
        ("lowprec/test_rounding.py exact_weight or held_once",),
    ),
    Mutation(
        "average-noise-of-a-part",
        "lowprec/rounding.py",
        "torch.tensor([0, 0, start, 0]",
        "torch.tensor([0, 0, 0, 0]",
        ("lowprec/test_average.py moves_along",),
    ),
    Mutation(
        "betas-swapped",
        "lowprec/optimizers/adamw.py",
        'beta1, beta2 = group["betas"]',
        'beta2, beta1 = group["betas"]',
        ("lowprec/test_adamw.py torch_adamw_bit_for_bit",),
    ),
    Mutation(
        "bias-correction-a-step-late",
        "lowprec/optimizers/adamw.py",
        "(1 - beta1**step)",
        "(1 - beta1 ** (step + 1))",
        ("lowprec/test_adamw.py torch_adamw_bit_for_bit",),
    ),
    Mutation(
        "eps-under-the-root",
        "lowprec/optimizers/adamw.py",
        "(n.rate * m) / (v.sqrt() / n.root_correction + n.eps)",
        "(n.rate * m) / ((v + n.eps).sqrt() / n.root_correction)",
        ("lowprec/test_cpu_step.py bits_of_the_torch_code", "lowprec/test_adamw.py eps_is_added"),
    ),
    Mutation(
        "moments-share-noise",
        "lowprec/optimizers/rounded.py",
        "[noise >> 16, second, second >> 16]",
        "[second, second, second >> 16]",
        ("lowprec/test_optim.py independently", "lowprec/test_cpu_step.py bits_of_the_torch_code"),
    ),
    Mutation(
        "decay-twice",
        "lowprec/optimizers/rounded.py",
        'decay=1 - float(group["lr"])',
        'decay=1 - 2 * float(group["lr"])',
        ("lowprec/test_adamw.py torch_adamw_bit_for_bit",),
    ),
    Mutation(
        "codes-share-noise",
        "lowprec/optimizers/rounded.py",
        "kind = Noise.EXP_AVG + self.moments.index(name)",
        "kind = Noise.EXP_AVG",
        ("lowprec/test_moments.py share_noise",),
    ),
    Mutation(
        "nesterov-without-momentum",
        "lowprec/optimizers/sgd.py",
        "of_momentum=momentum if nesterov else 1.0",
        "of_momentum=1.0",
        ("lowprec/test_optimizers.py sgd_is or sgd_with",),
    ),
    Mutation(
        "lion-keeps-its-step",
        "lowprec/optimizers/lion.py",
        "(m + n.one_minus_beta2 * (g - m),)",
        "(m + n.one_minus_beta1 * (g - m),)",
        ("lowprec/test_cpu_step.py other_optimisers", "lowprec/test_optimizers.py lion_in"),
    ),
    Mutation(
        "muon-scale-of-the-shorter-side",
        "lowprec/optimizers/muon.py",
        "0.2 * max(rows, columns)",
        "0.2 * min(rows, columns)",
        ("lowprec/test_optimizers.py muon_is_torchs",),
    ),
    Mutation(
        "adafactor-rows-not-normalised",
        "lowprec/optimizers/adafactor.py",
        '(new["row_var"] / new["row_var"].mean()).rsqrt()',
        'new["row_var"].rsqrt()',
        ("lowprec/test_optimizers.py adafactor_is or adafactor_by",),
    ),
    Mutation(
        "warm-up-of-the-average-off-by-one",
        "lowprec/optimizers/average.py",
        "min(self.full_decay, (1 + self.step) / (10 + self.step))",
        "min(self.full_decay, self.step / (9 + self.step))",
        ("lowprec/test_average.py warm_up",),
    ),
    Mutation(
        "clip-of-a-released-tensor-dropped",
        "lowprec/optimizers/release.py",
        "scale = {p: clip_factor(norms[p], self.clip)}",
        "scale = {p: 1.0}",
        ("lowprec/test_release.py clipped",),
    ),
    Mutation(
        "offload-waits-for-the-other-room",
        "lowprec/optimizers/offload.py",
        "list(copy_pairs(on_device, states[n])), free_after[n % 2])",
        "list(copy_pairs(on_device, states[n])), free_after[(n + 1) % 2])",
        ("lowprec/test_states_on_cpu.py ordered",),
    ),
    Mutation(
        "noise-of-a-last-block-starts-anew",
        "lowprec/formats.py",
        "key[2] += cut",
        "key[2] += whole",
        ("lowprec/test_formats.py any_length",),
    ),
    Mutation(
        "second-moment-may-be-zero",
        "lowprec/formats.py",
        "(y > 0) & (code == 0) & (table[0] == 0)",
        "(y < 0) & (code == 0) & (table[0] == 0)",
        ("lowprec/test_formats.py zero", "lowprec/test_cpu_step.py codes_have_the_bits"),
    ),
    Mutation(
        "float8-scale-not-multiplied",
        "lowprec/formats.py",
        "return self.values(codes.view(self.dtype)) * scales[:, None]",
        "return self.values(codes.view(self.dtype))",
        ("lowprec/test_formats.py compiled_and_eager and e4m3",),
    ),
    Mutation(
        "scale-of-gradients-dropped",
        "lowprec/kernels/exact_step.py",
        "part = g[at].float() * row[PLACE_OF_SCALE]",
        "part = g[at].float()",
        ("lowprec/test_adamw.py with_a_scale",),
    ),
    Mutation(
        "zeros-may-be-raised-at-any-eps",
        "lowprec/kernels/exact_step.py",
        "return eps * (1 - beta2) ** 0.5 > 2.0**-37",
        "return eps > 0",
        ("lowprec/test_adamw.py denormal",),
    ),
    Mutation(
        "loss-not-divided",
        "lowprec/precision.py",
        "self.scaler.scale(loss / self.micro_batches.divisor(self, weight)).backward()",
        "self.scaler.scale(loss).backward()",
        ("lowprec/test_precision.py accumulation_averages",),
    ),
    Mutation(
        "last-micro-batch-alone",
        "lowprec/gradients.py",
        "run.sums[p].add_(p.grad)",
        "run.sums[p].copy_(p.grad)",
        ("lowprec/test_precision.py fp32_accumulation or fp32_sum",),
    ),
    Mutation(
        "mask-becomes-infinite",
        "lowprec/cast.py",
        "torch.where(x.isfinite(), x.clamp(-top, top), x)",
        "torch.where(x.isfinite(), x, x.clamp(-top, top))",
        ("lowprec/test_precision_refusals.py finite_masks",),
    ),
    Mutation(
        "moments-of-an-exact-master",
        "lowprec/recipes.py",
        'moments = "fp32" if flags.master in rules.EXACT_MASTERS else "bf16"',
        'moments = "bf16" if flags.master in rules.EXACT_MASTERS else "fp32"',
        ("lowprec/test_recipes.py compose",),
    ),
    Mutation(
        "two-micro-batches-with-release",
        "lowprec/rules.py",
        "lambda run: run.grad_release and run.accumulate > 1",
        "lambda run: run.grad_release and run.accumulate > 2",
        ("lowprec/test_rules.py", "lowprec/test_release.py refused_with"),
    ),
    Mutation(
        "bytes-of-sums-halved",
        "lowprec/ledger.py",
        'sizes["accumulate"] = 4.0',
        'sizes["accumulate"] = 2.0',
        ("lowprec/test_ledger.py bytes",),
    ),
    Mutation(
        "second-moment-moves-with-gradients-alone",
        "lowprec/telemetry.py",
        "should_move = has_grad | (moment != 0)",
        "should_move = has_grad",
        ("lowprec/test_telemetry.py",),
    ),
    Mutation(
        "history-of-amax-rolls-back",
        "lowprec/layers/fp8_product.py",
        "history.roll(-1, 0)",
        "history.roll(1, 0)",
        ("lowprec/test_fp8.py amax or delayed",),
    ),
    Mutation(
        "equal-magnitudes-both-lose",
        "lowprec/layers/sparsity.py",
        "bc = b >= c",
        "bc = b > c",
        ("lowprec/test_sparsity_masks.py equal_magnitudes",),
    ),
    Mutation(
        "variance-of-a-write",
        "lowprec/watch/write_errors.py",
        "variance = f * (1 - f)",
        "variance = f",
        ("watch/test_write_errors.py", "lowprec/test_optimizers_in_runs.py test_watch"),
    ),
    Mutation(
        "norms-of-this-rank-alone",
        "lowprec/fsdp.py",
        "norms[p] = own if self.parts[p] is None else whole",
        "norms[p] = own",
        ("harness/test_fsdp.py norms_and_telemetry",),
    ),
)

HARNESS = (
    Mutation(
        "schedule-without-its-end",
        "harness/flags.py",
        'if config.lr_schedule != "constant" or config.fp4_finish:',
        "if config.fp4_finish:",
        ("harness/test_flags.py going_on",),
    ),
    Mutation(
        "checksum-not-compared",
        "harness/checkpoints.py",
        "if tail[len(DIGEST_MARK) :] != digest(file, size - DIGEST_BYTES).encode():",
        'if tail[len(DIGEST_MARK) :] == b"":',
        ("harness/test_checkpoints.py flipped",),
    ),
    Mutation(
        "steps-that-were-never-done",
        "harness/checkpoints.py",
        "if not 0 <= done <= step:",
        "if not 0 <= done:",
        ("harness/test_checkpoints.py wrong_values",),
    ),
    Mutation(
        "last-row-of-metrics-lost",
        "harness/run_folder.py",
        'row["step"] <= step]',
        'row["step"] < step]',
        ("harness/test_runs.py",),
    ),
    Mutation(
        "new-shards-removed-too",
        "harness/shards.py",
        "if old != kept and written.fullmatch(old.name)",
        "if written.fullmatch(old.name)",
        ("harness/test_fsdp_runs.py removes_old_ones",),
    ),
    Mutation(
        "resume-forgets-micro-batches",
        "harness/batches.py",
        "start = step * config.accumulate",
        "start = step",
        ("harness/test_batches.py",),
    ),
    Mutation(
        "every-epoch-alike",
        "harness/batches.py",
        "stream(self.seed, Stream.ORDER, epoch)",
        "stream(self.seed, Stream.ORDER, 0)",
        ("harness/test_batches.py",),
    ),
    Mutation(
        "losses-of-an-interval-forgotten",
        "harness/resume.py",
        'run.interval = checkpoint["interval"]',
        "run.interval = 0",
        ("harness/test_runs.py",),
    ),
    Mutation(
        "ranks-share-noise",
        "harness/reduction.py",
        "hash64(self.seed, 1 + rank)",
        "hash64(self.seed, 1)",
        ("harness/test_reduction.py mean or unbiased",),
    ),
    Mutation(
        "smallest-for-largest",
        "harness/ranks.py",
        "op=dist.ReduceOp.MAX",
        "op=dist.ReduceOp.MIN",
        ("harness/test_processes.py smallest",),
    ),
    Mutation(
        "patience-one-look-longer",
        "harness/validation.py",
        "self.waited >= self.patience",
        "self.waited > self.patience",
        ("harness/test_validation.py patience",),
    ),
    Mutation(
        "warm-up-starts-at-zero",
        "harness/schedule.py",
        "min(1.0, (step + 1) / config.warmup)",
        "min(1.0, step / config.warmup)",
        ("harness/test_schedule.py",),
    ),
)

TASKS = (
    Mutation(
        "min-snr-upside-down",
        "tasks/diffusion.py",
        "weight = snr.clamp(max=gamma) / snr",
        "weight = snr / snr.clamp(max=gamma)",
        ("tasks/test_strategies.py min_snr",),
    ),
    Mutation(
        "guidance-from-the-label",
        "tasks/generation.py",
        "without_label + guidance * (with_label - without_label)",
        "with_label + guidance * (with_label - without_label)",
        ("tasks/test_strategies.py guidance",),
    ),
    Mutation(
        "frechet-cross-term-once",
        "tasks/metrics.py",
        "cov_b.trace() - 2 * cross",
        "cov_b.trace() - cross",
        ("tasks/test_metrics.py frechet",),
    ),
    Mutation(
        "kid-biased",
        "tasks/metrics.py",
        "/ (len(x) * (len(x) - 1))",
        "/ len(x) ** 2",
        ("tasks/test_metrics.py kid",),
    ),
    Mutation(
        "one-slice-less-held-out",
        "tasks/data.py",
        "torch.arange(len(owners)) >= len(owners) - count",
        "torch.arange(len(owners)) > len(owners) - count",
        ("tasks/test_data.py one_volume",),
    ),
    Mutation(
        "bdh-reads-its-own-position",
        "tasks/language.py",
        "(turned @ turned.mT).tril(-1)",
        "(turned @ turned.mT).tril()",
        ("tasks/test_language.py bdh_is or own_position",),
    ),
    Mutation(
        "right-answers-for-errors",
        "tasks/classify.py",
        "labels[answer != labels]",
        "labels[answer == labels]",
        ("tasks/test_classify.py most_errors",),
    ),
    Mutation(
        "last-batch-of-masks-alone",
        "tasks/segment.py",
        "counts = counts + metrics.confusion(",
        "counts = metrics.confusion(",
        ("tasks/test_segment.py",),
    ),
    Mutation(
        "kl-sign-of-the-logarithm",
        "tasks/vae.py",
        "- 1 - variance.log()",
        "- 1 + variance.log()",
        ("tasks/test_vae_losses.py kl",),
    ),
    Mutation(
        "shares-sum-over-slots",
        "tasks/slots.py",
        "weights / weights.sum(1, keepdim=True)",
        "weights / weights.sum(2, keepdim=True)",
        ("tasks/test_slots.py published_algorithm",),
    ),
    Mutation(
        "noise-and-image-swapped",
        "tasks/reflow.py",
        "return images.chunk(2, dim=1)",
        "return images.chunk(2, dim=1)[::-1]",
        ("tasks/test_reflow.py came_with",),
    ),
    Mutation(
        "second-step-from-the-first-time",
        "tasks/distillation.py",
        "self.teach(halfway, labels, middle, end)",
        "self.teach(halfway, labels, t, end)",
        ("tasks/test_distillation.py written_out",),
    ),
    Mutation(
        "target-at-the-later-time",
        "tasks/consistency.py",
        "wanted = self.end(self.target(model), nearer, labels, earlier)",
        "wanted = self.end(self.target(model), nearer, labels, later)",
        ("tasks/test_consistency.py loss_written_out",),
    ),
)

MUTATIONS = (*LOWPREC, *HARNESS, *TASKS)


def check_rows(mutations):
    """End with a line for the first mutation whose text does not stand in its file once."""
    for mutation in mutations:
        found = (ROOT / mutation.file).read_text().count(mutation.old)
        if found != 1:
            where = f"its text stands in {mutation.file} {found} times, not once"
            sys.exit(f"mutations: {mutation.name}: {where}")


# ---- Running -----------------------------------------------------------------------------------------------


def copy_repository(folder):
    """Copy the files that git knows, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.split("\0"):
        source = ROOT / name
        if name and source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def tests_pass(words, copy, limit):
    """Whether pytest with these words passes in the copy, in a process of its own.

    The process is forked from this one, which has imported torch and nothing of the repository.
    """
    pid = os.fork()
    if pid == 0:
        _become_pytest(words, copy)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code in NOTHING_RAN:
                sys.exit(f"mutations: pytest chose no test by {' '.join(words)}")
            return code == pytest.ExitCode.OK
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _become_pytest(words, copy):
    os.setsid()  # what the tests start ends with them
    os.chdir(copy)
    sys.path = [str(copy), *(path for path in sys.path if not path.startswith(str(ROOT)))]
    output = os.open(copy / "pytest.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *words]))
    finally:
        os._exit(status)


def words_of(test):
    """["tests/FILE"] or ["tests/FILE", "-k", CHOSEN] of a text of `Mutation.tests`."""
    name, _, chosen = test.partition(" ")
    if chosen:
        return [f"tests/{name}", "-k", chosen]
    return [f"tests/{name}"]


def catcher(mutation, copy, whole):
    """The tests that fail under the mutation, as a text; None where all pass."""
    for test in mutation.tests:
        words = words_of(test)
        if not tests_pass(words, copy, LIMIT):
            return words[0].removeprefix("tests/")
    if whole and not tests_pass(list(ROOMS), copy, WHOLE_LIMIT):
        return "the whole rooms"
    return None


def try_one(mutation, copy, whole):
    """(what catches it or None, seconds)."""
    file = copy / mutation.file
    sound = file.read_text()
    start = time.monotonic()
    file.write_text(sound.replace(mutation.old, mutation.new))
    try:
        found = catcher(mutation, copy, whole)
    finally:
        file.write_text(sound)
    return found, time.monotonic() - start


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutations alone")
    parser.add_argument("--list", action="store_true", help="print names and files, run nothing")
    parser.add_argument("--sound", action="store_true", help="run the chosen tests without any fault")
    parser.add_argument("--whole", action="store_true", help="and the whole rooms where these pass")
    given = parser.parse_args()
    unknown = set(given.only or ()) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no mutation has the name {min(unknown)}; see --list")
    return given


def try_all(chosen, copy, whole):
    """Print the table; the number of mutations that survive."""
    survivors = 0
    for mutation in chosen:
        found, seconds = try_one(mutation, copy, whole)
        survivors += found is None
        line = f"{mutation.name:<42}{mutation.file:<36}{found or 'SURVIVED':<34}{seconds:5.0f} s"
        print(line, flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return survivors


def fail_without_fault(chosen, copy):
    """Print the chosen tests that fail in the copy as it is; their number."""
    tests = dict.fromkeys(test for mutation in chosen for test in mutation.tests)
    failing = [test for test in tests if not tests_pass(words_of(test), copy, LIMIT)]
    for test in failing:
        print(f"fails without any fault: {test}")
    print(f"{len(tests) - len(failing)} of {len(tests)} choices of tests pass")
    return len(failing)


def main():
    given = arguments()
    chosen = [mutation for mutation in MUTATIONS if not given.only or mutation.name in given.only]
    check_rows(MUTATIONS)
    if given.list:
        for mutation in chosen:
            print(f"{mutation.name:<42}{mutation.file}")
        return 0
    sys.dont_write_bytecode = True  # a file that changes within a second would be taken for its old self
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_repository(copy)
        if given.sound:
            return int(fail_without_fault(chosen, copy) > 0)
        return int(try_all(chosen, copy, given.whole) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
