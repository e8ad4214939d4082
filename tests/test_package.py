"""The package as a whole: what it installs, what it imports, and that its documents say what it does."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxspec
from jaxspec.__main__ import commands, main

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted([*(ROOT / "jaxspec").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

# For each part of jaxspec, the parts it may import, itself included. The commands may import everything.
MAY_IMPORT = {
    "errors": set(),
    "version": set(),
    "config": {"errors"},
    "sharding": {"config", "errors"},
    "layers": {"layers", "config", "errors", "sharding"},
    "verifiers": {"verifiers", "layers", "config", "errors", "sharding"},
    "drafters": {"drafters", "verifiers", "layers", "config", "errors", "sharding"},
}
NO_COMMANDS = {"generate", "train", "convert", "evaluate", "plan", "serve", "__main__"}
COMMANDS_USE = ("decoding", "training", "evaluation", "forecast")


def python(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """This interpreter in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def imported_modules(source: Path) -> set[str]:
    """Dotted names of all modules that a file imports, anywhere in it; `from a import b` counts as a.b."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_package_called_kernels_is_installed(tmp_path):
    code = "import importlib.util, jaxspec_kernels; spec = importlib.util.find_spec('kernels'); print(spec and spec.origin)"
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None" or not done.stdout.startswith(str(ROOT))


def test_the_kernels_folder_does_not_shadow_an_installed_kernels_package(tmp_path):
    real = tmp_path / "kernels" / "__init__.py"
    real.parent.mkdir()
    real.write_text("")
    # The repository root is first on the path here, the installed package after it.
    done = python("-c", "import sys, kernels; print(sys.path[0] == '', kernels.__file__)", PYTHONPATH=str(tmp_path))
    assert done.stdout.strip() == f"True {real}", done.stderr


def test_the_kernels_folder_has_no_init_file():
    # With one, `import kernels` in a checkout would find this folder before the package of that name.
    assert not list((ROOT / "kernels").glob("*.py"))


def test_transformers_does_not_take_the_kernels_folder_for_the_package():
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        pytest.skip("Hugging Face's kernels package is installed here")
    code = "from transformers.utils.import_utils import is_kernels_available as f; print(f())"
    done = python("-c", code)
    assert done.stdout.strip() == "False", done.stderr


def test_every_folder_of_code_is_a_package():
    folders = {source.parent for source in SOURCES}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]
    assert (ROOT / "jaxspec" / "py.typed").exists()


def test_version_is_the_same_everywhere():
    assert jaxspec.__version__ == importlib.metadata.version("jaxspec")
    assert jaxspec.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_python_m_jaxspec_lists_every_command_without_importing_jax():
    code = "import sys; from jaxspec.__main__ import main; main([]); assert 'jax' not in sys.modules, 'imported jax'"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "generate" in commands()
    for name, description in commands().items():
        assert re.search(rf"python -m jaxspec\.{name} +{re.escape(description)}", done.stdout)


def test_an_unknown_command_is_refused_with_the_nearest_one(capsys):
    assert main(["genrate"]) == 2
    error = capsys.readouterr().err
    assert "genrate" in error
    assert "'generate'" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", commands())
def test_python_m_jaxspec_command_is_python_m_jaxspec_dot_command(name):
    spaced = python("-m", "jaxspec", name, "--help")
    dotted = python("-m", f"jaxspec.{name}", "--help")
    assert spaced.returncode == dotted.returncode == 0, spaced.stderr
    assert spaced.stdout == dotted.stdout


@pytest.mark.parametrize("name", commands())
def test_every_flag_of_a_command_is_in_its_page(name):
    help_text = python("-m", f"jaxspec.{name}", "--help").stdout
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", help_text))
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert len(flags) > 1
    assert not sorted(flag for flag in flags if not re.search(rf"{flag}(?![\w-])", page))
    in_page = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page))
    assert not sorted(in_page - flags), "the page names flags that the command does not have"


def test_importing_jaxspec_imports_neither_torch_nor_jax():
    done = python("-c", "import sys, jaxspec; print([name for name in ('torch', 'jax') if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_nothing_in_the_package_imports_torch():
    assert not [
        source for source in SOURCES if {name.partition(".")[0] for name in imported_modules(source)} & {"torch"}
    ]


def test_imports_run_one_way():
    wrong = []
    for source in SOURCES:
        parts = source.relative_to(ROOT).with_suffix("").parts
        inner = {name.split(".")[1] for name in imported_modules(source) if name.startswith("jaxspec.")}
        if parts[0] == "kernels":
            wrong += [(str(source), name) for name in inner]
        elif parts[1] in MAY_IMPORT:
            wrong += [(str(source), name) for name in inner - MAY_IMPORT[parts[1]]]
        elif parts[1] == "checkpoint":  # knows models, and nothing that runs them
            wrong += [(str(source), name) for name in inner & {*NO_COMMANDS, *COMMANDS_USE}]
        elif parts[1] in COMMANDS_USE:
            wrong += [(str(source), name) for name in inner & NO_COMMANDS]
    assert not wrong


def test_run_time_dependencies_are_the_ones_imported_and_documented():
    declared = {requirement.split(">=")[0] for requirement in PROJECT["dependencies"]}
    imported = {name.partition(".")[0] for source in SOURCES for name in imported_modules(source)}
    third_party = imported - set(sys.stdlib_module_names) - {"jaxspec", "jaxspec_kernels"}
    third_party = {{"orbax": "orbax-checkpoint", "yaml": "pyyaml"}.get(name, name) for name in third_party}
    assert third_party <= declared, "imported but not declared"
    # transformers renders chat templates with jinja2 and does not depend on it
    assert declared - third_party <= {"jinja2"}, "declared but not imported"


def test_the_page_of_dependencies_gives_every_bound():
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in PROJECT["dependencies"]:
        name, bound = requirement.split(">=")
        assert f"| {name} | >= {bound} |" in page


def test_ci_ends_with_the_test_command_of_the_readme():
    assert "\nmake test" in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci" / "run").read_text().endswith("\nmake test\n")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (document.parent / target).exists(), target


def test_no_path_of_a_developers_machine_is_in_the_tree():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    texts = [
        ROOT / name for name in listed.stdout.splitlines() if name.endswith((".py", ".md", ".toml", ".sh", ".json"))
    ]
    wrong = re.compile(r"/(?:root|home|tmp|work)/\w")
    found = [
        str(path) for path in texts if path != Path(__file__) and path.is_file() and wrong.search(path.read_text())
    ]
    assert not found


def test_jax_is_strict_about_promotion_in_tests():
    import jax

    assert (jax.config.jax_numpy_rank_promotion, jax.config.jax_numpy_dtype_promotion) == ("raise", "strict")
