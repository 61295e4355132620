"""Which tests run some lines: mutations.py starts it in the processes of tests, and theirs.

RUN_LINES=FILE   JSON, {path: {line: [names]}}; FILE.seen gets a line "NAME TEST" for each of them and each
                 test that runs it, and "NAME" alone where that is done for several tests
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
    lines_of = {}  # code -> those of its lines that are wanted
    known = set()

    def called(frame, event, argument):
        code = frame.f_code
        lines = wanted.get(code.co_filename)
        if not lines or code.co_name == "<module>":
            return None
        if code not in lines_of:
            lines_of[code] = {line for _, _, line in code.co_lines() if line in lines}
        return step if lines_of[code] else None

    def step(frame, event, argument):
        if event == "line" and frame.f_lineno in lines_of[frame.f_code]:
            test, _, phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
            test = f" {test}" if phase == "(call)" else ""
            key = frame.f_code, frame.f_lineno, test
            if key not in known:
                known.add(key)
                names = wanted[frame.f_code.co_filename][frame.f_lineno]
                os.write(seen, "".join(f"{name}{test}\n" for name in names).encode())
        return step

    threading.settrace(called)
    sys.settrace(called)


if os.environ.get("RUN_LINES"):
    watch()
