"""Checkpoints as other programs keep them: shards, folders, prefixes, states of 8 bits. None runs code."""

import argparse
import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from lowprec.__main__ import main
from lowprec.watch import compare
from lowprec.watch.checkpoints import read_checkpoint


@pytest.fixture(scope="module")
def pair():
    """Two state dicts of one run, the last layer of which stood in the second."""
    torch.manual_seed(0)
    before = {f"layers.{i}.w": torch.randn(8, 16) for i in range(6)}
    after = {name: t + 0.01 * torch.randn_like(t) for name, t in before.items()}
    stood = {**after, "layers.3.w": before["layers.3.w"]}
    return before, after, stood


def single(path, tensors):
    save_file(tensors, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def sharded(path, tensors, suffix="safetensors", name="model"):
    path.mkdir()
    names = list(tensors)
    index = {}
    for number, part in enumerate((names[:3], names[3:])):
        file = f"{name}-{number}.{suffix}"
        content = {key: tensors[key] for key in part}
        save_file(content, path / file) if suffix == "safetensors" else torch.save(content, path / file)
        index |= dict.fromkeys(part, file)
    (path / f"{name}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def pickled_shards(path, tensors):
    return sharded(path, tensors, "bin", "pytorch_model")


def both_indices(path, tensors):
    """A partial download of a Hub's folder: the index of .bin shards is there, and its shards are not."""
    sharded(path, tensors)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "pytorch_model-00001-of-00001.bin")}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return path


def one_file(path, tensors):
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    return path


@pytest.mark.filterwarnings("ignore")
def distributed(path, tensors):
    dcp.save({"model": tensors, "epoch": 3}, checkpoint_id=path)
    return path


def of_lightning(path, tensors):
    path = path.with_suffix(".ckpt")
    content = {
        "epoch": 1,
        "state_dict": {f"net.{name}": t for name, t in tensors.items()},
        "callbacks": {"ModelCheckpoint": {"best_model_path": Path("best.ckpt"), "best": torch.tensor(1.0)}},
        "hyper_parameters": argparse.Namespace(lr=1e-3),
    }
    torch.save(content, path)
    return path


def prefixed(prefix):
    def save(path, tensors):
        return single(path, {name if prefix is None else prefix + name: t for name, t in tensors.items()})

    return save


def within(path, tensors):
    return single(path, {name.replace(".w", "._orig_mod.w"): t for name, t in tensors.items()})


KEPT = {
    "shards": sharded,
    "shards of torch.save": pickled_shards,
    "both indices": both_indices,
    "a folder of one file": one_file,
    "DCP": distributed,
    "Lightning": of_lightning,
    "both": prefixed("module._orig_mod."),
    "_orig_mod. within": within,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", KEPT.values(), ids=KEPT)
def test_a_checkpoint_is_read_however_it_is_kept(tmp_path, pair, save):
    before, after, stood = pair
    start = single(tmp_path / "before", before)
    assert compare.compare(start, save(tmp_path / "after", after)).status == 0
    found = compare.compare(start, save(tmp_path / "stood", stood)).findings
    assert [f.site for f in found] == ["update"] and "layers.3" in found[0].tensor


def test_a_real_checkpoint_of_lightning_is_read(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, width=8):
            super().__init__()
            self.save_hyperparameters(
                {"width": width, "where": Path("here"), "args": argparse.Namespace(a=1)}
            )
            self.net = torch.nn.Linear(4, width)

        def training_step(self, batch):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    trainer = lightning.Trainer(max_steps=2, enable_model_summary=False, **options)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 4)))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    found = read_checkpoint(tmp_path / "a.ckpt")
    assert set(found.weights) == {"state_dict.net.weight", "state_dict.net.bias"}
    assert found.states["optimizer_states.0.0"]["exp_avg_sq"].shape == (8, 4)


# ---- States of 8 bits --------------------------------------------------------------------------------------


