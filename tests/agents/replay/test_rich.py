"""Markdown and LaTeX of a transcript: what is set, what stays text, and that nothing of it can act."""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spear_agents.engines.base import Served
from spear_agents.play.trajectory import StopReason, TokenKind, Trajectory, TrajectoryWriter
from spear_agents.viewer.runs import Run
from spear_agents.viewer.server import export_page
from tests.agents.replay.chromium import Chromium
from tests.agents.replay.conftest import HOSTILE, serve
from tests.agents.test_trajectory import make_trajectory

TEXT = r"""## Plan

1. Compute **the sum** of `f(x)`: $\sum_{i=1}^n i^2$.
2. Look at [a page](https://example.com/x) and ![a picture](https://example.com/y.png).

\[
x
= \frac{1}{3}
\]

| n | root |
|---|---|
| 1 | \(\sqrt{2}\) |

```python
print("<i>")
```
It costs $5 and
$7. <b>bold</b> \undefined{$\undefined{2}$}

[name]: https://example.com/z
"""


def write(path: Path, *changes: dict[str, Any], **fields: Any) -> None:
    """An episode with a turn for each of the changes."""
    made = make_trajectory(count=len(changes), tokens=TokenKind.BYTES)
    turns = tuple(replace(turn, **change) for turn, change in zip(made.turns, changes, strict=True))
    episode: Trajectory = replace(made, turns=turns, **fields)
    with TrajectoryWriter(path / "episodes.jsonl") as writer:
        writer.write(episode)


@pytest.fixture
def page(browser: Chromium, tmp_path: Path) -> Iterator[Chromium]:
    """An exported episode whose response is the text above."""
    write(tmp_path, {"response": f"<think>*why*</think>{TEXT}", "observation": "Find $$e^x$$ here: #$.$#"})
    export_page(Run(tmp_path), tmp_path / "page.html")
    browser.console.clear()
    browser.resize(1400, 900)
    browser.open(f"file://{tmp_path}/page.html#episodes")
    browser.wait("document.querySelectorAll('#detail math').length === 4")
    yield browser
    assert browser.console == []


def texts(page: Chromium, selector: str) -> list[str]:
    found = page.evaluate(f"[...document.querySelectorAll({selector!r})].map((one) => one.textContent)")
    return [str(text) for text in found]


def test_markdown_is_set_and_links_pictures_and_html_stay_text(page: Chromium) -> None:
    rich = "#detail div.rich"
    assert texts(page, f"{rich} h4") == ["Plan"] and texts(page, f"{rich} strong") == ["the sum"]
    assert texts(page, f"{rich} code") == ["f(x)"] and texts(page, f"{rich} pre") == ['print("<i>")']
    assert texts(page, f"{rich} li")[1] == (
        "Look at a page (https://example.com/x) and ![a picture](https://example.com/y.png)."
    )
    assert texts(page, f"{rich} th") == ["n", "root"]
    last = texts(page, f"{rich} p")[-1]
    assert last.startswith("It costs $5 and$7. <b>bold</b>") and r"$\undefined{2}$" in last, "prices and errors"
    assert "[name]: https://example.com/z" in texts(page, rich)[-1], "nothing is left out"
    assert texts(page, "#detail a, #detail img, #detail b.bold, #detail i.x") == []


def test_latex_of_an_observation_is_set_and_its_board_stays(page: Chromium) -> None:
    (shown,) = texts(page, "#detail .seen pre.rich")
    assert shown.startswith("Find ") and shown.endswith(" here: #$.$#")
    assert page.evaluate("document.querySelector('.seen math').getAttribute('display')") == "block"


def test_the_text_is_there_as_it_was_written(page: Chromium) -> None:
    copied = "document.querySelector('#detail div.rich:not(.thought *)').source"
    assert page.evaluate(copied) == TEXT
    page.press("m")
    page.wait("!document.querySelector('#detail math')")
    assert TEXT.strip() in "\n".join(texts(page, "#detail .block pre"))
    page.press("m")
    page.wait("document.querySelectorAll('#detail math').length === 4")


