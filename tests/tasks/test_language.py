"""Language: BDH and GPT against their equations written out, text and windows, FP8 on bare parameters."""

import json
import math
from pathlib import Path

import cli
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cli import checkpoint, command, metrics, one_line, summary

import strategies
from lowprec import __main__ as lowprec_command
from lowprec.precision import recipe
from tasks import language
from tasks.language import BDH, BDHS, GPT, GPTS, TEXT_FILE, Language, Text, Windows
from tasks.task import Rng

in_a_folder_of_its_own = cli.in_a_folder_of_its_own

SHORT = (
    "--task language --block 16 --batch_size 4 --length 8 --log_every 2 --sample_every 0 --warmup 0".split()
)
SMALL = {"gpt": (2, 32, 2), "bdh": (2, 32, 2, 4)}


def quick(*flags, name="run", steps=4):
    return command(*SHORT, "--name", name, "--steps", steps, *flags)


def net(kind, block=16, dropout=0.0, seed=0):
    torch.manual_seed(seed)
    made = GPT(*SMALL["gpt"], block) if kind == "gpt" else BDH(*SMALL["bdh"], dropout=dropout)
    with torch.no_grad():
        for p in made.parameters():  # larger than at the start, so that no term of an equation is near zero
            p.mul_(8 if p.dim() > 1 else 1)
    return made


def ids(*shape, seed=1):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def task(**flags):
    known = strategies.flag_table("language")
    values = {**Language.own_defaults(), "block": 16, "length": 8, **flags}
    config = known.typed(values)
    return Language(Language.load(config), recipe(more=Language.sites), config)


# ---- The nets against their equations ----------------------------------------------------------------------


def layer_norm(v):
    centred = v - v.mean()
    return centred / np.sqrt((centred**2).mean() + 1e-5)


def bdh_written_out(model, tokens):
    """Logits [T, 256] of one sequence, float64: the equations of arXiv 2509.26507, neuron by neuron."""
    e, ev, d = (p.detach().double().numpy() for p in (model.encoder, model.encoder_v, model.decoder))
    embedding, readout = model.embed.weight.detach().double().numpy(), model.lm_head.detach().double().numpy()
    heads, _, n = e.shape
    x = [layer_norm(embedding[token]) for token in tokens]
    for _ in model.layers:
        concatenated = [[] for _ in tokens]
        for h in range(heads):
            sparse = [np.maximum(v @ e[h], 0) for v in x]
            turned = []
            for t, v in enumerate(sparse):
                w = np.empty(n)
                for i in range(n // 2):
                    angle = t * 65536.0 ** (-2 * i / n)
                    a, b = v[2 * i], v[2 * i + 1]
                    w[2 * i] = a * math.cos(angle) - b * math.sin(angle)
                    w[2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
                turned.append(w)
            for t in range(len(tokens)):
                read = np.zeros_like(x[0])
                for s in range(t):
                    read += (turned[t] @ turned[s]) * x[s]
                gate = np.maximum(layer_norm(read) @ ev[h], 0)
                concatenated[t].append(sparse[t] * gate)
        x = [layer_norm(v + layer_norm(np.concatenate(c) @ d)) for v, c in zip(x, concatenated, strict=True)]
    return np.stack([v @ readout for v in x])


def test_bdh_is_its_published_equations():
    model, tokens = net("bdh").double().eval(), ids(1, 12)
    wanted = bdh_written_out(model, tokens[0].tolist())
    got = model(tokens)[0].detach().numpy()
    assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max()  # the phases are fp32
    assert np.abs(wanted).max() > 1


def test_gpt_attends_as_a_causal_softmax_does():
    model, tokens = net("gpt").double(), ids(2, 11)
    layer = model.layers[0]
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    q, k, v = layer.qkv(x).chunk(3, dim=-1)
    wanted = torch.zeros_like(x)
    for b in range(2):
        for h in range(2):
            own = slice(16 * h, 16 * (h + 1))
            for t in range(11):
                scores = (k[b, : t + 1, own] @ q[b, t, own]) / math.sqrt(16)
                share = scores.exp() / scores.exp().sum()
                wanted[b, t, own] = share @ v[b, : t + 1, own]
    torch.testing.assert_close(layer.attention(x), wanted @ layer.proj.weight.T)

    y = x + layer.attention(rms(x))
    wanted = y + F.gelu(rms(y) @ layer.up.weight.T) @ layer.down.weight.T
    torch.testing.assert_close(layer(x), wanted)

    y = model.embed.weight[tokens] + model.position_embed.weight[:11]
    for layer in model.layers:
        y = layer(y)
    torch.testing.assert_close(model(tokens), rms(y) @ model.embed.weight.T)


def test_a_mixture_is_of_two_experts_even_where_all_scores_are_equal():
    mixture = language.Mixture(8, experts=3)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.up.normal_()
        mixture.down.normal_()
        answers = (F.gelu(x[:, None] @ mixture.up) @ mixture.down).unbind(1)  # of each expert: [B, T, width]
        found, uneven = mixture(x)
    pairs = torch.stack([answers[0] + answers[1], answers[0] + answers[2], answers[1] + answers[2]]) / 2
    assert ((found - pairs).abs().amax(3).amin(0) < 1e-4).all()
    assert uneven == pytest.approx(1)  # their probabilities are equal, whoever is chosen


def test_in_training_a_mixture_is_held_to_busy_experts_as_in_the_switch_transformer():
    scores = torch.tensor([[[2.0, 1.0, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0]]])
    p = scores.softmax(2)[..., :2].sum() / 2  # the two that are chosen share all the work
    assert language.imbalance(scores, scores > 0.5) == pytest.approx(4 * p.item() / 2)
    made = task(model="moe")
    model, batch = made.net(), made.data.train[[0, 1]]
    added = made.loss(model, batch, Rng(0), 0) - made.loss(model.eval(), batch, Rng(0), 0)
    assert 0.02 <= added.item() < 0.03  # of two mixtures, a hundredth of 1 or a little more each


def rms(x):
    return x / x.square().mean(-1, keepdim=True).add(torch.finfo(x.dtype).eps).sqrt()


@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16])
def test_rotary_phases_are_those_of_float64(cast):
    """Whatever dtype the net has: in bf16 positions beyond 256 would share their phases."""
    seen = []
    model = BDH(2, 64, 4, 16).to(cast)
    original = language.rotate

    def spy(x, cos, sin):
        seen.append((cos, sin))
        return original(x, cos, sin)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "rotate", spy)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast == torch.bfloat16):
            model(ids(1, 600))
    cos, sin = seen[0]
    assert cos.dtype == sin.dtype == torch.float32
    i = torch.arange(256, dtype=torch.float64) // 2 * 2
    angle = torch.arange(600, dtype=torch.float64)[:, None] * 65536.0 ** (-i / 256)
    assert (cos - angle.cos()).abs().max() < 1e-4 and (sin - angle.sin()).abs().max() < 1e-4


