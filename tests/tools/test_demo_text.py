"""Prose is found, code is not, nothing repeats, and the same files give the same bytes."""

import json
import subprocess
import sys

import pytest

from gatewright import artifact
from gatewright.documents import chunks
from gatewright.errors import UserError
from tools import demo_text, prose
from tools.debian_docs import unpack

NUMPYDOC = '''
"""Solve a linear system of equations by elimination.

This function solves the system for you, and it is careful with small pivots.  See
:func:`scipy.linalg.solve <scipy>` and the `user guide`_ for what it does in *all* cases.

Parameters
----------
a : array_like
    The matrix of the system, which must be square and of full rank.
b : (N,) ndarray
    short

Examples
--------
>>> solve(a, b)  # this is a comment that reads like a sentence of the English language.
array([1., 2.]) and this line is what the doctest prints, which is not prose for us.

The code that follows is in a literal block, which the reader should not see at all::

    for this in the block: print("it is a sentence of the code and not of the prose.")

.. code-block:: python

    # This is also a comment in the code that we would not like to see in the text.

.. note:: one
    The note is a part of the prose, and it should be kept by the reader of the text.
"""


def f():
    """The function's own docstring is the second of the texts that are found in here."""
    x = """A string that is not a docstring is not for us, even if it is a sentence."""
    return x


class C:
    if True:

        def method(self):
            """A method that is defined in a branch is found as well as any of the others."""
'''


def test_docstrings_in_order_and_nothing_else():
    found = list(prose.docstrings(NUMPYDOC))
    assert [d.split()[0] for d in found] == ["Solve", "The", "A"]
    assert list(prose.docstrings("def broken(:")) == []
    assert list(prose.docstrings("(" * 10_000 + ")" * 10_000)) == []


def test_paragraphs_keep_prose_and_cut_code():
    first = next(prose.docstrings(NUMPYDOC))
    assert list(prose.paragraphs(first)) == [
        "Solve a linear system of equations by elimination.",
        "This function solves the system for you, and it is careful with small pivots. "
        "See scipy.linalg.solve and the user guide for what it does in all cases.",
        "The matrix of the system, which must be square and of full rank.",
        "The code that follows is in a literal block, which the reader should not see at all:",
        "The note is a part of the prose, and it should be kept by the reader of the text.",
    ]


def test_markdown():
    text = (
        "# The title of this page is not a part of the prose\n\n"
        "Read [the guide](https://x.org/a_b) before you start, because **it** says what is in the "
        "`config` of the run.\n\n```python\n# it is a comment that is in the code of the page.\n"
        "```\n| it is | a table | of it |\n\n- The item of the list is a sentence of its own too."
    )
    assert list(prose.paragraphs(text)) == [
        "Read the guide before you start, because it says what is in the config of the run.",
        "The item of the list is a sentence of its own too.",
    ]


def test_html():
    page = (
        "<html><head><title>It is the title of the page and not for us.</title></head><body>"
        "<h1>The heading is not in the text that is kept.</h1><p>The paragraph is kept, and "
        "<b>its</b> entities &amp; tags are read as they should be.</p>"
        "<pre>the code is not in the text that is kept, so it is left out.</pre>"
    )
    assert list(prose.html_paragraphs(page)) == [
        "The paragraph is kept, and its entities & tags are read as they should be."
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Too short to be of use.",
        "x = [y for y in range(10)]; print(x[0]); z = {a: b for a, b in c.items()}.",
        "Der Rat der Stadt hat gestern beschlossen, dass die Straße gesperrt bleiben soll.",
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron.",
        "this is a sentence of the text that has no mark at its end and so is not one",
    ],
)
def test_what_is_not_prose(text):
    assert not prose.is_prose(text)


def test_novelty():
    seen = prose.Novelty()
    words = [f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(200)]
    whole = " ".join(words)
    assert seen.admit(whole)
    assert not seen.admit(whole)
    assert not seen.admit(whole.upper().replace(" ", ", ") + "!!"), "letters decide"
    assert not seen.admit(" ".join([*words[:150], "other", *words[151:]])), "one word changed"
    assert seen.admit(" ".join(reversed(words)))


