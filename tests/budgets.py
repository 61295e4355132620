"""What may only fall: lines of the rooms, what an import loads, what a step enters, branches that ask for a
feature by name.

    python tests/budgets.py            today's figures, their budgets in budgets.toml, and their aims
    python tests/budgets.py --write    and lower the budgets of figures that fell
"""

import argparse
import ast
import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = Path(__file__).with_suffix(".toml")
ROW = re.compile(r'^"(?P<figure>[^"]+)" = \{ budget = (?P<budget>\d+)(?:, aim = (?P<aim>\d+))? \}', re.M)

# ---- Lines -------------------------------------------------------------------------------------------------

CODE = ".py", ".cpp", ".h"
ROOMS = "lowprec", "harness", "tasks", "benchmarks", "experiments", "tests"
WINGS = "layers", "parts", "watch", "advice", "trials"  # of lowprec: its core is what stands outside them


def files_of(room):
    """The code of a room, without what belongs to one experiment or one record: that is no machinery."""
    own = [path for path in (ROOT / room).rglob("*") if path.suffix in CODE]
    apart = re.compile(r"experiments/(\d|bench/)")
    return sorted(path for path in own if not apart.match(str(path.relative_to(ROOT))))


def core():
    """The files of lowprec's core."""
    wings = [ROOT / "lowprec" / name for name in WINGS]
    return [path for path in files_of("lowprec") if not any(wing in path.parents for wing in wings)]


def lines_of(paths):
    """Lines of all files, in full hundreds: a line more or less is no event."""
    lines = sum(len(path.read_text().splitlines()) for path in paths)
    return math.ceil(lines / 100) * 100


def lines():
    figures = {f"lines of {room}": lines_of(files_of(room)) for room in ROOMS}
    figures["lines of lowprec's core"] = lines_of(core())
    figures["lines of the Watch"] = lines_of(files_of("lowprec/watch"))
    figures["lines at the root"] = lines_of(ROOT.glob("*.py"))
    return figures


# ---- Branches ----------------------------------------------------------------------------------------------

# feature -> what the condition of a branch that asks for it has in its text
FEATURES = {
    "ranks": r"spread|\brank|RankBucket|rank_bucket|fsdp|mesh|to_local|local_tensor|Chunk|\.ranks\b|world",
    "states elsewhere": r"away|offload|states_on|\.home\b",
    "release": r"release|\bhold\b",
    "eco": r"\beco\b|feedback",
    "split8": r"split8|24_bits|torch\.int8",
    "codes": r'coded|coder|_scale"|CODE_FORMATS|opt8bit|opt4bit',
    "kahan and masters": r"kahan|master|low_part|\blow\b",
    "fp8": r"fp8",
    "fp4": r"fp4",
    "2:4": r"sparse24|srste",
    "lora": r"lora",
    "nf4": r"nf4",
    "quantised generation": r"gptq|quantise|BLOCKS_OF_GENERATION|quant_state",
    "frozen parts": r"frozen(?!set)|averages_inside",
    "an average on the CPU": r"average_on|OnCPU|catch_up|before_writing",
    "optimisers of others": r'PEER|by_recipe|Peer|Joined|parts"',
    "fp16": r"scaler|loss_scale|fp16",
    "islands": r"island|fp32_modules|fp32_outputs|with_statistics|\.whole\b",
    "a dry run": r'is_meta|"meta"|\bdry\b',
}
USERS_OF_THE_CORE = "trainer.py", "strategies.py", "precision.py", "train.py", "harness/flags.py"


def conditions(path):
    """The text of each condition in a file: of an if, a loop, a comprehension, a Rule."""
    text = path.read_text()
    lines = text.encode().splitlines()
    for node in ast.walk(ast.parse(text)):
        tests = []
        if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
            tests = [node.test]
        elif isinstance(node, ast.comprehension):
            tests = node.ifs
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Rule":
            tests = node.args[:1]
        for test in tests:
            # ast.get_source_segment splits the whole text anew for each
            own = lines[test.lineno - 1 : test.end_lineno]
            own[-1] = own[-1][: test.end_col_offset]
            own[0] = own[0][test.col_offset :]
            yield b"\n".join(own).decode()


