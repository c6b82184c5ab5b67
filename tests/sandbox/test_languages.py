"""Languages beside Python, packages of the operator, and pictures that come back."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

from spear_sandbox.installation import LANGUAGES, PACKAGES, find_installation, find_languages, run_language
from spear_sandbox.pool.local import IsolationRefusedError, LocalExecutor
from spear_sandbox.protocol import Limits
from spear_sandbox.service.wire import RunRequest
from tests.sandbox.service import RunningService, ScriptedExecutor, ask, run_local

TESTS = (
    "def test_one(): assert 1\n\ndef test_two(tmp_path): (tmp_path / 'a').write_text('b')\n\ndef test_no(): assert 0\n"
)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with run_local(Limits(wall_s=20.0), 2) as running:
        yield running


def need(language: str) -> None:
    if language not in find_languages():
        pytest.skip(f"{language} is not installed")


def run(service: RunningService, **fields: object) -> dict[str, dict[str, object]]:
    status, content, _ = ask(service.url, fields)
    assert status == 200, content
    return dict(content)


def test_bash(service: RunningService) -> None:
    need("bash")
    files = {"a.txt": base64.b64encode(b"x").decode()}
    code = "read line; echo $line $(cat a.txt); echo no >&2; echo out > b; exit 3"
    content = run(service, code=code, language="bash", stdin="in\n", files=files, fetch_files=["b"])
    result = content["run_result"]
    assert (content["status"], result["return_code"], result["stdout"], result["stderr"]) == (
        "Failed",
        3,
        "in x\n",
        "no\n",
    )
    assert content["files"] == {"b": base64.b64encode(b"out\n").decode()} and content["compile_result"] is None
    late = run(service, code="while true; do :; done", language="bash", run_timeout=0.3)["run_result"]
    assert late["status"] == "TimeLimitExceeded"


def test_pytest(service: RunningService) -> None:
    content = run(service, code=TESTS, language="pytest")
    assert content["status"] == "Failed" and "1 failed, 2 passed" in str(content["run_result"]["stdout"])
    assert run(service, code=TESTS, language="pytest", args=["-k", "one or two"])["status"] == "Success"
    assert ask(service.url, {"code": "", "language": "pytest", "args": "-q"})[0] == 422


def test_a_file_named_as_our_program_stays(service: RunningService) -> None:
    need("bash")
    files = {"main.py": base64.b64encode(b"def add(a, b):\n    return a + b\n").decode()}
    code = "from main import add\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
    assert run(service, code=code, language="pytest", files=files)["status"] == "Success"
    content = run(service, code="cat main.py", language="bash", files=files)
    assert "return a + b" in content["run_result"]["stdout"]


@pytest.mark.slow
def test_cpp(service: RunningService) -> None:
    need("cpp")
    code = "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << 2 * x; return 4; }"
    content = run(service, code=code, language="cpp", stdin="21", compile_timeout=30)
    assert content["compile_result"]["return_code"] == 0
    assert (content["run_result"]["stdout"], content["run_result"]["return_code"]) == ("42", 4)
    content = run(service, code="int main() {", language="cpp", compile_timeout=30)
    assert content["status"] == "Failed" and content["run_result"] is None
    assert "error" in str(content["compile_result"]["stderr"])
    content = run(service, code="int main() { for (;;); }", language="cpp", compile_timeout=30, run_timeout=0.3)
    assert content["run_result"]["status"] == "TimeLimitExceeded"


def test_any_time_may_be_given_to_the_compiler() -> None:
    compiler = ScriptedExecutor()
    asked = RunRequest("int", language="cpp", compile_timeout=1e6)
    language = next(one for one in LANGUAGES if one.compiled)
    asyncio.run(run_language(compiler, language, asked, Limits()))
    assert [limits and limits.wall_s for limits in compiler.limits] == [86_400]


@pytest.mark.slow
def test_how_large_a_program_gets_is_its_own_doing(service: RunningService) -> None:
    need("cpp")
    table = "int table[{}] = {{1}};\nint main() {{ return table[5]; }}"
    content = run(service, code=table.format(1 << 20), language="cpp", compile_timeout=30)
    assert (content["status"], content["run_result"]["return_code"]) == ("Success", 0), "a table of 4 MiB"
    content = run(service, code=table.format(5 << 20), language="cpp", compile_timeout=30)
    assert content["status"] == "Failed" and content["run_result"] is None
    assert "16 MiB" in str(content["compile_result"]["stderr"])


def test_files_that_fit_a_pattern_come_back(service: RunningService) -> None:
    code = "for n in range(3): open(f'p{n}.png', 'w').write(str(n))\nimport os; os.symlink('/etc/passwd', 'x.png')"
    files = run(service, code=code, fetch_files=["*.png", "main.py"])["files"]
    assert sorted(files) == ["main.py", "p0.png", "p1.png", "p2.png"]


@pytest.mark.slow
def test_packages_of_the_operator_are_warm_and_draw() -> None:
    pytest.importorskip("matplotlib")
    installation = find_installation((*PACKAGES, "matplotlib"))
    assert {"matplotlib", "PIL", "cycler"} <= {name.partition(".")[0] for name in installation.packages}

    async def go() -> None:
        executor = LocalExecutor("namespaces", zygotes=1, installation=installation)
        try:
            await executor.start()
        except IsolationRefusedError as error:
            pytest.skip(f"no namespaces here: {error}")
        session = await executor.open_session()
        await session.run("import sys; warm = 'matplotlib.pyplot' in sys.modules; import matplotlib.pyplot as plt")
        outcome = await session.run("plt.plot([1, 2]); plt.show(); print(warm)")
        (shown,) = outcome.display
        assert outcome.stdout == "True\n" and base64.b64decode(shown["image/png"]).startswith(b"\x89PNG")
        code = "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.savefig('a.png')"
        made = await executor.run(code, fetch_files=["*.png"])
        assert made.files["a.png"].startswith(b"\x89PNG") and not made.stderr
        await executor.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("name", "module", "lists"),
    [
        ("odd-name", "odd_module.py", "odd_module.py,,\n"),
        ("outer-name", "inner_name/__init__.py", ".,,\ninner_name/__init__.py,,\n{info}/METADATA,,\n"),
    ],
    ids=["of another name", "that lists its folder"],
)
def test_packages_of_unusual_distributions_are_found_with_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, lists: str
) -> None:
    """As most wheels of today, they lack a top_level.txt."""
    for own, path, lines, needs in (
        (name, module, lists, "Requires-Dist: odd-helper\n"),
        ("odd-helper", "helper/__init__.py", "helper/__init__.py,,\n", ""),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
        info = tmp_path / f"{own.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {own}\nVersion: 1.0\n{needs}")
        (info / "RECORD").write_text(lines.format(info=info.name))
    monkeypatch.setattr("sys.path", [str(tmp_path)])  # of all installed ones they would be searched for seconds
    top = module.partition("/")[0]
    assert {top, "helper"} <= find_installation([top.removesuffix(".py")]).packages.keys()


def test_node(service: RunningService) -> None:
    need("nodejs")
    for name in ("nodejs", "js"):
        content = run(service, code="console.log(6 * 7)", language=name)
        assert (content["status"], content["run_result"]["stdout"]) == ("Success", "42\n"), content
