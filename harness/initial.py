"""What a run does to its initial weights: scale them, perturb them, or take those of a checkpoint."""

import torch

from harness.checkpoints import check_whole
from lowprec.errors import Refused


@torch.no_grad()
def scale_matrices(net, factor):
    """Multiply the matrices and kernels of `net`, in place; vectors stay."""
    for p in net.parameters():
        if p.dim() > 1:
            p.mul_(factor)


@torch.no_grad()
def perturb(net, pattern):
    """Move each fp32 weight of `net` that is trained to its neighbour, in place: by 6e-8 to 1.2e-7 of itself,
    up or down by a fixed random pattern of this number. Zeros stay.

    Runs from such weights differ by chaos alone, so their spread is what no recipe can be blamed for. To flip
    the last bit would not do: torch draws uniform weights with 24 bits, whose last bit is nearly always 0.
    """
    draw = torch.Generator().manual_seed(pattern)
    for p in net.parameters():
        if p.requires_grad and p.dtype == torch.float32:
            up = torch.randint(0, 2, p.shape, generator=draw, dtype=torch.int32).to(p.device)
            neighbour = (p.view(torch.int32) + (2 * up - 1)).view(torch.float32)  # of larger size, or smaller
            p.copy_(torch.where(p == 0, p, neighbour))


def load_average(net, checkpoint, source):
    """Give `net`, still fp32, the averaged weights of a checkpoint of any recipe. source: its name. Raises
    Refused for a net of other shapes, and for one of adapters.
    """
    check_whole(checkpoint, source)
    saved = checkpoint["precision"]
    average = saved["averages"]["ema"]["shadow"]
    wanted = net.state_dict()
    # tied weights have several names, and the average knows them by the first
    first_name = {p: name for name, p in net.named_parameters()}
    state = dict(saved["model"])
    for name, p in net.named_parameters(remove_duplicate=False):
        if first_name[p] in average:
            state[name] = average[first_name[p]]
    # what layers of a recipe hold beside weights, scales for one, stays behind
    state = {name: value for name, value in state.items() if name in wanted}
    shapes = {name: getattr(value, "shape", None) for name, value in state.items()}
    if shapes != {name: value.shape for name, value in wanted.items()}:
        other = f"{source} holds a net of other shapes (other channels, labels, image size or --size)"
        raise Refused(f"{other}: use another checkpoint")
    if next(net.parameters()).device.type != "meta":
        net.load_state_dict(state)
