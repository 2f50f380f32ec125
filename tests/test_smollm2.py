"""Real models: SmolLM2 and Qwen2.5 against transformers, and what is still found in 3,000 tokens.

These tests fetch SmolLM2 once (93 MB); where that is impossible they are skipped, and say so.
"""

import random

import pytest
import torch

from command import story
from command.report import Tally
from command.text import Text
from loops import LOOPS
from model import ModelConfig
from sampling import Sampling
from sfi import Engine, SFIConfig, Step, decode
from study import exactness
from tests.tiny import transformers_model

DENSE = SFIConfig(policy="dense")


def greedy(model, text, ids, new, cfg=DENSE):
    sizes = dict(max_length=len(ids) + new, new_tokens=new)
    engine = Engine(model, cfg, text.token_text, ops=LOOPS, **sizes)
    return [token for step in decode(engine, [ids], max_new_tokens=new) for token in step.tokens[0]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen25"])
def test_greedy_tokens_equal_transformers(name, request):
    model, text, folder = request.getfixturevalue(name)
    hf = transformers_model(folder, torch.float32)
    prompts = [
        text.encode("The three laws of motion are"),
        text.encode(text.chat("Write a short poem about the sea and a lighthouse.")),
        text.encode(text.chat(story.story(seed=3, paragraphs=6) + "\n\nWho is mentioned in this text?")),
    ]
    for ids in prompts:
        with torch.no_grad():
            out = hf.generate(
                torch.tensor([ids]),
                max_new_tokens=64,
                min_new_tokens=64,
                do_sample=False,
                repetition_penalty=1.0,
                use_cache=True,
                eos_token_id=None,
            )
        want, got = out[0, len(ids) :].tolist(), greedy(model, text, ids, 64)
        if got != want:  # allowed only where the two best logits nearly tie
            at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
            with torch.no_grad():
                best = hf(torch.tensor([ids + want[:at]])).logits[0, -1].topk(2).values
            print(f"token {at}: {got[at]} against {want[at]}, logits {best.tolist()}")
            assert best[0] - best[1] < 1e-3


def pass_key_prompt(text: Text, depth: float, tokens=3000):
    """(ids of about `tokens` tokens of prose with a pass key at the fraction `depth`, the key)."""
    rng = random.Random(f"{depth:.3f}")
    key = "".join(rng.choice("0123456789") for _ in range(5))
    paragraphs = story.story(seed=rng.randrange(1000), paragraphs=40).split("\n\n")
    while len(text.encode("\n\n".join(paragraphs))) > tokens - 70:
        paragraphs.pop()
    paragraphs.insert(
        round(depth * len(paragraphs)), f"The pass key is {key}. Remember it. {key} is the pass key."
    )
    question = "\n\n".join(paragraphs) + "\n\nWhat is the pass key?"
    return text.encode(text.chat(question) + "The pass key is"), key


@pytest.mark.slow
def test_pass_keys(smollm2):
    """14 keys at depths of 5 to 90 %: dense finds all, so does the default at N = 256 and 128, windows hardly
    any.
    """
    model, text, _ = smollm2
    configs = {
        "dense": DENSE,
        "default 256": SFIConfig(n_select=256),
        "default 128": SFIConfig(n_select=128),
        "window": SFIConfig(policy="window"),
    }
    found, fast = dict.fromkeys(configs, 0), 0
    for i in range(14):
        ids, key = pass_key_prompt(text, 0.05 + 0.85 * i / 13)
        assert 2850 <= len(ids) <= 3050
        base = Engine(model, DENSE, text.token_text, ops=LOOPS, max_length=len(ids) + 8, new_tokens=8)
        base.prefill(0, ids[:-32])
        for name, cfg in configs.items():
            engine, tally = base.fork(cfg), Tally()
            logits, _ = engine.prefill(0, ids[-32:])
            out = [logits.argmax().item()]
            while len(out) < 8:
                logits, did = engine.step(out[-1:])
                tally.add(Step([out[-1:]], did, out[-1:]))
                out.append(logits.argmax().item())
            found[name] += key in text.tokenizer.decode(out).replace(" ", "")
            fast += tally.fast
    print(found)
    assert fast == 3 * 14 * 7  # every step but dense's was fast: the answers come from the compact memory
    assert found["dense"] == 14
    assert found["default 256"] == 14
    assert found["default 128"] == 14
    assert found["window"] <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, i, n_select, temperature",
    [("continuation", 15, 64, 0.0), ("list", 22, 256, 0.8), ("chat", 14, 64, 0.8)],
)
def test_exact_mode_gives_dense_decodings_tokens(smollm2, kind, i, n_select, temperature):
    """Greedy and sampled, of prompts that `exactness.py` runs at full length, 40 of them."""
    model, text, _ = smollm2
    ids, new = exactness.prompt(kind, i, text), 50
    bench = exactness.Bench(model, text, False)
    bench.read(ids, new)
    cfg = SFIConfig(exact=True, n_select=n_select, n_recent=128, draft_cost=0.3)
    sampling = Sampling(temperature, seed=1)
    (dense, *_), (exact, tally, _) = [exactness.decoded(bench, c, new, sampling) for c in (DENSE, cfg)]
    place = exactness.parted(bench, ids, dense, exact, sampling)
    print(f"{tally.accepted} of {tally.drafted} drafts right, {tally.slow} passes; parts at {place}")
    assert place is None or place[1] < exactness.TIE
    assert len(exact) == new and tally.accepted > 15


def test_the_folder_is_a_published_ones_twin(smollm2):
    """8K context, tied head, chat template, the end token of its chat, digits one by one."""
    model, text, folder = smollm2
    config: ModelConfig = model.config
    assert (
        config.model_type,
        config.num_hidden_layers,
        config.max_positions,
        config.tie_word_embeddings,
    ) == ("llama", 30, 8192, True)
    assert text.stop_ids == {text.tokenizer.token_to_id("<|im_end|>")}
    assert text.chat("Hello").endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert [text.token_text(i) for i in text.encode(" in 1984")] == [" in", " ", "1", "9", "8", "4"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
