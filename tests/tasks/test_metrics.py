"""metrics.py and fit_features.py: distances against closed forms, scores that tell real, damaged and random
images apart, and the net in whose features they are told apart.

    python -m pytest tests/tasks/test_metrics.py
"""

import dataclasses
import itertools
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy import linalg

from lowprec.machine import exact_math
from tasks import data, feature_net, metrics


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # 8x8 images gain nothing from more, and lose much when the cores are busy
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def digits():
    """(train images, train labels, held-out images, held-out labels)"""
    loaded = data.load("digits")
    return (*loaded.train[list(range(len(loaded.train)))], *loaded.heldout[list(range(len(loaded.heldout)))])


@pytest.fixture(scope="module")
def net():
    return metrics.yardstick(data.load("digits"), "nowhere")


@pytest.fixture(scope="module")
def references(digits, net):
    return metrics.reference_scores(net, *digits[:3])


# ---- Distances ---------------------------------------------------------------------------------------------


def features_with(mean, cov, count=400, seed=0):
    """Features whose sample mean and covariance are exactly these."""
    x = torch.randn(count, len(mean), generator=draw(seed), dtype=torch.float64)
    x = (x - x.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(x.T.cov())).T
    return x @ torch.linalg.cholesky(cov).T + mean


def test_frechet_of_diagonal_gaussians_is_the_closed_form():
    mean_a, mean_b = torch.tensor([0.0, 1.0, -2.0]).double(), torch.tensor([3.0, 1.0, -1.0]).double()
    var_a, var_b = torch.tensor([1.0, 4.0, 9.0]).double(), torch.tensor([4.0, 4.0, 0.25]).double()
    a, b = features_with(mean_a, var_a.diag()), features_with(mean_b, var_b.diag(), count=150, seed=1)
    wanted = (9 + 0 + 1) + (1 + 0 + 2.5**2)  # |mean difference|^2 + |std difference|^2
    assert metrics.frechet_distance(a, b) == pytest.approx(wanted, rel=1e-9)
    assert metrics.frechet_distance(a, a) == pytest.approx(0, abs=1e-9)


def test_frechet_of_covariances_that_do_not_commute():
    root_a, root_b = torch.randn(2, 6, 6, generator=draw(), dtype=torch.float64)
    cov_a, cov_b = root_a @ root_a.T + torch.eye(6), root_b @ root_b.T + torch.eye(6)
    wanted = (cov_a + cov_b).trace() - 2 * np.trace(linalg.sqrtm((cov_a @ cov_b).numpy())).real
    zero = torch.zeros(6).double()
    found = metrics.frechet_distance(features_with(zero, cov_a), features_with(zero, cov_b))
    assert found == pytest.approx(wanted)


def test_kid_is_the_mmd_of_all_pairs_and_unbiased():
    a, b = torch.randn(7, 3, generator=draw()), torch.randn(5, 3, generator=draw(1))

    def kernel(pairs):
        return np.mean([(float(x.double() @ y.double()) / 3 + 1) ** 3 for x, y in pairs])

    wanted = (
        kernel(itertools.permutations(a, 2))
        + kernel(itertools.permutations(b, 2))
        - 2 * kernel(itertools.product(a, b))
    )
    assert metrics.kid(a, b) == pytest.approx(wanted)

    draws = [metrics.kid(*torch.randn(2, 40, 8, generator=draw(seed))) for seed in range(400)]
    assert abs(np.mean(draws)) < 3 * np.std(draws) / math.sqrt(len(draws))
    assert 100 < sum(value < 0 for value in draws) < 350
    assert metrics.kid(torch.randn(400, 8, generator=draw()), torch.randn(400, 8, generator=draw(1)) + 1) > 1


