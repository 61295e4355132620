"""The findings of a Watch, and the table of all kinds of faults.

    python -m lowprec.watch.findings                    prints the table as Markdown
    python -m lowprec.watch.findings docs/faults.md     writes it between the marks of a page
"""

import sys
from pathlib import Path

from . import faults  # noqa: F401  declares them
from .fault import of_average, of_run, of_tensor, of_watch_without_steps, table_of
from .measured import Measured
from .verdicts import FINDING_LIMITS


def findings(watch):
    """(list of Finding, worst first; {site: share lost, summed over all tensors})."""
    if not watch.steps:
        return of_watch_without_steps.findings(watch), {}
    if not watch.looks:
        return [], {}
    seen = Measured(watch)
    found = of_run.findings(seen)
    for one in seen.tensors:
        found += of_tensor.findings(one, one.name)
    for one in seen.averaged:
        found += of_average.findings(one, one.name)
    sites = {finding.site for finding in found if finding.severity != "note"}
    total = seen.total().items()
    sound = {site: share for site, share in total if site not in sites and share <= FINDING_LIMITS[site][0]}
    return sorted(found, key=lambda finding: finding.rank), sound


def table():
    """All kinds of faults that a Watch knows, as Markdown."""
    return table_of([*of_tensor, *of_average, *of_run, *of_watch_without_steps])


BEGIN_OF_TABLE, END_OF_TABLE = "<!-- findings -->\n", "<!-- end of findings -->\n"


def main(argv):
    if sys.flags.optimize > 1:
        sys.exit("python -OO takes docstrings away, which say what is measured: make the table without it")
    if not argv:
        print(table(), end="")
        return
    page = Path(argv[0])
    before, rest = page.read_text().split(BEGIN_OF_TABLE)
    _, after = rest.split(END_OF_TABLE)
    page.write_text(f"{before}{BEGIN_OF_TABLE}{table()}{END_OF_TABLE}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
