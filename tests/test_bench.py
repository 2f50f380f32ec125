"""The benchmark's own parts: what it measures is what it says.  No time is asserted."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from command.config import model_config
from memory import REFERENCE
from model import attend
from sfi import Engine, SFIConfig
from study import bench, bench_exact, peers, steps, versus
from tests.conftest import ROOT
from tests.tiny import SMALL, token_text


def test_costs_of_passes_leave_the_row_as_long_as_it_was(tiny):
    cfg = replace(SMALL, exact=True)
    engine = steps.filled(Engine(tiny, cfg, token_text, max_length=130, new_tokens=30), 90)
    costs = bench_exact.pass_costs(engine, [1, 3, 4] * 8)
    assert list(costs) == list(bench_exact.PASSES) and min(costs.values()) > 0
    assert engine.rows[0].tokens == [0] * 90


def test_gathering_by_index_equals_reading_a_packed_block():
    """The row that shows what coalescing is worth must do the same work."""
    torch.manual_seed(0)
    q, K, V = torch.randn(2, 1, 6, 8), torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8)
    positions = torch.rand(3, 40).topk(12).indices.sort(-1).values
    start, length = torch.zeros(2, dtype=torch.int64), torch.tensor([12, 12])
    packed = [torch.stack([x[b, h, positions[h]] for h in range(3)]) for x in (K, V) for b in range(2)]
    want, _ = attend(q, torch.stack(packed[:2]), torch.stack(packed[2:]), start, length)
    got, _ = steps.gathering(positions, attend)(q, K, V, start, length)
    torch.testing.assert_close(got, want)


def test_a_row_of_the_table(tiny):
    """All kinds of steps are timed, and counts and bytes are the schedule's."""
    words = [0, 1, 2, 3, 5, 7] * 8  # a sentence starts every six tokens
    r = steps.measure(tiny, SMALL, 90, 2, words, token_text, REFERENCE)
    assert {"dense", "fast", "slow", "gather"} == set(r["quartiles_ms"])
    assert all(r[f"{name}_ms"] > 0 for name in r["quartiles_ms"])
    assert (r["context"], r["batch"]) == (90, 2) and 20 < r["visible"] < 40
    assert 1 < r["mean_interval"] <= SMALL.max_interval + 1
    weights, kv, n = (
        sum(p.nbytes for p in tiny.parameters()),
        tiny.config.kv_bytes(tiny.dtype) * 2,
        r["mean_interval"],
    )
    want = (weights + 90 * kv) / (weights + ((n - 1) * r["visible"] + 90) * kv / n)
    assert abs(r["byte_speedup"] - want) < 1e-9 and r["attention_gb_s"] > 0


@pytest.mark.parametrize("chance", [0.0, 0.7, 1.0])
def test_rounds_of_exact_mode(tiny, chance):
    """Drafts are right as often as asked for, and tokens, drafts and bytes are those of the rounds."""
    cfg = SFIConfig(n_sink=2, n_select=10, n_recent=8, align=4, max_interval=9, min_gap=9, n_evidence=5)
    cfg = replace(cfg, exact=True, draft_cost=0.05)
    engine = steps.filled(Engine(tiny, cfg, token_text, max_length=500, new_tokens=400), 90)
    r = bench_exact.measure(engine, [1.0] * 6, [chance] * 6, [1, 3, 4, 6] * 50, 30)
    m, made = r["drafts_per_pass"], r["tokens_per_pass"]
    assert made == (1 if chance == 0 else m + 1 if chance == 1 else made) and made <= m + 1
    assert m == 9 if chance == 1 else m < 9
    assert r["dense_ms"] > 0 and r["pass_ms"] > 0 and r["speedup"] > 0
    weights, kv = tiny.weight_bytes(tiny.dtype, 1)[1], tiny.config.kv_bytes(tiny.dtype)
    if chance == 1:  # a fast step sees the sinks, those selected, 8 to 11 recent, the pass's and its own
        low, high = (made * (weights + 90 * kv) / ((m + 1) * weights + (90 + m * v) * kv) for v in (42, 30))
        assert low < r["byte_speedup"] < high


