"""Podman, set up for this machine, and the images that the stack is made of."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PROGRAMS = ("podman", "podman-compose", "runc", "netavark", "debootstrap")
HELPERS = "/usr/lib/podman:/usr/libexec/podman"
"""Where distributions keep netavark, which nobody calls by hand."""
CAP_SYS_RESOURCE = 1 << 24
DEBIAN = "debian:bookworm-slim"
PYTHON_BASE = "python:3.11-slim-bookworm"


def why_not() -> str | None:
    """What keeps this machine from running containers; None if nothing does."""
    if os.geteuid() != 0:
        return "no podman here that root calls: networks of containers need root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:{HELPERS}") is None]
    if missing:
        return f"no podman with all that it needs: {', '.join(missing)} not found (CONTRIBUTING.md)"
    return None


class Engine:
    """Calls podman with a configuration of its own in ``folder``, unless CONTAINERS_CONF names one.

    Images and containers lie where the machine's podman has them.
    """

    def __init__(self, folder: Path):
        configuration = folder / "containers.conf"
        configuration.write_text(_configuration())
        self.environment = {"CONTAINERS_CONF": str(configuration), **os.environ}

    def run(self, *command: str, check: bool = True, cwd: Path = ROOT, **environment: str) -> str:
        """A command to its end: what it wrote to standard output."""
        done = subprocess.run(
            command, cwd=cwd, env={**self.environment, **environment}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, (command, done.stdout[-4000:], done.stderr[-8000:])
        return done.stdout

    def succeeds(self, *command: str) -> bool:
        done = subprocess.run(command, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        return done.returncode == 0

    def has(self, image: str) -> bool:
        return self.succeeds("podman", "image", "exists", image)

    def provide(self, folder: Path) -> None:
        """Makes what the files ask for and is not here, from packages of Debian: no registry is needed."""
        asked = [PYTHON_BASE, *(image for image in images_of_others() if _stand_in(image).exists())]
        missing = [image for image in asked if not self.has(image)]
        if missing and not self.has(DEBIAN):
            root, archive = folder / "debian", folder / "debian.tar"
            self.run(
                "debootstrap", "--variant=minbase", "--include=ca-certificates,netbase,tzdata", "bookworm", str(root)
            )
            self.run("tar", "-C", str(root), "-cf", str(archive), ".")
            self.run("podman", "import", str(archive), DEBIAN)
            shutil.rmtree(root)
            archive.unlink()
        for image in missing:
            self.run("podman", "build", "--format", "docker", "--network=host", "-f", str(_stand_in(image)),
                     "-t", image, str(HERE / "debian"))  # fmt: skip

    def image(self, tag: str, source: Path = ROOT) -> str:
        """The image of the code in ``source`` under this tag, by the script that operators call."""
        self.run(
            "bash", "deploy/images.sh", cwd=source, KINDS="cpu", TAG=tag,
            OPTIONS=os.environ.get("EVENKEEL_TEST_BUILD_OPTIONS", ""),
        )  # fmt: skip
        return f"evenkeel:{tag}"

    def older_image(self, folder: Path) -> tuple[str, str]:
        """Tag and commit of an image of the code before its newest migration, or of EVENKEEL_TEST_PREVIOUS."""
        file = max((ROOT / "service/core/migrations/versions").glob("0*.py"))
        newest = self.run("git", "log", "-1", "--format=%H", "--diff-filter=A", "--", str(file)).strip()
        asked = os.environ.get("EVENKEEL_TEST_PREVIOUS", f"{newest}^")
        commit = self.run("git", "rev-parse", "--short", asked).strip()
        tag = f"at-{commit}"
        if not self.has(f"evenkeel:{tag}"):
            source = folder / "older"
            source.mkdir()
            archive = folder / "older.tar"
            self.run("git", "archive", f"--output={archive}", commit)
            self.run("tar", "-C", str(source), "-xf", str(archive))
            self.image(tag, source)
        return tag, commit


def images_of_others() -> list[str]:
    """What docker-compose.yml takes from a registry."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return sorted({service["image"] for service in services.values() if "build" not in service})


def _stand_in(image: str) -> Path:
    name = re.sub(r"^.*/|:.*$", "", image)
    return HERE / "debian" / f"{name}.Dockerfile"


def _configuration() -> str:
    """What differs from podman's own defaults where no systemd runs, and where limits cannot be raised."""
    lines = ["[engine]", 'runtime = "runc"']
    if not Path("/run/systemd/system").is_dir():
        lines += ['cgroup_manager = "cgroupfs"', 'events_logger = "file"']
    capabilities = int(re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[0], 16)
    if not capabilities & CAP_SYS_RESOURCE:
        lines += ["[engine.runtimes]", f'runc = ["{HERE / "runc"}"]']
    return "\n".join([*lines, "[network]", 'network_backend = "netavark"', ""])
