"""Screenshots of the viewer, the player and the site beside references, in light, dark and on a phone.

``SCREENS=refresh`` writes the references anew. A screenshot that differs is left in ``build/screens/``: reference,
now, and where they differ.
"""

from __future__ import annotations

import base64
import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
from PIL import Image, ImageChops, ImageFilter

from spear_agents import evaluate
from spear_agents.viewer.play import Game, Stage
from spear_agents.viewer.runs import Run
from spear_agents.viewer.server import export_page
from tests.agents.replay.chromium import PROGRAM, Chromium
from tests.agents.replay.conftest import serve
from tests.agents.test_cli import train, write_launch

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
REFERENCES = Path(__file__).parent / "references"
DIFFERENT = ROOT / "build" / "screens"
MODES = {"light": (1280, 800), "dark": (1280, 800), "phone": (390, 844)}

CELL = 4
"""Pixels a side of the squares whose mean colours are compared, 8 on the screen: Chromiums draw letters differently."""
TOLERANCE = 8
"""Largest difference of a cell in a channel, of 255."""

ENVIRONMENTS = {"alfworld": "spear/ALFWorld-v0", "sokoban": "spear/Sokoban-v1", "webshop": "spear/WebShop-v0"}

_OPEN = "openEpisode(state.rows.find((row) => row.source === 'alfworld/expert').i)"
# What is shown, the mode, the script that leads there, and what is then true.
VIEWER = [
    ("runs", "light", "drawRuns()", "document.querySelectorAll('.runs tbody tr').length === 6"),
    ("runs", "phone", "drawRuns()", "document.querySelectorAll('.runs tbody tr').length === 6"),
    ("episode", "dark", _OPEN, "state.body && state.body.env === 'spear/ALFWorld-v0'"),
]
SITE = [("index", "light"), ("sokoban", "phone")]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser that knows matplotlib's fonts only, so that lines break at the same words on every machine."""
    if PROGRAM is None:
        pytest.skip("no Chromium on this machine: apt install chromium")
    folder = tmp_path_factory.mktemp("chromium")
    families = {"sans-serif": "DejaVu Sans", "system-ui": "DejaVu Sans", "monospace": "DejaVu Sans Mono"}
    aliases = "".join(
        f"<alias binding='same'><family>{name}</family><prefer><family>{font}</family></prefer></alias>"
        for name, font in families.items()
    )
    (folder / "fonts.conf").write_text(
        f"<fontconfig><dir>{matplotlib.get_data_path()}/fonts/ttf</dir><cachedir>{folder}</cachedir>{aliases}</fontconfig>"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FONTCONFIG_FILE", str(folder / "fonts.conf"))
        with Chromium(folder / "profile") as browser:
            # The site keeps the colours of the first visit.
            forget = "try { localStorage.clear() } catch { /* a blank page has none */ }"
            browser.call("Page.addScriptToEvaluateOnNewDocument", source=forget)
            yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of an exported page with episodes of each environment and the curves of a training."""
    folder = tmp_path_factory.mktemp("runs") / "example"
    for name, env_id in ENVIRONMENTS.items():
        evaluate(env_id, engine="expert", tasks=6, concurrency=1, out=folder / name / "expert", progress=False)
        evaluate(env_id, engine="random", tasks=6, concurrency=1, out=folder / name / "random", progress=False)
    for path in folder.rglob("episodes.jsonl"):  # times are shown, and differ from run to run
        path.write_text(re.sub(r'"seconds":[\d.e-]+', '"seconds":1.5', path.read_text("ascii")), "ascii")
        os.utime(path, (0, 86_400 * 365 * 55))
    steps = []
    for i in range(1, 41):
        wave = math.sin(1.7 * i)
        metrics = {"success/all": 0.3 + 0.012 * i + 0.06 * wave, "entropy/token-mean": 1.4 * 0.96**i + 0.02 * wave}
        metrics |= {"reward/total": -0.4 + 0.03 * i + 0.1 * wave, "reward/outcome": -0.5 + 0.03 * i + 0.1 * wave}
        metrics |= {"spear/gamma": min(1, i / 20), "spear/mu": max(0.0, 1 - i / 20), "baseline/p50": 0.01 * i}
        steps.append(train(i, **metrics, **{"lr": 1e-5, "time/step": 2 + wave}))
    write_launch(folder / "training", 0, (0, {"val/success/all": 0.31}), *steps, (40, {"val/success/all": 0.74}))
    target = folder.parent / "page.html"
    export_page(Run(folder), target)
    return target.as_uri()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of the documentation."""
    pytest.importorskip("mkdocs", reason="needs the dependency group 'docs'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=600, check=True)
    return folder


def dress(chromium: Chromium, mode: str) -> None:
    chromium.resize(*MODES[mode])
    chromium.prefer("dark" if mode == "dark" else "light")


def take(chromium: Chromium) -> Image.Image:
    """What is in sight, as soon as it stays the same."""
    chromium.evaluate("document.activeElement.blur()")  # a cursor blinks
    chromium.evaluate("document.querySelectorAll('[src$=gif]').forEach((one) => { one.style.visibility = 'hidden' })")
    chromium.evaluate(
        "Promise.all([document.fonts.ready, ...[...document.images].map((one) => one.decode().catch(String))])"
    )
    before = None
    for _ in range(50):
        chromium.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        shot = base64.b64decode(chromium.call("Page.captureScreenshot", format="png")["data"])
        if shot == before:
            return Image.open(io.BytesIO(shot)).convert("RGB")
        before = shot
    raise AssertionError("the page does not come to rest")


def find_differences(one: Image.Image, other: Image.Image) -> Image.Image:
    """White where two pictures of one size differ by more than the tolerance, a pixel a cell."""
    size = (one.width // CELL, one.height // CELL)
    means = [image.resize(size, Image.Resampling.BOX).filter(ImageFilter.BoxBlur(1)) for image in (one, other)]
    red, green, blue = ImageChops.difference(*means).split()
    most = ImageChops.lighter(ImageChops.lighter(red, green), blue)
    return most.point(lambda value: 255 if value > TOLERANCE else 0)


def check(name: str, screen: Image.Image) -> None:
    """Compares half a screenshot's width and height with its reference, or makes it the reference."""
    path = REFERENCES / f"{name}.webp"
    now = screen.resize((screen.width // 2, screen.height // 2), Image.Resampling.BOX)
    if os.environ.get("SCREENS") == "refresh":
        REFERENCES.mkdir(exist_ok=True)
        now.save(path, lossless=True)
        return
    assert path.is_file(), f"{path.name} is missing: SCREENS=refresh makes it"
    reference = Image.open(path).convert("RGB")
    places = find_differences(reference, now)
    if places.getbbox() is None:
        return
    DIFFERENT.mkdir(parents=True, exist_ok=True)
    marked = Image.composite(Image.new("RGB", now.size, "red"), now, places.resize(now.size).point(lambda on: on // 2))
    sheet = Image.new("RGB", (3 * now.width, now.height))
    for place, image in enumerate((reference, now, marked)):
        sheet.paste(image, (place * now.width, 0))
    sheet.save(DIFFERENT / f"{name}.png")
    pytest.fail(f"build/screens/{name}.png shows what changed; if it is meant: SCREENS=refresh", pytrace=False)


@pytest.mark.parametrize(("name", "mode", "script", "condition"), VIEWER)
def test_viewer(chromium: Chromium, page: str, name: str, mode: str, script: str, condition: str) -> None:
    dress(chromium, mode)
    chromium.open(page)
    chromium.evaluate(script)
    chromium.wait(condition)
    check(f"viewer-{name}-{mode}", take(chromium))


def test_player(chromium: Chromium, tmp_path: Path) -> None:
    stage = Stage(lambda: Game(ENVIRONMENTS["sokoban"], tmp_path / "game"))
    dress(chromium, "light")
    with serve(Run(tmp_path / "game"), stage) as server:
        chromium.open(server.address)
        chromium.wait("document.querySelector('.stage')")
        for turn, key in enumerate(("i", "ArrowUp")):
            chromium.press(key)
            chromium.wait(f"game.now.turn === {turn}")
        check("player-sokoban-light", take(chromium))
    stage.close()


@pytest.mark.parametrize(("name", "mode"), SITE)
def test_site(chromium: Chromium, site: Path, name: str, mode: str) -> None:
    dress(chromium, mode)
    chromium.call("Page.navigate", url="about:blank")
    chromium.call("Page.navigate", url=(site / f"{name}.html").as_uri())
    chromium.wait("document.readyState === 'complete' && document.querySelector('.md-footer')")
    check(f"site-{name}-{mode}", take(chromium))
