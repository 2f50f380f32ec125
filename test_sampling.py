"""Sampling: greedy, the distribution, and noise that belongs to one place of one row."""

import pytest
import torch

from sfi import noise, sample


def test_noise_is_finite():
    """An exponential draw of exactly 0, once in 2^23 in fp32, would make a random token certain."""
    assert all(torch.isfinite(noise(0, 0, position, 151936)).all() for position in range(100))


def test_tiny_temperatures_do_not_overflow():
    for temperature in (1e-6, 1e-38, 1e-300):
        assert sample(torch.tensor([[1.0, 30.0, 20.0, 50.0]]), [0], temperature, 0) == [3]


def test_greedy_is_the_argmax():
    logits = torch.randn(3, 50)
    assert sample(logits, [0, 1, 2], 0.0, 0) == logits.argmax(-1).tolist()


def test_sampling_follows_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    drawn = torch.tensor([sample(logits, [i], 0.7, 3)[0] for i in range(20000)])
    share = torch.bincount(drawn, minlength=4) / 20000
    torch.testing.assert_close(share, (logits[0] / 0.7).softmax(0), atol=0.015, rtol=0)


def test_noise_depends_on_seed_row_and_position_alone():
    base = noise(1, 2, 3, 50)
    assert torch.equal(base, noise(1, 2, 3, 50)) and torch.equal(base[:20], noise(1, 2, 3, 20))
    for other in (noise(2, 2, 3, 50), noise(1, 3, 3, 50), noise(1, 2, 4, 50), noise(1, 3, 2, 50)):
        assert not torch.isclose(base, other).any()


@pytest.mark.parametrize(
    "temperature, seed, message",
    [(-0.1, 0, "temperature = -0.1"), (float("nan"), 0, "temperature = nan"), (1, -1, "seed = -1")],
)
def test_sampling_errors(temperature, seed, message):
    with pytest.raises(ValueError, match=message):
        sample(torch.zeros(1, 4), [0], temperature, seed)


def test_logits_that_are_not_finite_are_an_error_not_token_0():
    with pytest.raises(ValueError, match="not finite"):
        sample(torch.tensor([[0.0, float("nan")]]), [0], 0.0, 0)
