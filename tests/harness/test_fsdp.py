"""A net that fully_shard spreads over ranks: the same bits on 1, 2 and 4 of them as on one that spreads
nothing; states that any number of ranks reads. Real processes, gloo, tiny nets.
"""

import json
from pathlib import Path

import pytest
import rank_server
import torch
from cli import ROOT, assert_same, process
from rank_server import ranks_messages, told

from harness import shards

ranks = rank_server.ranks


# ---- The same bits -----------------------------------------------------------------------------------------

RECIPES = {
    1: ["stochastic opt8bit"],
    2: ["fp32", "split", "stochastic opt4bit", "bf16 average", "norm island", "fp32 master"],
    4: ["kahan+stochastic", "sgd", "lion"],
}


@pytest.mark.parametrize("world", RECIPES)
def test_any_number_of_ranks_trains_to_the_bits_of_one_that_spreads_nothing(world, ranks):
    """Weights, average, moments and what completes weights, the ledger's bytes a parameter, what is drawn."""
    found = told(ranks, world, "same_bits", RECIPES[world], "cpu")
    assert found == {name: [] for name in RECIPES[world]}


def test_rows_that_cut_blocks_of_codes_step_to_the_same_bits(ranks):
    found = told(ranks, 4, "pieces", "cpu")
    assert len(found) == 4 and not any(found.values()), found


def test_norms_and_telemetry_are_those_of_the_whole_net(ranks):
    two, four = (told(ranks, world, "clipped") for world in (2, 4))
    for name in two:
        if name != "fp16":  # products in 16 bits: gradients of 2 ranks are added before they are rounded
            assert two[name][0] == pytest.approx(four[name][0], rel=1e-9), name
            assert two[name][1] == four[name][1], name
    one, spread = two["one rank"][0], two["spread"][0]
    assert spread == pytest.approx(one, rel=2e-6)


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks):
    assert told(ranks, 2, "overflow") == {"skipped": 1, "moved": []}


# ---- Checkpoints -------------------------------------------------------------------------------------------


def test_a_state_goes_through_dcp_to_another_number_of_ranks(ranks):
    ended = ranks(2, "saved", "split opt4bit", "folder", "whole.pt")
    assert ended == [0, 0], ranks_messages(ranks)
    assert told(ranks, 4, "loaded", "split opt4bit", "folder", "whole.pt") == []


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_each_rank_of_a_strangers_loop_gets_its_own_moments_back(kind, ranks):
    if kind == "int8":
        pytest.importorskip("bitsandbytes")
    assert told(ranks, 2, "of_a_stranger", kind, "folder") == [[], []]


def test_a_watch_goes_on_where_a_rank_has_no_rows_of_a_tensor(ranks):
    assert told(ranks, 4, "watched") == ["healthy: nothing is losing information"] * 4


def test_run_module_in_a_wrapper_takes_the_same_steps_under_ddp_and_fully_shard(ranks):
    differing = told(ranks, 2, "modules")
    assert len(differing) == 4 and not any(differing.values()), differing


def test_micro_batches_that_ddp_would_not_see_are_refused_and_the_others_are_summed(ranks):
    words = told(ranks, 2, "micro_batches")
    assert len(words["refused"]) == 6 and all(words["refused"].values()), words["refused"]
    assert not words["differing"]


# ---- Bad input ---------------------------------------------------------------------------------------------


def test_what_can_not_be_spread_is_refused_in_a_line(ranks):
    said = told(ranks, 2, "refused")
    words = {
        "adafactor": "adamw, sgd or lion",
        "muon": "adamw, sgd or lion",
        "torch": "adamw, sgd or lion",
        "fp8": "--bf16 or --pure_bf16",
        "sparse24": "leave one of the two out",
        "int8": "leave one out",
        "grad_release": "leave one out",
        "average_on": "leave one out",
        "states_on": "leave one out",
        "statistics": "fully_shard(block.norm)",
        "generator": "blank=",
    }
    assert said.keys() == words.keys()
    for name, line in said.items():
        assert line and words[name] in line and "\n" not in line, (name, line)


# ---- Parts -------------------------------------------------------------------------------------------------


def test_a_tree_of_values_comes_back_from_json():
    state = {"a": (1, 2.5, [None, True]), 3: {"x": torch.arange(3)}, "b": {"$odd": "name"}, "c": float("inf")}
    tensors = {}
    tree = json.loads(json.dumps(shards._taken_apart(state, tensors)))
    assert_same(shards._put_together(tree, lambda leaf: tensors[leaf["$tensor"]]), state)


# ---- On GPUs -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs with NCCL")
@pytest.mark.parametrize("job, words", [("same_bits", [RECIPES[2]]), ("pieces", [])])
def test_two_gpus_train_to_the_bits_of_one(job, words):
    """As the ranks above do by gloo."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    given = map(json.dumps, [*words, "cuda", "told.json"])
    assert process(*launch, ROOT / "tests/fsdp_jobs.py", job, *given).wait(300) == 0
    found = json.loads(Path("told.json").read_text())
    assert found and not any(found.values()), found
