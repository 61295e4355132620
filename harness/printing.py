"""What a person reads: the recipe before a run, scores and a summary after it."""

from harness.shards import file_that_is_there
from harness.validation import BEST_FILE
from lowprec import evidence
from lowprec.advice.text import layout
from lowprec.recipes import recipe

# ---- Tables ------------------------------------------------------------------------------------------------


def markdown_table(rows, rule="---", space=" "):
    """A table in Markdown whose first row is its head. space: on both sides of what stands in a cell."""
    head, *body = rows
    lines = []
    for row in [head, [rule] * len(head), *body]:
        cells = (f"{space}{cell}{space}" for cell in row)
        lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines)


def compact_table(rows):
    """The same without spaces, for a page that has to stay short."""
    return markdown_table(rows, "-", "")


def score_table(scores, reference, unprinted=(), distances=()):
    """Scores of each source of weights beside the floor (real images) and the ceiling (noise). Of `distances`
    those are left out, and named, whose floor lies above the ceiling.
    """
    idle = []
    if reference:
        floor, ceiling = reference["floor"], reference["ceiling"]
        idle = [name for name in distances if floor.get(name, 0) > ceiling.get(name, 0)]
    columns = dict(scores)
    if reference:
        columns["real (floor)"] = reference["floor"]
        columns["noise (ceiling)"] = reference["ceiling"]
    rows = [["score", *columns]]
    first_source = next(iter(scores.values()))
    for name, value in first_source.items():
        if name in unprinted or name in idle:
            continue
        found = [column.get(name) for column in columns.values()]
        if not isinstance(value, list):
            rows.append([name, *map(_number, found)])
            continue
        for i in range(len(value)):
            of_class = [one[i] if isinstance(one, list) else one for one in found]
            rows.append([f"{name} of class {i}", *map(_number, of_class)])
    table = layout(rows)
    if idle:
        few = "by these real images are no nearer to the held-out ones than noise is: there are too few"
        table += f"\nleft out: {', '.join(idle)}: {few}"
    return table


def _number(value):
    if value is None:
        return "-"
    return f"{value:.4f}"


# ---- Before a run ------------------------------------------------------------------------------------------


def print_head(task, table, device, ledger, folder):
    """What is trained, on what, in which precision, and where it is written. task: a tasks.Task; table: the
    FlagTable of its config.
    """
    mib = ledger.parameters * ledger.state_bytes / 2**20
    print(task.data)
    print(f"{task}, {ledger.parameters:,} parameters, on {device}")
    print(f"precision: {precision_flags(table, task.config) or 'fp32 everywhere'}")
    if line := known_cost(task.config, ledger.parameters):
        print(line)
    print(
        f"weights, gradients and optimiser: {ledger.state_bytes:.2f} bytes a parameter ({mib:.1f} MiB; fp32: "
        "16 with AdamW)"
    )
    print(f"writes to {folder}")


def precision_flags(table, config):
    """The flags of precision that a run's command says, in one line: '--pure_bf16 --stochastic'."""
    of_precision = [row for row in table.rows if row.group == "precision"]
    unlike = [row.name for row in of_precision if getattr(config, row.name) != row.default]
    return evidence.typed({name: getattr(config, name) for name in unlike})


def known_cost(config, parameters):
    """What the recipe of a run was measured to cost, in one line; "" for fp32. config: flags.Config."""
    key = evidence.recipe_key(vars(config))
    if key == evidence.FP32:
        return ""
    found = evidence.nearest(
        key,
        evidence.KIND_OF_MODEL.get(config.model),
        "finetune" if config.finetune else "from scratch",
        config.lr,
        parameters,
        optimizer=config.optimizer,
        weights="average" if config.ema_decay else "last",
    )
    if found is None:
        return "measured cost: no record of this recipe"
    unlike = ""
    if found.differs:
        unlike = f"; measured with {'; '.join(found.differs)}"
    return f"measured cost: held-out loss {evidence.row_in_words(found.row)}{unlike}"


def print_ledger(ledger, sites, whole):
    """The precision of every tensor; unless `whole`, of those alone that differ from fp32 training. sites:
    of the task.
    """
    if whole:
        print(ledger)
        return
    reference = recipe(more=sites)
    rows = []
    for row in ledger.rows:
        usual = reference[row["site"]] if row["site"] in reference.sites else "fp32"
        if row["value"] != usual:
            rows.append([row["site"], row["value"], row["why"]])
    if rows:
        print("\n" + layout(rows, further=str.ljust))
        print("--ledger prints the precision of all other tensors too\n")


# ---- --check -----------------------------------------------------------------------------------------------


def start_here(flags, reason):
    """Where to start on this machine, for `lowprec.advice.check.report`."""
    return [f"start with: python train.py {flags}".rstrip(), reason]


# ---- After a run -------------------------------------------------------------------------------------------


def print_scores(task, scores, reference):
    """The table of scores, and what else the task has to say."""
    if any(scores.values()):
        print(score_table(scores, reference, task.unprinted, task.distances))
    for source, found in scores.items():
        text = task.told(found)
        if text:
            print(f"\n{source}:\n{text}")


def late_scores(share):
    """What is said beside scores of an average that holds this share of the initial weights."""
    return (
        f"\nema is no result of the training: that average still holds {share:.0%} of the initial weights.\n"
        "raw are the last weights. In a new run --ema_warmup lets the average follow them sooner"
    )


def print_summary(summary, device, kind, folder, runs):
    """What came out. kind: of the items that are counted a second; runs: where runs are kept."""
    memory = f"peak memory {summary['peak_memory'] / 2**20:.0f} MiB"
    if device.type == "cpu":
        memory += " (the process, libraries included)"
    if "activations" in summary:
        memory += f", {summary['activations']['total'] / 2**20:.1f} MiB kept for backward"
    skipped = summary["skipped_steps"]
    if skipped:
        memory += f", {skipped} steps skipped by the loss scaler"
    print(
        f"\n{summary['step']} steps in {summary['seconds']:.0f} s + {summary['scoring_seconds']:.0f} s of "
        f"scoring, {summary.get(f'{kind}_per_second', 0):.0f} {kind} a second, {memory}"
    )
    if "validation" in summary:
        print(_best_line(folder, summary["validation"]))
    print(f"pictures: {folder}/samples/   curves: tensorboard --logdir {runs}")


def _best_line(folder, found):
    """Which held-out score was the best, and where its weights are."""
    if found["step"] is None:
        line = f"no held-out {found['watched']} was found, so there is no {BEST_FILE}"
    else:
        best = f"best held-out {found['watched']} {_number(found['best'])} at step {found['step']}"
        line = f"{best}, kept as {file_that_is_there(folder / BEST_FILE)}"
    if found["stopped"]:
        return f"stopped early: {line}"
    return line
