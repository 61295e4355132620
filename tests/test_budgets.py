"""No figure of budgets.toml rises above its budget."""

import budgets


def test_no_figure_is_above_its_budget():
    today, known = budgets.figures(), budgets.budgets()
    risen = [
        f"{figure}: {value}, its budget is {known[figure][0]}"
        for figure, value in today.items()
        if value > known[figure][0]
    ]
    why = "make it smaller, or raise its budget in tests/budgets.toml and say why in a comment there"
    assert not risen, f"{'; '.join(risen)}: {why}"
