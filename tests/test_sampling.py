"""Sampling: greedy, the distribution, and noise that belongs to one place of one row."""

import re

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from command.config import sampling_settings
from sampling import GREEDY, Sampling, kept, noise, noisy


def keeps(p, **settings):
    """The tokens kept of the probabilities p."""
    return kept(torch.tensor([p]).log(), Sampling(temperature=1.0, **settings))[0].nonzero()[:, 0].tolist()


def test_top_p_keeps_the_token_that_crosses_p_and_at_least_one():
    """Reported against nano-vllm, mlx-lm and TransformerLens: the crossing token was lost, or all were."""
    p = [0.1, 0.2, 0.3, 0.4]
    assert keeps(p, top_p=0.6) == [2, 3]
    assert keeps(p, top_p=0.39) == keeps(p, top_p=0.0) == [3]
    assert keeps(p, top_p=0.95) == keeps(p, top_p=1.0) == [0, 1, 2, 3]


def test_top_k_and_min_p():
    p = [0.1, 0.2, 0.3, 0.4]
    assert keeps(p, top_k=2) == [2, 3] and keeps(p, top_k=1) == [3]
    assert keeps(p, top_k=0) == keeps(p, top_k=4) == keeps(p, top_k=1000) == [0, 1, 2, 3]
    assert keeps(p, min_p=0.6) == [2, 3] and keeps(p, min_p=1.0) == [3]


def test_order_each_filter_reads_what_the_one_before_left():
    p = [0.1, 0.2, 0.3, 0.4]
    # After top-k 2 the two hold 3/7 and 4/7, so top-p 0.55 is reached by the first alone.
    assert keeps(p, top_k=2, top_p=0.55) == [3] and keeps(p, top_p=0.55) == [2, 3]
    # The temperature comes first: at 0.25 the likeliest holds 0.72, at 4 only 0.3.
    log_p = torch.tensor([p]).log()
    few, all_four = (kept(log_p, Sampling(temperature=T, top_p=0.7)).sum().item() for T in (0.25, 4.0))
    assert (few, all_four) == (1, 3)


def test_filters_equal_transformers():
    """Its warpers in its order; no equal logits, which the two count differently."""
    torch.manual_seed(0)
    logits = torch.randn(6, 300) * 3
    for T in (0.3, 1.0, 1.7):
        for k, p, m in ((0, 0.9, 0.0), (20, 0.95, 0.0), (7, 1.0, 0.0), (0, 1.0, 0.2), (40, 0.8, 0.05)):
            warped = TemperatureLogitsWarper(T)(None, logits)
            warped = TopKLogitsWarper(k)(None, warped) if k else warped
            warped = TopPLogitsWarper(p)(None, warped)
            warped = MinPLogitsWarper(m)(None, warped)
            got = kept(logits, Sampling(temperature=T, top_k=k, top_p=p, min_p=m))
            assert torch.equal(got, warped.isfinite()), (T, k, p, m)


def test_only_kept_tokens_are_drawn_and_in_proportion():
    logits, s = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log(), Sampling(temperature=1.0, top_p=0.6, seed=5)
    drawn = torch.tensor([noisy(logits, [(0, i)], s)[0].argmax() for i in range(5000)])
    share = torch.bincount(drawn, minlength=4) / 5000
    torch.testing.assert_close(share, torch.tensor([0, 0, 3 / 7, 4 / 7]), atol=0.025, rtol=0)


def test_defaults_come_from_generation_config():
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampling_settings(own, seed=3) == Sampling(0.6, 20, 0.95, 0.0, 3)
    assert sampling_settings(own, top_k=0, temperature=1.2, min_p=None) == Sampling(1.2, 0, 0.95)
    assert sampling_settings(own, temperature=0.0).temperature == 0  # greedy, whatever the file says
    assert sampling_settings({"do_sample": True}) == Sampling(temperature=1.0)
    for greedy in (
        {},
        {"temperature": 0.6, "top_p": 0.9},
        own | {"do_sample": False},
        own | {"do_sample": None},
    ):
        assert sampling_settings(greedy) == GREEDY
    assert sampling_settings({}, top_k=0, top_p=1.0, min_p=0.0) == GREEDY  # off is no filter
    assert sampling_settings({}, temperature=0.7, top_p=0.9) == Sampling(0.7, top_p=0.9)


