"""The server and SDKs of other versions than the one that is installed: each is put into a folder of its own, without
its dependencies, which the environment has.

    python .ci/sdk_versions.py items newest            every test of the conformance list, with this one as the client
    python .ci/sdk_versions.py steps 0.36.0 0.25.0     what a program does with an SDK, step by step

`items` is for versions with the API of the tests, 0.38; `steps` for all since 0.25.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".sdk"  # ignored by git
TESTS = ROOT / "tests" / "server"


def installed(version: str) -> Path:
    """Where the SDK of this version is; the newest is asked for each time."""
    target = FOLDER / version
    if version == "newest" or not (target / "tinker").is_dir():
        wanted = "tinker" if version == "newest" else f"tinker=={version}"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--upgrade", "--target", str(target), wanted], check=True)
    return target


def with_sdk(target: Path) -> dict[str, str]:
    """An environment in which `import tinker` finds this one."""
    path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "TINKER_TELEMETRY": "0"}


def version_in(target: Path) -> str:
    (information,) = target.glob("tinker-*.dist-info")
    return information.name.removeprefix("tinker-").removesuffix(".dist-info")


def items(target: Path) -> int:
    files = sorted(map(str, TESTS.glob("test_items_*.py")))
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    return subprocess.run(pytest, cwd=ROOT, env=with_sdk(target), check=False).returncode


def steps(target: Path) -> int:
    """The server is in this process, and does not see the SDK."""
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    import tempfile

    from running import running

    with tempfile.TemporaryDirectory() as storage, running(Path(storage)) as server:
        command = [sys.executable, str(TESTS / "sdk_steps.py"), server.url]
        return subprocess.run(command, cwd=ROOT, env=with_sdk(target), check=False).returncode


def main(how: str, versions: list[str]) -> int:
    done: dict[str, int] = {}
    own = metadata.version("tinker")
    for version in versions:
        target = installed(version)
        name = version_in(target)
        if name == own and how == "items":
            sys.stdout.write(f"tinker {name} is the installed one, with which every test is run\n")
        elif name not in done:
            done[name] = {"items": items, "steps": steps}[how](target)
    for name, code in done.items():
        sys.stdout.write(f"tinker {name}: {'all passed' if code == 0 else 'failed'}\n")
    return int(any(done.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
