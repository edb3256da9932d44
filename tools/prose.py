"""English prose out of documentation: docstrings, reStructuredText, Markdown and HTML.

Code, tables, headings, markup and signatures are cut away; what is left is judged paragraph
by paragraph.  Nothing that is read is imported or run: Python files are parsed with `ast`.
"""

from __future__ import annotations

import ast
import html.parser
import inspect
import re
import warnings
import zlib
from collections.abc import Iterator

MIN_PARAGRAPH_CHARS = 40

_FENCE = re.compile(r"^\s*(```|~~~)")
_UNDERLINE = re.compile(r"^\s*([=\-~^\"'`#*+.:_])\1{2,}\s*$")
_TABLE = re.compile(r"^\s*(\+[-=+]{3,}|\|.*\||[=-]+(\s+[=-]+)+\s*$)")
_DIRECTIVE = re.compile(r"^(\s*)\.\. +([\w:-]+)::")
_REMARK = re.compile(r"^\s*\.\.( |$)")
_ATX = re.compile(r"^\s{0,3}#{1,6}\s")
_PARAMETER = re.compile(
    r"^\s*\*{0,2}`{0,2}[\w.*, ]{1,40}`{0,2}\*{0,2} *(: .{0,80}|\(.{1,120}\) *:?)$"
)
_NAMED = re.compile(
    r"^\s*(?::\w[\w ]*[^:]*:|[-*+]?\s*\*{0,2}`{0,2}[\w.]+`{0,2}\*{0,2}\s*\([^)]*\)\s*:|@\w+)\s+"
)
_BULLET = re.compile(r"^\s*(?:[-*+•]|\d{1,2}[.)]|[a-z]\))\s+")
_INLINE = [
    (re.compile(r":[\w:+-]+:`~?([^`<]*?)(?:\s*<[^>]*>)?`"), r"\1"),  # :role:`text <target>`
    (re.compile(r"`([^`<]+?)\s*<[^>]*>`__?"), r"\1"),  # `text <url>`_
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),
    (re.compile(r"\[([^\]]+)\]\([^)]*\)"), r"\1"),
    (re.compile(r"\[([^\]]+)\]\[[^\]]*\]"), r"\1"),
    (re.compile(r"</?[A-Za-z][^>]{0,200}>"), ""),
    (re.compile(r"`{1,2}([^`]*)`{1,2}_{0,2}"), r"\1"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"\1"),
    (re.compile(r"(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])"), r"\1"),
    (re.compile(r"\s*\[\d+\]_"), ""),
    (re.compile(r"\s+"), " "),
]
_MARKED = re.compile(r"[`*\[<]")
# Directives whose body is prose; the body of any other is dropped.
_SPOKEN = {
    *("note", "warning", "tip", "important", "caution", "hint", "seealso", "admonition"),
    *("deprecated", "versionadded", "versionchanged", "topic", "attention", "danger"),
}
_WORD = re.compile(r"[A-Za-z]+(?:['’][a-z]+)?")
_TRIPLE_QUOTED = re.compile(r'"""(.*?)"""|\'\'\'(.*?)\'\'\'', re.DOTALL)
_COMMON = """
a an and are as at be been but by can do does for from has have he her his how if in into is
it its may more must no not of on one only or other she should so such than that the their
then there these they this to use used was we were when which while will with would you your
"""
_FUNCTION_WORDS = frozenset(_COMMON.split())
_SIGNS = re.compile(r"[{}<>=\[\]|\\_#@$^~`%&*/+]")
_END = re.compile(r"[.!?:][)\"'’”]*$")


def _unmarked(line: str) -> str:
    if not _MARKED.search(line):
        return " ".join(line.split())
    for pattern, by in _INLINE:
        line = pattern.sub(by, line)
    return line.strip()


