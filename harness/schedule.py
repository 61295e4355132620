"""What is due at a step. Its learning rate: lowprec/trials/schedule.py."""


def is_due(every, step):
    """Whether what happens `every` so many steps, 0 for never, happens after this step."""
    return bool(every) and step % every == 0
