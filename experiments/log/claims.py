"""The claims table: what five documents say about low precision, and what was measured here.

    python -m experiments.log.claims            checks experiments/claims.toml and writes CLAIMS.md
    python -m experiments.log.claims --check    exit status 1 if CLAIMS.md is not what the records give

experiments/report.py does the same beside EXPERIMENTS.md. claims.toml has the documents, each with a title
and the number of its items, and an entry an item:

    id        "003.22": document, item
    claim     what the document says, in our words and with its number
    verdict   one of VERDICTS; or a rule, so that the table turns right by itself when records arrive:
              "auto:011/bf16, 016/bf16"           by the equivalence verdicts of these arms
              "auto:{bench:cpu-memory kept dit:S/8:64:1 / bf16} from 0.4 to 0.6", also "below x", "above x"
    expects   what the arms of a rule have to be for the claim to hold: equal (default), better, worse
    in_kind   whether what holds by a rule holds in kind only
    said      what was measured; figures stand in it as {reference}, and are never typed
    why       of what was not measured: why not, and what comes nearest here
    evidence  references: arm:011/bf16, bench:cpu-memory, test:tests/test_x.py::test_name, flag:--bf16,
              file:docs/speed.md. Those in `said` and `verdict` need not be repeated

evidence.py has the figures. What an experiment or a record in `planned` does not hold yet is "not measured
yet"; anything else that is not there is refused.
"""

import argparse
import dataclasses
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.log.analysis import verdict  # noqa: E402
from experiments.log.definition import HERE, ROOT, folders, load, tomllib  # noqa: E402
from experiments.log.evidence import Evidence, Pending  # noqa: E402
from experiments.log.records import recorded  # noqa: E402
from harness.files import write_atomically  # noqa: E402
from harness.flags import Parser  # noqa: E402
from lowprec.errors import Refused  # noqa: E402

PAGE = "CLAIMS.md"
VERDICTS = {  # what each means, in the order of the page's first paragraph
    "holds": "measured here as the document says it",
    "holds in kind": "the same effect, on another net, size or machine than the document's",
    "does not hold": "measured here, and otherwise",
    "undecided": "measured, and the seeds do not settle it",
    "not measured": "and the table says why not, and what comes nearest",
    "not measured yet": "the experiment or benchmark is there and has no record",
    "built": "a recommendation or a tool, which can be used here",
    "nothing to measure": "a reference, or a matter of other people's files",
}
EXPECTED = {  # of the arms of a rule: verdicts by which the claim holds, and by which it does not
    "equal": ({"equal", "better"}, {"worse"}),
    "better": ({"better"}, {"equal", "worse"}),
    "worse": ({"worse"}, {"equal", "better"}),
}
NUMBER = r"[-+]?\d+(?:\.\d+)?"
COMPARED = re.compile(rf"\{{([^{{}}]+)\}} (?:from ({NUMBER}) to ({NUMBER})|(below|above) ({NUMBER}))")


@dataclasses.dataclass
class Claim:
    id: str
    claim: str
    verdict: str
    said: str = ""
    why: str = ""
    evidence: list = dataclasses.field(default_factory=list)
    expects: str = "equal"
    in_kind: bool = False

    @property
    def rule(self):
        """What follows "auto:", or ""."""
        return self.verdict.removeprefix("auto:") if self.verdict.startswith("auto:") else ""

    @property
    def ruling_arms(self):
        """The arms that a rule names: ["011/bf16"]; [] without a rule, or where it compares figures."""
        return [] if "{" in self.rule else [name.strip() for name in self.rule.split(",") if name.strip()]

    def references(self):
        """All evidence, that of the placeholders and of the rule included, each once."""
        found = list(self.evidence)
        for inside in re.findall(r"\{([^{}]*)\}", self.said + self.why + self.rule):
            is_bench = inside.startswith("bench:")
            found.append(inside.split()[0] if is_bench else "arm:" + inside.rpartition(".")[0])
        found += [f"arm:{name}" for name in self.ruling_arms]
        return list(dict.fromkeys(found))