def is_prose(paragraph: str) -> bool:
    """Say whether a paragraph reads like English sentences rather than code or lists."""
    if len(paragraph) < MIN_PARAGRAPH_CHARS or not _END.search(paragraph):
        return False
    words = _WORD.findall(paragraph)
    if len(words) < 7:
        return False
    letters = sum(map(len, words))
    common = sum(word.lower() in _FUNCTION_WORDS for word in words)
    return (
        common >= max(2, 0.2 * len(words))
        and letters + len(words) >= 0.85 * len(paragraph)
        and len(_SIGNS.findall(paragraph)) <= 0.02 * len(paragraph)
        and letters <= 8 * len(words)
    )


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def paragraphs(text: str) -> Iterator[str]:
    """Yield the prose paragraphs of a docstring, reStructuredText or Markdown text."""
    held: list[str] = []
    fenced = False
    doctest = False
    skip_over: int | None = None  # drop lines indented deeper than this
    for line in [*text.expandtabs(4).split("\n"), ""]:
        bare = line.lstrip()
        head = bare[:1]
        if head in "`~" and _FENCE.match(line):
            fenced = not fenced
            held.clear()
            continue
        if fenced:
            continue
        if skip_over is not None and bare:
            if len(line) - len(bare) > skip_over:
                continue
            skip_over = None
        doctest = bool(bare) and (doctest or bare.startswith(">>>"))
        cut = not bare or doctest
        starts = None
        if not head.isalnum():
            if _UNDERLINE.match(line):
                held.clear()  # what stood above it was a heading
                continue
            directive = _DIRECTIVE.match(line) if head == "." else None
            if directive and directive.group(2).lower() not in _SPOKEN:
                skip_over = len(directive.group(1))
            cut = cut or bool(_REMARK.match(line) or _TABLE.match(line) or _ATX.match(line))
        if not cut and (":" in bare or ")" in bare or not head.isalpha()):
            cut = bool(_PARAMETER.match(line))
            starts = _NAMED.match(line) or _BULLET.match(line)
        if (cut or starts) and held:
            whole = " ".join(held)
            if whole.endswith("::"):
                whole, skip_over = whole[:-1], _indent(held[-1])
            if len(whole) >= MIN_PARAGRAPH_CHARS and is_prose(whole := _unmarked(whole)):
                yield whole
            held.clear()
        if not cut:
            held.append(line[starts.end() :] if starts else line)


def quoted_share(source: str) -> float:
    """Return how much of a Python file stands in triple quotes, 0 to 1: a cheap first look."""
    return sum(len(a) + len(b) for a, b in _TRIPLE_QUOTED.findall(source)) / max(len(source), 1)


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a Python file, in order: module, classes, functions, methods.

    A file that does not parse yields nothing.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        body = getattr(node, "body", [])
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found = ast.get_docstring(node, clean=False)
            if found:
                yield inspect.cleandoc(found)
        elif not isinstance(node, (ast.If, ast.Try, ast.With)):
            continue
        waiting.extend(reversed(body))


class _HTML(html.parser.HTMLParser):
    """Collects the text of paragraphs, items and definitions, without code."""

    _BLOCKS = frozenset(("p", "li", "dd", "td", "blockquote", "div", "section", "dt", "br"))
    _HEADS = frozenset(("h1", "h2", "h3", "h4", "h5", "h6", "title"))
    _DROPPED = frozenset(("pre", "script", "style", "table", "nav", "head", "footer", *_HEADS))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self._held: list[str] = []
        self._dropped: list[str] = []

    def flush(self) -> None:
        whole = " ".join("".join(self._held).split())
        self._held.clear()
        if whole:
            self.blocks.append(whole)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._DROPPED:
            self._dropped.append(tag)
        if tag in self._BLOCKS or tag in self._DROPPED:
            self.flush()

    def handle_endtag(self, tag: str) -> None:
        if self._dropped and tag in self._dropped:
            while self._dropped.pop() != tag:
                pass
        if tag in self._BLOCKS:
            self.flush()

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self._held.append(data)


def html_paragraphs(page: str) -> Iterator[str]:
    """Yield the prose paragraphs of an HTML page."""
    parser = _HTML()
    parser.feed(page)
    parser.close()
    parser.flush()
    return (block for block in parser.blocks if is_prose(block))


class Novelty:
    """Remembers paragraphs and recognises those that were seen before, or nearly so.

    Two paragraphs are the same if they agree in their letters.  One is nearly the same as
    earlier text if most of its runs of `RUN` words were seen; only every fourth run, chosen by
    its checksum, is looked at and remembered.
    """

    RUN = 8
    KEPT_BITS = 0b11
    MOST_SEEN = 0.5

    def __init__(self) -> None:
        self._whole: set[int] = set()
        self._runs: set[int] = set()

    def admit(self, paragraph: str) -> bool:
        """Return True, and remember the paragraph, if it is new."""
        words = [w.lower().encode() for w in _WORD.findall(paragraph)]
        whole = zlib.crc32(b" ".join(words)) << 32 | zlib.adler32(b"".join(words))
        if whole in self._whole:
            return False
        self._whole.add(whole)
        runs = set()
        for i in range(len(words) - self.RUN + 1):
            checksum = zlib.crc32(b" ".join(words[i : i + self.RUN]))
            if not checksum & self.KEPT_BITS:
                runs.add(checksum)
        if runs and len(runs & self._runs) > self.MOST_SEEN * len(runs):
            return False
        self._runs |= runs
        return True