ATTACKS = [
    HOSTILE,
    "<img src=x onerror=window.owned=1>",
    "<script>window.owned=1</script>",
    "<a href='javascript:window.owned=1'>x</a>",
    "<svg><script>window.owned=1</script></svg>",
    "<iframe srcdoc='<script>parent.owned=1</script>'>",
    "<math><mtext><img src=x onerror=window.owned=1></mtext></math>",
    "<style>*{display:none}</style>",
    "javascript:window.owned=1",
    "https://example.com/?owned",
    "[x](javascript:window.owned=1)",
    "![x](https://example.com/x.png)",
    "![x](data:image/svg+xml,<svg onload=window.owned=1>)",
    "<https://example.com>",
    "[x]: https://example.com\n[x]",
    "&lt;img src=x onerror=window.owned=1&gt;",
    "`<img src=x onerror=window.owned=1>`",
    "$$" + r"\href{javascript:window.owned=1}{x}" + "$$",
    r"\(\url{https://example.com}\)",
    r"\(\includegraphics[height=1em]{https://example.com/x.png}\)",
    r"\(\htmlClass{x}{y}\htmlStyle{position:fixed}{z}\htmlData{a=b}{c}\htmlId{data}{d}\)",
    r"\(\def\a{\a\a}\a\)",
    r"\(\gdef\text{owned}\require{x}\)",
    r"\(\rule{99999em}{99999em}\)",
    r"\(\color{red}\colorbox{url(https://example.com)}{x}\)",
    r"\(\text{<img src=x onerror=window.owned=1>}\)",
    r"\(\verb|<script>window.owned=1</script>|\)",
    r"\(\begin{array}{" + "c" * 500 + r"} x \end{array}\)",
    r"\(" + "{" * 900 + "x" + "}" * 900 + r"\)",
    r"\[" + r"\frac{1}{" * 200 + "x" + "}" * 200 + r"\]",
    "$" * 3_000,
    r"\(" * 3_000,
    "\ud800\u202e\u0000",
]
CONTEXTS = [
    "{}", "# {}", "- {}", "1. {}\n   - {}", "> {}\n\n# x", "**{}** `x`", "*{}* **x**", "~~{}~~ **x**", "`x` `{}`",
    "```\n{}\n```", "~~~{}\nx\n~~~", "|a|b|\n|---|---|\n|{}|x|", "**x** [{}](https://example.com)", "**x** [x]({})",
    "**x** ![{}]({})", "**x** [x](<{}> \"{}\")", "- [ ] {}\n- [x] {}", "**x** <{}>", "<div>\n{}\n</div>\n\n# x",
    "<!-- {} --> **x**", "# x\n\n[{}]: {}\n", "$x$ {}", r"\(x\) \({}\)", r"\[{}\]", "$$x$$ $${}$$", r"\(\text{{{}}}\)",
    r"\(\frac{{{}}}{{x}}\)",
]  # fmt: skip
ELEMENTS = """
div p h4 strong em del code pre blockquote ul ol li table tr th td hr br span math semantics mrow mi mo mn ms mtext
mspace mfrac msup msub msubsup mover munder munderover msqrt mroot mtable mtr mtd mstyle mpadded mphantom menclose
mglyph annotation
"""
ATTRIBUTES = """
class start display xmlns encoding mathvariant stretchy fence separator lspace rspace minsize maxsize accent
accentunder scriptlevel displaystyle columnalign columnspacing columnlines rowspacing rowlines linethickness width
height depth voffset mathcolor mathbackground mathsize notation symmetric movablelimits largeop form frame
linebreak side rowalign
"""


def test_nothing_of_a_hostile_text_acts(browser: Chromium, tmp_path: Path) -> None:
    """Every attack in every place, read as Markdown and as LaTeX, makes known elements with known attributes."""
    write(tmp_path, {"response": "$x$"})
    cases = [one.replace("{}", attack) for one, attack in itertools.product(CONTEXTS, ATTACKS)]
    cases += ["> " * 5_000 + "**x**", "- " * 5_000 + "x", "**" * 9_000, "[" * 9_000 + "`x`", "|" * 9_000 + "\n|---|"]
    export_page(Run(tmp_path), tmp_path / "page.html")
    browser.console.clear()
    browser.open(f"file://{tmp_path}/page.html#episodes")
    browser.evaluate("loadMath()")
    script = """(async (cases) => {
      const [elements, attributes, shown] = [new Set(), new Set(), { rich: 0, math: 0, slowest: 0 }];
      const place = document.body.appendChild(document.createElement("section"));
      for (const text of cases) {
        const start = performance.now();
        const made = [richText(text), mathText(text)].filter(Boolean);
        place.replaceChildren(...made);
        await new Promise((done) => setTimeout(done));
        shown.slowest = Math.max(shown.slowest, performance.now() - start);
        shown.rich += made.length;
        for (const one of place.querySelectorAll("*")) {
          elements.add(one.localName);
          shown.math += one.localName === "math";
          for (const { name } of one.attributes) attributes.add(name);
        }
      }
      place.remove();
      return { elements: [...elements], attributes: [...attributes], ...shown };
    })"""
    found = browser.evaluate(f"{script}({json.dumps(cases)})")
    assert set(found["elements"]) <= set(ELEMENTS.split()) and set(found["attributes"]) <= set(ATTRIBUTES.split())
    assert found["rich"] > len(CONTEXTS) * len(ATTACKS) / 2 and found["math"] > 200
    assert found["slowest"] < 5_000, "milliseconds of a text"
    assert browser.evaluate("typeof window.owned") == "undefined"
    assert browser.console == []


