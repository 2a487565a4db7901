"""The wheel and the sdist: what is in them, and that they work where they are installed."""

import os
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import fedquilt as fq

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
SHARED = sysconfig.get_paths()["purelib"]


def list_source():
    """The files of the package as git or a user has them."""
    files = (path for path in (SOURCE / "fedquilt").rglob("*") if path.is_file())
    return {str(path.relative_to(SOURCE)) for path in files if "__pycache__" not in path.parts}


def list_wheel(path):
    with zipfile.ZipFile(path) as wheel:
        return {name for name in wheel.namelist() if not name.endswith("/")}


def build(kind, folder):
    """Builds as ``python -m build`` does, without an environment of its own."""
    words = ["-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", tmp_path_factory.mktemp("sdist"))


def test_the_wheel_has_every_file_of_the_package_and_its_command(wheel):
    assert wheel.name == f"fedquilt-{fq.__version__}-py3-none-any.whl"
    names = list_wheel(wheel)
    information = f"fedquilt-{fq.__version__}.dist-info"
    assert {name for name in names if not name.startswith(information)} == list_source()
    assert {"fedquilt/py.typed", "fedquilt/cli/templates/train.py.jinja"} <= names
    assert any(name.startswith("fedquilt/report/static/") for name in names)
    with zipfile.ZipFile(wheel) as file:
        commands = file.read(f"{information}/entry_points.txt").decode()
        metadata = Parser().parsestr(file.read(f"{information}/METADATA").decode())
    assert "fedquilt = fedquilt.cli:main" in commands
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"tensorboard", "mlflow", "wandb", "flower"} <= set(metadata.get_all("Provides-Extra"))


@pytest.mark.package
def test_the_sdist_has_what_a_packager_needs(sdist):
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "constraints.txt",
        "src/fedquilt/py.typed",
    ):
        assert name in names
    assert not any("__pycache__" in name or name.startswith(("runs/", ".venv")) for name in names)


class Environment:
    """A fresh environment, whose other packages are those of the tests."""

    def __init__(self, folder, package):
        venv.create(folder, symlinks=True, with_pip=False)
        self.folder, self.bin = folder, folder / "bin"
        (site,) = folder.glob("lib/python*/site-packages")
        # its packages, without what is installed there in an editable way
        (site / "shared.pth").write_text(SHARED + "\n")
        words = ["-m", "pip", "--python", str(self.bin / "python"), "install", "--no-deps", "-q"]
        words += ["--no-index", "--no-build-isolation", "--disable-pip-version-check"]
        self.check([sys.executable, *words, str(package)], folder)
        self.site = site

    def check(self, words, folder):
        """What a command prints, which must succeed, with nothing of ours on its path."""
        names = ("PYTHONPATH", "FEDQUILT_LOG_LEVEL")
        clean = {name: value for name, value in os.environ.items() if name not in names}
        clean |= {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            words, cwd=folder, env=clean, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{words}: {result.stdout}{result.stderr}"
        return result.stdout


@pytest.mark.package
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installed_package_works_as_typed(kind, tmp_path, request):
    installed = Environment(tmp_path / "environment", request.getfixturevalue(kind))
    work = tmp_path / "work"
    work.mkdir()
    assert installed.site.joinpath("fedquilt", "py.typed").is_file()
    place = "import fedquilt; print(fedquilt.__file__)"
    found = installed.check([installed.bin / "python", "-c", place], work)
    assert Path(found.strip()).is_relative_to(installed.site)
    program = str(installed.bin / "fedquilt")
    assert installed.check([program, "--version"], work) == f"fedquilt {fq.__version__}\n"
    files = {str(path.relative_to(installed.site)) for path in installed.site.rglob("*")}
    assert list_source() <= files
    assert "tensorboard" in installed.check([program, "doctor"], work)
    printed = installed.check([program, "init", "project"], work)
    project = work / "project"
    train, script = printed.splitlines()[-2:]
    quick = " --rounds 1 --workers 0 --set data.fraction=0.1"
    trained = installed.check(["sh", "-c", train + quick], project)
    installed.check(["sh", "-c", script], project)
    hints = trained.partition("Next:\n")[2].splitlines()
    assert [shlex.split(hint)[1] for hint in hints] == ["evaluate", "customize", "report"]
    for hint in hints:
        installed.check(["sh", "-c", hint], project)
    assert (project / "small.onnx").is_file()
    assert (project / "report" / "index.html").is_file()
