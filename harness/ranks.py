"""The processes of a run, as torchrun starts them: which one this is, and what they do together.

    ranks_here()      Ranks of a process by itself, Replicas of several; of --fsdp they are Spread
"""

import gc
import io
import json
import os
import socket
import time
from contextlib import nullcontext, redirect_stdout, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import reduction
from lowprec.cast import exact_modules
from lowprec.errors import Refused, first_line
from lowprec.parts.activations import recomputed_blocks
from lowprec.parts.ranks import WORLDS_SHOWN, share_buffers, spread_over_ranks

# that processes wait for one another until all have met. torchrun ends them all where one ends, so that those
# it starts may wait for one that reads its libraries from a slow disk
MEETING_TIME = timedelta(seconds=600 if "TORCHELASTIC_RUN_ID" in os.environ else 60)
WAITING_TIME = timedelta(minutes=10)  # and afterwards: one of them scores, the others wait
RANK_IS_ABSENT = "a process has ended, or was not started; the same command on all starts again"


def check_cuda(asked, instead):
    """Raise Refused unless torch finds a GPU. asked: the flag that wants one; instead: what to do."""
    if not torch.cuda.is_available():
        raise Refused(f"{asked}: torch finds no CUDA device here; {instead}")


class Followed(Refused):
    """Another rank was refused, and says why."""


class Ranks:
    """A process by itself, a world of one: what it does with others does nothing.

    rank: of this process; local: on its machine. world: how many there are. spread: whether a net is spread
    over them by fully_shard. worlds_shown: numbers of ranks that a dry run tells of.
    """

    rank, world, spread, worlds_shown = 0, 1, False, WORLDS_SHOWN

    def __init__(self):
        self.local = int(os.environ.get("LOCAL_RANK", 0))

    @property
    def main(self):
        """Whether this one writes and prints."""
        return self.rank == 0

    @property
    def words(self):
        """What sets the noise of this process apart from the main one's."""
        return (self.rank,) if self.rank else ()

    def device(self, name):
        """The torch.device of this process, of a --device: auto, cpu or cuda."""
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda":
            instead = "use --device cpu, or a torch build with CUDA on a machine with a GPU"
            check_cuda("--device cuda", instead)
            torch.cuda.set_device(self.local)
            name = f"cuda:{self.local}"
        return torch.device(name)

    def place(self, net, recipe, device, flags):
        """A new net, which each rank has built as a whole, where it is trained. flags: as of `meet`."""
        return net.to(device)

    def meet(self, device, flags):
        """Join the other processes."""

    def wait(self):
        """Go on when all have come here."""

    def sum(self, value):
        """Sum a tensor over all ranks, in place."""
        return value

    def mean(self, value):
        """The mean of a tensor over all ranks; the tensor itself may change."""
        return self.sum(value) / self.world

    def any(self, number, device):
        """The largest of the ranks' numbers (None counts as 0), or None where all are 0."""
        return number or None

    def first(self, act, device):
        """act() on the main rank. Where that is refused all ranks are, so that none waits for it."""
        act()

    def gathered(self, make, *given):
        """make(*given) on the main rank, and on all where a net is spread; None on the others."""
        return make(*given)

    def check(self, run):
        """Raise Refused for a Precision whose gradients the processes can't sum."""

    def wrap(self, run, net, seed, step):
        """`net`, the model of a Precision `run`, compiled or not, with gradients averaged over all ranks.

        seed, step: what their rounding goes by, see reduction.py.
        """
        return net

    def synchronised(self, run, last):
        """What the backward pass of a micro-batch runs in; `last`: of a step."""
        return nullcontext()


