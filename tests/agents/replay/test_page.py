from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_agents.replay.page import escape_json, export_page, make_policy, render_page
from spear_agents.replay.runs import Run
from spear_envs.core.errors import SpearError
from tests.agents.replay.conftest import HOSTILE

values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from([HOSTILE, "</script", "<!--", "\u2028"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_json_comes_back_and_cannot_end_its_element(value: Any) -> None:
    text = escape_json(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")
    assert text.isascii()


def test_nothing_of_a_hostile_episode_stands_in_the_page_as_it_was_written(sokoban_run: Path, tmp_path: Path) -> None:
    size = export_page(Run(sokoban_run), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert size == (tmp_path / "page.html").stat().st_size
    assert "window.owned" in text  # the list has it, as data
    assert "<script>window" not in text and "<img" not in text and "<svg" not in text
    assert text.count("</script>") == 1 + 5 + 1, "data, five episodes, the script"


def test_the_policy_allows_this_script_and_this_style_alone() -> None:
    text = render_page({"title": "x", "token": "y"})
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', text)[0])
    assert policy == make_policy()
    assert "unsafe" not in policy and "default-src 'none'" in policy
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        content = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[-1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy
    assert not re.search(r"\son\w+=", text.partition("<script")[0]), "no handlers in attributes"
    assert "innerHTML" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


def test_marks_in_data_are_not_places_to_fill() -> None:
    text = render_page({"title": "{{script}}", "token": "{{style}}"})
    assert "<title>{{script}} · SPEAR</title>" in text
    assert '"token":"{{style}}"' in text


def test_a_page_that_cannot_be_written_is_one_error(sokoban_run: Path) -> None:
    with pytest.raises(SpearError, match="cannot be written"):
        export_page(Run(sokoban_run), "/proc/nowhere/page.html")


def test_an_export_is_the_same_every_time(sokoban_run: Path, tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        export_page(Run(sokoban_run), tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_folder_whose_name_is_no_text_is_shown(sokoban_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run\xff<b>")
    try:
        shutil.copytree(sokoban_run, folder)
    except OSError:
        pytest.skip("this file system takes text alone")
    export_page(Run(folder), tmp_path / "page.html")
    assert "<title>run\ufffd&lt;b&gt; · SPEAR</title>" in (tmp_path / "page.html").read_text("utf-8")