def test_sizes_are_equal_and_as_published():
    wanted = {"tiny": 0.23e6, "1M": 0.852e6, "3M": 2.75e6, "25M": 25.3e6, "100M": 100.9e6}
    assert list(GPTS) == list(BDHS) == list(wanted)
    for size, count in wanted.items():
        with torch.device("meta"):
            nets = GPT(*GPTS[size], 128 if size in ("tiny", "1M", "3M") else 512), BDH(*BDHS[size])
        counts = [sum(p.numel() for p in made.parameters()) for made in nets]
        assert counts[1] == pytest.approx(count, rel=0.005)
        assert counts[0] == pytest.approx(counts[1], rel=0.05), size


# ---- The text ----------------------------------------------------------------------------------------------


def test_windows_are_of_the_text_and_a_target_follows_its_input():
    text = torch.arange(100, dtype=torch.uint8)
    for most in (1000, 90, 7):
        windows = Windows(text, 10, most)
        assert len(windows) == min(most, 90)
        inputs, targets = windows[[0, len(windows) - 1]]
        assert inputs.dtype == torch.int64 and inputs.shape == targets.shape == (2, 10)
        assert inputs[0].tolist() == list(range(10)) and torch.equal(inputs + 1, targets)
    assert Windows(text, 10, 1000)[[89]][1][0, -1] == 99  # the last byte is learnt


def test_the_committed_text_is_the_one_that_the_docstring_names():
    assert TEXT_FILE.stat().st_size == 196_818
    text = Text(TEXT_FILE, 128)
    assert text.fingerprint == "e7b72bfd25d395f5"
    assert text.train.text.numel() == 177_137 and text.heldout.text.numel() == 19_681
    assert bytes(text.train[[0]][0][0].tolist()).startswith(b"In the beginning God created")


def test_train_and_heldout_share_no_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(200)) + b"\xff" * 10)
    text = Text(path, 20)  # the largest block that a tenth of it lets one have
    assert text.train.text.tolist() == list(range(189)) and text.heldout.text.numel() == 21


WIDE = ("utf-16", "utf-16-be", "utf-32-le")


@pytest.mark.parametrize(
    "spec, words",
    [
        ("text:empty.txt", "has 0 bytes"),
        ("text:short.txt", "has 169 bytes, and its last tenth"),
        *((f"text:{name}.txt", "is in UTF-16 or UTF-32, or no text") for name in WIDE),
        ("text:missing.txt", "No such file"),
        ("text:/dev/zero", "is no file"),
        ("text:~nobody-here/a", "can't read"),
        ("text:", "reads text; write --data text:FILE"),
    ],
)
def test_bad_texts_end_with_one_line(spec, words, capsys):
    Path("empty.txt").touch()
    Path("short.txt").write_bytes(b"x" * 169)
    for name in WIDE:
        Path(f"{name}.txt").write_bytes(("Wörter, 詞。" * 500).encode(name))
    assert quick("--data", spec) == 2
    assert words in one_line(capsys)
    assert not Path("runs").exists()