def branches():
    """How many conditions ask for each feature, and how many for any."""
    found = Counter()
    python = [path for path in core() if path.suffix == ".py"]
    for path in (*python, *(ROOT / name for name in USERS_OF_THE_CORE)):
        for condition in conditions(path):
            asked = [name for name, words in FEATURES.items() if re.search(words, condition)]
            found.update(asked or ["none"])
            found["any feature"] += bool(asked)
    return {f"branches that ask for {name}": found[name] for name in ("any feature", *FEATURES)}


# ---- What runs ---------------------------------------------------------------------------------------------


def measured():
    """What importing loads and what a step enters, seen by a process of its own."""
    words = [sys.executable, __file__, "--measure"]
    done = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def measure():
    """The figures of `measured`, in the process that it starts."""
    sys.path[0] = str(ROOT)
    import torch

    torch.set_num_threads(1)
    figures = {}
    for name in ("AdamW", "recipe", "Precision"):
        count_import(name, figures)
    count_optimizer(torch, figures)
    count_precision(torch, figures)
    return figures


def count_import(name, figures):
    for module in [module for module in sys.modules if module.partition(".")[0] == "lowprec"]:
        del sys.modules[module]
    exec(f"from lowprec import {name}")
    modules = [module for key, module in sys.modules.items() if key.startswith("lowprec.")]
    paths = [Path(module.__file__) for module in modules]
    paths = [path for path in paths if path.name != "__init__.py"]  # nobody has to read these
    figures[f"files that importing {name} loads"] = len(paths)
    figures[f"lines that importing {name} loads"] = lines_of(paths)


def count_optimizer(torch, figures):
    from lowprec import AdamW
    from lowprec.kernels import cpu_step

    kinds = {"an eager AdamW.step": False}
    if cpu_step.library() is not None:
        kinds["an AdamW.step in C++"] = True
    for what, compiled in kinds.items():
        weight = torch.nn.Linear(8, 8).bfloat16()
        held = dict(update="stochastic", exp_avg="bf16", exp_avg_sq="bf16")
        optimizer = AdamW(weight.parameters(), lr=1e-3, compiled=compiled, **held)
        for p in weight.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        entered(what, optimizer.step, figures)


def count_precision(torch, figures):
    from lowprec import Precision, recipe

    def backward():
        run.backward(run(x).square().mean())

    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 8))
    x = torch.randn(16, 32)
    chosen = entered("recipe()", lambda: recipe(pure_bf16=True, stochastic=True), figures)
    run = entered("Precision()", lambda: Precision(net, chosen, lr=1e-3), figures)
    backward()
    run.step()
    entered("run(x)", lambda: run(x), figures)
    backward()
    entered("run.step()", run.step, figures)
    backward()
    entered("run.step(measure=True)", lambda: run.step(measure=True), figures)


def entered(what, call, figures):
    """call(), with the functions of this repository that it enters counted, and their files."""
    codes = set()

    def see(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/lowprec/"):
            codes.add(frame.f_code)

    sys.setprofile(see)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    named = {code for code in codes if not code.co_name.startswith("<")}  # lambdas stand within others
    figures[f"functions that {what} enters"] = len(named)
    figures[f"files that {what} enters"] = len({code.co_filename for code in codes})
    return result


# ---- The table ---------------------------------------------------------------------------------------------


def figures():
    return {**lines(), **branches(), **measured()}


def budgets():
    """{figure: (budget, aim or None)}."""
    rows = ROW.finditer(BUDGETS.read_text())
    return {row["figure"]: (int(row["budget"]), row["aim"] and int(row["aim"])) for row in rows}


def lower(today):
    """Write those of today's figures into budgets.toml that are below their budgets."""

    def lowered(row):
        figure, budget = row["figure"], int(row["budget"])
        return row[0].replace(f"budget = {budget}", f"budget = {min(budget, today.get(figure, budget))}")

    BUDGETS.write_text(ROW.sub(lowered, BUDGETS.read_text()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="lower the budgets of figures that fell")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure()))
        return
    today, known = figures(), budgets()
    print(f"{'':<52}{'today':>8}{'budget':>8}{'aim':>8}")
    for figure, value in today.items():
        budget, aim = known.get(figure, (None, None))
        print(f"{figure:<52}{value:>8}{budget or '-':>8}{aim or '':>8}")
    if given.write:
        lower(today)


if __name__ == "__main__":
    main()
