"""Names that other programs give to our flags: Lightning's, and those of the five documents on low precision
that this program began with.

    trainer: {precision: bf16-mixed, max_epochs: 5}      in a YAML file, for bf16: true and epochs: 5
    python train.py --learning_rate 1e-3                 for --lr 1e-3
    python -m harness.names                              the table of docs/names.md

Capitals make no difference, nor do dashes for underscores.
"""

import os

SECTIONS = "trainer", "globals"  # mappings of a YAML file whose keys count as if they stood by themselves


def _over_all_processes(text):
    """{flag: value} of a batch of one process."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    return {"batch_size": str(int(text) * world) if text.isdigit() else text}


# Their name: our flag, which takes the same values. Or {their value: {our flag: value}}, a text in place of
# the dict where a value has no equal. Or a function of their value, which gives that dict
NAMES = {
    # Lightning
    "precision": {
        "32-true": {},
        "bf16-mixed": {"bf16": True},
        "16-mixed": {"fp16": True},
        "bf16-true": {"pure_bf16": True},
        "transformer-engine": {"fp8": True, "fp8_backend": "te"},
        "16-true": "no recipe here holds weights in fp16; write bf16-true or 16-mixed",
        "64-true": "no recipe here computes in fp64; write 32-true",
    },
    "gradient_clip_val": "clip_grad",
    "gradient_clip_algorithm": {"norm": {}, "value": "write clip_grad or clip_tensor, of norms"},
    "max_epochs": "epochs",
    "max_steps": "steps",
    "accumulate_grad_batches": "accumulate",
    "accelerator": {"auto": {}, "cpu": {"device": "cpu"}, "gpu": {"device": "cuda"}},
    "strategy": {"auto": {}, "ddp": {}, "fsdp": {"fsdp": True}},
    "log_every_n_steps": "log_every",
    "default_root_dir": "runs",
    "seed_everything": "seed",
    # the documents
    "use_amp": {"true": {"bf16": True}, "false": {}},
    "amp_dtype": {"bfloat16": {"bf16": True}, "float16": {"fp16": True}},
    "compute_dtype": {"bfloat16": {"bf16": True}, "float16": {"fp16": True}, "float32": {}},
    "use_fp8": {"true": {"fp8": True, "fp8_recipe": "delayed"}, "false": {}},
    "fp8_amax_history_len": "amax_history_len",
    "fp8_amax_compute_algo": "amax_compute_algo",
    "use_4bit_optimizer": {"true": {"opt8bit": True}, "false": {}},  # it "uses 8-bit AdamW", says its text
    "compile_model": {"true": {"compile": True}, "false": {}},
    "num_epochs": "epochs",
    "learning_rate": "lr",
    "early_stopping_patience": "early_stop",
    "batch_size_per_gpu": _over_all_processes,
    "num_workers": "workers",
    "accumulation_steps": "accumulate",
}
NO_EQUAL = {  # their name: what to write
    "devices": "start processes by torchrun --nproc_per_node=N train.py",
    "num_nodes": "start processes by torchrun --nnodes=N train.py",
    "check_val_every_n_epoch": "write validate_every, which counts steps",
    "val_check_interval": "write validate_every, which counts steps",
    "use_optimizations": "write compile for speed, or checkpoint_activations for memory",
}


def plain(name):
    """A name without capitals, dashes and its section: 'globals.BATCH_SIZE' -> 'batch_size'."""
    name = str(name).lower().replace("-", "_")
    section, _, rest = name.partition(".")
    return rest if rest and section in SECTIONS else name


def in_our_words(theirs):
    """{our flag: its value as a text, or True} of {their name, plain: its value as a text}. Raises ValueError
    with a line that says what to write.
    """
    theirs = dict(theirs)
    if theirs.get("use_amp", "").lower() == "false":
        theirs.pop("amp_dtype", None)
    elif "amp_dtype" in theirs:  # it says which, and use_amp no more than that
        theirs.pop("use_amp", None)
    found = {}
    for name, value in theirs.items():
        for flag, own in _ours(name, value).items():
            if found.setdefault(flag, own) != own:
                raise ValueError(f"{name} {value}: another name says --{flag} {found[flag]}; keep one")
    if found.get("fp8"):
        found.pop("bf16", None)  # in which FP8 computes all else
    return found


def is_known(name):
    """Whether another program calls something so. name: plain."""
    return name in NAMES or name in NO_EQUAL


def _ours(name, value):
    if name in NO_EQUAL:
        raise ValueError(f"{name} has no equal here: {NO_EQUAL[name]}")
    row = NAMES[name]
    if isinstance(row, str):
        return {row: value}
    if callable(row):
        return row(value)
    ours = row.get(value.lower())
    if ours is None:
        raise ValueError(f"{name} is {', '.join(row)}, and not {value!r}")
    if isinstance(ours, str):
        raise ValueError(f"{name} {value}: {ours}")
    return ours


def table():
    """All names as a table of Markdown."""
    lines = ["| their name | here |", "|---|---|"]
    for name, row in NAMES.items():
        if isinstance(row, dict):
            cells = [f"{value}: {_typed(ours)}" for value, ours in row.items()]
        else:
            cells = [f"`{row}`" if isinstance(row, str) else "`batch_size`, times the number of processes"]
        lines.append(f"| `{name}` | {'; '.join(cells)} |")
    lines += [f"| `{name}` | nothing: {instead} |" for name, instead in NO_EQUAL.items()]
    return "\n".join(lines)


def _typed(ours):
    if isinstance(ours, str):
        return f"nothing: {ours}"
    words = [name if value is True else f"{name}: {value}" for name, value in ours.items()]
    return f"`{', '.join(words)}`" if words else "the default"


if __name__ == "__main__":
    print(table())