# ---- Training ----------------------------------------------------------------------------------------------


def test_the_loss_is_nats_a_byte_and_bits_follow():
    made = task()
    logits = torch.randn(4, 16, 256, generator=torch.Generator().manual_seed(0))
    inputs, targets = made.data.train[[0, 1, 2, 3]]
    loss = made.loss(lambda ids: logits, (inputs, targets), None, 0)
    share = logits.double().softmax(-1).gather(2, targets[..., None]).log().mean()
    assert loss.item() == pytest.approx(-share.item(), rel=1e-5)
    even, _ = made.evaluate(lambda ids: torch.zeros(*ids.shape, 256), Rng(0))
    assert even["nats_a_byte"] == pytest.approx(math.log(256)) and even["bits_a_byte"] == pytest.approx(8)


def test_scores_are_taken_over_all_heldout_windows():
    made = task()

    def knows(ids):  # a net that says a space everywhere
        logits = torch.zeros(*ids.shape, 256)
        logits[..., ord(" ")] = 5.0
        return logits

    _, targets = made.data.heldout[list(range(len(made.data.heldout)))]
    scores, pictures = made.evaluate(knows, Rng(0))
    spaces = (targets == ord(" ")).double().mean().item()
    assert scores["accuracy"] == pytest.approx(spaces)
    assert scores["nats_a_byte"] == pytest.approx(math.log(255 + math.exp(5)) - 5 * spaces, rel=1e-5)
    assert made.validate(knows, Rng(0))["loss"] == pytest.approx(scores["nats_a_byte"], rel=1e-5)
    assert pictures["text"].shape[0] == 3


@pytest.mark.parametrize("kind", SMALL)
def test_training_lowers_the_loss_and_says_tokens_a_second(kind, capsys):
    Path("a.txt").write_bytes(b"the cat sat on the mat. " * 40)
    assert quick("--model", kind, "--data", "text:a.txt", "--lr", "1e-2", "--ema_decay", "0.8", steps=50) == 0
    found, losses = summary(), [row["loss"] for row in metrics()]
    assert losses[0] > 4 and found["scores"]["ema"]["nats_a_byte"] < 0.6 * losses[0]
    assert found["tokens_per_second"] == pytest.approx(16 * found["images_per_second"])
    assert "tokens a second" in capsys.readouterr().out
    assert Path("runs/run/samples/final.png").stat().st_size > 500
    foresees_a_run(capsys)


def foresees_a_run(capsys):
    assert lowprec_command.main(["foresee", "runs/run"]) == 0
    printed = capsys.readouterr().out
    assert "runs/run: fp32, step 50 of 50; ahead are all rates of the run" in printed
    assert "over the rates ahead" in printed and "at a rate of 0.01," in printed
    config = json.loads(Path("runs/run/config.json").read_text())
    config["flags"] |= {"steps": 51, "lr_schedule": "cosine"}  # as of a run that is under way
    Path("runs/run/config.json").write_text(json.dumps(config))
    assert lowprec_command.main(["foresee", "runs/run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unwritten_ahead"] > found["unwritten"]["1.0"]  # the last step has a lower rate
    Path("runs/run/checkpoint.pt").unlink()
    assert lowprec_command.main(["foresee", "runs/run"]) == 2
    assert "runs/run/checkpoint.pt: no such file" in capsys.readouterr().err


# ---- FP8 on bare parameters --------------------------------------------------------------------------------

DELAYED = ["--model", "bdh", "--fp8", "--fp8_recipe", "delayed", "--fp8_backend", "emulate"]


def test_bare_parameters_are_multiplied_in_fp8_and_the_ledger_says_so(capsys):
    assert quick(*DELAYED, steps=3) == 0
    printed = capsys.readouterr().out
    assert "delayed scaling, by emulate: 6 of 6 linear layers" in printed
    ledger = json.loads(Path("runs/run/ledger.json").read_text())
    names = [f"layers.{i}.{part}" for i in range(2) for part in ("encode", "encode_v", "decode")]
    assert [layer["name"] for layer in ledger["fp8"]["layers"]] == names
    assert all(layer["flops"] > 0 and not layer.get("left_out") for layer in ledger["fp8"]["layers"])
    saved = checkpoint()["precision"]["model"]
    for name in names:  # each product has a scale of its own, which has moved, though the matrices are shared
        assert (saved[f"{name}.scale"] > 0).all()
    scales = [tuple(saved[f"{name}.scale"].tolist()) for name in names]
    assert len({row[0] for row in scales}) == len(names) and len({row[1] for row in scales}) < len(names)
    assert {"fp8_underflow_input", "fp8_saturated_grad"} <= set(metrics()[-1])
    assert command("--diagnose", "runs/run") in (0, 1)
    assert "fp8" in capsys.readouterr().out
