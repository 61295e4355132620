"""The moments of an optimiser in the memory of the CPU, of weights on a GPU.

    run = Precision(model, recipe(pure_bf16=True, stochastic=True), states_on="cpu")
    optimizer = AdamW(params, lr=1e-3, update="stochastic", away=Offload(Traffic(device)))     # any loop

The step itself runs on the GPU, bucket by bucket (see buckets.py), and has the bits of the ordinary one.
While a bucket is stepped, the moments of the next come on a stream of their own, and those of the one before
go back on another. So the GPU holds the moments of two buckets at most, and none between steps. A tensor of
262,144 entries or more is a bucket by itself.

A step moves all moments over the bus and back: 16 bytes a parameter in fp32, 4 in 8-bit codes. Forward and
backward hide none of that, for the gradients come last. What completes a bf16 weight stays on the GPU: the
average reads Kahan's compensation, remainder or fp32 master at every step. torch rounds each piece of pinned
memory up to a power of two. Works with all optimisers after `Rounded`.
"""

import copy

import torch

from ..errors import Refused
from .rounded import Rounded
from .state import LOW

ALIGNED = 256  # bytes; vectorised kernels need 16

# ---- Where moments are -------------------------------------------------------------------------------------


class Offload:
    """Keeps moments in the memory `home`, and brings them for a step. traffic: what copies, see Traffic; None
    for shapes alone. Several optimisers may share one.
    """

    def __init__(self, traffic, home="cpu"):
        self.traffic, self.home = traffic, torch.device(home)
        self.left = None  # the last copy that goes back

    def keep(self, state):
        """A bucket's new state, made at `home`, in the memory that copies need."""
        if self.traffic is None:
            return state
        return {name: self.traffic.memory(t) for name, t in state.items()}

    def settle(self):
        """Let the host wait until the moments are back: they may be read and written there then."""
        if self.left is not None:
            self.traffic.wait(self.left)

    def passing(self, work):
        """Yield each item of `Rounded.plan` with its moments on the device. Asking for the next says that
        this one has been stepped.
        """
        if not work:
            return
        far = [moments_of(item.piece) for item in work]
        rooms = [self.traffic.room(max(map(size_of, far[at::2]))) for at in range(min(2, len(work)))]
        begun = [self.traffic.now()] if self.left is None else [self.traffic.now(), self.left]
        free = [begun, begun]  # what the next copy into a room has to wait for

        def fetch(n):
            near = views(rooms[n % 2], far[n])
            return near, self.traffic.copy("in", list(pairs(near, far[n])), free[n % 2])

        ahead = fetch(0)
        for n, item in enumerate(work):
            (near, came), ahead = ahead, fetch(n + 1) if n + 1 < len(work) else None
            self.traffic.need(came)
            here = copy.copy(item.piece)
            here.state = {**item.piece.state, **near}
            yield item._replace(piece=here)
            self.left = self.traffic.copy("out", list(pairs(far[n], near)), [self.traffic.now()])
            free[n % 2] = [self.left]


def moments_of(piece):
    """{name: flat tensor} of a bucket's state that is kept away."""
    return {name: t for name, t in piece.state.items() if name not in LOW}


def size_of(state):
    """Bytes of a room that holds a state."""
    return sum(-(-t.nbytes // ALIGNED) * ALIGNED for t in state.values())


def views(room, state):
    """{name: part of the room, uint8, as a tensor like the state's}."""
    found, start = {}, 0
    for name, t in state.items():
        found[name] = room[start : start + t.nbytes].view(t.dtype)
        start += -(-t.nbytes // ALIGNED) * ALIGNED
    return found


def pairs(targets, sources):
    return ((target, sources[name]) for name, target in targets.items())


def sizes(optimizer):
    """(bytes of moments that an optimiser keeps away, those of them that are on the GPU at once at most)."""
    parts = getattr(optimizer, "parts", [optimizer])
    states = [moments_of(bucket) for part in parts for _, bucket in part._buckets]
    away = sum(t.nbytes for state in states for t in state.values())
    return away, sum(sorted(map(size_of, states))[-2:])


class Traffic:
    """Copies between a GPU and pinned memory, each way on a stream of its own. Copies of one way follow one
    another; all else waits for what it is told to, never the host but in `wait`.
    """

    def __init__(self, device):
        self.device = device
        self.streams = {"in": torch.cuda.Stream(device), "out": torch.cuda.Stream(device)}

    def memory(self, t):
        return t.pin_memory()

    def room(self, n):
        """n bytes on the GPU, which nobody gets anew before both streams are done with them."""
        room = torch.empty(n, dtype=torch.uint8, device=self.device)
        for stream in self.streams.values():
            room.record_stream(stream)
        return room

    def now(self):
        """What the GPU was given so far."""
        return torch.cuda.current_stream(self.device).record_event()

    def copy(self, way, pairs, after):
        """Start to copy [(target, source)] once all of `after` is done. Returns what is done with the last.
        """
        stream = self.streams[way]
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def need(self, copied):
        """Let what the GPU is given from now on wait for a copy; the host goes on."""
        torch.cuda.current_stream(self.device).wait_event(copied)

    def wait(self, copied):
        """Let the host wait for it."""
        copied.synchronize()


# ---- The choice --------------------------------------------------------------------------------------------


def offloaded(where, device):
    """The Offload of moments that are kept on 'device' or on the 'cpu', of weights on `device`; None where
    these are one place. On the meta device it is that of a GPU. where: may be an Offload itself.
    """
    if isinstance(where, Offload):
        return where
    if where not in ("device", "cpu"):
        raise Refused(f"states_on={where}: moments are kept on the device or on the cpu")
    if where == "device" or device.type not in ("cuda", "meta"):
        return None
    return Offload(Traffic(device)) if device.type == "cuda" else Offload(None, "meta")


def check_offload(where, grad_release=False, optimizer=None):
    """Raise Refused for what moments can't be away with. optimizer: once it is made."""
    if where == "device":
        return
    if grad_release:
        early = "--grad_release steps within backward, where it is not known which moments come next"
        raise Refused(f"{early} (--states_on cpu): leave one out; --opt8bit or --opt4bit makes moments small")
    for part in getattr(optimizer, "parts", [] if optimizer is None else [optimizer]):
        if not isinstance(part, Rounded):
            own = type(getattr(part, "inner", part))
            its = f"{own.__module__.partition('.')[0]}'s {own.__name__}"
            alone = f"--states_on cpu knows the states of our optimisers alone, and {its} is none"
            raise Refused(f"{alone}: use adamw, sgd, lion, adafactor or muon of ours, or drop it")
