"""The benchmark's own parts: what it measures is what it says.  No time is asserted."""

import torch

import bench
from model import attend
from sfi import REFERENCE, SFIConfig
from test_sfi import SMALL, token_text


def test_gathering_by_index_equals_reading_a_packed_block():
    """The row that shows what coalescing is worth must do the same work."""
    torch.manual_seed(0)
    q, K, V = torch.randn(2, 1, 6, 8), torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8)
    positions = torch.rand(3, 40).topk(12).indices.sort(-1).values
    start, length = torch.zeros(2, dtype=torch.int64), torch.tensor([12, 12])
    packed = [torch.stack([x[b, h, positions[h]] for h in range(3)]) for x in (K, V) for b in range(2)]
    want, _ = attend(q, torch.stack(packed[:2]), torch.stack(packed[2:]), start, length)
    got, _ = bench.gathering(positions, attend)(q, K, V, start, length)
    torch.testing.assert_close(got, want)


def test_a_row_of_the_table(tiny):
    """All kinds of steps are timed, and counts and bytes are the schedule's."""
    words = [0, 1, 2, 3, 5, 7] * 8  # a sentence starts every six tokens
    r = bench.measure(tiny, SMALL, 90, 2, words, token_text, REFERENCE)
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


def test_figure(tmp_path):
    row = {"context": 2048, "batch": 1, "dense_ms": 2.0, "fast_ms": 1.0, "slow_ms": 3.0, "gather_ms": 1.5}
    row |= {"loop_ms_per_token": 1.2, "floor_ms": 0.5, "transformers_ms": 4.0}
    rows = [row, row | {"context": 8192, "dense_ms": 4.0}, row | {"batch": 4}]
    bench.draw({"rows": rows, "dtype": "float32", "machine": "a machine"}, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 5000


def test_too_small_a_benchmark_is_refused(capsys):
    for argv in (["--steps", "5"], ["--contexts", "500"], ["--batches", "0"]):
        try:
            bench.main(argv)
        except SystemExit as e:
            assert e.code == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"--steps {2 * SFIConfig().max_interval}" in err
