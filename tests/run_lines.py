"""Which of some lines a process runs: mutations.py starts it in the processes of tests, and theirs.

RUN_LINES=FILE   JSON, {path: {line: name}}; the names of lines that run are added to FILE.seen
"""

import json
import os
import sys
import threading


def watch():
    wanted = {}
    with open(os.environ["RUN_LINES"]) as file:
        for path, lines in json.load(file).items():
            wanted[path] = {int(line): names for line, names in lines.items()}
    seen = os.open(os.environ["RUN_LINES"] + ".seen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    left_of = {}  # code -> whether it has such lines

    def called(frame, event, argument):
        code = frame.f_code
        lines = wanted.get(code.co_filename)
        if not lines or code.co_name == "<module>":
            return None
        if code not in left_of:
            left_of[code] = {line for _, _, line in code.co_lines() if line in lines}
        return step if left_of[code] else None

    def step(frame, event, argument):
        left = left_of[frame.f_code]
        if event == "line" and frame.f_lineno in left:
            left.discard(frame.f_lineno)
            names = wanted[frame.f_code.co_filename][frame.f_lineno]
            os.write(seen, "".join(f"{name}\n" for name in names).encode())
        return step

    threading.settrace(called)
    sys.settrace(called)


if os.environ.get("RUN_LINES"):
    watch()