# ---- Reading claims.toml -----------------------------------------------------------------------------------


def read(path):
    """(documents {number: {"title", "items"}}, planned, [Claim]) of claims.toml, checked in itself."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise Refused(f"{path} is not TOML that can be read: {error}") from None
    if unknown := set(table) - {"documents", "planned", "claims"}:
        raise Refused(f"{path}: unknown key '{sorted(unknown)[0]}'; the keys are documents, planned, claims")
    documents, entries = table.get("documents", {}), table.get("claims", [])
    whole = isinstance(documents, dict) and isinstance(entries, list) and bool(documents and entries)
    fields = {"title": str, "items": int}
    for document in documents.values() if whole else []:
        whole &= isinstance(document, dict) and {k: type(x) for k, x in document.items()} == fields
    if not whole or not all(isinstance(entry, dict) for entry in entries):
        raise Refused(f"{path}: it has [documents.NNN] with title and items, and [[claims]]")
    claims = [_claim(entry, path) for entry in entries]
    wanted = [f"{d}.{i:02}" for d, known in documents.items() for i in range(1, known["items"] + 1)]
    ids = [claim.id for claim in claims]
    for name in ids:
        if name not in wanted:
            raise Refused(f"{path}: {name} is no item of the documents")
        if ids.count(name) > 1:
            raise Refused(f"{path}: item {name} stands there twice")
    if missing := [name for name in wanted if name not in ids]:
        raise Refused(f"{path}: item {missing[0]} has no entry")
    if ids != wanted:
        raise Refused(f"{path}: entries stand in the order of their numbers")
    return documents, table.get("planned", []), claims


def _claim(entry, path):
    fields = {f.name: f.type for f in dataclasses.fields(Claim)}
    where = f"{path}: item {entry.get('id', '(without an id)')}"
    for name, x in entry.items():
        if name not in fields:
            raise Refused(f"{where}: unknown key '{name}'; the keys are {', '.join(fields)}")
        if type(x) is not fields[name]:
            raise Refused(f"{where}: {name} is a {fields[name].__name__}, not {x!r}")
    for name in ("id", "claim", "verdict"):
        if not entry.get(name):
            raise Refused(f"{where}: '{name}' is missing")
    claim = Claim(**entry)
    for wrong, what in faults(claim):
        if wrong:
            raise Refused(f"{where}: {what}")
    return claim


def faults(claim):
    """(whether, what) of everything that can be wrong with one entry by itself."""
    measured = claim.verdict in ("holds", "holds in kind", "does not hold", "undecided") or claim.rule
    known = [name for name in VERDICTS if name != "not measured yet"]
    outside = re.sub(r"\{[^{}]*\}|`[^`]*`|arXiv \d+\.\d+|\b00\d\.\d\d\b", "", claim.said)
    compared = COMPARED.sub("", claim.rule) if "{" in claim.rule else ""
    yield claim.verdict.startswith("auto:") and not claim.rule.strip(), "a rule names arms or figures"
    yield not claim.rule and claim.verdict not in known, f"a verdict is a rule, or of {', '.join(known)}"
    yield bool(compared.replace(" and ", "").strip()), f"a rule that is not understood: '{claim.rule}'"
    yield claim.expects not in EXPECTED, f"expects is one of {', '.join(EXPECTED)}"
    yield claim.in_kind and not claim.rule, "in_kind goes with a rule; else say 'holds in kind'"
    yield bool(measured) and not claim.said, "what was measured is missing: 'said'"
    yield bool(measured) and not claim.references(), "what was measured has evidence"
    yield claim.verdict == "built" and not claim.evidence, "what is built has evidence"
    yield claim.verdict == "not measured" and not claim.why, "what was not measured says why"
    for name in ("claim", "said", "why"):
        yield "\n" in getattr(claim, name), f"'{name}' is one line"
    typed = re.search(r"\d+\.\d+|\d+ ?%|\d ?x\b", outside)
    yield typed is not None, f"'{typed and typed[0]}' in 'said' is typed: a figure is a {{reference}}"


# ---- One row -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    claim: Claim
    verdict: str
    text: str
    machines: set


def row_for(claim, evidence):
    """The row of a claim. Raises Refused, with the claim's number, for references to what does not exist."""
    try:
        pending = check_references(claim, evidence)
        said, missing = filled(claim.said, evidence)
        why, _ = filled(claim.why, evidence)
        verdict_here = decided(claim, evidence, pending)
    except Refused as error:
        raise Refused(f"claims.toml: item {claim.id}: {error}") from None
    if missing and not claim.why:
        verdict_here = "not measured yet"
    if verdict_here == "not measured yet":
        commands = list(dict.fromkeys([*pending.values(), *missing]))
        said = f"{' and '.join(f'`{command}`' for command in commands)} will tell"
    elif missing:
        said = ""
    names = claim.references()
    machines = set()
    if verdict_here != "not measured yet":
        machines = machines.union(*map(evidence.machine, names))
    links = ", ".join(dict.fromkeys(link(name, evidence) for name in names))
    words = [sentence(part) for part in (said, why) if part]
    if links:
        words.append(f"({links})" if words else links)
    return Row(claim, verdict_here, " ".join(words), machines)


