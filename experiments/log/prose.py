"""Numbers in prose: each must be, to the digits that it is written with, a figure that the records give.

Checked is what stands outside the generated parts of an experiment's README.md, unless its experiment.toml
says `unchecked_prose = true`, and front.md, where figures stand as {011/stochastic.difference} and typed ones
need a source. What is allowed:

    a figure of the experiment       scores, losses and other figures of its arms: means, spreads, paired
                                     differences and the ends of their intervals, achieved margins, ratios and
                                     percentages of the baseline, curves' ends, what the page shows, and what
                                     experiment.toml holds (flags, margin, seeds, prediction)
    one of another experiment        in a paragraph that links to its page
    `code`, 8x8, bf16, 8-bit, 2:4    no figures, as are numbers of experiments and papers (011, arXiv),
                                     levels ("95 % interval"), and whole numbers up to 12
    what stands before a source      <!-- source: final_loss of 001/plain over 001/fp32 -->, on its line: such
                                     a source (sources.py) is computed; words (a file, arXiv) are believed
"""

import math
import re
import statistics

from scipy import stats

from experiments.log import pages, sources
from experiments.log.analysis import comparison, loss_comparison, of_nearest, records_of, scores, weights_of
from experiments.log.sources import Figures, NoFigure, flat, spread, summary

SMALL = 12  # whole numbers up to this are counts that anyone can see
SOURCE = re.compile(r"<!--\s*source:\s*(\S.*?)\s*-->")
NO_FIGURES = re.compile(
    r"`[^`]*`|\]\([^)]*\)|<[^<>]*>|\{\{?[^{}]*\}?\}|arXiv:? ?\d+\.\d+|doi:? ?\S+"
    r"|(?<![,.])\b0\d\d\b|\b\d+:\d+\b"
    r"|\b\d+-bits?\b|\b(?:90|95) % (?:CI|confidence|interval)|\bat (?:5|90|95) %"
    r"|\b(?:seeds?|attempts?|items?|experiments?) \d+(?:(?: to |-|, | and )\d+)*"
)
NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>(?<![\d.])[-+−])?(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)(?P<power>e[-+]?\d+)?"
    r"(?![\w]|\.\d)(?P<percent> ?%)?"
)

# ---- Numbers in a text -------------------------------------------------------------------------------------


def numbers(line):
    """[(as written, decimals, value, whether signed, whether in percent)] of the figures in a line."""
    found = []
    for match in NUMBER.finditer(NO_FIGURES.sub(" ", line)):
        digits = match["digits"].replace(",", "")
        value = float(digits + (match["power"] or ""))
        value = -value if match["sign"] in ("-", "−") else value
        whole = "." not in digits and not match["power"]
        if whole and abs(value) <= SMALL and not match["percent"]:
            continue
        places = len(digits.partition(".")[2]) - int((match["power"] or "e0")[1:])
        found.append((match[0].strip(), places, value, bool(match["sign"]), bool(match["percent"])))
    return found


def paragraphs(text):
    """[[(number of the line, line)]] of the hand-written paragraphs of a page."""
    found, generated = [[]], False
    for i, line in enumerate(text.splitlines(), start=1):
        if re.match(r"<!-- generated: \w+ begin -->", line):
            generated = True
        elif re.match(r"<!-- generated: \w+ end -->", line):
            generated = False
        elif not generated and line.strip():
            found[-1].append((i, line))
            continue
        found.append([])
    return [part for part in found if part]


# ---- What the records of an experiment give ----------------------------------------------------------------


def figures_of(experiment, known):
    """The Figures of an experiment."""
    e, found = experiment, Figures()
    of_words(found, toml_words(e))
    of_words(found, [pages.results(e, known)])
    runs = [r for arm in e.arms for r in records_of(e, arm, known).values()]
    found.add(
        e.margin, e.loss_margin, len(e.seeds), len(e.arms), len(runs), sum(r.get("seconds", 0) for r in runs)
    )
    for arm in e.arms:
        of_arm(found, e, arm, known)
    return found


def toml_words(experiment):
    """The texts of experiment.toml."""
    e = experiment
    yield from (e.title, e.question, e.believed, e.prediction, " ".join(e.common), *e.missed)
    for arm in e.arms:
        yield from (arm.note, " ".join(arm.flags), f"{arm.x:g} {arm.margin:g}")


def of_words(found, texts):
    for text in texts:
        for match in NUMBER.finditer(re.sub(r"[|`\[\]()=]|<!--|-->", " ", text)):
            value = float(match["digits"].replace(",", "") + (match["power"] or ""))
            value = -value if match["sign"] in ("-", "−") else value
            (found.percent if match["percent"] else found.plain).add(value)


