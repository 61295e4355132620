"""Perceptual distance: images compared in the layers of a frozen net in place of their pixels.

    python train.py --perceptual 0.1                       beside the squared error of rflow and ddpm
    python train.py --perceptual 0.1 --set perceptual=bf16 through a feature net cast to bf16

The net is the one that scores are taken in (feature_net.py). A score in the features that a run was trained
on flatters that run: compare runs with this term with one another, or by sliced_wasserstein, which sees
pixels alone.
"""

import copy

import torch
from torch import nn

from harness.flags import Flag, amount
from lowprec.machine import exact_math
from lowprec.recipes import Site
from tasks.feature_net import FeatureNet

# A row of every task that brings the term: one flag, whatever it is added to.
PERCEPTUAL = Flag(
    "perceptual",
    0.0,
    "weight of a perceptual distance in the loss, between the clean image that the net's answer stands for "
    "and the true one, in the layers of the net that scores; 0 for none",
    "generation",
    type=amount,
)
PERCEPTUAL_SITE = Site(
    ("fp32", "bf16"),
    {
        "fp32": "feature net of --perceptual: its distance is a small difference of features",
        "bf16": "feature net, features and distance of --perceptual in 8 significant bits",
    },
    {
        "bf16": "perceptual=bf16: features keep 8 bits, and a difference of near images fewer; "
        "use --set perceptual=fp32 (default)"
    },
)


class Perceptual(nn.Module):
    """(a, b), images [B, C, H, W] in [-1, 1] of any floating dtype -> fp32 [B], the distance of each pair.

    net: a FeatureNet, which is copied; the copy is frozen. dtype: what weights, activations and distances are
    held in. Gradients flow to both images, never to the net. It is 0 for equal images, and at most 4 a layer.

    After arXiv 1801.03924 (LPIPS, equation 1) without its learnt weights: the channels of each layer are
    brought to unit length at every position, squared differences are summed over channels and averaged over
    positions, and the layers are summed.
    """

    def __init__(self, net: FeatureNet, dtype=torch.float32):
        super().__init__()
        self.resize = net.resize
        self.dtype = dtype
        body = copy.deepcopy(net.body).to(dtype).eval().requires_grad_(False)
        last = max(i for i, layer in enumerate(body) if isinstance(layer, nn.SiLU))
        self.layers = body[: last + 1]  # the pooled features behind them have no positions

    def features(self, images):
        """[[B, channels, h, w] of unit length over channels] of each activation, in self.dtype."""
        x = self.resize(images).to(self.dtype)
        found = []
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.SiLU):
                # 1e-4 in place of LPIPS' 1e-10, whose square root's slope is 1e5 where a position is silent
                found.append(x * (x.square().sum(1, keepdim=True) + 1e-4).rsqrt())
        return found

    def forward(self, a, b):
        with exact_math(), torch.autocast(a.device.type, enabled=False):
            distances = []  # layers x [B]
            for x, y in zip(self.features(a), self.features(b), strict=True):
                distances.append((x - y).square().sum(1).mean((1, 2)))
            return torch.stack(distances).sum(0).float()
