"""SGD, Lion, Adafactor, Muon in whole runs: recipes, groups, the doctor, the command."""


import cli
import common
import pytest
import test_optimizers
import torch
from common import BF16, RECIPES, net, refused, same
from torch import nn

import strategies
import trainer
from lowprec import recipes
from lowprec.optimizers import build
from lowprec.optimizers.adafactor import Adafactor
from lowprec.optimizers.build import OPTIMIZERS, divided_groups
from lowprec.optimizers.lion import Lion
from lowprec.optimizers.muon import Muon, hidden_matrices
from lowprec.optimizers.rounded import AdamW
from lowprec.optimizers.sgd import SGD
from lowprec.precision import Precision
from lowprec.recipes import Recipe, recipe
from lowprec.watch.watch import Watch

eager = common.eager
in_a_folder_of_its_own = cli.in_a_folder_of_its_own
OURS = test_optimizers.OURS
each = test_optimizers.each


# ---- Runs --------------------------------------------------------------------------------------------------

LR = {"sgd": 0.02, "lion": 1e-3}


def run_of(name, key, seed=0, **options):
    if "opt" in key:
        pytest.importorskip("bitsandbytes" if "8" in key else "torchao")
    options = {"optimizer": name, "ema_decay": 0.9, "lr": LR.get(name), "clip_grad": 1.0, **options}
    return Precision(net(seed, width=24), recipe(**RECIPES[key]), **options)