def test_an_open_formula_is_searched_in_linear_time(tmp_path: Path) -> None:
    write(tmp_path, {"observation": "$" + "=" * 100_000, "response": "go"})
    start = time.process_time()
    export_page(Run(tmp_path), tmp_path / "page.html")
    assert time.process_time() - start < 3


def test_a_text_of_empty_lines_is_looked_through_once(page: Chromium) -> None:
    texts = "Array.from({ length: 20 }, () => isRich('\\n'.repeat(19_999) + 'x'))"
    script = f"(() => {{ const start = performance.now(); {texts}; return performance.now() - start; }})()"
    assert page.evaluate(script) < 3_000, "milliseconds; it took ten seconds while each line looked at those after it"


@pytest.mark.parametrize(
    ("text", "count"),
    [("$x$", 1), (r"\(x\)", 1), (r"\[x\]", 1), ("$$a=b$$", 1), (r"$\alpha$", 1), ("$a^2$ is $b_{1}$", 2),
     ("$5 and $6", 0), ("$ $ board $.$", 0), ("$__$", 0), ("US$x and US$", 0)],
)  # fmt: skip
def test_only_a_page_with_latex_has_the_library(browser: Chromium, tmp_path: Path, text: str, count: int) -> None:
    for observation in (text, "a second episode without it"):
        write(tmp_path, {"observation": observation, "response": "go"})
    size = export_page(Run(tmp_path), tmp_path / "page.html")
    has_library = '<script type="text/plain" id="katex">' in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert has_library == (count > 0) and size < 500_000
    for address in (f"file://{tmp_path}/page.html", "served"):
        with serve(Run(tmp_path)) as server:
            browser.open(f"{server.address if address == 'served' else address}#episodes")
            browser.wait("state.body")
            browser.wait(f"document.querySelectorAll('#detail math').length === {count}")
            assert count or text in browser.evaluate("document.querySelector('#detail .seen').textContent")


def test_an_episode_says_its_time_its_fault_and_tokens_where_known(browser: Chromium, tmp_path: Path) -> None:
    counted = Served(model="m", prompt_tokens=312, completion_tokens=88)
    fault = {"won": False, "stop": StopReason.FAULT, "fault": "engine", "detail": "the server answered 503 <b>"}
    write(tmp_path, {"served": counted}, {}, seconds=75.0, reward_terms={}, **fault)
    lines = (tmp_path / "episodes.jsonl").read_text().splitlines()
    (tmp_path / "episodes.jsonl").write_text(json.dumps(json.loads(lines[0]) | {"seconds": 75.0}) + "\n")
    with serve(Run(tmp_path)) as server:
        browser.open(f"{server.address}#episodes")
        browser.wait("document.querySelectorAll('#detail .turn').length >= 2")
        heads = texts(browser, "#detail .turn .right")
        assert "312 → 88 tokens" in heads[0] and heads[1].count("bytes") == 1
        assert "time75 s" in texts(browser, "#detail .chip")
        assert "the server answered 503 <b>" in texts(browser, "#detail .note")


def test_filters_and_a_search_lead_to_an_episode_that_fits(browser: Chromium, tmp_path: Path) -> None:
    for name, said in (("a", "a red door"), ("b", "a blue door")):
        write(tmp_path / name, {"response": said})
    export_page(Run(tmp_path), tmp_path / "page.html")
    browser.resize(1400, 900)
    browser.open(f"file://{tmp_path}/page.html#episodes")
    browser.wait("state.body && state.body.turns[0].said === 'a red door'")
    browser.press("\\")
    browser.type("blue")
    browser.wait("state.body.turns[0].said === 'a blue door' && state.shown.length === 1")
    overtaken = """(async () => {
      const real = unpack;
      let release;
      const gate = new Promise((done) => { release = done; });
      unpack = async (id) => { await gate; return real(id); };
      const slow = searchTranscripts();
      filters.said = "";
      await searchTranscripts();
      release();
      await slow;
      unpack = real;
      applyFilters();
      return state.shown.length;
    })()"""
    assert browser.evaluate(overtaken) == 2
    browser.evaluate("filters.said = ''; filters.source = 'a'; buildFilters(); searchTranscripts()")
    browser.wait("state.body.turns[0].said === 'a red door'")
