"""Tells a process that another one of its run has ended, which the library they speak through may not.

gloo now and then waits on for the answer of a process that was killed, and NCCL does (nccl issue 585), until
their time is over. So each process keeps a connection to the first one, which carries nothing but a farewell.
The operating system closes it when a process ends, by whatever. Needs no torch; copy it.

    line = Lifeline(rank, host, store, ended)    # on all processes; host: where the first one is
    line.end()                                   # this one is done, and the others go on without it
"""

import json
import secrets
import socket
import time
from contextlib import suppress
from threading import Thread

GRACE = 10  # seconds in which a process may still end with a line of its own, which says more
FAREWELL = b"."
# a connection over which nothing comes is asked every minute whether the machine at its other end still runs
ASKED = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


def _server(host):
    """A socket that listens, at a free port, to all that reach this machine as `host`."""
    family = socket.getaddrinfo(host, None)[0][0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both)


class Lifeline:
    """ended(): is called from a thread, GRACE seconds after a connection has closed without a farewell. The
    first process may have many of them, the others have one: where the first ends, all learn of it.

    store: has set(key, text) and get(key), which waits for it. Raises OSError where there is no way to the
    first process, or for it to listen.
    """

    def __init__(self, rank, host, store, ended):
        self.ended, self.done, self.open, self.listener = ended, False, [], None
        if rank == 0:
            try:
                self.listener = _server(host)
            except OSError:
                store.set("lifeline", json.dumps([0, ""]))  # where nobody is
                raise
            token = secrets.token_hex(16)  # a stranger's connection, as of a scanner of ports, has none
            store.set("lifeline", json.dumps([self.listener.getsockname()[1], token]))
            self._in_a_thread(self._listen, token.encode())
        else:
            port, token = json.loads(store.get("lifeline"))
            line = socket.create_connection((host, port), 10)
            line.settimeout(None)
            line.sendall(token.encode())
            self._in_a_thread(self._hold, line)

    def end(self):
        """Say farewell to all."""
        self.done = True
        for line in self.open:
            with suppress(OSError):
                line.sendall(FAREWELL)
                line.close()
        if self.listener is not None:
            with suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
            self.listener.close()

    def _in_a_thread(self, act, *given):
        Thread(target=act, args=given, name="lifeline", daemon=True).start()

    def _listen(self, token):
        with suppress(OSError):  # closed
            while True:
                self._in_a_thread(self._greet, self.listener.accept()[0], token)

    def _greet(self, line, token):
        with suppress(OSError):
            if line.recv(len(token), socket.MSG_WAITALL) == token:
                return self._hold(line)
        line.close()

    def _hold(self, line):
        self.open.append(line)
        said = b""
        with suppress(OSError):
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in ASKED.items():
                if hasattr(socket, name):
                    line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            said = line.recv(1)
        if said == FAREWELL or self.done:
            return
        time.sleep(GRACE)
        if not self.done:
            self.ended()
