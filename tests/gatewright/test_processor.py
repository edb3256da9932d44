import pytest

from gatewright import processor


@pytest.mark.parametrize(
    ("flags", "slow"),
    [
        ("flags : sse2 avx avx2 fma", True),
        ("flags : avx2 avx512f avx512bw", False),
        ("flags : avx2 avx512f avx512bw avx512_bf16 amx_bf16", False),
        ("Features : fp asimd bf16", False),
        ("arm64", False),  # where nothing tells
    ],
)
def test_bf16_is_slow_on_x86_without_avx512(
    flags: str, slow: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processor, "features", lambda: f"model name : X\n{flags}")
    assert processor.bf16_is_slow() == slow
    processor.warn_of_slow_bf16("--dtype float32", "cuda")
    assert capsys.readouterr().err == ""
    processor.warn_of_slow_bf16("--dtype float32", "cpu")
    said = capsys.readouterr().err
    assert said.count("\n") == slow
    assert ("--dtype float32 is the fast way here" in said) == slow


def test_this_processor_is_read() -> None:
    assert processor.features()