@pytest.mark.parametrize("kind", ["split", "fp32"])
@pytest.mark.parametrize(
    "name, key", [("adamw", "kahan"), ("muon", "stochastic"), ("adafactor", "pure_bf16")]
)
def test_a_finish_changes_no_value_writes_exactly_and_resumes_bit_for_bit(name, key, kind):
    run, again = run_of(name, key), run_of(name, key)
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    common.train(run, 3)
    before = {k: t.float().clone() for k, t in run.weights("raw").items()}
    run.finish(kind)
    assert all(same(t.float(), before[k]) for k, t in run.weights("raw").items())
    schedule.step()  # it still reaches the groups: the steps below are smaller
    averages = {name: t.clone() for name, t in run.ema.shadow.items()}
    (report,) = common.train(run, 1, measure=True)
    for name, raw in run.weights("raw").items():
        if name in averages:  # it follows what is held exactly, not its bf16 image
            assert torch.allclose(run.ema.shadow[name], averages[name].lerp(raw.float(), 0.1), 1e-5, 1e-8)
    assert run.optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    assert report["update_survival"] > 0.999
    states = [t for state in run.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    held = sum(t.nbytes for t in states) + 2 * sum(p.nbytes for p in run.params)
    told = run.ledger().state_bytes * sum(p.numel() for p in run.params)
    assert told == pytest.approx(held, abs=0.01)
    again.load_state_dict(common.through_a_file(run.state_dict()))
    for one in (run, again):
        common.train(one, 2, seed=1)
    for source in ("raw", "ema"):
        assert all(same(t, again.weights(source)[k]) for k, t in run.weights(source).items())
    refused(lambda: run.finish(kind), f"finished with {kind} already")


def test_what_can_not_be_finished_is_refused():
    refused(lambda: run_of("adamw", "bf16").finish("split"), "fp32 throughout", "add --pure_bf16")
    refused(lambda: run_of("adamw", "split").finish("fp32"), "--master split writes exactly")
    refused(lambda: run_of("adamw", "pure_bf16").finish("half"), "finish", "split", "fp32")
    refused(
        lambda: run_of("adamw", "pure_bf16", grad_release=True, clip_grad=0.0).finish("split"),
        "leave one out",
    )


def test_sites_have_rows_and_values_of_their_own():
    run = run_of("muon", "stochastic")
    rows = {row["site"]: row for row in run.ledger().rows}
    assert rows["momentum"]["value"] == rows["exp_avg"]["value"] == "bf16"
    assert rows["momentum"]["bytes"] > rows["exp_avg"]["bytes"] > 0
    assert rows["orthogonalise"]["value"] == "bf16" and "Newton-Schulz" in str(run.ledger())
    assert run.optimizer_name == "Muon and AdamW"
    rows = {row["site"]: row for row in run_of("sgd", "stochastic").ledger().rows}
    assert rows["exp_avg"]["why"] == rows["exp_avg_sq"]["why"] == "sgd keeps none"
    assert rows["exp_avg"]["bytes"] == 0 and rows["momentum"]["bytes"] == 2
    assert "orthogonalise" not in rows and "row_var" not in rows
    assert {"momentum", "row_var"}.isdisjoint(row["site"] for row in run_of("adamw", "fp32").ledger().rows)


def test_sites_follow_the_flags_and_can_be_set():
    low = dict(pure_bf16=True)
    assert recipe(**low, optimizer="sgd").momentum == "bf16"
    assert recipe(**low, master="split", optimizer="muon").orthogonalise == "fp32"  # the bits of fp32
    assert recipe(bf16=True, optimizer="muon").orthogonalise == "bf16"
    assert recipe(optimizer="muon").orthogonalise == recipe(optimizer="muon").momentum == "fp32"
    assert recipe(opt8bit=True, optimizer="sgd").coded == {"int8"}
    r = recipe(sites=["momentum=bf16", "orthogonalise=bf16"], optimizer="muon")
    run = Precision(net(), r, optimizer="muon")
    assert run.recipe == r == r.keeping("muon")
    states = [item for state in run.optimizer.state.values() for item in state.items()]
    held = {name: t.dtype for name, t in states if name != "step"}
    assert held == dict(momentum=BF16, exp_avg=torch.float32, exp_avg_sq=torch.float32)
    assert run.optimizer.parts[0].dtype == BF16
    assert recipe(optimizer="adamw") == recipe() == Recipe() == Recipe().keeping("adamw")
    assert recipe(optimizer="torch").moments == ["exp_avg", "exp_avg_sq"]
    warned = recipe(**low, optimizer="adafactor").warnings()
    assert any(line.startswith("row_var and col_var in bf16") for line in warned)
    sound = recipe(**low, stochastic=True, optimizer="adafactor").warnings()
    assert not any("row_var" in line for line in sound)
    assert not any("exp_avg_sq" in line for line in recipe(**low, optimizer="sgd").warnings())


REFUSED = {
    "a site of others": (dict(sites=["momentum=bf16"]), ["sgd and muon", "this is adamw"]),
    "a site of muon": (
        dict(sites=["orthogonalise=bf16"], optimizer="sgd"),
        ["--optimizer muon", "this is sgd"],
    ),
    "a moment that is not kept": (
        dict(sites=["exp_avg_sq=bf16"], optimizer="lion"),
        ["lion keeps no exp_avg_sq", "exp_avg"],
    ),
    "a value": (dict(sites=["row_var=int8"], optimizer="adafactor"), ["no value of row_var", "fp32, bf16"]),
    "codes": (dict(opt8bit=True, optimizer="adafactor"), ["too few for codes", "--set row_var=bf16"]),
    "nothing rounded": (
        dict(pure_bf16=True, master="split", stochastic=True, optimizer="sgd"),
        ["drop --stochastic or add --set momentum=bf16"],
    ),
}


@pytest.mark.parametrize("flags, words", REFUSED.values(), ids=REFUSED)
def test_what_an_optimiser_lacks_is_refused_in_one_line(flags, words):
    refused(lambda: recipe(**flags), *words)


def test_options_that_an_optimiser_lacks_are_refused():
    params = [nn.Parameter(torch.ones(4, 4))]
    for name in ("adamw", "lion", "adafactor", "torch"):
        words = "--momentum", "sgd and muon"
        refused(lambda name=name: build.build(name, params, recipe(), momentum=0.5), *words)
    refused(lambda: build.build("adamw", params, recipe(), nesterov=True), "--nesterov", "sgd and muon")
    refused(lambda: strategies.settle({"optimizer": "sgd", "beta2": 0.9}), "--beta2 0.9", "sgd has no beta2")
    refused(lambda: Muon([nn.Parameter(torch.ones(4))]), "here is a vector", "AdamW")
    refused(lambda: build.build("adam", params, recipe()), "unknown", "sgd, lion, adafactor, muon")
    assert build.build("sgd", params, recipe(), momentum=0.0).defaults["momentum"] == 0.0


def test_defaults_are_the_optimisers_own_until_a_flag_says_otherwise():
    settled = {name: strategies.settle({"optimizer": name}).config for name in OPTIMIZERS}
    assert {name: c.lr for name, c in settled.items()} == {
        "adamw": 1e-3, "sgd": 0.01, "lion": 1e-4, "adafactor": 0.01, "muon": 1e-3,
    }  # fmt: skip
    assert settled["lion"].beta2 == 0.99 and settled["adamw"].beta2 == 0.999
    assert strategies.settle({"optimizer": "sgd", "lr": 0.3}).config.lr == 0.3
    for name, config in settled.items():
        (group, *_) = Precision(net(), optimizer=name).optimizer.param_groups
        assert group["lr"] == config.lr, "the class and its flags say two things"
    (group,) = Precision(net(), optimizer="sgd", momentum=0.5, nesterov=True).optimizer.param_groups
    assert (group["momentum"], group["nesterov"]) == (0.5, True)


# ---- Which parameters are whose ----------------------------------------------------------------------------


def names_of(model, params):
    return {name for name, p in model.named_parameters() if any(p is q for q in params)}


def test_muon_takes_the_matrices_of_hidden_layers():
    model = net()
    run = Precision(model, optimizer="muon")
    muon, adamw = run.optimizer.parts
    assert (type(muon), type(adamw)) == (Muon, AdamW)
    of_muon = names_of(model, [p for group in muon.param_groups for p in group["params"]])
    assert of_muon == {"middle.weight"}  # not the first convolution, the embedding, the norm, the head
    assert len(run.optimizer.owner) == len(run.params)
    bare = divided_groups([{"params": list(model.parameters())}], "muon")  # without names: by shape
    assert names_of(model, bare[0]["params"]) == {"stem.weight", "middle.weight"}


class Text(nn.Module):
    """A language model with a tied head, a position table that is no module, and a vector that looks like a
    matrix."""

    def __init__(self):
        super().__init__()
        self.wte, self.attn, self.norm = nn.Embedding(20, 8), nn.MultiheadAttention(8, 2), nn.LayerNorm(8)
        self.up, self.decode = nn.Linear(8, 16), nn.Linear(8, 20, bias=False)
        self.decode.weight = self.wte.weight
        self.pos_embed, self.gate = nn.Parameter(torch.zeros(5, 8)), nn.Parameter(torch.zeros(1, 8))
        self.lm_head = nn.Linear(16, 8)


def test_embeddings_heads_and_vectors_are_not_hidden_matrices():
    model = Text()
    hidden = {"attn.in_proj_weight", "attn.out_proj.weight", "up.weight"}
    assert names_of(model, hidden_matrices(model)) == hidden
    model.roles = {"up": {"head"}}  # as the net declares it
    assert names_of(model, hidden_matrices(model)) == hidden - {"up.weight"}


def test_groups_keep_their_options_and_may_name_an_optimiser():
    model = net()
    groups = [
        {"params": [model.middle.weight, model.middle.bias], "lr": 2e-3, "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if "middle" not in name], "optimizer": "sgd"},
    ]
    run = Precision(model, recipe(pure_bf16=True, stochastic=True), groups=groups, optimizer="muon")
    assert [type(part) for part in run.optimizer.parts] == [Muon, AdamW, SGD]
    found = [(g["lr"], g["weight_decay"], len(g["params"])) for g in run.optimizer.param_groups]
    assert found == [(2e-3, 0.1, 1), (2e-3, 0.1, 1), (0.01, 0.0, 8)]
    assert run.recipe.momentum == run.recipe.exp_avg_sq == "bf16"
    common.train(run, 3)
    others = [p for p in run.params if p is not model.middle.bias]
    assert run.optimizer.nbytes()["momentum"] == 2 * sum(p.numel() for p in others)


# ---- The doctor --------------------------------------------------------------------------------------------


def watched(name, key, lr=None, steps=24):
    run = run_of(name, key, **({"lr": lr} if lr else {}))
    watch = Watch(run.model, run.optimizer, run.ema, every=3, most=512)
    common.train(run, steps)
    watch.remove()
    return watch


@pytest.mark.parametrize("key", ["stochastic", "split"])
@each
def test_watch_is_silent_about_what_works(name, key):
    watch = watched(name, key)
    assert [f for f in watch.findings() if f.severity != "note"] == [], str(watch)
    assert watch.looks >= 8 and watch.shares()["middle.weight"]["update"] < 0.02


@each
def test_watch_names_updates_that_are_lost_to_nearest(name):
    small = dict(sgd=1e-4, lion=1e-5, adafactor=1e-4, muon=1e-5)[name]
    watch = watched(name, "pure_bf16", small)
    lost = {f.tensor for f in watch.findings() if f.site == "update" and f.severity != "note"}
    assert "middle.weight" in lost, str(watch)
    assert watch.shares()["middle.weight"]["update"] > 0.3


# ---- The command -------------------------------------------------------------------------------------------


def test_the_command_resumes_bit_for_bit():
    flags = "--optimizer muon --momentum 0.9 --nesterov off --weight_decay 0.1 --pure_bf16 --stochastic"
    flags = flags.split()
    assert cli.quick(*flags, name="whole") == 0
    assert cli.quick(*flags, name="run", steps=2) == 0
    assert cli.quick(*flags, name="run") == 0
    a, b = (cli.checkpoint(name)["precision"] for name in ("whole", "run"))
    cli.assert_same(a, b)
    config = cli.checkpoint()["config"]
    assert (config["momentum"], config["nesterov"]) == (0.9, "off")
    assert cli.quick(*flags, "--momentum", "0.8", name="run", steps=6) == 2  # fixed at a resume


def test_the_command_refuses_in_one_line(capsys):
    for flags, words in (
        ("--optimizer sgd --set exp_avg=bf16", "sgd keeps no exp_avg"),
        ("--momentum 0.5", "--momentum belongs to --optimizer sgd and muon"),
        ("--optimizer lion --momentum 1.5", "not a number from 0 to below 1"),
        ("--optimizer sgd --beta2 0.99", "sgd has no beta2"),
    ):
        capsys.readouterr()
        assert cli.quick(*flags.split()) == 2
        assert words in cli.one_line(capsys)


def test_every_site_of_an_optimiser_is_explained():
    for name, site in recipes.OF_OPTIMIZERS.items():
        theirs = [key for key in OPTIMIZERS if any(name in kind.sites for kind in build.classes_of(key))]
        assert theirs and set(site.values) - {"fp32"} <= set(site.why)
    for kind in OPTIMIZERS.values():
        assert set(kind.moments) <= set(recipes.MOMENTS) and kind.__doc__
    assert set(Adafactor.signed.values()) == {False} and Lion.flags["lr"] == 1e-4


NO_EPS = {
    "sgd": "choose adamw or muon",
    "lion": "choose adamw or muon",
    "adafactor": "adafactor has no eps; drop it, or choose adamw or muon, or --least_rms",
}


@pytest.mark.parametrize("name, said", NO_EPS.items())
def test_an_eps_that_an_optimiser_has_not_is_refused(name, said, capsys):
    assert cli.quick("--optimizer", name, "--eps", "1e-6") == 2
    assert said in capsys.readouterr().err
    if name != "adafactor":  # whose eps in a loop is a pair
        refused(lambda: Precision(nn.Linear(4, 4), optimizer=name, eps=1e-6), "belongs to --optimizer adamw")


def test_adafactor_refuses_eps_beside_least_rms_and_a_loop_gives_it_a_pair(capsys):
    assert cli.quick("--optimizer", "adafactor", "--least_rms", 0.05, "--eps", "1e-6") == 2
    assert "adafactor has no eps; drop it, or choose adamw or muon, or --least_rms" in cli.one_line(capsys)

    def made(eps):
        return Precision(nn.Linear(4, 4), optimizer="adafactor", eps=eps).optimizer

    refused(lambda: made(0.05), "a pair, of squares and of weights, as (1e-30, 0.001)")
    assert made((1e-30, 0.05)).param_groups[0]["eps"] == (1e-30, 0.05)


def test_a_least_rms_reaches_adafactor_and_no_other(capsys):
    flags = {"optimizer": "adafactor", "least_rms": 0.05, "batch_size": 4}
    run = trainer.Trainer(strategies.settle(flags))
    assert [group["eps"] for group in run.precision.optimizer.param_groups] == [(1e-30, 0.05)]
    for other in ("adamw", "muon", "torch"):
        assert cli.quick("--optimizer", other, "--least_rms", 0.05) == 2
        assert "has no least_rms; drop it, or choose adafactor" in cli.one_line(capsys)


@pytest.mark.parametrize("net", [[], ["--model", "dit"]])
def test_adafactor_says_that_zeros_grow_late(net, capsys):
    late = "matrices start at zero and grow late"
    assert cli.quick("--optimizer", "adafactor", *net, steps=1) == 0
    assert late in capsys.readouterr().out
    assert cli.quick("--optimizer", "adafactor", "--least_rms", 0.05, *net, steps=1, name="sooner") == 0
    assert late not in capsys.readouterr().out


def test_adafactor_says_nothing_where_no_matrix_starts_at_zero(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten " * 100)
    text = ["--task", "language", "--data", f"text:{tmp_path / 'text.txt'}", "--length", 16]
    assert cli.quick("--optimizer", "adafactor", *text, steps=1) == 0
    assert "start at zero" not in capsys.readouterr().out


def test_an_eps_reaches_adamw():
    run = trainer.Trainer(strategies.settle({"eps": 1e-3, "batch_size": 4}))
    assert [group["eps"] for group in run.precision.optimizer.param_groups] == [1e-3]
