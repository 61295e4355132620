"""All kinds of faults, a file a family; see ../fault.py."""

from . import averages, checkpoints, gradients, moments, net, noise, weights

__all__ = ["averages", "checkpoints", "gradients", "moments", "net", "noise", "weights"]