def torchao_state(kind):
    optim = pytest.importorskip("torchao.optim")
    return lambda p: getattr(optim, kind)(p)


def bnb_state(p):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(p, min_8bit_size=0)


def after_a_step(make):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(64, 256))
    optimizer = make([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    return p, optimizer


EIGHT_BITS = {
    "torchao": (lambda: torchao_state("AdamW8bit"), 0.05),
    "torchao, 4 bits": (lambda: torchao_state("AdamW4bit"), 0.5),
    "bitsandbytes": (lambda: bnb_state, 0.05),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_states_in_codes_are_decoded(tmp_path, kind):
    make, error = EIGHT_BITS[kind]
    with torch.compiler.set_stance("force_eager"):
        p, optimizer = after_a_step(make())
    torch.save({"model": {"w": p.detach()}, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    with torch.serialization.safe_globals([]):
        torch.serialization.clear_safe_globals()  # as where the package was never imported
        found = read_checkpoint(tmp_path / "a.pt").states["optimizer.0"]["exp_avg_sq"]
    wanted = 0.001 * p.grad.square()
    assert type(found) is torch.Tensor and found.shape == p.shape
    assert float((found - wanted).norm() / wanted.norm()) < error


# ---- Adapters ----------------------------------------------------------------------------------------------

FACTORS = [("lora_A.weight", "lora_B.weight"), ("hada_w2_b", "hada_w2_a")]


@pytest.mark.parametrize("down, up", FACTORS)
def test_an_adapter_that_does_nothing_is_named(tmp_path, down, up):
    torch.manual_seed(0)
    start = {f"l{i}.{down}": torch.randn(4, 16) for i in range(3)}
    start |= {f"l{i}.{up}": torch.zeros(16, 4) for i in range(3)}
    good = {name: t + 0.01 * torch.randn_like(t) for name, t in start.items()}
    begin = single(tmp_path / "start", start)
    assert compare.compare(begin, single(tmp_path / "good", good)).status == 0
    dead = {name: start[name] if up in name else t for name, t in good.items()}
    found = compare.compare(begin, single(tmp_path / "dead", dead)).findings
    assert [(f.site, f.severity, f.tensor) for f in found] == [("adapter", "severe", "")]
    assert "all 3 factors" in found[0].text and "does nothing" in found[0].text
    partly = {**good, f"l1.{up}": start[f"l1.{up}"]}
    found = compare.compare(begin, single(tmp_path / "partly", partly)).findings
    assert [(f.site, f.severity, f.tensor) for f in found] == [("adapter", "moderate", f"l1.{up}")]


# ---- Dtypes ------------------------------------------------------------------------------------------------

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def cast(*dtypes):
    """Tensors cast to one dtype after the other."""

    def change(tensors):
        for dtype in dtypes:
            tensors = {name: t.to(dtype) for name, t in tensors.items()}
        return tensors

    return change


# dtypes of the earlier file, of the later one, and what it is a copy in
COPIES = {
    "bf16": ((FP32,), (BF16,), "bf16"),
    "e4m3": ((FP32,), (E4M3,), "fp8_e4m3fn"),
    "bf16 in fp32": ((FP32,), (BF16, FP32), "bf16"),
    "e4m3 in bf16": ((FP32,), (E4M3, BF16), "fp8_e4m3fn"),
    "bf16 to fp32, nothing lost": ((BF16,), (FP32,), None),
}


@pytest.mark.parametrize("first, then, name", COPIES.values(), ids=COPIES)
def test_a_copy_in_another_dtype_was_not_trained(tmp_path, first, then, name):
    torch.manual_seed(0)
    start = cast(FP64, *first)({f"l{i}.w": torch.randn(32, 32, dtype=FP64) * 0.05 for i in range(4)})
    trained = {key: t.double() + torch.randn(t.shape, dtype=FP64) for key, t in start.items()}
    torch.save(start, tmp_path / "start.pt")

    def findings(tensors):
        torch.save(cast(*then)(tensors), tmp_path / "after.pt")
        found = compare.compare(tmp_path / "start.pt", tmp_path / "after.pt").findings
        return [f for f in found if f.site == "update"]

    (copied,) = findings(start)
    assert copied.severity == "severe"
    assert copied.text.endswith(f"copy of the earlier one in {name}" if name else "no weight changed at all")
    assert findings(trained) == []
    partly = findings({**trained, "l2.w": start["l2.w"]})
    assert [f.tensor for f in partly] == ["l2.w"] and "100% of its entries" in partly[0].text


def test_wide_tensors_that_were_rounded_on_the_way_are_named(tmp_path, pair):
    before, after, _ = pair
    start = single(tmp_path / "start", before)
    rounded = cast(BF16, FP32)(after)
    (found,) = compare.compare(start, single(tmp_path / "rounded", rounded)).findings
    assert "6 of 6" in found.text and "are fp32 and hold bf16 numbers alone" in found.text
    # a net that came in bf16, and values that are numbers of any dtype
    assert compare.compare(single(tmp_path / "low", cast(BF16, FP32)(before)), start).status == 0
    signs = {name: t.sign() for name, t in after.items()}
    assert compare.compare(start, single(tmp_path / "signs", signs)).status == 0


@pytest.mark.parametrize("dtype", [FP32, BF16, E4M3])
def test_an_average_in_another_dtype_is_compared_with_the_start(tmp_path, pair, dtype):
    before, after, _ = pair
    start = single(tmp_path / "start", before)
    for average in (before, cast(BF16)(after)):  # it stands at the start, or averages nothing
        torch.save({"model": cast(BF16)(after), "ema": cast(dtype)(average)}, tmp_path / "after.pt")
        found = compare.compare(start, tmp_path / "after.pt").findings
        assert {f.site for f in found} == {"ema"}


# ---- No code -----------------------------------------------------------------------------------------------


class Touches:
    def __reduce__(self):
        return Path.touch, (Path("was-run"),)


class Evaluates:
    def __reduce__(self):
        return eval, ("open('was-run', 'w')",)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spoil", [Touches, Evaluates])
@pytest.mark.parametrize("save", [pickled_shards, distributed, of_lightning])
def test_no_code_is_run(tmp_path, monkeypatch, capsys, pair, save, spoil):
    monkeypatch.chdir(tmp_path)
    before, after, _ = pair
    start = save(tmp_path / "before", before)
    path = save(tmp_path / "after", copy.deepcopy(after))
    if save is of_lightning:
        torch.save({"state_dict": after, "hyper_parameters": spoil()}, path)
    elif save is distributed:
        records = pickle.loads((path / ".metadata").read_bytes())
        records.storage_meta = spoil()
        (path / ".metadata").write_bytes(pickle.dumps(records))
    else:
        torch.save({"layers.0.w": spoil()}, path / "pytorch_model-0.bin")
    main(["compare", str(start), str(path)])
    assert not Path("was-run").exists()
    assert "Traceback" not in capsys.readouterr().err


BROKEN = {
    "a missing shard": lambda path: (path / "model-1.safetensors").unlink(),
    "a shard elsewhere": lambda path: rename(path, "../model-0.safetensors"),
    "no index": lambda path: (path / "model.safetensors.index.json").write_text("{}"),
    "an index of text": lambda path: (path / "model.safetensors.index.json").write_text("text"),
    "a tensor too many": lambda path: rename(path, None),
}


def rename(path, file):
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    if file:
        content["weight_map"]["layers.0.w"] = file
    else:
        content["weight_map"]["more"] = "model-0.safetensors"
    index.write_text(json.dumps(content))


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_broken_shards_are_one_line_and_status_2(tmp_path, capsys, pair, spoil):
    path = sharded(tmp_path / "a", pair[0])
    spoil(path)
    assert main(["compare", str(path), str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
