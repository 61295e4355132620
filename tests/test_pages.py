"""The pages: what README shows works, and links lead to files. test_report.py checks generated parts."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train
from lowprec.advice import command as advising

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
LINES = re.compile(r"(?:^|`|&& )(?:python|torchrun --nproc_per_node=2) (train\.py[^`#\n]*)", re.M)


def commands():
    """The commands of train.py on the pages at the root and in docs/ that a reader may type as they stand."""
    found = set()
    for page in PAGES:
        for command in LINES.findall(page.read_text()):
            whole = not command.rstrip().endswith("\\")
            if whole and "…" not in command and "--help" not in command:
                found.add(command.strip())
    return sorted(found)


@pytest.mark.parametrize("command", commands())
def test_every_command_parses(command):
    if "FILE" in command or "mine.py" in command:
        pytest.skip("names a file of the reader's own; tests/tasks/test_task_file.py runs one")
    words = shlex.split(command)[1:]
    if "--advise" in words:  # it has flags of its own beside those of train.py
        _, words = advising.build_advice_parser("train.py --advise").parse_known_args(words)
    # status 2 on an unknown flag or value
    given = vars(train.build_parser().parse_args(words))
    verbs = {"dry_run", "check", "list", "advise", "trial", "sample", "diagnose", "config"}
    assert set(given) <= set(train.FLAGS.defaults()) | verbs


def test_the_loop_of_the_readme_learns(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    loop = next(block for block in blocks if "Precision(" in block)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    x = torch.randn(64, 8)
    scope = {"model": model, "loader": [(x, x[:, :1] * 2)] * 200, "F": F}
    before = F.mse_loss(model(x), x[:, :1] * 2).item()
    exec(loop, scope)
    assert scope["loss"].item() < 0.2 * before
    assert not any(p.requires_grad for p in scope["net"].net.parameters())
    assert "bytes a parameter" in capsys.readouterr().out


def anchors(page):
    """Where links into a page may lead: its marks, and its headings as GitHub names them."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    named = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    found = re.findall(r"(?:\]\(|^\[[^\]]+\]: )([^)#\s]*)(?:#([\w-]+))?\)?", page.read_text(), re.M)
    for target, anchor in set(found):
        if target.startswith("https://"):
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"
