"""The Selector against a slow and obvious loop version, in float64, written from the formulas."""

import math

import pytest
import torch

import selector
from selector import BETA, fusion_weight, power_mean, structural_prior, suppress_neighbours, top_n
from sfi import SFIConfig

STEPS = selector.SELECTORS["paper"].steps


def select(scores, key_norm, n, cfg, past=None):
    past = torch.zeros_like(key_norm) if past is None else past
    return selector.select_row(scores, key_norm, past, n, cfg)


def paper(scores, key_norm, steps=None, fusion="arithmetic"):
    return selector.paper(scores, key_norm, None, SFIConfig(selector="paper", steps=steps, fusion=fusion))


def follow(scores, past, steps=None):
    return selector.follow(scores, None, past, SFIConfig(steps=steps))


def loop_paper(scores, key_norm, n, steps, fusion):
    """Sets of the n selected candidate indices per KV head, and the final log scores, by plain loops over
    lists.
    """
    K, R, M = scores.shape
    final = []
    for h in range(K):
        p = []
        for r in range(R):
            row = [float(x) for x in scores[h, r]]
            total = math.fsum(math.exp(x - max(row)) for x in row)
            p.append([math.exp(x - max(row)) / total for x in row])
        alpha = 0.5 if "power_mean" in steps else 1.0
        f = [(sum(p[r][j] ** alpha for r in range(R)) / R) ** (1 / alpha) for j in range(M)]
        f = [x / math.fsum(f) for x in f]
        s = f
        if "prior" in steps:
            weights = []
            for j in range(M):
                x = j / (M - 1) if M > 1 else 0.0
                place = -(-math.log(0.6) / 0.9) * x**1.8 + 0.4 * math.log(max(1 - x, 1e-12))
                weights.append(float(key_norm[h, j]) ** -0.5 * math.exp(0.7 * place))
            r = [x / math.fsum(weights) for x in weights]
            ff, fr, rr = (
                math.fsum(a * b for a, b in zip(u, v, strict=True)) for u, v in ((f, f), (f, r), (r, r))
            )
            best = (ff - fr) / (ff - 2 * fr + rr) if ff - 2 * fr + rr else 0.0
            lam = min(max(best, 0.0), 0.35 if R == 1 else 0.25)
            if fusion == "arithmetic":
                s = [(1 - lam) * a + lam * b for a, b in zip(f, r, strict=True)]
            else:
                s = [a ** (1 - lam) * b**lam for a, b in zip(f, r, strict=True)]
                s = [x / math.fsum(s) for x in s]
        s = [math.log(x) for x in s]
        if "nms" in steps:
            s = [s[j] - (max(s[max(j - 16, 0) : j + 17]) - s[j]) for j in range(M)]
        final.append(s)
    if "exclusive" in steps and K > 2:
        shares = [[math.exp(final[h][j] / 2) for h in range(K)] for j in range(M)]
        final = [
            [final[h][j] + 0.85 * math.log(max(shares[j][h] / sum(shares[j]), 1e-12)) for j in range(M)]
            for h in range(K)
        ]
    return [set(sorted(range(M), key=lambda j: (-s[j], j))[:n]) for s in final], final


def loop_follow(scores, past, n, steps):
    """Sets of the n selected candidate indices per KV head, and the new past."""
    K, R, M = scores.shape
    p = scores.double().softmax(-1).tolist()
    f = [[sum(p[h][r][j] for r in range(R)) / R for j in range(M)] for h in range(K)]
    if "past" in steps:
        old = past.double().tolist()
        total = [sum(f[h]) + 9 * sum(old[h]) for h in range(K)]
        f = past = [[(f[h][j] + 9 * old[h][j]) / total[h] for j in range(M)] for h in range(K)]
    if "heads" in steps:
        f = [[f[h][j] / 2 + sum(f[i][j] for i in range(K)) / K / 2 for j in range(M)] for h in range(K)]
    chosen = []
    for h in range(K):
        score = list(f[h])
        if "followers" in steps:
            for j in range(M):
                strongest = max((p[h][r][i] for r in range(R) for i in range(max(j - 24, 0), j)), default=0.0)
                score[j] = max(score[j], 0.01 * strongest)
        chosen.append(set(sorted(range(M), key=lambda j, s=score: (-s[j], j))[:n]))
    return chosen, past


def evidence(K, R, M, seed=0):
    g = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(K, R, M, generator=g), 1 + torch.rand(K, M, generator=g)


