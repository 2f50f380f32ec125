"""What this project claims, a short test each; what each part must do to the last detail is in `tests/`.

The models are tiny and random: L = 2 layers, K = 3 KV heads, G = 5 query heads each, D = 16.  Token t has the
text WORDS[t % 10], so that sentences end.  Under the configuration SMALL a prompt of 60 tokens sees fast and
slow steps: 2 sinks, 10 selected, 8 recent.

What must be equal, and how closely, in fp32:
    logits, ours and transformers                       1e-4
    whole prompt, chunks, token by token                1e-5
    engine and a naive simulation with masks            1e-4
    nothing to select, and dense decoding, one row      bit for bit
    a row in a batch and alone                          the same tokens
    exact mode and dense decoding                       the same tokens, unless its two best are within 1e-3
"""

import json
from dataclasses import replace

import pytest
import torch

import generate
from cpu import CPU
from loops import LOOPS
from memory import REFERENCE
from model import NotFinite
from sampling import GREEDY, Sampling
from selector import SELECTORS
from sfi import Engine, SFIConfig, decode
from tests.naive import CONFIGS, Naive
from tests.tiny import (
    SMALL,
    decoded,
    dense_logits,
    load_folder,
    make_checkpoint,
    make_folder,
    poisoned,
    prompt,
    tiny_model,
    token_text,
)
from trigger import Trigger, look