def test_sliced_wasserstein_of_a_shift_is_the_shift():
    x = torch.rand(300, 1, 8, 8, generator=draw())
    shuffled = x[torch.randperm(300, generator=draw())]
    assert metrics.sliced_wasserstein(x, shuffled) == pytest.approx(0, abs=1e-12)
    assert metrics.sliced_wasserstein(x, x + 0.25) == pytest.approx(0.25, rel=1e-6)
    large = torch.randn(50, 3, 16, 16, generator=draw())  # more values than directions: a fixed estimate
    shift = torch.randn(3, 16, 16, generator=draw(1))
    found = metrics.sliced_wasserstein(large, large + shift)
    assert found == pytest.approx(shift.square().mean().sqrt().item(), rel=0.25)
    assert found == metrics.sliced_wasserstein(large, large + shift)
    assert found != metrics.sliced_wasserstein(large, large + shift, seed=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("distance", [metrics.frechet_distance, metrics.kid, metrics.sliced_wasserstein])
def test_a_value_that_is_not_finite_makes_distances_infinite(distance, bad):
    a, b = torch.randn(2, 50, 4, generator=draw())
    assert math.isfinite(distance(a, b))
    a[3, 2] = bad
    assert distance(a, b) == distance(b, a) == math.inf


def test_pixel_stats():
    found = metrics.pixel_stats(torch.tensor([-3.0, -1.0, 0.0, 1.0]).bfloat16())
    assert found == {"min": -3, "max": 1, "mean": -0.75, "std": pytest.approx(2.1875**0.5), "outside": 0.25}
    found = metrics.pixel_stats(torch.tensor([0.0, math.nan]))
    assert math.isnan(found["mean"]) and math.isnan(found["min"]) and found["outside"] == 0.5


# ---- Feature net -------------------------------------------------------------------------------------------


def test_the_committed_digits_net_reads_heldout_digits(digits, net):
    with torch.no_grad():
        accuracy = (net(digits[2]).argmax(1) == digits[3]).double().mean().item()
    assert accuracy >= 0.97
    with feature_net.safetensors.safe_open(feature_net.DIGITS_NET_FILE, "pt") as file:
        noted = json.loads(file.metadata()["feature_net"])
    assert accuracy == pytest.approx(noted["heldout_accuracy"], abs=0.005)
    assert feature_net.DIGITS_NET_FILE.stat().st_size < 1_000_000
    assert not net.training and not any(parameter.requires_grad for parameter in net.parameters())


def test_features_are_standardised_and_independent_of_the_batch(digits, net):
    features = net.features(digits[0])
    assert features.dtype == torch.float32 and features.shape == (len(digits[0]), 32)
    assert features.mean(0).abs().max() < 1e-3 and (features.std(0) - 1).abs().max() < 1e-3
    assert torch.allclose(net.features(digits[0][5:6])[0], features[5], atol=1e-4)
    assert torch.allclose(net.classify(features), net(digits[0]))


@pytest.mark.parametrize("size", [12, 32])
def test_digits_of_another_size_are_scored_by_the_same_net(net, size):
    loaded = data.load("digits", image_size=size)
    images, labels = loaded.heldout[list(range(len(loaded.heldout)))]
    train = loaded.train[list(range(400))]
    assert images.shape[-1] == size
    found = metrics.reference_scores(net, *train, images)
    assert found["floor"]["label_accuracy"] > 0.95
    assert found["floor"]["frechet"] < found["ceiling"]["frechet"] / 50


@pytest.mark.parametrize("channels, size", [(1, 8), (3, 11), (2, 64)])
def test_any_size_and_channels(channels, size):
    net = feature_net.FeatureNet(channels, 5, size)
    assert net(torch.zeros(2, channels, size, size)).shape == (2, 5)
    assert net.features(torch.zeros(2, channels, 3 * size, size)).shape == (2, 32)
    checkerboard = (torch.arange(3 * size)[:, None] + torch.arange(3 * size)) % 2 * 2.0 - 1
    assert net.resize(checkerboard.expand(1, channels, -1, -1)).abs().max() < 0.1  # antialiased
    with pytest.raises(ValueError, match="at least 8x8"):
        feature_net.FeatureNet(1, 5, 7)


def test_bf16_images_are_scored_in_fp32_whatever_the_run_has_set(digits, net):
    images = digits[0][:64].bfloat16()
    wanted = metrics.generation_scores(net, images.float(), digits[1][:64], digits[2])
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert metrics.generation_scores(net, images, digits[1][:64], digits[2]) == wanted
            assert net(images).dtype == torch.float32
        assert torch.get_float32_matmul_precision() == "medium"  # put back as it was
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_precision_inside_is_ieee_fp32(net):
    seen, watched = [], feature_net.FeatureNet(1, 10, 8)

    def settings(*_):
        conv, matmul = torch.backends.cudnn.conv, torch.backends.cuda.matmul
        return conv.fp32_precision, matmul.fp32_precision, torch.is_autocast_enabled("cpu")

    watched.body.register_forward_hook(lambda *_: seen.append(settings()))
    with exact_math(tf32=True), torch.autocast("cpu", dtype=torch.bfloat16):
        before = settings()
        watched(torch.zeros(1, 1, 8, 8))
        assert settings() == before == ("tf32", "tf32", True)
    [(convolution, product, autocast)] = seen
    assert convolution in ("ieee", "none") and product == "ieee" and not autocast


def test_fitting_is_reproducible_and_leaves_the_global_generator_alone(digits):
    state = torch.get_rng_state()
    with torch.no_grad():
        nets = [feature_net.fit_feature_net(*digits[:2], 10, seed, steps=5) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    first, same, other = (torch.cat([p.flatten() for p in fitted.parameters()]) for fitted in nets)
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert (nets[0].features(digits[0]).std(0) - 1).abs().max() < 1e-3
    assert feature_net.fit_feature_net(torch.zeros(2, 1, 80, 80), steps=2, batch_size=2).image_size == 64


def test_a_net_without_labels_learns_rotations(digits):
    fitted = feature_net.fit_feature_net(digits[0], None, 0, seed=0, steps=100)
    assert fitted.num_classes == 4 and not fitted.supervised
    turned = torch.cat([torch.rot90(digits[2], turns, (2, 3)) for turns in range(4)])
    with torch.no_grad():
        right = fitted(turned).argmax(1) == torch.arange(4).repeat_interleave(len(digits[2]))
    assert right.double().mean() > 0.6
    scores = metrics.reference_scores(fitted, *digits[:3])
    assert scores["floor"]["label_accuracy"] is None
    assert scores["floor"]["frechet"] < scores["ceiling"]["frechet"] / 50


@pytest.fixture
def another(digits):
    """A Data that is no set's own: its net has to be fitted."""
    found = data.load("digits")
    return dataclasses.replace(found, name="folder:/a b/c", fingerprint="0123456789abcdef", yardstick=None)


def weights(fitted):
    return torch.cat([value.flatten() for value in fitted.state_dict().values()])


def test_a_net_is_fitted_once_and_again_when_its_file_is_damaged(another, tmp_path, monkeypatch):
    def kept(found=another):
        return metrics.yardstick(found, tmp_path / "kept", steps=3)

    fits, fit = [], feature_net.fit_feature_net
    monkeypatch.setattr(metrics, "fit_feature_net", lambda *args: fits.append(1) or fit(*args))
    first = weights(kept())
    [path] = (tmp_path / "kept").iterdir()
    assert path.name == "folder_a_b_c-0123456789abcdef-1x8x8-10classes-seed0.safetensors"
    assert torch.equal(weights(kept()), first) and len(fits) == 1
    content = path.read_bytes()
    other_format = content.replace(b'\\"format\\": 1', b'\\"format\\": 0')
    assert other_format != content
    for damage in (b"", b"not a net", content[: len(content) // 2], other_format):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="damaged|not a feature net"):
            feature_net.load_feature_net(path)
        assert torch.equal(weights(kept()), first)
        assert path.read_bytes() == content
    assert len(fits) == 5
    kept(dataclasses.replace(another, fingerprint="fedcba9876543210"))
    assert not kept(dataclasses.replace(another, num_classes=0)).supervised
    colour = data.Tensors(another.train.images.expand(-1, 3, -1, -1), another.train.target, 8)
    assert kept(dataclasses.replace(another, train=colour, channels=3)).channels == 3
    assert len(fits) == 8 and len(list((tmp_path / "kept").iterdir())) == 4


def test_runs_that_ask_together_fit_one_net(another, tmp_path, monkeypatch):
    fits, fit = [], feature_net.fit_feature_net

    def slow(*args):
        fits.append(1)
        time.sleep(0.3)
        return fit(*args)

    monkeypatch.setattr(metrics, "fit_feature_net", slow)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: metrics.yardstick(another, tmp_path / "kept", steps=3), range(3)))
    assert len(fits) == 1 and all(torch.equal(weights(net), weights(found[0])) for net in found)


def test_the_committed_net_is_for_the_set_and_not_for_its_name(another, tmp_path):
    """`--data medmnist:digits.npz` has the name of the built-in digits, and not their net."""
    committed = weights(feature_net.load_feature_net(feature_net.DIGITS_NET_FILE))
    assert torch.equal(weights(metrics.yardstick(data.load("digits"), tmp_path)), committed)
    assert not list(tmp_path.iterdir())
    fitted = metrics.yardstick(dataclasses.replace(another, name="digits"), tmp_path, steps=3)
    assert not torch.equal(weights(fitted), committed)


def test_labels_are_drawn_in_the_proportions_of_the_real_ones():
    def like(*sizes, count=1000):
        labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        return metrics.labels_like(labels, len(sizes), count)

    assert torch.equal(like(35, 36, 37), torch.arange(1000) % 3)  # a balanced set: in turn
    drawn = like(90, 9, 1, 0)
    assert drawn.bincount(minlength=4).tolist() == [900, 90, 10, 0]
    assert drawn[:100].bincount(minlength=4).tolist() == [90, 9, 1, 0]  # mixed, for a picture
    assert like(2, 1, count=4).tolist() == [0, 0, 1, 0] and len(like(70, 20, 10, count=7)) == 7
    assert metrics.labels_like(torch.zeros(5, dtype=torch.int64), 0, 3).tolist() == [0, 0, 0]


# ---- Generation --------------------------------------------------------------------------------------------


def test_floor_lies_far_below_ceiling(references):
    floor, ceiling = references["floor"], references["ceiling"]
    assert floor["frechet"] < ceiling["frechet"] / 100
    assert abs(floor["kid"]) < ceiling["kid"] / 20
    assert floor["sliced_wasserstein"] < ceiling["sliced_wasserstein"] / 10
    assert floor["label_accuracy"] > 0.98 and ceiling["label_accuracy"] < 0.3


def test_scores_worsen_with_damage(digits, net, references):
    images, labels, heldout, _ = digits
    noise = torch.randn(images.shape, generator=draw())
    noisy = [metrics.generation_scores(net, images + std * noise, labels, heldout) for std in (0.1, 0.3, 1.0)]
    for name in ("frechet", "kid", "sliced_wasserstein"):
        values = [references["floor"][name], *(scores[name] for scores in noisy)]
        assert values == sorted(values), name
    without_threes = metrics.generation_scores(net, images[labels != 3], labels[labels != 3], heldout)
    assert without_threes["frechet"] > 5 * references["floor"]["frechet"]
    assert without_threes["label_accuracy"] > 0.98
    assert metrics.generation_scores(net, images, (labels + 1) % 10, heldout)["label_accuracy"] < 0.05


def test_the_floor_draws_each_class_as_often_as_the_samples_do(digits, net):
    images, labels, heldout = digits[:3]
    order = torch.randperm(len(labels), generator=draw())
    chosen = metrics._as_often(order, labels, torch.tensor([3] * 40 + [7] * 10))
    assert torch.bincount(labels[chosen], minlength=10).tolist() == [0, 0, 0, 40, 0, 0, 0, 10, 0, 0]
    assert len(chosen.unique()) == len(chosen)
    few = order[labels[order] != 0][:20]  # without a zero: others stand in
    assert len(metrics._as_often(few, labels, torch.zeros(15).long()).unique()) == 15
    assert len(metrics._as_often(few, labels, torch.zeros(100).long()).unique()) == 20

    def floors(draws):
        return np.array([metrics.reference_scores(net, *digits[:3], **d)["floor"]["frechet"] for d in draws])

    # 300 at random meet classes more or less often than the held-out images have them, and score worse for it
    balanced = floors([{"seed": seed, "wanted": torch.arange(300) % 10} for seed in range(8)])
    at_random = []
    for seed in range(8):
        some = torch.randperm(len(labels), generator=draw(seed))[:300]
        scores = metrics.generation_scores(net, images[some], labels[some], heldout)
        at_random.append(scores["frechet"])
    assert balanced.mean() < 0.8 * np.mean(at_random)


def test_samples_are_clamped_for_all_but_the_pixel_figures(digits, net):
    images = digits[0][:100]
    scores = metrics.generation_scores(net, images * 3, digits[1][:100], digits[2])
    clamped = metrics.generation_scores(net, (images * 3).clamp(-1, 1), digits[1][:100], digits[2])
    assert (scores["pixel_min"], scores["pixel_max"]) == (-3, 3) and scores["pixel_outside"] > 0.1
    assert scores["pixel_mean"] == pytest.approx(3 * images.mean().item(), rel=1e-5)
    for name in ("frechet", "kid", "sliced_wasserstein", "label_accuracy"):
        assert scores[name] == clamped[name]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_pixel_is_not_scored_prettily(digits, net, bad):
    images, labels = digits[0][:100].clone(), digits[1][:100]
    whole = metrics.generation_scores(net, images, labels, digits[2])
    images[7, 0, 4, 4] = bad
    scores = metrics.generation_scores(net, images, labels, digits[2])
    assert scores["frechet"] == scores["kid"] == scores["sliced_wasserstein"] == math.inf
    assert not math.isfinite(scores["pixel_mean"])
    assert scores["label_accuracy"] == pytest.approx(whole["label_accuracy"] - 0.01)
    images[:] = bad
    labels = torch.zeros_like(labels)  # argmax of NaN logits is class 0
    assert metrics.generation_scores(net, images, labels, digits[2])["label_accuracy"] == 0