def sets(slots, first):
    assert (slots[:, 1:] > slots[:, :-1]).all(), "unique and ascending"
    return [set((row - first).tolist()) for row in slots]


SWITCHES = [STEPS, *(tuple(s for s in STEPS if s != off) for off in STEPS), ()]


@pytest.mark.parametrize("fusion", ["arithmetic", "geometric"])
@pytest.mark.parametrize("steps", SWITCHES, ids=lambda steps: "+".join(steps) or "none")
@pytest.mark.parametrize(
    "K, R, M, n", [(3, 6, 200, 41), (5, 1, 77, 76), (2, 4, 130, 10), (3, 2, 1, 1), (4, 3, 33, 33)]
)
def test_paper_equals_loops(K, R, M, n, steps, fusion):
    scores, key_norm = evidence(K, R, M)
    cfg = SFIConfig(n_sink=3, selector="paper", steps=steps, fusion=fusion)
    want, log_s = loop_paper(scores, key_norm, n, steps, fusion)
    got = paper(scores, key_norm, steps, fusion)
    torch.testing.assert_close(got, torch.tensor(log_s), atol=1e-4, rtol=1e-5)
    assert sets(select(scores, key_norm, n, cfg), 3) == want


FOLLOW = selector.SELECTORS["follow"].steps


@pytest.mark.parametrize("steps", [FOLLOW, *(tuple(s for s in FOLLOW if s != off) for off in FOLLOW), ()])
@pytest.mark.parametrize(
    "K, R, M, n",
    [(3, 6, 200, 41), (5, 1, 77, 76), (1, 4, 130, 10), (3, 2, 1, 1), (4, 3, 33, 33), (2, 2, 6, 3)],
)
def test_follow_equals_loops_over_three_refreshes(K, R, M, n, steps):
    """Each with more candidates than the one before; the peaks are high enough to pull their followers in."""
    cfg, past = SFIConfig(n_sink=3, selector="follow", steps=steps), torch.zeros(K, M + 20)
    old = past.clone()
    for i in range(3):
        scores, key_norm = evidence(K, R, M + 10 * i, seed=i)
        scores *= 2
        seen = slice(0, M + 10 * i)
        want, new = loop_follow(scores, old[:, seen], n, steps)
        slots = select(scores, key_norm, n, cfg, past[:, seen])
        assert slots.shape == (K, n) and sets(slots, 3) == want
        old[:, seen] = torch.as_tensor(new)
        torch.testing.assert_close(past, old)


def test_follow_step_by_step():
    """One head looks at candidate 100, the other nowhere in particular; earlier refreshes looked at 50."""
    p = torch.full((2, 3, 400), 1e-4)
    p[0, 1, 100] = 0.9
    p /= p.sum(-1, keepdim=True)
    past = torch.zeros(2, 400)
    past[:, 50] = 1.0
    chosen = lambda steps, past: top_n(follow(p.log(), past.clone(), steps), 26).tolist()
    assert chosen((), past) == [[*range(25), 100], list(range(26))]
    assert chosen(("past",), past) == [[*range(24), 50, 100], [*range(25), 50]]
    assert chosen(("heads",), past) == [[*range(25), 100]] * 2
    assert chosen(("followers",), past)[0] == [0, *range(100, 125)]
    assert chosen(FOLLOW, past)[0] == [50, *range(100, 125)] and chosen(FOLLOW, past)[1][-2:] == [50, 100]
    torch.testing.assert_close(follow(p.log(), torch.zeros(2, 400), ()), p.mean(1))


def test_rows_of_a_batch_have_their_own_candidates():
    """Each as alone; a row that is not refreshed gets nothing and forgets nothing."""
    torch.manual_seed(0)
    cfg = SFIConfig(n_sink=3)
    scores = torch.randn(3, 2, 4, 60)
    key_norm, past = torch.rand(3, 2, 80), torch.rand(3, 2, 80)
    before = past.clone()
    slots = selector.select(scores, key_norm, past, torch.tensor([50, -1, 40]), 10, cfg)
    for b, high in ((0, 50), (2, 40)):
        part = slice(3, high)
        want = select(
            scores[b][..., part], key_norm[b, :, part], 10, cfg, alone := before[b, :, part].clone()
        )
        assert torch.equal(slots[b], want) and torch.equal(past[b, :, part], alone)
    assert slots[1].eq(0).all() and torch.equal(past[1], before[1])


