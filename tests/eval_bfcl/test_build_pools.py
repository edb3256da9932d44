import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from eval_bfcl import build_pools, pools
from gatewright import artifact, bfcl, cli
from gatewright.errors import UserError


def names_of(folder: Path, k: int, seed: int = 0) -> dict[str, list[str]]:
    rows = pools.read_jsonl(folder / pools.cell_name(k, seed) / "pools.jsonl")
    return {r["id"]: r["names"] for r in rows}


def test_the_file_contract(make_pools: Callable[..., Path]) -> None:
    folder = make_pools(split="simple_python", retriever="bm25", pool_sizes="1,8,24", seeds="0,1")
    for k in (1, 8, 24):
        for seed in (0, 1):
            rows = pools.read_jsonl(folder / f"pool_size={k}/seed={seed}/pools.jsonl")
            assert len(rows) == 400
            for row in rows:
                assert (row["k"], row["seed"], row["beta"]) == (k, seed, None)
                assert len(row["names"]) == len(set(row["names"])) == k
                assert row["gold"] in row["names"]
                assert row["retrieved"] == (row["gold_rank"] <= k) == (not row["injected"])
            assert sum(r["retrieved"] for r in rows) == {1: 310, 8: 385, 24: 390}[k]
    manifest = artifact.read_manifest(folder, "pools")
    assert manifest["extra"]["tool_names"] == 370
    assert manifest["extra"]["recall_percent"]["pool_size=24 seed=0"] == 97.5
    artifact.verify(folder)


def test_every_pool_shows_the_questions_own_schema_and_best_comes_first(
    make_pools: Callable[..., Path],
) -> None:
    folder = make_pools(split="simple_python", retriever="bm25", pool_sizes="1,8,24", seeds="0,1")
    questions = {q.id: q for q in bfcl.load_split("simple_python")}
    _, cells = pools.load(folder)
    assert [c.k for c in cells] == [1, 1, 8, 8, 24, 24]
    own_schemas = 0
    for cell in cells[-2:]:
        for row in cell.rows:
            tools = cell.tools(row)
            assert [t["name"] for t in tools] == row.names
            own = questions[row.id].tools[0]
            assert own in tools
            own_schemas += own != cell.schemas[(own["name"], None)]
            if row.gold_rank == 1:
                assert row.names[0] == row.gold
    assert own_schemas == 2 * 30  # 57 questions share 27 names; the first of each has its own


def test_pools_of_growing_k_are_nested(make_pools: Callable[..., Path]) -> None:
    folder = make_pools(
        split="simple_python", retriever="plackett_luce", beta=10.0, pool_sizes="4,16,64"
    )
    rows = {
        k: pools.read_jsonl(folder / pools.cell_name(k, 0) / "pools.jsonl") for k in (4, 16, 64)
    }
    nested = 0
    for small, middle, large in zip(*rows.values(), strict=True):
        if small["retrieved"]:
            assert large["names"][:16] == middle["names"]
            assert middle["names"][:4] == small["names"]
            nested += 1
        assert small["gold_rank"] == large["gold_rank"]
    assert nested > 200


def test_one_noise_serves_every_beta_and_large_beta_is_bm25(
    make_pools: Callable[..., Path],
) -> None:
    def built(retriever: str, **more: object) -> dict[str, list[str]]:
        flags = {"split": "simple_java", "pool_sizes": "8", "seeds": "3", **more}
        return names_of(make_pools(retriever=retriever, **flags), 8, 3)

    def pl(beta: float) -> dict[str, list[str]]:
        return built("plackett_luce", beta=beta)

    bm25 = built("bm25")
    assert pl(0.0) == built("random")  # the same Gumbel noise
    # Tools of equal score are ordered by noise at any finite beta, by the corpus in BM25.
    distinct = distinct_scores("simple_java", 8)
    assert len(distinct) > 20
    large = pl(1e12)
    assert all(large[id] == bm25[id] for id in distinct)

    def overlap(a: dict[str, list[str]], b: dict[str, list[str]]) -> float:
        return float(np.mean([len(set(a[i]) & set(b[i])) for i in a]))

    near = [overlap(pl(beta), bm25) for beta in (0.05, 10.0, 1000.0)]
    assert near[0] < near[1] < near[2] <= 8
    assert overlap(pl(10.0), pl(11.0)) > overlap(pl(10.0), bm25)  # paired draws move little


def distinct_scores(split: str, k: int) -> list[str]:
    """Return questions whose k + 1 best tools have scores that differ."""
    questions = bfcl.load_split(split)
    corpus = build_pools.Corpus(questions)
    out = []
    for q in questions:
        best = np.sort(corpus.pool.scores(q.query, corpus.own(q)).round(9))[::-1][: k + 1]
        if len(set(best.tolist())) == k + 1:
            out.append(q.id)
    return out