def sentence(text):
    """With a capital, unless it begins with a name as bf16, and with a full stop."""
    if re.match(r"[a-z]+[ ,;]", text):
        text = text[0].upper() + text[1:]
    return text if text.endswith(".") else text + "."


def check_references(claim, evidence):
    """{reference: command} of those without records yet. Raises Refused for what does not exist."""
    pending = {}
    for reference in claim.references():
        try:
            evidence.check(reference)
        except Pending as command:
            pending[reference] = str(command)
    return pending


def filled(text, evidence):
    """(text with its figures, [commands that make those that are missing])."""
    missing = []

    def put(match):
        try:
            return evidence.figure(match[1])[1]
        except Pending as command:
            missing.append(str(command))
            return "?"

    return re.sub(r"\{([^{}]*)\}", put, text), missing


def decided(claim, evidence, pending):
    """The verdict of a claim, by its rule where it has one."""
    if not claim.rule:
        needs = claim.verdict in ("holds", "holds in kind", "does not hold")
        unrun = [name for name in pending if name.startswith(("arm:", "bench:"))]
        return "not measured yet" if needs and unrun else claim.verdict
    by_figures = "{" in claim.rule
    found = compared(claim.rule, evidence) if by_figures else by_arms(claim, evidence)
    return "holds in kind" if found == "holds" and claim.in_kind else found


def by_arms(claim, evidence):
    """Arms without pairs do not count, as long as one has some."""
    good, bad = EXPECTED[claim.expects]
    found = []
    for name in claim.ruling_arms:
        try:
            seen = evidence.seen(name)
        except Pending:
            continue
        if seen.arm.name == seen.arm.baseline:
            raise Refused(f"{name} is its own baseline, and decides nothing")
        if seen.pairs:
            found.append(verdict(seen.pairs, seen.result))
    if not found:
        return "not measured yet"
    if any(said in bad for said in found):
        return "does not hold"
    return "holds" if all(said in good for said in found) else "undecided"


def compared(rule, evidence):
    for reference, low, high, side, bound in COMPARED.findall(rule):
        try:
            x = evidence.figure(reference)[0]
        except Pending:
            return "not measured yet"
        ends = {"below": (-math.inf, bound), "above": (bound, math.inf), "": (low, high)}[side]
        if x is None or not float(ends[0]) <= x <= float(ends[1]):
            return "does not hold"
    return "holds"


