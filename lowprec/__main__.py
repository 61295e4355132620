"""The library's own command.

    python -m lowprec                        its version, what this machine can do, which kernels it would use
    python -m lowprec advise --params 7e9    which recipe to train a net in, and what it takes and costs
    python -m lowprec trial mine.py          what each recipe costs on a net of one's own, tried in little
    python -m lowprec foresee runs/NAME      what writing its weights in bf16 would do to it (any checkpoint)
    python -m lowprec compare BEFORE AFTER   two checkpoints of any program: what did training move?

Exit status: 0, 1 for findings of `compare`, 2 for bad input, which ends in one line.
"""

import gc
import importlib
import sys

from .advice.check import report
from .errors import Forgiving, Refused, end_of_reader
from .machine import quiet_libraries

MODULE_OF_COMMAND = {
    "advise": ".advice.command",
    "trial": ".trials.command",
    "foresee": ".trials.foresee",
    "compare": ".watch.compare",
}
# the flags that `recommended_flags` gives -> the same as arguments of the library
RECIPE_OF_FLAGS = {
    "--bf16": "recipe(bf16=True); short of memory: recipe(pure_bf16=True, stochastic=True)",
    "--fp16": "recipe(fp16=True)",
    "": "recipe(), which is fp32; short of memory: recipe(pure_bf16=True, stochastic=True)",
}


def main(argv=None):
    """The exit status of `python -m lowprec` with these words."""
    if argv is None:
        argv = sys.argv[1:]
        sys.stderr = Forgiving(sys.stderr)
    quiet_libraries()
    try:
        status = run_command(*argv)
        sys.stdout.flush()  # a pipe that is closed is met here
        return status
    except Refused as error:
        print(f"lowprec: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return end_of_reader()
    except KeyboardInterrupt:
        print("lowprec: stopped", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"lowprec: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 2


def run_command(name="", *words):
    """The exit status of one of the commands. Each is imported where it is asked for: it takes a second."""
    if name in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    if not name:
        print(report(lambda flags, reason: [f"start with {RECIPE_OF_FLAGS[flags]}"]))
        return 0
    if name not in MODULE_OF_COMMAND:
        raise Refused(f"unknown command {name!r}; there are: {', '.join(MODULE_OF_COMMAND)}")
    return importlib.import_module(MODULE_OF_COMMAND[name], __package__).main(list(words))


if __name__ == "__main__":
    gc.disable()  # looking for garbage takes a sixth of the time that advise needs for a large net
    sys.exit(main())
