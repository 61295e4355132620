"""Golden figures: digests of what 20 steps of each recipe leave in a checkpoint and in its scores.

    python tests/golden.py                           train every arm and compare; status 1 if a figure moved
    python tests/golden.py --only fp32,split         these arms alone, and those that they start from
    python tests/golden.py --write                   record this machine's figures in golden.json
    python tests/golden.py --write --checkout DIR    record those of another checkout, of an older commit, say

Bits depend on the machine: matrix products differ between CPUs and between versions of torch. The figures are
kept under a key of both, and a machine without a record compares nothing. To compare there, check out the old
commit in DIR, record its figures by the last command, then run the first.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
RECORD = HERE / "golden.json"
COMMON = "--steps 20 --warmup 5 --batch_size 16 --sample_every 0 --seed 0 --threads 1 --device cpu".split()
DRAWN = "--samples 16 --sample_steps 2".split()  # of a task that draws images
FP8 = "--fp8 --fp8_backend emulate"

# Arm -> its flags. RUN:ARM stands for the folder that another arm leaves; that arm is trained before.
ARMS = {
    "fp32": "",
    "fp32-dit": "--model dit",
    "bf16": "--bf16",
    "fp16": "--fp16",
    "nearest": "--pure_bf16",
    "stochastic": "--pure_bf16 --stochastic",
    "stochastic-dit": "--model dit --pure_bf16 --stochastic",
    "kahan": "--pure_bf16 --kahan",
    "kahan-stochastic": "--pure_bf16 --kahan --stochastic",
    "split": "--pure_bf16 --master split",
    "fp32-master": "--pure_bf16 --master fp32",
    "opt8bit": "--pure_bf16 --stochastic --opt8bit",
    "opt8bit-nearest": "--opt8bit",
    "opt4bit": "--pure_bf16 --stochastic --opt4bit",
    "accumulate": "--pure_bf16 --stochastic --accumulate 2",
    "islands": "--pure_bf16 --stochastic --set islands=norm+embed+final",
    "islands-dit": "--model dit --pure_bf16 --stochastic --set islands=embed+final",
    "fp8-tensorwise": f"--model dit {FP8}",
    "fp8-rowwise": f"--model dit --pure_bf16 --stochastic {FP8} --fp8_recipe rowwise",
    "fp8-delayed": f"--model dit {FP8} --fp8_recipe delayed --amax_history_len 4",
    "srste": "--model dit --pure_bf16 --stochastic --sparse24 srste",
    "magnitude": "--model dit --finetune RUN:fp32-dit --sparse24 magnitude",
    "segment": "--task segment --batch_size 4",
    "ddpm": "--task ddpm --bf16",
    "reflow": "--task reflow --teacher RUN:fp32 --pairs 64 --teacher_steps 4",
    "averages": "--pure_bf16 --warmup 0 --average 0.99:bf16:stochastic --average 0.9:fp32 --weights all",
    "weight-decay": "--pure_bf16 --kahan --weight_decay 0.1 --weight_decay_on all",
    "weight-decay-matrices": "--pure_bf16 --kahan --weight_decay 0.1",
    "torch": "--optimizer torch",
    "torchastic": "--pure_bf16 --optimizer torchastic",
    "torchao": "--pure_bf16 --optimizer torchao",
    "bitsandbytes": "--opt8bit --optimizer bitsandbytes",
    "int8-moment": "--set exp_avg=int8 --set exp_avg_sq=bf16",
}


def machine():
    """The key of golden.json: what the bits of a CPU run depend on besides the code."""
    name, features = platform.processor() or platform.machine(), set()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            lines = file.read().partition("\n\n")[0].splitlines()
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        name = facts.get("model name", name)
        features = set((facts.get("flags") or facts.get("Features") or "").split())
    matter = sorted(f for f in features if f.startswith(("avx512", "avx2", "amx", "bf16", "sve", "i8mm")))
    return f"{name}; {' '.join(matter)}; torch {torch.__version__.partition('+')[0]}"


# ---- Digests -----------------------------------------------------------------------------------------------


def tensors(tree, path=()):
    """[(path, tensor)] of nested dicts and lists, keys sorted. Plain numbers are left out."""
    if torch.is_tensor(tree):
        return [(path, tree)]
    if isinstance(tree, dict):
        children = sorted(tree.items(), key=lambda item: str(item[0]))
    elif isinstance(tree, (list, tuple)):
        children = enumerate(tree)
    else:
        return []
    return [leaf for key, child in children for leaf in tensors(child, (*path, str(key)))]


def digest(tensor):
    """SHA-256 of dtype, shape and bytes."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode() + content).hexdigest()


def summed(lines):
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def part(path):
    """The part of a checkpoint that a tensor belongs to: "model", "optimizer.exp_avg", "averages.ema" ..."""
    if path[0] == "optimizer":
        return f"optimizer.{path[-1]}"
    if path[0] == "averages":
        return f"averages.{path[1]}"
    return path[0]


