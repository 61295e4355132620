"""lowprec/evidence.json: what each recipe costs in held-out loss, one row a comparison with fp32.

A comparison is found by its flags: the baseline has none of precision, and the arm adds only such. Where
several arms hold the same comparison, the one with the most pairs stands. lowprec/evidence.py has the
columns.

    evidence_text(experiments, known)     what the file holds, with speeds of benchmarks and what others found
"""

import json

import strategies
from benchmarks.common import RECIPES, rows_by
from benchmarks.records import H100_COMPILED, milliseconds, rows_of_record, whole_record
from experiments.log.analysis import HELD_OUT, loss_comparison, weights_of_score
from experiments.log.definition import ROOT
from experiments.log.overview import PARAMETERS, beside_baseline, flags_of, net_of
from lowprec.advice.machines import kind_of_cpu, kind_of_gpu
from lowprec.evidence import (
    FP32,
    KIND_OF_MODEL,
    EvidenceRow,
    Other,
    Speed,
    recipe_key,
)

EVIDENCE_FILE = ROOT / "lowprec" / "evidence.json"
CAUTION = (
    "Nets of 0.1 to 4.2 million parameters, and one of 32 million on an H100, most on images of 8x8 pixels, "
    "a few thousand steps, at a learning rate chosen for fp32. Nobody drew these nets at random."
)
WEIGHTS_NAMES = {"ema": "average", "raw": "last"}  # what a record calls them: what a row does


# ---- Rows --------------------------------------------------------------------------------------------------


def comparisons(experiments, known):
    """[Row], in the order of the experiments and their arms."""
    found = {}
    for experiment in experiments:
        if experiment.miniature:
            continue
        for arm in experiment.arms:
            both = beside_baseline(arm)
            if both is None:
                continue
            own, plain, _ = both
            if recipe_key(plain) != FP32 or recipe_key(own) == FP32:
                continue
            base = arm.base.trained
            for weights in WEIGHTS_NAMES:
                kind, pairs, change = loss_comparison(arm, known, weights)
                if change is None or kind != HELD_OUT:
                    continue
                row = evidence_row(arm, own, weights, pairs, change)
                same = base, row.recipe, row.optimizer, weights
                if same not in found or pairs > found[same].pairs:
                    found[same] = row
    return list(found.values())


def evidence_row(arm, flags, weights, pairs, change):
    spec = flags["task"]
    task = strategies.find_task(spec if spec in strategies.TASKS else str(ROOT / spec))
    data = flags["data"] or task.implied["data"]
    return EvidenceRow(
        kind=KIND_OF_MODEL[flags["model"]],
        task=spec,
        data=data.partition(":")[0],
        regime="finetune" if flags["finetune"] else "from scratch",
        recipe=recipe_key(flags),
        optimizer=flags["optimizer"],
        parameters=PARAMETERS.get(net_of(flags), 0),
        steps=flags["steps"],
        batch=flags["batch_size"],
        lr=flags["lr"],
        change=round(change.mean, 5),
        low=round(change.low, 5),
        high=round(change.high, 5),
        pairs=pairs,
        weights=WEIGHTS_NAMES[weights],
        experiment=arm.trained.experiment.number,
    )


def miniatures(experiments, known):
    """[(recipe, tried, whole, arm)] of each arm in a tenth of the steps: changes of the loss in percent."""
    by_number, found = {e.number: e for e in experiments}, []
    for arm in (arm for e in experiments for arm in e.arms if arm.whole):
        number, _, name = arm.whole.partition("/")
        whole = by_number[number].arm(name)
        flags = flags_of(arm)
        if flags["steps"] * 10 == flags_of(whole)["steps"]:
            both = (loss_comparison(one, known, weights_of_score(arm))[2] for one in (arm, whole))
            tried, of_whole = (round(change.mean, 5) for change in both)
            found.append((recipe_key(flags), tried, of_whole, f"{arm.experiment.number}/{arm.name}"))
    return found


