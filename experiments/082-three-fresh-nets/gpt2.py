"""A GPT-2 of transformers on the bytes of the manual that comes with Python (here 3.11). Loss: cross-entropy.

python -m lowprec trial experiments/082-three-fresh-nets/gpt2.py --steps 100
"""

from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, BLOCK = 8, 32
TEXT = torch.tensor(list("".join(topics[name] for name in sorted(topics)).encode()))
TRAIN, HELD_OUT = TEXT[:-40000], TEXT[-40000:]

options = dict(lr=1e-3, weight_decay=0.01, clip_grad=1.0)


def build():
    shape = dict(n_embd=128, n_layer=4, n_head=4, n_positions=BLOCK, vocab_size=256)
    without = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**shape, **without))


def loss(model, batch):
    logits = model(batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def windows(text, starts):
    return text[starts[:, None] + torch.arange(BLOCK + 1)]


def batches(seed):
    drawn = torch.Generator().manual_seed(seed)
    while True:
        yield windows(TRAIN, torch.randint(len(TRAIN) - BLOCK, (BATCH,), generator=drawn))


def held_out():
    starts = torch.arange(0, len(HELD_OUT) - BLOCK, 100)
    return [windows(HELD_OUT, part) for part in starts.split(100)]