DENSE = SFIConfig(policy="dense")
EXACT = replace(SMALL, exact=True, draft_cost=0.0)
SAMPLED = Sampling(0.8, top_k=30, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


# The model


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama"])
def test_logits_are_those_of_transformers(tmp_path, kind):
    theirs = make_checkpoint(tmp_path, kind, heads=6, kv_heads=2, head_dim=16, hidden_size=48)
    tokens = torch.tensor([prompt(37), prompt(37, 1)])
    with torch.no_grad():
        want = theirs(tokens).logits
    torch.testing.assert_close(dense_logits(load_folder(tmp_path), tokens), want, atol=1e-4, rtol=0)


def test_a_prompt_may_be_read_whole_in_chunks_or_token_by_token(tiny):
    tokens = prompt(83)
    want = dense_logits(tiny, torch.tensor([tokens]))[0, -1]
    one_by_one = [[token] for token in tokens]
    keys = []
    for pieces, chunk in (
        ([tokens], 512),
        ([tokens], 13),
        ([tokens[:40], tokens[40:]], 512),
        (one_by_one, 1),
    ):
        engine = Engine(tiny, replace(SMALL, policy="dense"), token_text, max_length=83, new_tokens=0)
        for piece in pieces:
            logits, _ = engine.prefill(0, piece, chunk=chunk)
        torch.testing.assert_close(logits[0], want, atol=1e-5, rtol=0)
        keys.append(engine.cache.k)
    torch.testing.assert_close(keys[-1], keys[0], atol=1e-5, rtol=0)


# Slow steps and fast steps


@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_is_what_masks_over_the_whole_cache_would_give(tiny, name):
    """`tests/naive.py` keeps all keys in lists and hides by a mask what a step may not see."""
    cfg = CONFIGS[name]
    naive, engine = Naive(tiny, cfg), poisoned(tiny, cfg, max_length=100, new_tokens=40)
    close = lambda got, want: torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    close(engine.prefill(0, prompt(60))[0][0], naive.prefill(prompt(60)))
    for i, token in enumerate(prompt(40, seed=1)):
        logits, (did,) = engine.step([token])
        close(logits[0], naive.step(token))
        assert did.reason == naive.reasons[-1] and did.length == 61 + i
        if did.reason == "fast":
            assert did.visible == len(naive.visible[0][0]) <= engine.cache.cap
    kinds = {"dense": {"dense"}, "window": {"fast"}, "never": {"fast"}, "fixed": {"fast", "interval"}}
    assert set(naive.reasons) == kinds.get(cfg.policy, {"fast", "sentence", "interval"})


def test_a_fast_step_reads_the_compact_memory_alone(tiny):
    """With NaN in all of the full cache seven fast steps give the same logits; the slow one cannot."""
    plain, blind = (Engine(tiny, SMALL, token_text, max_length=90, new_tokens=20) for _ in range(2))
    for engine in (plain, blind):
        engine.prefill(0, prompt(60))
    blind.cache.k[..., blind.cache.cap :, :] = float("nan")
    for token in (0, 1, 0, 1, 0, 1, 0):
        (want, _), (got, (did,)) = plain.step([token]), blind.step([token])
        assert did.reason == "fast" and torch.equal(got, want)
    assert plain.step([1])[1][0].reason == "interval"
    with pytest.raises(NotFinite):
        blind.step([1])


def test_nothing_is_evicted(tiny):
    """All keys and values of the prompt are as they were read, and a slow step sees every one of them."""
    engine = Engine(tiny, SMALL, token_text, max_length=100, new_tokens=40)
    engine.prefill(0, prompt(60))
    whole = slice(engine.cache.cap, engine.cache.cap + 60)
    before = engine.cache.k[..., whole, :].clone(), engine.cache.v[..., whole, :].clone()
    did = [engine.step([token])[1][0] for token in prompt(40, seed=1)]
    assert torch.equal(engine.cache.k[..., whole, :], before[0])
    assert torch.equal(engine.cache.v[..., whole, :], before[1])
    slow = [x for x in did if x.reason != "fast"]
    assert slow and all(x.visible == x.length for x in slow)


@pytest.mark.parametrize(
    "delay, pieces, slow",
    [
        (16, [".", " The", " age", " of", " Ann", " is", " not", " told"], [" is"]),  # after the first name
        (16, [".", " Ann", " Lee", "'s", " age", " is"], [" age"]),
        (
            3,
            [".", " The", " age", " of", " the", " old", " sea"],
            [" the"],
        ),  # nothing is named: in the end there
        (0, [".", " The", " age", " of", " Ann", " is"], [" The"]),  # the paper's rule
        (0, ["She", ' "', "go", '."', " Then"], [" Then"]),
        (0, ["e", ".g", ".", " the", " 98", ".", "6"], []),
        (0, ["。", "他"], ["他"]),
    ],
)
def test_a_slow_step_comes_when_a_sentence_has_named_something(delay, pieces, slow):
    trigger, found = Trigger(), []
    for piece in pieces:
        trigger, looks = look(trigger, piece, delay)
        found += [piece] * looks
    assert found == slow


def test_as_long_as_all_fits_it_is_dense_decoding_bit_for_bit(tiny):
    for n in (1, 2, 3, 9, 10, 22):
        (got, steps, _), (want, _, _) = (decoded(tiny, cfg, [prompt(n)], 24 - n) for cfg in (SMALL, DENSE))
        assert got == want and {did.reason for s in steps[1:] for did in s.rows} <= {"short", "first"}
        sfi, dense = (Engine(tiny, cfg, token_text, max_length=24, new_tokens=9) for cfg in (SMALL, DENSE))
        assert torch.equal(sfi.prefill(0, prompt(n))[0], dense.prefill(0, prompt(n))[0])
        assert torch.equal(sfi.step([7])[0], dense.step([7])[0])


# The Selector


def test_evidence_is_the_true_attention_of_the_last_queries(tiny):
    """After QK-norm and RoPE, over the candidates alone, of the last n_evidence queries of the prompt."""
    seen, q, k, tokens = [], {}, {}, prompt(61)

    def select(scores, key_norm, *rest):
        seen.append((scores.clone(), key_norm.clone()))
        return REFERENCE.select(scores, key_norm, *rest)

    ops = REFERENCE._replace(select=select)
    Engine(tiny, SMALL, token_text, max_length=70, new_tokens=5, ops=ops).prefill(0, tokens, chunk=20)

    def attention(layer, queries, keys, values):
        q[layer], k[layer] = queries[0], keys[0]  # (T, H, D), (T, K, D)
        wide = [x.repeat_interleave(5, dim=2) for x in (keys, values)]  # (1, T, H, D)
        heads = [x.transpose(1, 2) for x in (queries, *wide)]
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)

    tiny(torch.tensor([tokens]), torch.arange(61)[None], attention)
    low, high, W = SMALL.n_sink, SMALL.recent_start(61), SMALL.n_evidence
    for layer, (scores, key_norm) in enumerate(seen):
        torch.testing.assert_close(key_norm[0, :, :61], k[layer].norm(dim=-1).T, atol=1e-5, rtol=0)
        for head in range(15):
            rows = scores[0, head // 5, head % 5 * W : (head % 5 + 1) * W, low:high]
            want = q[layer][61 - W :, head] @ k[layer][low:high, head // 5].T / 16**0.5
            torch.testing.assert_close(rows.softmax(-1), want.softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("selector", SELECTORS)
def test_selected_are_candidates_each_once_in_order(tiny, selector):
    """Neither sinks nor the recent window, which the memory shows anyway; each KV head chooses for itself."""
    seen = []
    engine = Engine(tiny, replace(SMALL, selector=selector), token_text, max_length=100, new_tokens=40)
    engine.cache.observe = lambda row, layer, did, slots, scores: seen.append((did, slots))
    list(decode(engine, [prompt(60)], max_new_tokens=40))
    assert len(seen) > 4
    for did, slots in seen:
        assert slots.shape == (3, 10) and (slots.diff(dim=-1) > 0).all()
        assert slots.min() >= 2 and slots.max() < did.recent_start <= did.visible - 8


# Batches, sampling, backends


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["sentence-follow", "sentence-paper", "reread", "window", "dense"])
def test_rows_of_a_batch_are_independent(tiny, name, sampling):
    """Unequal lengths, rows that end at different times, slow beside fast: each row as if it were alone."""
    prompts, stop_ids = [prompt(5, 1), prompt(61, 2), prompt(31, 3)], set(range(3, 97, 10))
    together, steps, _ = decoded(tiny, CONFIGS[name], prompts, 40, sampling=sampling, stop_ids=stop_ids)
    for b, ids in enumerate(prompts):  # noise belongs to the row, so the row keeps its place
        rows = [[0]] * b + [ids]
        alone, others, _ = decoded(tiny, CONFIGS[name], rows, 40, sampling=sampling, stop_ids=stop_ids)
        assert together[b] == alone[b]
        done = slice(len(alone[b]))
        assert [s.rows[b] for s in steps][done] == [s.rows[b] for s in others][done]
    if name in ("sentence-follow", "sentence-paper", "reread"):
        assert any({"fast"} < {did.reason for did in s.rows} for s in steps[1:]), "no mixed step was tested"


@pytest.mark.parametrize("ops", [CPU, LOOPS], ids=["PyTorch", "Numba"])
@pytest.mark.parametrize("name", ["reread", "sentence-paper", "window", "never"])
def test_the_fast_formulations_give_the_references_tokens(tiny, name, ops):
    """On a CPU here; `tests/test_backends.py` holds the Triton kernels to the reference too."""
    prompts = [prompt(60), prompt(9, 1)]
    want, _, _ = decoded(tiny, CONFIGS[name], prompts, 30)
    assert decoded(tiny, CONFIGS[name], prompts, 30, ops=ops)[0] == want


# Exact mode


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ops", [REFERENCE, LOOPS], ids=["reference", "cpu"])
def test_exact_mode_gives_dense_decodings_tokens(tiny, ops, sampling):
    prompts = [prompt(60), prompt(9, 1), prompt(130, 2)]
    want, _, _ = decoded(tiny, DENSE, prompts, 60, sampling=sampling)
    got, steps, _ = decoded(tiny, EXACT, prompts, 60, sampling=sampling, ops=ops)
    did = [row for step in steps for row in step.rows]
    drafted, accepted = sum(row.drafted for row in did), sum(row.accepted for row in did)
    assert got == want and 0 < accepted < drafted


# The command


def test_the_command_answers_and_says_what_it_read(capsys, tmp_path):
    make_folder(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The sea was calm. " * 12)
    argv = ["--ckpt", tmp_path / "model", "--prompt", tmp_path / "text.txt", "--json", "--dtype", "float32"]
    argv += ["--n-select", 20, "--n-recent", 16, "--max-interval", 8, "--min-gap", 2, "--max-new-tokens", 20]
    with pytest.raises(SystemExit) as end:
        generate.main([str(x) for x in argv])
    out, err = capsys.readouterr()
    r = json.loads(out.splitlines()[-1])
    assert end.value.code == 0 and out.startswith(r["text"][0] + "\n")
    assert r["fast_steps"] > r["slow_steps"] > 0 and r["kv_bytes_read"] < r["kv_bytes_dense"]
    assert f"steps: {r['fast_steps']} fast, " in err and "KV cache read: " in err


def test_bad_input_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as end:
        generate.main(["--n-select", "-5"])
    out, err = capsys.readouterr()
    message = "n_select = -5; allowed is a whole number of tokens, 0 or more"
    assert (end.value.code, out, err) == (2, "", f"generate.py: error: {message}\n")