def of_arm(found, experiment, arm, known):
    e, base_arm = experiment, experiment.arm(arm.baseline)
    own, base = scores(e, arm, known), scores(e, base_arm, known)
    found.add(*spread(list(own.values())))
    pairs, result = comparison(e, arm, known)
    _, loss_pairs, loss = loss_comparison(e, arm, known)
    mean = statistics.fmean([base[seed] for seed in own if seed in base] or [0])
    if result:
        ends = ninety(result.mean, result.p_difference, pairs)
        values = [result.mean, result.low, result.high, result.achieved, *ends]
        found.add(*values, result.p_difference, result.p_equal, result.mean / arm.margin)
        if mean and math.isfinite(mean):
            found.share(*(x / abs(mean) for x in [*values, arm.margin]))
            found.ratio(statistics.fmean(own.values()) / mean)
    if loss:
        found.percent.update([loss.mean, loss.low, loss.high, loss.achieved])
        found.percent.update(ninety(loss.mean, loss.p_difference, loss_pairs))
        found.add(loss.p_difference)
    found.share(*(x for x in of_nearest(e, arm, known) if x is not None))
    weights = weights_of(arm), "raw"
    sides = [[flat(r, weights) for r in records_of(e, a, known).values()] for a in (arm, base_arm)]
    for name in dict.fromkeys(name for side in sides[0] for name in side if name != "seed"):
        of_figure(found, name, *sides)


def of_figure(found, name, own, base):
    """Mean, spread and paired difference of any figure that the records of two arms hold."""
    x, y = ([f[name] for f in side if name in f] for side in (own, base))
    found.add(*spread(x))
    if all(0 <= v <= 1 for v in x):
        found.share(statistics.fmean(x), 1 - statistics.fmean(x))
    if y and all(map(math.isfinite, x + y)) and statistics.fmean(y):
        found.ratio(statistics.fmean(x) / statistics.fmean(y))
    pairs = {f["seed"]: f[name] for f in base if name in f}
    differences = [f[name] - pairs[f["seed"]] for f in own if name in f and f["seed"] in pairs]
    if len(differences) > 1 and all(map(math.isfinite, differences)):
        found.add(*summary(differences))


def ninety(mean, p, pairs):
    """The ends of the 90 % interval of a mean whose t-test has this p."""
    if not 0 < p < 1 or not math.isfinite(mean):
        return []
    half = stats.t.isf(0.05, pairs - 1) * abs(mean) / stats.t.isf(p / 2, pairs - 1)
    return [mean - half, mean + half]


# ---- The check ---------------------------------------------------------------------------------------------


def check(experiments, chosen, known, root):
    """[(path, line, number)] of the numbers without a record behind them."""
    by_number, cache, found = {e.number: e for e in experiments}, {}, []

    def figures(number):
        if number not in cache:
            cache[number] = figures_of(by_number[number], known)
        return cache[number]

    pages_here = [(e.folder / "README.md", [e.number]) for e in chosen if not e.unchecked_prose]
    if len(chosen) == len(experiments):
        pages_here.append((root / pages.FRONT, []))
    for path, own in pages_here:
        for part in paragraphs(path.read_text(encoding="utf-8")) if path.exists() else []:
            cited = re.findall(r"\]\([^)]*?(\d{3})-[\w-]+/", " ".join(line for _, line in part))
            wanted = [number for number in dict.fromkeys([*own, *cited]) if number in by_number]
            if path.name == pages.FRONT:
                wanted = []  # its figures are references; a typed one has a source
            for i, line in part:
                found += [(path, i, what) for what in of_line(line, wanted, figures, by_number, known)]
    return found


def of_line(line, wanted, figures, experiments, known):
    """The numbers of a line, and its sources, that no record gives."""
    *told, rest = SOURCE.split(line)  # text, source, text, source, ..., text
    found = []
    for text, source in [*zip(told[::2], told[1::2], strict=True), (rest, "")]:
        try:
            own = sources.figures_of(source, experiments, known)
        except NoFigure as error:
            found.append(f"the source {error}")
            continue
        if source and own is None:
            continue  # words are taken at their word
        for written, *figure in numbers(text):
            whole = figure[0] == 0 and not figure[-1]  # of the page, such as a number of steps
            given = [*([own] if own else []), *(map(figures, wanted) if whole or not own else [])]
            if not any(x.have(*figure) for x in given):
                found.append(written)
    return found
