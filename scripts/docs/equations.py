"""LaTeX to MathML, which browsers draw by themselves: no script, no font and no network."""

from __future__ import annotations

import html
import re
from xml.etree import ElementTree

from latex2mathml.converter import convert

__all__ = ["convert_equations"]

_MATHML = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", _MATHML)

# What pymdownx.arithmatex leaves, in its generic form.
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def convert_equations(page: str) -> str:
    """Replace the equations of an HTML page by MathML."""
    return _EQUATION.sub(_convert, page)


def _convert(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    latex = html.unescape(found[3]).replace("~", " ")
    # The engine knows no \tfrac.
    latex = re.sub(r"\\tfrac(\w)(\w)", r"\\frac{\1}{\2}", latex).replace(r"\tfrac", r"\frac")
    # Words are upright, in indices too; else each letter is a variable of its own.
    latex = re.sub(r"(?<=_)\{([A-Za-z]{2,})\}", r"{\\mathrm{\1}}", latex)
    equation = ElementTree.fromstring(convert(latex, display=display))
    for over in equation.iter(f"{{{_MATHML}}}mover"):
        if (
            over[1].text == "\N{MACRON}"
        ):  # which most fonts do not draw over a letter: the style sheet has a line for it
            over.remove(over[1])
            over.tag, over.attrib = f"{{{_MATHML}}}mrow", {"class": "bar"}
        else:
            over.set("accent", "true")
    return ElementTree.tostring(equation, encoding="unicode")
