"""Who may import whom, read from the imports of every file outside tests/."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# room -> the rooms that it may import, besides itself
ALLOWED = {
    "lowprec": (),
    "lowprec/wings": ("lowprec",),
    "harness": ("lowprec",),
    "models": ("lowprec", "harness.flags"),
    "precision": ("lowprec", "harness.flags"),
    "options": ("lowprec", "harness.flags"),
    "tasks": ("lowprec", "harness", "precision", "models"),
}
for name in ("harness", "models", "precision", "options", "tasks"):
    ALLOWED[name] += ("lowprec/wings",)
BELOW_STRATEGIES = (*ALLOWED, "harness.flags")
ALLOWED["strategies"] = BELOW_STRATEGIES
ALLOWED["trainer"] = (*BELOW_STRATEGIES, "strategies")
ALLOWED["doctor"] = (*ALLOWED["trainer"], "trainer")
ALLOWED["train"] = (*ALLOWED["doctor"], "doctor")
ALLOWED["benchmarks"] = (*ALLOWED["train"], "train")
ALLOWED["experiments"] = (*ALLOWED["benchmarks"], "benchmarks")
ALLOWED["bench"] = (*ALLOWED["experiments"], "experiments")


WINGS = "lowprec.watch", "lowprec.advice", "lowprec.trials"


def room(name):
    """Of a module, as in lowprec.watch.writes. The face and the command of the library show all of it."""
    if name in ("lowprec.__init__", "lowprec.__main__") or name.startswith(WINGS):
        return "lowprec/wings"
    return name.partition(".")[0]


FILES = [path for path in ROOT.rglob("*.py") if room(".".join(path.relative_to(ROOT).parts)[:-3]) in ALLOWED]


def imported(path):
    """Full names of the modules of this repository that a file imports, anywhere in it."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join((*base, *(node.module or "").split("."))).strip(".")
            for alias in node.names:
                module = f"{start}.{alias.name}"
                yield module if (ROOT / (module.replace(".", "/") + ".py")).exists() else start


def test_a_file_imports_what_its_room_may():
    for path in FILES:
        own = room(".".join(path.relative_to(ROOT).parts)[:-3])
        for name in imported(path):
            its = room(name)
            allowed = its not in ALLOWED or its == own or its in ALLOWED[own] or name in ALLOWED[own]
            assert allowed, f"{path} imports {name}"


# ---- Within the library ------------------------------------------------------------------------------------

# the floors of lowprec, from the ground up: a module imports from its own floor and from those below
FLOORS = (
    "errors rounding machine roles attention",
    "formats curves float8 layers.block_formats kernels.*",  # number formats
    "optimizers.*",
    "sites recipes rules",
    # of parts what all are, their table, and what cast and view ask once a net is unusual
    "cast view ledger telemetry precision parts parts.part parts.frozen parts.mixed parts.first_call",
    "parts.* layers.*",
    "watch.* advice.* trials.* evidence __init__ __main__",
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}


def floor(module):
    """Of a module, as in optimizers.rounded: its own, or that of the folder that it is in."""
    name = module.removesuffix(".__init__")
    return FLOOR_OF[name if name in FLOOR_OF else f"{name.partition('.')[0]}.*"]


def test_the_floors_of_the_library():
    for path in ROOT.glob("lowprec/**/*.py"):
        own = ".".join(path.relative_to(ROOT / "lowprec").with_suffix("").parts)
        for name in imported(path):
            other = name.removeprefix("lowprec.")
            assert other == name or floor(other) <= floor(own), f"{own} imports {other}, which is above it"


# ---- Tests -------------------------------------------------------------------------------------------------

MOVES = re.compile(r'\.cuda\(\)|device="cuda"|in \("cpu", "cuda"\)')


def test_what_moves_to_a_gpu_is_marked():
    """Without the mark a test sees no GPU on any machine, so that nothing would ever run it."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        tests = ast.parse(text).body if MOVES.search(text) else ()
        for test in tests:
            if test.__class__ is ast.FunctionDef and test.name.startswith("test_"):
                marks = " ".join(map(ast.unparse, test.decorator_list))
                assert "gpu" in marks or not MOVES.search(ast.get_source_segment(text, test)), test.name