def test_random_pools_are_uniform(make_pools: Callable[..., Path]) -> None:
    folder = make_pools(
        split="simple_python", retriever="random", pool_sizes="37", seeds="0,1,2,3,4"
    )
    ranks = [
        r["gold_rank"]
        for seed in range(5)
        for r in pools.read_jsonl(folder / pools.cell_name(37, seed) / "pools.jsonl")
    ]
    counts = np.histogram(ranks, bins=np.arange(0.5, 371, 37))[0]
    assert chisquare(counts).pvalue > 1e-3


def test_the_oracle_puts_the_correct_tool_first(make_pools: Callable[..., Path]) -> None:
    folder = make_pools(split="multiple", retriever="oracle", pool_sizes="1,4")
    for row in pools.read_jsonl(folder / pools.cell_name(1, 0) / "pools.jsonl"):
        assert row["names"] == [row["gold"]]
    questions = {q.id: q for q in bfcl.load_split("multiple")}
    for row in pools.read_jsonl(folder / pools.cell_name(4, 0) / "pools.jsonl"):
        own = [t["name"] for t in questions[row["id"]].tools]
        assert set(own) <= set(row["names"][: len(own)])


def test_questions_with_several_correct_tools(make_pools: Callable[..., Path]) -> None:
    folder = make_pools(split="parallel_multiple", retriever="bm25", pool_sizes="4,8")
    several = 0
    for row in pools.read_jsonl(folder / pools.cell_name(4, 0) / "pools.jsonl"):
        assert set(row["golds"]) <= set(row["names"])
        assert row["gold_rank"] == max(row["gold_ranks"])
        assert row["retrieved"] == all(r <= 4 for r in row["gold_ranks"])
        several += len(row["golds"]) > 1
    assert several > 100


def test_irrelevance_pools_hold_no_correct_tool(make_pools: Callable[..., Path]) -> None:
    folder = make_pools(split="irrelevance", retriever="bm25", pool_sizes="8")
    for row in pools.read_jsonl(folder / pools.cell_name(8, 0) / "pools.jsonl"):
        assert row["gold"] is row["gold_rank"] is None
        assert not row["injected"]
        assert len(row["names"]) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"split": "simple_pyton"}, "did you mean 'simple_python'"),
        ({"retriever": "oracel"}, "--retriever oracel .*'oracle'"),
        ({"retriever": "plackett_luce"}, "with --beta"),
        ({"beta": 1.0}, "--beta: only --retriever plackett_luce"),
        ({"utility": "rank"}, "--utility: only"),
        ({"retriever": "plackett_luce", "beta": float("nan")}, "--beta nan"),
        ({"retriever": "plackett_luce", "beta": float("inf")}, "--beta inf"),
        ({"retriever": "plackett_luce", "beta": 1.0, "utility": "cosine"}, "--utility cosine"),
        ({"pool_sizes": "1,x"}, "--pool-sizes 1,x: 'x' is not a whole number"),
        ({"pool_sizes": "0"}, "--pool-sizes 0: each must be at least 1"),
        ({"pool_sizes": "371"}, "has only 370 tool names"),
        ({"seeds": "-1"}, "--seeds"),
        ({"split": "parallel_multiple", "pool_sizes": "1"}, "needs pools of at least 4"),
    ],
)
def test_bad_flags_are_one_line_and_leave_nothing(
    flags: dict[str, object], message: str, tmp_path: Path
) -> None:
    good = {"split": "simple_python", "retriever": "bm25", "pool_sizes": "1,8"}
    with pytest.raises(UserError, match=message):
        build_pools.main(build_pools.Args(out=tmp_path / "out", **{**good, **flags}))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--split", "simple_javascript", "--retriever", "bm25", "--pool-sizes", "1,4"]
    argv += ["--out", str(tmp_path / "p")]
    with pytest.raises(SystemExit) as stop:
        cli.run(build_pools.main, build_pools.Args, prog="build_pools", argv=argv)
    assert stop.value.code == 0
    assert "50 questions of simple_javascript, 50 tool names" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.run(build_pools.main, build_pools.Args, prog="build_pools", argv=argv)
    assert stop.value.code == 2


def test_pools_are_the_same_in_another_process(tmp_path: Path) -> None:
    flags = ["--split", "simple_javascript", "--retriever", "plackett_luce", "--beta", "2"]
    flags += ["--pool-sizes", "4", "--seeds", "7", "--out"]
    texts = []
    for n, hash_seed in enumerate(("1", "2")):
        out = tmp_path / str(n)
        subprocess.run(
            [sys.executable, "-m", "eval_bfcl.build_pools", *flags, str(out)],
            check=True,
            capture_output=True,
            env={"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin"},
            cwd=Path(build_pools.__file__).parent.parent,
        )
        texts.append((out / "pool_size=4/seed=7/pools.jsonl").read_text())
    assert texts[0] == texts[1]
    assert json.loads(texts[0].splitlines()[0])["utility"] == "minmax"
