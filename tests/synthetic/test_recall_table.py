"""The recall table: every number of the summary has a row, verdicts have three values."""

from collections import Counter

import pytest

from gatewright import cli
from gatewright.statistics import Interval
from synthetic.recall import arms, claims, judge, table
from synthetic.recall.flags import RunArgs

ARMED, BARE = "fixed/gated_deltanet+conv", "fixed/gated_deltanet"


def rows(arm: str, values: list[float], floor: float = 0.12) -> list[dict]:
    common = {"arm": arm, "floor": floor, "parameters": 1, "steps": 1}
    return [{**common, "seed": s, "accuracy": v} for s, v in enumerate(values)]


def found(of: list[dict], text: str, pairs: int = 32) -> dict:
    (one,) = [v for v in table.verdicts(of, pairs) if text in v["claim"]]
    return one


# ../shared/reference/recall.md, row by row: the paper's values.
REFERENCE = [
    *(0.983, 0.653, 0.390, 0.592, 0.151, 0.561, 0.518, 0.992, 0.958),  # K = 32
    *(0.998, 0.806, 1.0, 0.999, 0.849, 0.702, 0.623, 0.382),  # hardened, K = 16 and 32
    *[0.018, 0.018, 0.018, 1.0] * 3,  # the wall at three lengths
    *((7, 10), (6, 10), (1, 10), (4, 5), (0, 9), (0, 6), (6, 6)),
    *((3, 10), (1, 10), (0, 10), (9, 10), (9, 10), (0, 10)),  # collision keys
    *(1.0, 0.524, 0.214, 0.087, 0.980, 0.389, 0.152, 0.071),  # S5
    *(0.021, 1.0, 0.038, 0.068, 0.019, 0.008, 1024, 28_900, 29_300, 500),  # the summary's text
]


@pytest.mark.parametrize("pairs", [8, 16, 32])
def test_every_number_of_the_paper_has_one_row(pairs: int) -> None:
    numbers = claims.numbers(pairs)
    assert Counter(n.paper for n in numbers if n.paper is not None) == Counter(REFERENCE)
    every = arms.all_arms(pairs)
    for n in numbers:
        ways = [n.arm in every, bool(n.instead), n.ours is not None]
        assert sum(ways) == 1, n
    printed = table.number_rows(numbers, [])
    assert all((x["ours"] is None) == bool(x["instead"]) for x in printed)


def test_commands_given_instead_are_ones_that_run() -> None:
    given = [x.instead for k in (8, 16, 32) for x in (*claims.numbers(k), *claims.claims(k))]
    commands = {x for x in given if x}
    assert len(commands) > 20
    for command in commands:
        program, flags = command.split(" run ")
        assert program == "python -m synthetic.recall"
        cli.parse(RunArgs, flags.split(), prog="run").arm()


@pytest.mark.parametrize("pairs", [16, 32])
def test_claims_name_arms_and_no_trained_arm_goes_unjudged(pairs: int) -> None:
    every = arms.all_arms(pairs)
    stated = claims.claims(pairs)
    named = {arm for c in stated for arm in (c.a, c.b) if arm}
    assert named == set(every)
    assert len({c.text for c in stated}) == len(stated)
    for c in stated:
        assert bool(c.a) != bool(c.instead), c
        assert bool(c.b) == (c.expect in ("greater", "equal", "not_less")) or not c.a, c
        assert not c.paper or len(c.paper) == 2 - (c.expect in ("never", "solved")), c
    for name, arm in every.items():
        assert arm.settings()["steps"] >= 1000, name
    assert {n.split("/")[0] for n in every} == set(arms.PARTS)


def test_the_papers_numbers_belong_to_their_k() -> None:
    class_claims = {}
    for k in (8, 16, 32):
        (c,) = [c for c in claims.mqar_claims("fixed", k) if "no class claim" in c.text]
        class_claims[k] = (c.expect, c.paper)
    assert class_claims == {
        8: ("not_less", ()),
        16: ("equal", (0.999, 0.998)),
        32: ("greater", (0.849, 0.702)),
    }
    assert not any(c.paper for c in claims.mqar_claims("shuffled", 32))

    def shown(k: int) -> dict:
        return {n.arm: n.paper for n in claims.numbers(k) if n.arm.startswith("fixed")}

    assert shown(8) == {}
    assert shown(16)["fixed/rwkv7"] == 0.998
    assert ARMED not in shown(16)
    assert shown(32)["fixed/rwkv7"] == 0.653


