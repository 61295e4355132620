"""What is trained, one file a system. A task of your own imports its parts from here:

    from tasks import Flag, Rng, Site, Task
"""

from harness.flags import Flag
from lowprec.recipes import Site

from .task import Rng, Task

__all__ = ["Flag", "Rng", "Site", "Task"]
