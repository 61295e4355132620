"""What is trained, one file a system. A task of your own imports its parts from here:

    from tasks import Flag, Rng, Site, Task, natural
"""

from harness.flags import (
    Flag,
    amount,
    count,
    crowd,
    few,
    fraction,
    inner,
    natural,
    path,
    positive,
    seed,
    several,
    share,
    thousand,
)
from lowprec.recipes import Site

from .task import Rng, Task