@pytest.mark.parametrize(
    ("expect", "difference", "p", "want"),
    [
        ("greater", (0.3, 0.2, 0.4), 0.01, "holds"),
        ("greater", (0.3, -0.1, 0.7), 0.2, "undecided"),
        ("greater", (-0.3, -0.4, -0.2), 0.01, "contradicted"),
        ("equal", (0.01, -0.05, 0.07), 0.5, "holds"),
        ("equal", (0.01, -0.3, 0.3), 0.9, "undecided"),
        ("equal", (0.01, -0.05, 0.12), 0.9, "undecided"),
        ("equal", (-0.01, -0.12, 0.05), 0.9, "undecided"),
        ("equal", (0.3, 0.2, 0.4), 0.01, "contradicted"),
        ("not_less", (0.3, 0.2, 0.4), 0.01, "holds"),
        ("not_less", (-0.02, -0.09, 0.05), 0.4, "holds"),
        ("not_less", (-0.02, -0.3, 0.3), 0.4, "undecided"),
        ("not_less", (-0.3, -0.4, -0.2), 0.01, "contradicted"),
    ],
)
def test_a_claim_holds_is_contradicted_or_undecided(
    expect: str, difference: tuple[float, float, float], p: float, want: str
) -> None:
    assert judge.compared(expect, Interval(*difference), p) == want


@pytest.mark.parametrize(
    ("expect", "accuracy", "want"),
    [
        ("never", [0.02, 0.02, 0.03, 0.02, 0.02], "holds"),
        ("never", [0.02, 0.02, 0.03, 0.02, 1.0], "contradicted"),
        ("never", [0.1, 0.7, 0.3, 0.6, 0.2], "undecided"),
        ("solved", [1.0, 1.0, 0.99, 1.0, 1.0], "holds"),
        ("solved", [1.0, 1.0, 0.3, 1.0, 1.0], "undecided"),
        ("solved", [0.2, 0.2, 0.3, 0.2, 0.1], "contradicted"),
    ],
)
def test_one_arms_lock_ins(expect: str, accuracy: list[float], want: str) -> None:
    assert judge.alone(expect, accuracy, 0.12) == want


def test_intervals() -> None:
    welch = judge.welch_interval([0.5, 0.6, 0.7], [0.1, 0.1, 0.4])
    # scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    assert (welch.low, welch.high) == pytest.approx((0.0452, 0.7548), abs=1e-4)
    assert judge.welch_interval([1.0, 1.0], [1.0, 1.0]) == Interval(0.0, 0.0, 0.0)
    assert judge.welch_interval([1.0], [0.5, 0.6]).low == -1
    # Newcombe 1998, table II, example (a): 56/70 - 48/80.
    newcombe = judge.newcombe_interval((56, 70), (48, 80))
    assert (newcombe.low, newcombe.high) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    mean = judge.mean_interval([0.9, 1.0, 1.0, 1.0])
    assert (mean.low, mean.high) == (pytest.approx(0.8954, abs=1e-4), 1.0)
    assert judge.mean_interval([0.4]) == Interval(0.4, 0.0, 1.0)


def test_verdicts_follow_the_statistics() -> None:
    clear = rows(ARMED, [0.9, 0.92, 0.95, 0.97, 0.99]) + rows(BARE, [0.4, 0.5, 0.55, 0.45, 0.5])
    one = found(clear, "lifts the delta-rule cell [fixed]")
    assert (one["verdict"], one["holds"], one["paper"]) == ("holds", True, [0.983, 0.518])
    assert one["p"] == one["p_holm"] == pytest.approx(2 / 252)
    assert "paper 0.983 against 0.518" in one["detail"]
    close = rows(ARMED, [0.5, 0.4, 0.6, 0.5]) + rows(BARE, [0.5, 0.45, 0.55, 0.5])
    assert found(close, "lifts the delta-rule cell [fixed]")["verdict"] == "undecided"
    other = found(clear, "lifts the diagonal cell [fixed]")
    assert (other["verdict"], other["holds"]) == ("not run", False)
    assert other["detail"].startswith("table --parts fixed; paper 0.592")


def test_lock_ins_are_compared_by_fishers_test() -> None:
    lifted = rows("lift/dense-1 curriculum", [1.0] * 7 + [0.02] * 3)
    dense = rows("lift/dense-4 only", [1.0] + [0.02] * 9)
    also = rows("lift/dense-4 curriculum", [1.0] * 6 + [0.02] * 4)
    one = found(lifted + dense + also, "lifts lock-in at L = 64")
    assert one["p"] == pytest.approx(0.02, abs=0.001)
    assert one["p_holm"] == pytest.approx(2 * one["p"])  # two comparisons were made
    assert one["verdict"] == "holds"
    # The paper's own 6 of 10 against 7 of 10 is no evidence for equality.
    assert found(lifted + dense + also, "dense supervision adds")["verdict"] == "undecided"


def test_with_three_seeds_nothing_is_decided() -> None:
    three = rows("wall/attention", [1.0] * 3) + rows("wall/rwkv7", [0.02] * 3)
    assert {v["verdict"] for v in table.verdicts(three)} == {"undecided", "not run"}
    five = rows("wall/attention", [1.0] * 5) + rows("wall/rwkv7", [0.02] * 5)
    assert [v["verdict"] for v in table.verdicts(five)].count("holds") == 3


