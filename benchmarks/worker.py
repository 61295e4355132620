"""A process to measure in, which can hang, crash or run out of time without taking the others along.

    worker = Worker(function)
    row = worker.do(argument, seconds=300)      # function(argument), in the process; raises Lost
    worker.close()
"""

import multiprocessing
import signal

from lowprec.machine import quiet_libraries


class Lost(Exception):
    """A process gave no result. timeout: because it took too long."""

    def __init__(self, message, timeout=False):
        super().__init__(message)
        self.timeout = timeout


def _serve(function, pipe):
    # Ctrl-C reaches both processes; the other one ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet_libraries()
    try:
        while True:
            pipe.send(function(pipe.recv()))
    except (EOFError, BrokenPipeError):
        pass


class Worker:
    """Calls function(argument) in a process of its own.

    The process is started when it is needed, and replaced after it is lost or closed.
    """

    def __init__(self, function, method="spawn"):
        self.function = function
        self.context = multiprocessing.get_context(method)
        self.process = None

    def do(self, argument, seconds):
        """The function's result. Raises Lost after `seconds`, or when the process ends."""
        if self.process is None:
            self._start()
        try:
            self.pipe.send(argument)
            if self.pipe.poll(seconds):
                return self.pipe.recv()
            lost = Lost(f"took longer than {seconds:.0f} s", timeout=True)
        except (EOFError, OSError):
            self.process.join(10)
            lost = Lost(f"its process ended, exit status {self.process.exitcode}")
        self.close(wait=0)
        raise lost

    def _start(self):
        self.pipe, theirs = self.context.Pipe()
        self.process = self.context.Process(target=_serve, args=(self.function, theirs))
        self.process.start()
        theirs.close()

    def close(self, wait=10):
        """End the process, by force after `wait` seconds."""
        if self.process is not None:
            self.pipe.close()  # it ends when it has nobody to listen to
            self.process.join(wait)
            self.process.kill()
            self.process.join()
            self.process = None


class Here:
    """As Worker, in this process."""

    def __init__(self, function):
        self.function = function

    def do(self, argument, seconds):
        return self.function(argument)

    def close(self):
        pass
