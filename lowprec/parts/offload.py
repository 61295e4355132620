"""The moments of an optimiser in the memory of the CPU, of weights on a GPU.

    run = Precision(model, recipe(pure_bf16=True, stochastic=True), states_on="cpu")
    optimizer = AdamW(params, lr=1e-3, update="stochastic", away=Offload(Traffic(device)))     # any loop

The step itself runs on the GPU, bucket by bucket, and has the bits of the ordinary one. While a bucket is
stepped, the moments of the next come on a stream of their own, and those of the one before go back on
another. So the GPU holds the moments of two buckets at most, and none between steps. What completes a bf16
weight stays on the GPU, for the average reads it at every step.
"""

import copy

import torch

from ..errors import check_choice
from ..optimizers.build import all_ours
from ..optimizers.state import Home
from .part import Part

ALIGNMENT = 256  # bytes; vectorised kernels need 16

# ---- Where moments are -------------------------------------------------------------------------------------


class Offload(Home):
    """Keeps moments in the memory `home`, and brings them for a step. traffic: what copies, see Traffic; None
    for shapes alone. Several optimisers may share one.
    """

    def __init__(self, traffic, home="cpu"):
        self.traffic, self.place = traffic, torch.device(home)
        self.left = None  # the last copy that goes back

    def keep(self, held):
        if self.traffic is None:
            return held
        return held.mapped(self.traffic.memory)

    def note(self):
        return "; in the memory of the CPU (--states_on cpu)"

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
        states = [moments_of(item.piece) for item in work]
        # two rooms on the device take turns: one is stepped in while the other is filled
        rooms = []
        for first in range(min(2, len(work))):
            largest = max(bytes_of_room(state) for state in states[first::2])
            rooms.append(self.traffic.room(largest))
        begun = [self.traffic.now()]
        if self.left is not None:
            begun.append(self.left)
        free_after = [begun, begun]  # what the next copy into a room has to wait for

        def fetch(n):
            on_device = views_of_room(rooms[n % 2], states[n])
            copied = self.traffic.copy("in", list(copy_pairs(on_device, states[n])), free_after[n % 2])
            return on_device, copied

        fetched = fetch(0)
        for n, item in enumerate(work):
            on_device, copied = fetched
            if n + 1 < len(work):
                fetched = fetch(n + 1)
            self.traffic.need(copied)
            yield item._replace(piece=with_moments(item.piece, on_device))
            stepped = self.traffic.now()
            self.left = self.traffic.copy("out", list(copy_pairs(states[n], on_device)), [stepped])
            free_after[n % 2] = [self.left]


def moments_of(piece):
    """{(moment, suffix): flat tensor} of a bucket's moments."""
    found = {}
    for name, held in piece.moments.items():
        for suffix, t in held.tensors().items():
            found[name, suffix] = t
    return found


def with_moments(piece, tensors):
    """A bucket with its moments in these tensors, which are as `moments_of` gave them."""
    piece = copy.copy(piece)
    following = iter(tensors.values())
    piece.moments = {name: held.mapped(lambda t: next(following)) for name, held in piece.moments.items()}
    return piece


def bytes_of_room(state):
    """Bytes of a room that holds a state."""
    return sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in state.values())


def views_of_room(room, state):
    """{name: part of the room, uint8, as a tensor like the state's}."""
    found, start = {}, 0
    for name, t in state.items():
        found[name] = room[start : start + t.nbytes].view(t.dtype)
        start += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
    return found


def copy_pairs(targets, sources):
    return ((target, sources[name]) for name, target in targets.items())


def bytes_kept_away(optimizer):
    """(bytes of moments that an optimiser keeps away, those of them that are on the GPU at once at most)."""
    away, rooms = 0, []
    for part in getattr(optimizer, "parts", [optimizer]):
        for bucket in part.begun():
            state = moments_of(bucket)
            away += sum(t.nbytes for t in state.values())
            rooms.append(bytes_of_room(state))
    return away, sum(sorted(rooms)[-2:])


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
    check_choice("states_on", where, ("device", "cpu"))
    if where == "device" or device.type not in ("cuda", "meta"):
        return None
    return Offload(Traffic(device)) if device.type == "cuda" else Offload(None, "meta")


class Offloaded(Part):
    """Keeps the moments of our optimisers where `states_on` says."""

    @classmethod
    def of(cls, run):
        run.away = offloaded(run.options.states_on, run.device)
        return cls(run)

    def ready(self, run):
        all_ours(run.optimizer, "--states_on cpu")

    def elsewhere(self):
        if self.run.away is None:  # the device is the CPU itself
            return 0, 0
        return bytes_kept_away(self.run.optimizer)