def test_settings_are_named_in_the_report():
    assert str(GREEDY) == str(Sampling(seed=4)) == "greedy"
    assert str(Sampling(0.6, 20, 0.95)) == "temperature 0.6, top-k 20, top-p 0.95, seed 0"


@pytest.mark.parametrize(
    "config, given, message",
    [
        (
            {"do_sample": True, "temperature": "hot"},
            {},
            "generation_config.json: temperature = 'hot'; allowed",
        ),
        ({"do_sample": True, "top_p": 7}, {}, "generation_config.json: top_p = 7; allowed"),
        ({}, {"top_p": 0.9}, "top_p = 0.9 at temperature 0, which is greedy; give a temperature above 0"),
        ({"do_sample": True}, {"temperature": 0.0, "min_p": 0.1}, "min_p = 0.1 at temperature 0"),
    ],
)
def test_defaults_that_make_no_sense(config, given, message):
    with pytest.raises(ValueError, match=message):
        sampling_settings(config, **given)


def test_noise_is_finite():
    """An exponential draw of exactly 0, once in 2^23 in fp32, would make a random token certain."""
    assert all(torch.isfinite(noise(0, 0, position, 151936)).all() for position in range(100))


def test_tiny_temperatures_do_not_overflow():
    for temperature in (1e-6, 1e-38, 1e-300):
        assert noisy(torch.tensor([[1.0, 30.0, 20.0, 50.0]]), [(0, 0)], Sampling(temperature)).argmax() == 3
        assert kept(torch.tensor([[1.0, 30.0, 20.0, 50.0]]), Sampling(temperature, top_p=0.9)).sum() == 1


def test_greedy_is_the_argmax():
    logits = torch.randn(3, 50)
    assert torch.equal(noisy(logits, [(0, 0), (1, 1), (2, 2)], GREEDY), logits)


def test_sampling_follows_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    drawn = torch.tensor([noisy(logits, [(0, i)], Sampling(0.7, seed=3))[0].argmax() for i in range(20000)])
    share = torch.bincount(drawn, minlength=4) / 20000
    torch.testing.assert_close(share, (logits[0] / 0.7).softmax(0), atol=0.015, rtol=0)


def test_noise_depends_on_seed_row_and_position_alone():
    base = noise(1, 2, 3, 50)
    assert torch.equal(base, noise(1, 2, 3, 50)) and torch.equal(base[:20], noise(1, 2, 3, 20))
    for other in (noise(2, 2, 3, 50), noise(1, 3, 3, 50), noise(1, 2, 4, 50), noise(1, 3, 2, 50)):
        assert not torch.isclose(base, other).any()


@pytest.mark.parametrize(
    "setting, message",
    [
        (
            dict(temperature=-0.1),
            "temperature = -0.1; allowed is a number from 0 (the likeliest token) to 1e9",
        ),
        (dict(temperature=1e10), "temperature = 10000000000.0; allowed"),
        (dict(temperature=float("nan")), "temperature = nan"),
        (dict(temperature=float("inf")), "temperature = inf"),
        (dict(temperature=True), "temperature = True"),
        (dict(top_k=-1), "top_k = -1; allowed is a whole number, 0"),
        (dict(top_k=2.5), "top_k = 2.5"),
        (dict(top_p=1.01), "top_p = 1.01; allowed is a number from 0 to 1"),
        (dict(min_p=-0.1), "min_p = -0.1; allowed is a number from 0"),
        (dict(seed=-1), "seed = -1"),
        (dict(seed=2**64), "seed = 18446744073709551616"),
    ],
)
def test_sampling_errors(setting, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Sampling(**setting)