def test_ties_go_to_the_lower_position():
    score = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 1.0, 5.0, 5.0, 9.0]])
    assert top_n(score, 2).tolist() == [[1, 2], [0, 1], [0, 4]]
    assert top_n(score, 5).tolist() == [[0, 1, 2, 3, 4]] * 3
    assert top_n(score, 0).shape == (3, 0)


def test_every_switch_changes_the_scores():
    scores, key_norm = evidence(3, 6, 200)
    whole = paper(scores, key_norm)
    for off in STEPS:
        assert not torch.allclose(whole, paper(scores, key_norm, tuple(s for s in STEPS if s != off)))
    assert not torch.allclose(whole, paper(scores, key_norm, fusion="geometric"))


def test_exclusivity_is_skipped_for_two_heads():
    scores, key_norm = evidence(2, 6, 200)
    assert torch.equal(paper(scores, key_norm), paper(scores, key_norm, STEPS[:3]))


def test_fusion_weight():
    log_f, log_r = torch.randn(2, 1, 50).log_softmax(-1)
    assert fusion_weight(log_f, log_f, 0.25).item() == 0.0  # 0/0
    assert fusion_weight(
        torch.tensor([[0.0, -90.0]]), torch.tensor([[0.5, 0.5]]).log(), 0.35
    ).item() == pytest.approx(0.35)
    free = fusion_weight(log_f, log_r, 1.0)
    f, r = log_f.exp(), log_r.exp()
    size = lambda lam: ((1 - lam) * f + lam * r).square().sum().item()
    assert size(free) <= min(size(free + 1e-2), size(free - 1e-2)) or free.item() in (0.0, 1.0)


def test_parts_of_the_paper_have_the_stated_shape():
    assert BETA == pytest.approx(0.5676, abs=1e-4)
    prior = structural_prior(torch.tensor([[1.0, 1.0, 1.0], [4.0, 1.0, 1.0]]))
    torch.testing.assert_close(prior.exp().sum(-1), torch.ones(2))
    assert (prior[0, :-1] > prior[0, 1:]).all()  # against the recent end
    assert prior[1, 0] - prior[0, 0] < prior[1, 1] - prior[0, 1]  # against large norms
    log_s = torch.zeros(1, 40)
    log_s[0, 20] = 1.0
    lowered = suppress_neighbours(log_s)
    assert (
        lowered[0, 20] == 1.0
        and (lowered[0, 4:20] == -1).all()
        and (lowered[0, 21:37] == -1).all()
        and (lowered[0, :4] == 0).all()
    )
    torch.testing.assert_close(
        power_mean(torch.log(torch.tensor([[[0.5, 0.5], [0.1, 0.9]]])), 1.0).exp(), torch.tensor([[0.3, 0.7]])
    )


def test_extreme_scores_stay_finite_and_exact():
    """Probabilities that underflow must still be ordered: everything stays in the log domain."""
    scores = torch.arange(300.0).expand(3, 2, 300) * -2.0
    cfg = SFIConfig(n_sink=0, selector="paper", steps=("power_mean",))
    slots = select(scores.contiguous(), torch.ones(3, 300), 100, cfg)
    assert slots.tolist() == [list(range(100))] * 3
    assert torch.isfinite(paper(scores, torch.zeros(3, 300))).all()


def test_follow_without_any_attention_takes_the_lowest():
    """Softmax underflows to exact zeros beyond 1e-38: such tokens are equal, and a first past is no 0/0."""
    scores = torch.full((3, 2, 300), -500.0)
    scores[:, :, 7] = 500.0
    past = torch.zeros(3, 300)
    slots = select(scores, torch.ones(3, 300), 28, SFIConfig(n_sink=0), past)
    assert slots.tolist() == [[0, 1, 2, *range(7, 32)]] * 3 and torch.equal(past, scores[:, 0].softmax(-1))


@pytest.mark.parametrize("name", selector.SELECTORS)
def test_scores_in_the_cache_dtype_are_widened_first(name):
    scores, key_norm = evidence(3, 6, 400)
    cfg = SFIConfig(selector=name)
    narrow = scores.bfloat16()
    assert torch.equal(select(narrow, key_norm, 128, cfg), select(narrow.float(), key_norm, 128, cfg))


def test_more_than_there_is_cannot_be_selected():
    with pytest.raises(ValueError, match="n = 9 of 8 candidates"):
        select(torch.zeros(1, 1, 8), torch.ones(1, 8), 9, SFIConfig())
