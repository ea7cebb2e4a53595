"""The project's own files: set-up, packaging, and which module may import which."""

import ast
import os
import shutil
import subprocess
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("fdllm_jax", "pallas_kernels", "convert")
# From the ground up; a module that is not named here may stand anywhere, as long as no circle comes of it.
LAYERS = [
    ["pallas_kernels", "fdllm_jax.config"],
    ["fdllm_jax.model", "fdllm_jax.cache", "fdllm_jax.query"],
    ["convert", "fdllm_jax.decoding"],
    ["fdllm_jax.engine"],
    ["fdllm_jax.evaluation", "fdllm_jax.generate", "fdllm_jax.compare"],
    ["fdllm_jax.evaluate"],
    ["benchmarks"],
    ["tests"],
]


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _layer(module: str) -> int | None:
    for n, names in enumerate(LAYERS):
        if any(f"{module}.".startswith(f"{name}.") for name in names):
            return n
    return None


def _imports(path: Path) -> set[str]:
    """Modules that a file imports as it is loaded."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                path = ROOT / name.replace(".", "/")
                found.add(name if path.with_suffix(".py").exists() or path.is_dir() else node.module)
    return found


def _sources() -> list[Path]:
    return sorted(path for package in (*PACKAGES, "benchmarks") for path in (ROOT / package).rglob("*.py"))


def test_imports_go_one_way():
    graph = {_module(path): _imports(path) for path in _sources()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError
    for module, imports in graph.items():
        if module.startswith("pallas_kernels"):
            assert not [name for name in imports if name.startswith(("fdllm_jax", "convert"))], module
        layers = {name: _layer(name) for name in imports}
        top = _layer(module)
        upward = [name for name, layer in layers.items() if None not in (layer, top) and layer > top]
        assert not upward, f"{module} imports {upward}"


def test_every_folder_of_sources_is_a_package():
    folders = {path.parent for path in [*_sources(), *(ROOT / "tests").rglob("*.py")]}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_the_changelog_starts_with_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line.startswith("## ")
    ]
    assert headings[0].split()[1] == project["version"]


def test_the_shipped_files_stay_small():
    sizes = [path.stat().st_size for path in (ROOT / "fdllm_jax" / "assets").rglob("*") if path.is_file()]
    assert sum(sizes) <= 24e6


class TestMakefile:
    @pytest.fixture
    def project(self, tmp_path: Path) -> Path:
        shutil.copy(ROOT / "Makefile", tmp_path)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        return tmp_path

    def _make(self, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", *arguments], cwd=project, capture_output=True, text=True, timeout=60)

    def _fake_venv(self, project: Path, script: str) -> None:
        python = project / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)

    @pytest.mark.parametrize("python", ["/no/such/python", "false"])
    def test_no_python_is_one_clear_message(self, project, python):
        done = self._make(project, "generate", f"PYTHON={python}")
        assert done.returncode != 0
        assert "Found no Python 3.11 or newer" in done.stderr and python in done.stderr
        assert not (project / ".venv").exists()

    def test_a_python_that_is_gone_makes_the_installation_stale(self, project):
        self._fake_venv(project, "exit 0")
        assert self._make(project, "generate").returncode == 0
        (project / ".venv" / "bin" / "python").unlink()
        assert "Found no Python" in self._make(project, "generate", "PYTHON=false").stderr
        assert not (project / ".venv" / ".base").exists()

    def test_a_failed_installation_leaves_no_stamp(self, project):
        self._fake_venv(project, 'case "$*" in *--version*) exit 0;; *) exit 1;; esac')
        for target in ("generate", "test", "lint"):
            assert self._make(project, target).returncode != 0
        assert not list((project / ".venv").glob(".[a-z]*"))

    def test_generate_installs_once_and_passes_the_prompt_unchanged(self, project):
        self._fake_venv(project, f'echo "$*" >> {project}/calls')
        prompt = """Ann's 3 "$5" notes; $(HOME) `x` \\ 10 %?"""
        for _ in range(2):
            assert self._make(project, "generate", f"PROMPT={prompt}").returncode == 0
        calls = (project / "calls").read_text().splitlines()
        assert calls[2:] == [f"-m fdllm_jax.generate {prompt}"] * 2
        assert "install" in calls[1] and "torch" not in calls[1]
        os.utime(project / "pyproject.toml", (2e9, 2e9))
        self._make(project, "generate")
        assert "install" in (project / "calls").read_text().splitlines()[5]


def test_continuous_integration_needs_only_a_path(tmp_path: Path):
    """`.ci/run` runs its four parts in this order, without HOME, input or a terminal, and stops at a failure."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    tools = tmp_path / "tools"
    tools.mkdir()
    make = tools / "make"
    make.write_text('#!/bin/sh\necho "$1 $CI $PWD"\n[ "$1" != types ] || exit ${FAIL:-0}\n')
    make.chmod(0o755)
    path = f"{tools}:/usr/bin:/bin"
    run = [str(tmp_path / ".ci" / "run")]
    done = subprocess.run(run, env={"PATH": path}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"{target} true {tmp_path}" for target in ("lint", "types", "test", "lower")]
    failed = subprocess.run(run, env={"PATH": path, "FAIL": "3"}, cwd="/", capture_output=True, text=True)
    assert failed.returncode == 3 and "test" not in [line.split()[0] for line in failed.stdout.splitlines()]