def test_figure(tmp_path):
    row = {"context": 2048, "batch": 1, "dense_ms": 2.0, "fast_ms": 1.0, "slow_ms": 3.0, "gather_ms": 1.5}
    row |= {"loop_ms_per_token": 1.2, "floor_ms": 0.5, "transformers_ms": 4.0}
    rows = [row, row | {"context": 8192, "dense_ms": 4.0}, row | {"batch": 4}]
    bench.draw({"rows": rows, "dtype": "float32", "machine": "a machine"}, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 5000


def test_lists_add_up_when_a_flag_is_repeated():
    assert bench.parser().parse_args("--contexts 2048 --contexts 8192 9000".split()).contexts == [
        2048,
        8192,
        9000,
    ]
    assert bench.parser().parse_args([]).batches == [1, 4]


def test_the_smallest_context_that_is_allowed_is_measured(tiny):
    """`--contexts 1812` passed its own check and died in topk."""
    cfg = replace(SMALL, align=4)
    least = cfg.n_sink + cfg.n_select + cfg.n_recent + cfg.align
    for context in (least, least + 1, least + 8):
        r = steps.measure(tiny, cfg, context, 1, [0, 1, 2, 3, 5, 7] * 4, token_text, REFERENCE)
        assert r["gather_ms"] > 0 and r["context"] == context


def test_a_peer_that_is_not_there_is_said_before_the_run(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as e:
        bench.main(["--peer"])
    assert e.value.code == 2 and "--peer: import of transformers halted" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["transformers", "llama_cpp_bf16", "llama_cpp_q8_0"])
def test_a_peer_does_the_same_work(name):
    """The same weights, so the same logits, as far as its dtypes allow; a cache as long as asked for."""
    if "llama" in name:
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    c = replace(model_config(steps.QWEN3_06B), vocab_size=300, hidden_size=128, intermediate_size=256)
    c = replace(c, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    torch.manual_seed(0)
    model = steps.random_model(c, torch.float32, torch.device("cpu"))
    engine = Engine(model, SFIConfig(policy="dense"), token_text, max_length=32, new_tokens=8)
    tokens = torch.randint(300, (20,)).tolist()
    want = engine.prefill(0, tokens)[0][0].numpy()
    other = peers.Peers(model, [24], 8)
    step = other.steps(24)[name]
    assert not other.steps(1 << 20)
    if name == "transformers":
        assert step().logits.shape == (1, 1, 300) and step().past_key_values.get_seq_length() == 26
        return
    it = other.llama_cpp[name]
    assert it.length == 24
    step()
    assert it.length == 25
    it.resize(0)
    assert abs(it.feed(tokens) - want).max() < (0.05 if "bf16" in name else 0.1) * want.std()


def test_versus_gives_both_checkouts_the_same_flags(monkeypatch, tmp_path, capsys):
    (tmp_path / "requirements.txt").touch()
    asked = []

    def bench_of(folder, flags):
        asked.append((folder, flags))
        row = dict.fromkeys((*versus.TIMES, *versus.READS), 2.0 if folder == tmp_path else 1.0)
        return {"bandwidth_gb_s": 1.0, "rows": [{"batch": 1, "context": 8192} | row]}

    monkeypatch.setattr(versus, "bench", bench_of)
    out = tmp_path / "runs.json"
    versus.main([str(tmp_path), "--rounds", "2", "--out", str(out), "--", "--steps", "130"])
    assert asked == [(tmp_path, ["--steps", "130"]), (ROOT, ["--steps", "130"])] * 2
    assert capsys.readouterr().out.count("2 1 2.00x") == 4 and len(json.loads(out.read_text())["here"]) == 2


def test_too_small_a_benchmark_is_refused(capsys):
    for argv in (["--steps", "5"], ["--contexts", "500"], ["--batches", "0"]):
        try:
            bench.main(argv)
        except SystemExit as e:
            assert e.code == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"--steps {2 * SFIConfig().max_interval}" in err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no interpreter")
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_the_check_for_gpus_on_toy_sizes(capsys):
    """All of `study.bench --check` in Triton's interpreter: it must find nothing wrong and time every row."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from study import gpu_check

    tiny = dict(vocab_size=97, hidden_size=48, intermediate_size=32, num_hidden_layers=1)
    tiny |= dict(num_attention_heads=3, num_key_value_heads=3, head_dim=16)
    sizes = gpu_check.Sizes(
        dtype=torch.float32, cfg=SMALL, base=tuple(tiny.items()), repeats=1, n_kv=2, length=256, far=4000,
        layers=1, prompts=(26, 21), new=4, n_select=5, n_recent=8, speed=(64,), batch=1, shares=(0.5,),
        kept_of=(64, 1),
        contexts=(40,), models=(("0.6b", 1),), steps=12,
    )  # fmt: skip
    result = gpu_check.main(torch.device("cpu"), sizes)
    assert all(row["error"] <= row["allowed"] for row in result["checks"]), result["checks"]
    assert len(result["checks"]) == 18 and "WRONG" not in capsys.readouterr().out
    assert result["rows"][0]["fast_ms"] > 0 and result["attention"][0]["of_copy"] > 0