@pytest.fixture
def sources(tmp_path):
    """A small site-packages: twelve modules, one of them a copy, one not UTF-8."""
    root = tmp_path / "site"
    root.mkdir()
    for i in range(12):
        one = chr(97 + i)
        body = "\n\n".join(
            f"The sentence number {one}{two} of the module is about the {'xyz'[j % 3]}{one}{two} "
            f"thing, which it does for {two}{one} and you."
            for j, two in enumerate("abcdef")
        )
        (root / f"m{i}.py").write_text(f'"""{body}"""\n')
    (root / "copy.py").write_text((root / "m3.py").read_text())
    (root / "latin.txt").write_bytes(
        b"It is a text of the caf\xe9 that is not in UTF-8 at all.\n" * 9
    )
    return [demo_text.Source(p, f"file:///x/{p.name}") for p in demo_text._files(root)]


def test_rows(sources):
    rows = list(demo_text.collect(sources, 10**9))
    assert len(rows) == 12, "eleven modules, and one of m3.py and its copy"
    assert set(rows[0]) == {"warc_record_id", "url", "text", "language"}
    assert len({r["text"] for r in rows}) == 12
    assert rows == list(demo_text.collect(sources[::-1], 10**9)), "order of listing is nothing"
    few = list(demo_text.collect(sources, 1000))
    assert few == rows[: len(few)]
    assert len(few) < 12


def run(tmp_path, monkeypatch, sources, name, **flags):
    monkeypatch.setattr(demo_text, "installed_sources", lambda: list(sources))
    out = tmp_path / name
    demo_text.main(demo_text.Args(out=out, min_mb=0.001, **flags))
    return out


def test_folder(tmp_path, monkeypatch, sources):
    monkeypatch.setattr(demo_text, "FRAME_BYTES", 1500)
    out = run(tmp_path, monkeypatch, sources, "a", shards=2)
    manifest = artifact.read_manifest(out, "text")
    assert manifest["extra"]["documents"] == 12
    shards = sorted((out / demo_text.PARTITION).iterdir())
    assert [s.name for s in shards] == [f"installed-docs-part-0000{i}.jsonl.zstd" for i in (0, 1)]
    magic = b"\x28\xb5\x2f\xfd"
    assert shards[0].read_bytes().count(magic) > 1, "several frames"
    rows = [json.loads(line) for s in shards for line in b"".join(chunks(s)).splitlines()]
    assert sum(len(r["text"].encode()) for r in rows) == manifest["extra"]["text_bytes"]
    again = run(tmp_path, monkeypatch, sources, "b", shards=2)
    assert artifact.read_manifest(again)["content_hash"] == manifest["content_hash"]


def test_too_little_text_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, sources):
    monkeypatch.setattr(demo_text, "installed_sources", lambda: list(sources))
    with pytest.raises(UserError, match=r"--min-mb 10: .* gives only 0\.0 MB; add some with"):
        demo_text.main(demo_text.Args(out=tmp_path / "out" / "x"))
    assert list((tmp_path / "out").iterdir()) == []


def test_bad_flags():
    code = subprocess.run(
        [sys.executable, "-m", "tools.demo_text", "--out", "x", "--min-mb", "20"],
        capture_output=True,
        text=True,
    )
    assert code.returncode == 2
    assert code.stderr.startswith("error: --min-mb 20.0")


def test_evaluation_data_is_not_read():
    urls = [s.url for s in demo_text.installed_sources()]
    assert any("/numpy/" in u for u in urls)
    assert not any("bfcl_eval" in u or "/tests/" in u for u in urls)


def test_debian_names_are_checked(tmp_path):
    with pytest.raises(UserError, match="is not a Debian package name"):
        unpack("--force", tmp_path)