def digests(state):
    """{part: digest} of Precision.state_dict().

    The digest of a part sees values and no names, so that a tensor may move to another place of its part. The
    digest "layout" sees names, dtypes and shapes and no values.
    """
    leaves = tensors(state)
    parts = {}
    for path, tensor in leaves:
        parts.setdefault(part(path), []).append(digest(tensor))
    found = {name: summed(sorted(values)) for name, values in sorted(parts.items())}
    found["layout"] = summed("/".join(path) + f" {t.dtype} {list(t.shape)}" for path, t in leaves)
    return found


# ---- Runs --------------------------------------------------------------------------------------------------


def sources(arm):
    """The arms whose folders `arm` starts from."""
    return [word.removeprefix("RUN:") for word in ARMS[arm].split() if word.startswith("RUN:")]


def train(arm, checkout, runs):
    """Train one arm by the real command; returns its figures. Raises RuntimeError if the command fails."""
    flags = ARMS[arm].replace("RUN:", f"{runs}/").split()
    words = [*COMMON, *([] if "segment" in flags else DRAWN), *flags]
    command = [sys.executable, f"{checkout}/train.py", *words, "--runs", str(runs), "--name", arm]
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    alone = {name: value for name, value in os.environ.items() if name not in ranks}
    done = subprocess.run(command, env={**alone, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
    return figures(Path(runs) / arm)


def figures(folder):
    """What is compared of a finished run: digests of checkpoint and scores, mean loss, bytes a parameter."""
    checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    if checkpoint["config"]["weights"] == "ema":
        summary["scores"].pop("raw", None)  # beside an average that has not arrived: not what was asked for
    return {
        **digests(checkpoint["precision"]),
        "loss": last["loss"],
        "scores": summed([json.dumps(summary["scores"], sort_keys=True)]),
        "bytes": summary["bytes_per_parameter"],
    }


def attempt(arm, checkout, runs):
    """The figures of an arm, or {"failed": why}; says on stderr that it is done."""
    try:
        found = train(arm, checkout, runs)
    except (RuntimeError, OSError, LookupError) as error:
        found = {"failed": f"{type(error).__name__}: {error}"}
    outcome = found.get("failed") or f"loss {found['loss']:.6f}"
    print(f"  {arm:<21} {outcome}", file=sys.stderr, flush=True)
    return found


def train_all(arms, checkout, runs, jobs=2):
    """{arm: figures} of `arms` and of those that they start from, `jobs` of them at a time."""
    wanted = {*arms, *(source for arm in arms for source in sources(arm))}
    first = [arm for arm in ARMS if arm in wanted and not sources(arm)]
    then = [arm for arm in ARMS if arm in wanted and sources(arm)]
    found = {}
    with ThreadPoolExecutor(jobs) as pool:
        for wave in (first, then):
            found.update(zip(wave, pool.map(lambda arm: attempt(arm, checkout, runs), wave), strict=True))
    return {arm: found[arm] for arm in ARMS if arm in found}


# ---- Comparison --------------------------------------------------------------------------------------------


def read_record():
    """{machine: {arm: figures}}."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write_record(found):
    """Put figures under this machine's key; what was recorded on others, and of other arms, stays."""
    record = read_record()
    mine = {**record.get(machine(), {}), **found}
    record[machine()] = {arm: mine[arm] for arm in ARMS if arm in mine}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def moved(known, found):
    """Names of the figures that differ."""
    return [name for name in {**known, **found} if known.get(name) != found.get(name)]


def verdict(known, found):
    """(whether the figures of an arm are as recorded, a line that says so)."""
    if "failed" in found:
        return False, f"FAILED  {found['failed']}"
    if known is None:
        return False, "NEW     not recorded on this machine"
    differs = moved(known, found)
    if not differs:
        return True, f"same    {' '.join(found)}"
    same = " ".join(name for name in found if name not in differs)
    loss = f" (loss {known.get('loss')} -> {found['loss']})" if "loss" in differs else ""
    return False, f"MOVED   {' '.join(differs)}{loss}; same: {same or 'nothing'}"


def main():
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--write", action="store_true", help="record the figures, compare nothing")
    parser.add_argument("--checkout", default=HERE.parent, metavar="DIR", help="the code to train with")
    parser.add_argument("--only", default=",".join(ARMS), metavar="ARM,ARM", help="these arms alone")
    parser.add_argument("--jobs", type=int, default=2, help="arms trained at a time (default: 2)")
    args = parser.parse_args()
    arms = args.only.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--only {unknown[0]}: unknown; the arms are {', '.join(ARMS)}")
    known = read_record().get(machine())
    if known is None and not args.write:
        print(f"golden.json has no figures of this machine ({machine()}); --help says how to get them")
        return 2
    with tempfile.TemporaryDirectory() as runs:
        found = train_all(arms, Path(args.checkout).resolve(), runs, args.jobs)
    if args.write:
        good = {arm: values for arm, values in found.items() if "failed" not in values}
        write_record(good)
        print(f"{RECORD}: {len(good)} arms written, {len(found) - len(good)} failed")
        return 1 if len(good) < len(found) else 0
    verdicts = {arm: verdict(known.get(arm), values) for arm, values in found.items()}
    for arm, (_, line) in verdicts.items():
        print(f"{arm:<21} {line}")
    good = sum(same for same, _ in verdicts.values())
    print(f"{good} of {len(found)} arms are as recorded")
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