def test_seeds_that_agree_at_the_floor_decide_nothing() -> None:
    """Arms that end a tenth of a per cent above the floor differ significantly, and say nothing."""

    def found(gain: float) -> str:
        armed = rows("s5/gated_deltanet+conv 16", [0.0710 + gain + i / 1e5 for i in range(5)], 0.07)
        bare = rows("s5/gated_deltanet 16", [0.0701 + i / 1e5 for i in range(5)], 0.07)
        by = {v["claim"]: v for v in table.verdicts([*armed, *bare])}
        line = by["S5: arming helps at depth 16"]
        assert line["p"] < 0.05
        return line["verdict"]

    assert (found(0.0), found(0.02)) == ("undecided", "holds")


def test_two_arms_that_learnt_nothing_are_not_equal_but_at_the_wall() -> None:
    def verdict(a: str, b: str, text: str, values: list[float]) -> str:
        return found(rows(a, values) + rows(b, values), text)["verdict"]

    nothing, learnt = [0.02, 0.03, 0.02, 0.03], [0.52, 0.53, 0.52, 0.53]
    mqar = ("fixed/deltanet", BARE, "decay costs nothing [fixed]")
    assert verdict(*mqar, nothing) == "undecided"
    assert verdict(*mqar, learnt) == "holds"
    s5 = ("s5/gated_deltanet+conv 8", "s5/gated_deltanet 8", "free at depth 8")
    assert verdict(*s5, nothing) == "undecided"
    assert verdict(*s5, learnt) == "holds"
    wall = ("wall/mamba2+conv", "wall/gated_deltanet+conv", "the same for mamba2")
    assert verdict(*wall, nothing) == "holds"


def test_arms_lines_count_lock_ins_and_leave_out_what_diverged(
    capsys: pytest.CaptureFixture,
) -> None:
    lifted = rows("lift/dense-1 curriculum", [1.0, 0.9, 0.1, 1.0, 0.2], floor=0.28)
    lifted[1] |= {"accuracy_one_query": 0.5, "rebinding": 0.04, "nothing_bound": True}
    bad = {"arm": lifted[0]["arm"], "seed": 5, "failed": "seed 5: not finite at step 3"}
    numbers = claims.numbers(32)
    (line,) = table.arm_rows([*lifted, bad], numbers)
    assert (line["n"], line["failed"], line["locked_in"]) == (5, 1, 3)
    assert line["mean"] == pytest.approx(0.64)
    assert line["paper"] == (7, 10)
    table.print_table([line])
    shown = capsys.readouterr().out.splitlines()[1]
    for part in ("0.640", "3 of 5", "0.280", "0.040", "7 of 10", "one query 0.500", "1 diverged"):
        assert part in shown
    assert "nothing bound in 1 of 5" in shown
    by = {x["value"]: x for x in table.number_rows(numbers, [line])}
    assert by["lock-in, L = 64: dense-1 curriculum"]["ours"] == (3, 5)
    assert by["the same cell lifted (best seed)"]["ours"] == 1.0
    assert by["lock-in, L = 512: gated"]["ours"] is None
    table.print_numbers(list(by.values()))
    out = capsys.readouterr().out
    assert "not run       lock-in, L = 512: gated, paper 6 of 6: python -m" in out
    assert "floor, K = 32: strongest without binding: 0.120, paper 0.068" in out


def test_survivors_are_the_claims_that_both_layouts_test(capsys: pytest.CaptureFixture) -> None:
    high, low = [0.9, 0.92, 0.95, 0.97, 0.99], [0.4, 0.5, 0.55, 0.45, 0.5]
    both = rows(ARMED, high) + rows(BARE, low)
    both += rows("shuffled/gated_deltanet+conv", low) + rows("shuffled/gated_deltanet", high)
    both += rows("fixed/mamba2+conv", high) + rows("fixed/mamba2", low)  # in one layout only
    (kept,) = table.survivors(table.verdicts(both))
    assert kept["claim"] == "convolution lifts the delta-rule cell"
    assert (kept["verdict_fixed"], kept["verdict_shuffled"]) == ("holds", "contradicted")
    assert kept["gap_shuffled"] == pytest.approx(-kept["gap_fixed"])
    table.print_survivors([kept])
    assert "holds         contradicted  convolution lifts" in capsys.readouterr().out


def test_the_longest_arms_start_first() -> None:
    every = arms.all_arms(32)
    order = sorted(every, key=lambda n: -arms.work(every[n]))
    assert {n.split("/")[0] for n in order[:12]} == {"s5", "wall", "lift", "collision"}
    assert order.index("s5/gated_deltanet 16") < order.index("fixed/mamba2+conv")
    assert order.index("collision/causal ramp") < order.index("fixed/gated_deltanet+conv")