class Processes(Ranks):
    """What several processes do together, as torchrun starts them."""

    def __init__(self):
        super().__init__()
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.worlds_shown = [self.world]

    def meet(self, device, flags):
        """As above; they end by themselves. flags: {name: value}, in which they must agree. Raises Refused on
        the first rank, Followed on the others.
        """
        if dist.is_initialized():
            return
        backend = "nccl" if device.type == "cuda" else "gloo"
        if not (dist.is_available() and getattr(dist, f"is_{backend}_available")()):
            missing = f"this torch has no {backend}, by which processes on {device.type} speak to each other"
            raise Refused(f"{missing}: install a build that has it, or use --device cpu, or one process")
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=MEETING_TIME))
            self._agree(store, {"device": device.type, **flags})
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world, timeout=MEETING_TIME
            )
        except Refused:
            raise
        except (ValueError, RuntimeError) as error:
            remedy = RANK_IS_ABSENT  # those of torch.distributed are RuntimeErrors
            if isinstance(error, ValueError):
                remedy = "start them by torchrun"
            apart = f"the {self.world} processes did not meet ({first_line(error)})"
            raise Refused(f"{apart}: {remedy}") from None
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # old torch
        set_timeout(WAITING_TIME)
        store.set_timeout(WAITING_TIME)

    def _agree(self, store, flags):
        """Ask all ranks for their flags before the first word of a backend, which would wait for ever."""
        store.set(f"flags of {self.rank}", json.dumps(flags))
        others = range(1, self.world)
        if not self.main:
            if store.get("flags differ"):
                store.set(f"told {self.rank}", "")
                raise Followed("the flags of the ranks differ")
            return
        line = ""
        for rank in others:
            line = self._difference(store, rank, flags)
            if line:
                break
        store.set("flags differ", line)
        if line:
            with suppress(RuntimeError):  # the store may end with this process
                store.wait([f"told {rank}" for rank in others], timedelta(seconds=5))
            raise Refused(line)

    @staticmethod
    def _difference(store, rank, flags):
        """What keeps a rank from training with this one, a line, or ""."""
        try:
            theirs = json.loads(store.get(f"flags of {rank}"))
        except dist.DistStoreError:
            return f"rank {rank} did not come within {MEETING_TIME.seconds} seconds: {RANK_IS_ABSENT}"
        for name, value in flags.items():
            if theirs.get(name) != value:
                its, own = json.dumps(theirs.get(name)), json.dumps(value)
                differ = f"rank {rank} was started with --{name} {its}, rank 0 with {own}"
                return f"{differ}: start all with the same command"
        return ""

    def wait(self):
        dist.barrier()

    def sum(self, value):
        dist.all_reduce(value)
        return value

    def any(self, number, device):
        flag = torch.tensor([number or 0], device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag.item() or None

    def first(self, act, device):
        self.each(act if self.main else lambda: None, device)

    def each(self, act, device):
        """act() on every rank. Where it is refused on some, all are, and the first of these says why."""
        refused, place = None, 0
        try:
            act()
        except Refused as error:
            refused, place = error, self.world - self.rank  # the largest place is the first rank's
        first = self.any(place, device)
        if not first:
            return
        if refused and first == place:
            raise refused
        raise Followed("another rank was refused")

    def check(self, run):
        if any(p._post_accumulate_grad_hooks for p in run.params):
            hooked = f"--optimizer {run.optimizer_name} takes gradients away by hooks"
            raise Refused(f"{hooked} before processes can sum them: use --optimizer adamw --stochastic")


class Replicas(Processes):
    """Processes that each hold the whole net: DistributedDataParallel averages their gradients."""

    def gathered(self, make, *given):
        return make(*given) if self.main else None

    def wrap(self, run, net, seed, step):
        mean = reduction.mean_of_ranks(run.recipe, run.params, seed, step)
        self.ddp = DistributedDataParallel(net)
        self.ddp.register_comm_hook(None, mean.hook)
        run.reduce_sums = mean.sums
        return self.ddp

    def synchronised(self, run, last):
        # fp32 sums of bf16 gradients are reduced once, after the last micro-batch; else DDP reduces p.grad
        # during the last backward pass
        if not last or run.keeps_sums:
            return self.ddp.no_sync()
        return nullcontext()


class Spread(Processes):
    """Processes that each hold rows of the net, by fully_shard; one of them is enough."""

    spread = True

    def __init__(self):
        super().__init__()
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise Refused("--fsdp spreads a net over processes: torchrun --nproc_per_node N train.py --fsdp")

    def place(self, net, recipe, device, flags):
        self.meet(device, flags)
        apart = []
        if recipe.low_weights:
            islands, whole = exact_modules(net, recipe)
            apart = [*islands, *whole]
        net = spread_over_ranks(net, recipe, device, recomputed_blocks(net), apart)
        share_buffers(net)
        return net


def ranks_here(spread=False):
    """The Ranks of this process, as its environment says. spread: whether a net is to be spread over them."""
    if spread:
        return Spread()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return Replicas()
    return Ranks()


def check_alone(verb):
    """Raise Refused for --verb on one of several processes."""
    if ranks_here().world > 1:
        raise Refused(f"--{verb} is the work of one process: start it by python, not by torchrun")


def main_alone_prints():
    """Within it the other processes print nothing to standard output."""
    return nullcontext() if ranks_here().main else redirect_stdout(io.StringIO())


def leave():
    """End what `meet` began: the group, and its threads where nobody holds it any more. One that still runs
    while Python ends can abort the process (pytorch 179291).
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def speaks_first():
    """Whether this process is to print why the run has ended: the first of its processes that asks."""
    if ranks_here().world == 1:
        return True
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection((host, port), 3).close()  # where nobody listens torch writes a page
        options = dict(is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.TCPStore(host, port, **options).add(f"has spoken {attempt}", 1) == 1
    except (LookupError, OSError, RuntimeError, ValueError):  # nobody is left who could have spoken
        return True


# ---- Processes that end before their time ------------------------------------------------------------------

RANK_HAS_ENDED = "another process of this run has ended; the same command resumes"
READER_HAS_ENDED = "a process that reads data was ended from outside, or for want of memory"
LOST_PROCESSES = {  # part of an error of another process: what a person reads
    "DataLoader worker": READER_HAS_ENDED,
    "unable to open shared memory": "the processes that read data have no shared memory left: --workers 0",
}
PEER_ERRORS = ("gloo", "nccl", "connection", "peer", "socket", "process group", "broken pipe")


def lost_process(error, world):
    """What happened, where an error tells that another process of the run has ended; else None."""
    text = str(error)
    if isinstance(error, (ConnectionResetError, EOFError)):  # while it handed over a batch
        return f"{READER_HAS_ENDED}; the same command resumes"
    for part, line in LOST_PROCESSES.items():
        if part in text:
            return f"{line}; the same command resumes"
    if world > 1 and any(word in text.lower() for word in PEER_ERRORS):
        return RANK_HAS_ENDED
    return None


def write_error_file(message):
    """Leave a message for torchrun, whose last words then hold it, in place of "no error file". Its own
    traceback before that can't be had away from inside: torchrun raises its own exception for any status
    but 0.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    facts = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
    with suppress(OSError), open(path, "w") as file:
        json.dump({"message": facts}, file)