# ---- Speeds ------------------------------------------------------------------------------------------------

TIMED_RECORDS = (  # (record of experiments/bench, the recipe that has speed 1, that in words, how all ran)
    ("cpu-training-64x64", "fp32", "fp32", "not compiled"),
    ("cpu-training-8x8", "fp32", "fp32", "not compiled"),
    (H100_COMPILED, "tf32", "fp32 with TF32", "compiled"),
)


def measured_speeds():
    """[Speed], one a net of a record."""
    found = []
    for record, reference, against, how in TIMED_RECORDS:
        machine = whole_record(record)["machine"]
        hardware = kind_of_gpu(machine["gpu"]) if machine["gpu"] else kind_of_cpu(machine["bf16"])
        for net, rows in rows_by(rows_of_record(record), "net").items():
            kind, parameters = KIND_OF_MODEL[net.partition(":")[0]], rows[0]["parameters"]
            ratios = ratios_of(milliseconds(record, net), reference)
            found.append(Speed(hardware, kind, parameters, net, record, against, how, ratios))
    return found


def ratios_of(times, reference):
    """{key of a recipe: its speed against the reference}. times: of `milliseconds`; of two programs that
    multiply in FP8 the first stands for the recipe.
    """
    ratios = {}
    for name, time in times.items():
        flags = RECIPES[name]
        if "sites" not in flags:
            ratios.setdefault(recipe_key(flags), round(times[reference] / time, 2))
    return ratios


# ---- What others found -------------------------------------------------------------------------------------

FOUND_BY_OTHERS = (
    Other(
        "pure_bf16",
        "torch's AdamW on bf16 weights, Qwen3-8B finetuned at lr 1e-4 for 220 steps: the training loss ends "
        "about 3 times as high as with fp32 states (0.0464), one run",
        "github.com/areal-project/AReaL, issue 1292",
    ),
    Other(
        "pure_bf16",
        "DeepSpeed with bf16 weights, gradients and states: training loss 3.12, not 3.09, one run",
        "github.com/deepspeedai/DeepSpeed, blogs/core_api_update",
    ),
    Other(
        "pure_bf16",
        "finetuning of a robot's policy: success rate 0 %, not 94 %, one run",
        "github.com/TensorAuto/OpenTau, issue 181",
    ),
    Other(
        "pure_bf16+stochastic",
        "pretraining of language models of up to 6.7 B parameters: validation perplexity better than that of "
        "bf16 with fp32 master weights",
        "arXiv 2502.20566",
    ),
    Other(
        "pure_bf16+stochastic",
        "with this or --kahan, seven applications: validation accuracy from 0.1 % lower to 0.2 % higher than "
        "in fp32",
        "arXiv 2010.06192",
    ),
    Other(
        "pure_bf16+stochastic+opt8bit",
        "a relative, weights of 24 bits and moments of 8: no measurable loss of quality up to the finetuning "
        "of Llama-3.1-8B",
        "arXiv 2602.23349",
    ),
)


# ---- The file ----------------------------------------------------------------------------------------------


def json_lines(rows):
    return ",\n".join(json.dumps(list(row), separators=(",", ":")) for row in rows)


def evidence_text(experiments, known):
    """What lowprec/evidence.json holds: a line a row."""
    rows = comparisons(experiments, known)
    parts = [
        f'{{"made_by": "python experiments/report.py",\n"caution": {json.dumps(CAUTION)}',
        f'"speeds": [\n{json_lines(measured_speeds())}\n]',
        f'"others": [\n{json_lines(FOUND_BY_OTHERS)}\n]',
        f'"miniatures": [\n{json_lines(miniatures(experiments, known))}\n]',
        f'"columns": {json.dumps(EvidenceRow._fields)}',
        f'"rows": [\n{json_lines(rows)}\n]}}\n',
    ]
    return ",\n".join(parts)