def link(reference, evidence):
    """A reference as Markdown."""
    kind, _, name = reference.partition(":")
    if kind == "arm":
        number = name.partition("/")[0]
        known = evidence.experiments.get(number)
        return f"[{number}](experiments/{known.folder.name}/README.md)" if known else number
    if kind == "bench":
        path = f"experiments/bench/{name}.json"
        return f"[{name}]({path})" if (evidence.root / "bench" / f"{name}.json").exists() else name
    if kind == "test":
        file = name.partition("::")[0]
        return f"[{Path(file).stem}]({file})"
    return f"`{name}`" if kind == "flag" else f"[{name}]({name})"


# ---- The page ----------------------------------------------------------------------------------------------


def render(documents, rows):
    """CLAIMS.md."""
    count = {name: sum(row.verdict == name for row in rows) for name in VERDICTS}
    told = [f"**{name}** {count[name]} ({why})" for name, why in VERDICTS.items() if count[name]]
    parts = [
        "# Claims",
        f"Five documents about low precision make {len(rows)} statements: figures, explanations, "
        "recommendations. Each has a row here: what the document says, and what was measured in this "
        f"repository. Verdicts: {', '.join(told)}. Equal, better and worse are verdicts of paired seeds "
        "within margins that were set before the runs, as [EXPERIMENTS.md](EXPERIMENTS.md) explains.",
        "`python experiments/report.py` writes this page from `experiments/claims.toml` and the records.",
    ]
    wrong = [row for row in rows if row.verdict == "does not hold"]
    wrong = [f"- **{row.claim.id}** {row.claim.claim} {row.text}" for row in wrong]
    if wrong:
        parts += ["## What does not hold", "\n".join(wrong)]
    for number, document in documents.items():
        here = [row for row in rows if row.claim.id.startswith(f"{number}.")]
        parts += [f"## {number} {document['title']}", table(here)]
    return "\n\n".join(parts) + "\n"


def table(rows):
    lines = ["| item | claim | measured here | on | verdict |", "|---" * 5 + "|"]
    for row in rows:
        on = ", ".join(sorted(row.machines)) or "-"
        cells = [row.claim.id, row.claim.claim, row.text or "-", on, row.verdict]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def pages(experiments, known, root=HERE, base=ROOT):
    """{path: text} of CLAIMS.md in the folder `base`, where the files are that it names; {} without a
    claims.toml. Raises Refused.
    """
    path = Path(root) / "claims.toml"
    if not path.exists():
        return {}
    documents, planned, claims = read(path)
    evidence = Evidence(experiments, known, root, base, planned)
    rows = [row_for(claim, evidence) for claim in claims]
    return {Path(base) / PAGE: render(documents, rows)}


def unnamed(claims, experiments):
    """["000.26: 031/bf16", ...]: arms that claims name and no experiment.toml has yet."""
    arms = {f"arm:{e.number}/{arm.name}" for e in experiments for arm in e.arms}
    named = [(claim.id, name) for claim in claims for name in claim.references() if name.startswith("arm:")]
    return [f"{number}: {name.removeprefix('arm:')}" for number, name in named if name not in arms]


def main(argv=None):
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="claims.py", description=__doc__, formatter_class=form)
    parser.add_argument("--check", action="store_true", help=f"write nothing; exit status 1 if {PAGE} is old")
    args = parser.parse_args(argv)
    try:
        loaded = {}
        experiments = [load(number, HERE, loaded) for number in folders()]
        known = {k: record for e in experiments for k, record in recorded(e).items()}
        made = pages(experiments, known)
        missing = unnamed(read(HERE / "claims.toml")[2], experiments)
    except Refused as error:
        print(f"claims.py: {error}", file=sys.stderr)
        return 2
    stale = 0
    for path, text in made.items():
        fresh = path.exists() and path.read_text() == text
        stale += not fresh
        if not args.check and not fresh:
            write_atomically(path, lambda file, text=text: file.write(text.encode()))
    if missing:
        print(f"named, and in no experiment.toml yet: {', '.join(missing)}")
    return stale if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
